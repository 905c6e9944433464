"""Access control of the HTTP API: the experiment's owner has a token, the experiment's own page has a session.

Credentials are required on loopback, too, since other users of a machine can reach its loopback. Only `own_programs` of the same
user need none there. The files of the page are public and contain nothing secret.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Collection
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nni_manager.engine.tokens import is_token
from nni_manager.support.http_server import MAX_HEAD_BYTES, OWN_NAMES, is_loopback, mark_authenticated
from nni_manager.web.own_programs import is_direct, is_own_program
from nni_manager.web.session_auth import KEY_HEADER, SessionAuth
from nni_manager.web.url_prefix import path_of

# The default limit; the few operations with larger bodies declare their own.
MAX_BODY_BYTES = 64 * 1024

_FULL_NAME_TIMEOUT_S = 0.5

# Headers of every response. The page runs only its own scripts, connects only to its own manager, and cannot be framed:
# it shows output of trials, which might contain script.
HEADERS_OF_ALL = {
    # The hash of an empty style element, which plotly fills by script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


# The status of a rejection, and the rest of its "cannot ..." message.
_Refusal = tuple[HTTPStatus, str]


class AuthMiddleware:
    """Passes authorized requests to the application and rejects the others."""

    def __init__(
        self,
        app: ASGIApp,
        session_auth: SessionAuth,
        host: str,
        most_body_bytes: Callable[[str, str], int] = lambda method, path: MAX_BODY_BYTES,
        is_public: Callable[[str, str], bool] = lambda method, path: False,
        for_programs: Collection[tuple[str, str]] = (),
        require_token: bool = True,
        own_hosts: Collection[str] = (),
    ) -> None:
        """`host`: the listen address. `own_hosts`: further names of this server, in lower case.

        `most_body_bytes`: the body limit of a method and a path. `is_public`: true for methods and
        paths without authentication. `for_programs`: endpoints that require the token; a browser session is not enough.
        `require_token`: on loopback, this user's own programs need the token, too.
        """
        self._app = app
        self._session_auth = session_auth
        self._host = host
        self._own_names = {*OWN_NAMES, host.lower(), f"[{host.lower()}]", *own_hosts}
        if not is_loopback(host):
            self._own_names.add(socket.gethostname().lower())
            # The full name needs DNS, which may take long to answer.
            learning = threading.Thread(target=self._learn_full_name, name="full-host-name", daemon=True)
            learning.start()
            learning.join(_FULL_NAME_TIMEOUT_S)
        self._most_body_bytes = most_body_bytes
        self._is_public = is_public
        self._for_programs = for_programs
        self._admits_own_programs = is_loopback(host) and not require_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on, or reject it."""
        if scope["type"] != "http":
            return  # the server has no websockets
        operation = scope["method"], path_of(scope)
        is_public = self._is_public(*operation)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS_OF_ALL)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        sizes = [len(name) + len(value) for name, value in scope["headers"]]
        head_bytes = len(scope["path"]) + len(scope["query_string"]) + sum(sizes)
        most = self._most_body_bytes(*operation)
        headers = Headers(scope=scope)
        refusal = (
            self._refusal_of_page(headers, scope, is_public)
            or (None if is_public else await self._refusal_of_client(headers, scope))
            or _refusal_of_size(headers, head_bytes, most)
        )
        if refusal is None:
            if not is_public:
                mark_authenticated(scope)
            await self._app(scope, receive, sending)
            return
        status, message = refusal
        # A rejected client must not keep a connection that others need.
        answered = {"Connection": "close"}
        if status is HTTPStatus.UNAUTHORIZED:
            answered["WWW-Authenticate"] = "Bearer"
        await JSONResponse({"error": f"cannot {message}"}, status, answered)(scope, receive, sending)

    def _refusal_of_page(self, headers: Headers, scope: Scope, is_public: bool) -> _Refusal | None:
        """The rejection of a request that a browser sends for another web page; None if allowed."""
        host = headers.get("host", "")
        if not self._is_own(host):
            return (
                HTTPStatus.BAD_REQUEST,
                f"answer for host {host[:100]!r}: it is not a name of this manager; use the manager's IP address",
            )
        # Links to the page are allowed from anywhere, e.g. from a web terminal.
        is_link = is_public and scope["method"] == "GET" and headers.get("sec-fetch-dest") == "document"
        if not is_link and _is_foreign(headers, f"{scope['scheme']}://{host}"):
            return HTTPStatus.FORBIDDEN, "accept a request from another web page; use nnictl"
        return None

    async def _refusal_of_client(self, headers: Headers, scope: Scope) -> _Refusal | None:
        """The rejection of a request that has no valid credentials and needs some; None if allowed."""
        refusal = self._refusal_of_credentials(headers, scope)
        may_be_own = (
            refusal is not None
            and self._admits_own_programs
            and (scope["method"], path_of(scope)) not in self._for_programs
            and is_direct(headers)
            and scope["client"]
            and scope["server"]
        )
        if may_be_own and await asyncio.to_thread(is_own_program, scope["client"], scope["server"]):
            return None
        return refusal

    def _refusal_of_credentials(self, headers: Headers, scope: Scope) -> _Refusal | None:
        """The rejection of a request without valid credentials; None if allowed."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and is_token(token.strip().encode(), self._session_auth.token):
            return None
        cookie = cookie_parser(headers.get("cookie", "")).get(self._session_auth.cookie_name)
        if self._session_auth.is_authenticated(cookie, headers.get(KEY_HEADER, "")):
            if (scope["method"], path_of(scope)) not in self._for_programs:
                return None
            return HTTPStatus.FORBIDDEN, "accept this request from a web page; use nnictl"
        return (
            HTTPStatus.UNAUTHORIZED,
            "accept a request without the manager's token; use nnictl, open the link of `nnictl webui url` in a browser, "
            "or send `Authorization: Bearer TOKEN` with the token in manager-process.json of the experiment's folder",
        )

    def _is_own(self, host_header: str) -> bool:
        """True if the Host header names this manager, as a defence against DNS rebinding.

        IP addresses are accepted, since no DNS record can redirect them.
        """
        host = host_header.lower()
        if not host.endswith("]"):
            name, _, port = host.rpartition(":")
            host = name if port.isdecimal() else host
        if host in self._own_names:
            return True
        return not is_loopback(self._host) and _is_address(host)

    def _learn_full_name(self) -> None:
        self._own_names.add(socket.getfqdn().lower())


def _refusal_of_size(headers: Headers, head_bytes: int, most_body_bytes: int) -> _Refusal | None:
    if head_bytes > MAX_HEAD_BYTES:
        return (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"accept an address and headers of more than {MAX_HEAD_BYTES} bytes; send less",
        )
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers:
        return HTTPStatus.LENGTH_REQUIRED, "accept a body without Content-Length; send that header"
    if not length.isdecimal() or int(length) > most_body_bytes:
        return (
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"accept a body of more than {most_body_bytes} bytes; send less",
        )
    return None


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return True
    return False


def _is_foreign(headers: Headers, own_origin: str) -> bool:
    """True if a browser reports another page as the origin. Programs other than browsers do not send these headers.

    Behind a proxy the page has the proxy's origin. The browser's own verdict holds there, or the proxy names its address; a page
    of another site can send neither header.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("none", "same-origin")
    proxied = f"{headers.get('x-forwarded-proto', 'http')}://{headers.get('x-forwarded-host', '')}"
    own = (own_origin.lower(), proxied.lower())
    return any(origin.lower() not in own for origin in headers.getlist("origin"))
