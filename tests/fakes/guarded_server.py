"""The server of the HTTP API with its access control, in front of an application that accepts everything."""

import asyncio
import socket
import threading
from pathlib import Path

import requests
import uvicorn
from deadlines import DEADLINE_S
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nni_manager.support.http_server import HttpServer, LingeringCloseMiddleware, listen
from nni_manager.web.auth_middleware import AuthMiddleware
from nni_manager.web.session_auth import SessionAuth

TOKEN = "the-right-token"


def a_session_auth():
    """A SessionAuth that accepts TOKEN. Its folder for ended sessions does not exist."""
    session_auth = SessionAuth(b"secret", "TESTEXPT", Path("/nonexistent/ended"))
    session_auth.token = TOKEN
    return session_auth


class Guarded:
    """An HttpServer in a thread; `done` counts the requests that reached the application."""

    def __init__(self, host="127.0.0.1", certificate=None, answer=b"done", **access):
        """`access`: further arguments of the middleware."""
        self.done = 0
        self._answer = answer
        app = Starlette(
            routes=[Route("/{path:path}", self._respond, methods=["GET", "DELETE", "PUT", "POST"])],
            middleware=[
                Middleware(LingeringCloseMiddleware),
                Middleware(AuthMiddleware, session_auth=a_session_auth(), host=host, **access),
            ],
        )
        listener = listen(host, 0, "")
        self.port = listener.getsockname()[1]
        self._server = HttpServer(app, None if certificate is None else certificate.path)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[listener])))
        self._thread.start()

    async def _respond(self, request) -> Response:
        # `_do` is looked up at each request, because a test may replace it while the server runs.
        return await self._do(request)

    async def _do(self, _) -> Response:
        self.done += 1
        return PlainTextResponse(self._answer)

    def ask(self, verb="GET", path="/summary", token=TOKEN, **options) -> requests.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        headers |= options.pop("headers", {})
        with requests.Session() as session:
            session.trust_env = False
            url = f"http://127.0.0.1:{self.port}{path}"
            return session.request(verb, url, headers=headers, timeout=DEADLINE_S, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    @property
    def config(self) -> uvicorn.Config:
        """The server's settings; changes apply to new connections."""
        return self._server.config

    def close(self):
        self._server.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
