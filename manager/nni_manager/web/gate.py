"""Who may speak to the HTTP API: the experiment's owner, who has its token, and no web page but its own.

A token is asked for on loopback, too: other users of a machine reach its loopback.
"""

import ipaddress
import socket
from collections.abc import Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nni_manager.engine.tokens import is_token
from nni_manager.serving import MOST_HEAD_BYTES, OWN_NAMES, is_loopback, keep_connection

# Few requests have more to say, and those say how much.
MOST_BODY_BYTES = 64 * 1024


class Gate:
    """Passes on what may come in, and answers the rest."""

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        host: str,
        most_body_bytes: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        """`host`: where the server listens. `most_body_bytes`: of requests with this method and path, where it is unusual."""
        self._app = app
        self._token = token
        self._host = host
        self._most_body_bytes = most_body_bytes or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return  # of other things there are none
        sizes = [len(name) + len(value) for name, value in scope["headers"]]
        head_bytes = len(scope["path"]) + len(scope["query_string"]) + sum(sizes)
        most = self._most_body_bytes.get((scope["method"], scope["path"]), MOST_BODY_BYTES)
        refusal = self._refusal(Headers(scope=scope), scope["scheme"], head_bytes, most)
        if refusal is None:
            keep_connection(scope)
            await self._app(scope, receive, send)
            return
        status, message = refusal
        # Who is refused does not keep a place that others need.
        headers = {"Connection": "close"}
        if status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        await JSONResponse({"error": f"cannot {message}"}, status, headers)(scope, receive, send)

    def _refusal(
        self, headers: Headers, scheme: str, head_bytes: int, most_body_bytes: int
    ) -> tuple[HTTPStatus, str] | None:
        host = headers.get("host", "")
        if not self._is_own(host):
            return (
                HTTPStatus.BAD_REQUEST,
                f"answer as {host[:100]!r}: that is not this manager's name; use its IP address",
            )
        if _is_foreign(headers, f"{scheme}://{host}"):
            return HTTPStatus.FORBIDDEN, "do this for another web page; use nnictl"
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not is_token(token.strip().encode(), self._token):
            return (
                HTTPStatus.UNAUTHORIZED,
                "let you in without the manager's token; nnictl finds it by itself, and other programs send it as "
                "`Authorization: Bearer TOKEN`: it is in manager-process.json in the experiment's folder",
            )
        if head_bytes > MOST_HEAD_BYTES:
            return (
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"take an address and headers of more than {MOST_HEAD_BYTES} bytes; send less",
            )
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            return HTTPStatus.LENGTH_REQUIRED, "take a body without Content-Length; send it"
        if not length.isdecimal() or int(length) > most_body_bytes:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"take more than {most_body_bytes} bytes; send less"
        return None

    def _is_own(self, host_header: str) -> bool:
        """Whether a browser that sends this was told to come here by its user, not by the DNS of a web page.

        Nobody's DNS says what an IP address is.
        """
        host = host_header.lower()
        if not host.endswith("]"):
            name, _, port = host.rpartition(":")
            host = name if port.isdecimal() else host
        own = self._host.lower()
        if host in (*OWN_NAMES, own, f"[{own}]"):
            return True
        return not is_loopback(self._host) and (
            _is_address(host) or host in (socket.gethostname().lower(), socket.getfqdn().lower())
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_foreign(headers: Headers, own_origin: str) -> bool:
    """Whether the browser says that some other page makes it ask. Programs that are no browser say nothing."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    return any(origin.lower() != own_origin.lower() for origin in headers.getlist("origin"))
