"""The operations by which a browser logs in and out, of a manager and of the server of all experiments."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nni_manager.web.json_encoding import Json, body_of
from nni_manager.web.openapi import MAPPING, ONE, Operation
from nni_manager.web.session_auth import CODE_S, SESSION_S, SessionAuth

# Small, since unauthenticated clients may send one.
MAX_CODE_BYTES = 1024
LOGIN = ("POST", "/session")
"""The method and the path of the exchange of a login code, which needs no authentication."""
NEW_LINK = ("POST", "/entrance")
"""Those of a new login code, which only programs get."""


class SessionRoutes:
    """The operations. `command` prints a login link."""

    def __init__(self, session_auth: SessionAuth, url_prefix: str, command: str) -> None:
        self._session_auth = session_auth
        self._url_prefix = url_prefix
        self._command = command

    def operations(self) -> list[Operation]:
        """The operations."""
        return [
            Operation(NEW_LINK[1], self.new_link, ONE, NEW_LINK[0]),
            Operation(
                LOGIN[1], self.begin_session, ONE, LOGIN[0], body=MAPPING, most_body_bytes=MAX_CODE_BYTES
            ),
            Operation("/session", self.end_session, ONE, "DELETE"),
        ]

    async def new_link(self, _: Request) -> Response:
        """A single-use login code for a browser, for the page at /enter#CODE."""
        return Json({"code": self._session_auth.new_login_code(), "expiresInS": CODE_S})

    async def begin_session(self, request: Request) -> Response:
        """Exchange a login code for a session: a cookie, and a key to send in the header X-Trial-Keeper."""
        sent = await body_of(request)
        code = sent.get("code") if isinstance(sent, dict) else None
        session = self._session_auth.begin(code) if isinstance(code, str) else None
        if session is None:
            raise HTTPException(
                403,
                "cannot log in with this link: it was used already, or is older than "
                f"{CODE_S // 60} minutes; `{self._command}` prints another",
            )
        answer = Json({"key": session.key})
        flags = self._cookie_flags(request)
        answer.set_cookie(self._session_auth.cookie_name, session.cookie, max_age=SESSION_S, **flags)
        # A browser with cookies of a hundred experiments would exceed the header limit and be rejected by all of them.
        for name in self._session_auth.too_old(request.cookies):
            answer.delete_cookie(name, **flags)
        return answer

    async def end_session(self, request: Request) -> Response:
        """Sign out the calling page; a new link signs it in again."""
        if cookie := request.cookies.get(self._session_auth.cookie_name):
            self._session_auth.end(cookie)
        answer = Json({})
        answer.delete_cookie(self._session_auth.cookie_name, **self._cookie_flags(request))
        return answer

    def _cookie_flags(self, request: Request) -> dict[str, Any]:
        is_secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        return {"secure": is_secure, "httponly": True, "samesite": "strict", "path": self._url_prefix or "/"}
