"""The HTTP API under /api/v1/nni: the application with its access control, the page, sessions and the change feed."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from nni_manager.engine.experiment_commands import FailedPrecondition
from nni_manager.engine.stored_experiment import ViewOnly
from nni_manager.errors import RetryableError, UserError
from nni_manager.store.errors import StoreUnusable
from nni_manager.support.http_server import LingeringCloseMiddleware, ResponseTruncated, mark_streaming
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.auth_middleware import MAX_BODY_BYTES, AuthMiddleware
from nni_manager.web.backend_reads import BackendReads, ExperimentBackend
from nni_manager.web.change_feed import MAX_FOLLOWERS, ChangeFeed, Cursor, too_many_followers
from nni_manager.web.compression import streamed
from nni_manager.web.experiment_routes import ExperimentRoutes
from nni_manager.web.files import PLACES, Files
from nni_manager.web.json_encoding import Json
from nni_manager.web.monitoring_routes import METRICS, MonitoringRoutes
from nni_manager.web.nni_routes import NniRoutes
from nni_manager.web.openapi import ONE, Operation, Schema, document
from nni_manager.web.query_values import is_true
from nni_manager.web.session_auth import SessionAuth
from nni_manager.web.session_routes import LOGIN, NEW_LINK, SessionRoutes
from nni_manager.web.trial_window_routes import TrialWindowRoutes
from nni_manager.web.url_prefix import UrlPrefixMiddleware, path_of
from trial_keeper import __version__

API_ROOT = "/api/v1/nni"
_MAX_SHOWN_PATH = 100
# An address that somebody may have typed. Any other is answered like a path that requires a login.
_PLAIN_PATH = re.compile(rf"(?!/page\b|/api\b|{METRICS}\b)(?:/[\w-]+)+")


class ManagerApi:
    """The routes. `end` ends the manager's process once the experiment is terminal. `own_hosts`: see `AuthMiddleware`."""

    def __init__(
        self,
        engine: ExperimentBackend,
        web: WebServerOptions,
        port: int,
        session_auth: SessionAuth,
        end: Callable[[], None],
        own_hosts: Collection[str] = (),
    ) -> None:
        self._host, self._own_hosts = web.host, own_hosts
        # A prefix is for a proxy, which may be one of this user's programs and pass on requests of anybody.
        self._require_token = web.require_token or web.url_prefix != ""
        self._url_prefix = web.url_prefix
        self._session_auth = session_auth
        self._files = Files()
        self._session_routes = SessionRoutes(session_auth, web.url_prefix, "nnictl webui url")
        self._live = ChangeFeed(engine.snapshot)
        self._monitoring = MonitoringRoutes(engine)
        self._window_routes = TrialWindowRoutes(engine)
        self._reads = BackendReads(engine)
        self._routes = ExperimentRoutes(self._reads, end)
        self._nni_routes = NniRoutes(self._reads, port, web.url_prefix)

    def close(self) -> None:
        """End the threads that read files."""
        self._reads.close()

    def operations(self) -> list[Operation]:
        """All operations of the API."""
        since: dict[str, Schema] = {"since": {"type": "string"}, "windows": {"type": "boolean"}}
        return [
            Operation("/openapi.json", self.description, ONE),
            Operation("/version", self.version, None),
            *self._session_routes.operations(),
            Operation("/changes", self.news, ONE, query=since),
            Operation("/events", self.events, None, query=since, media_type="text/event-stream"),
            *self._routes.operations(),
            *self._window_routes.operations(),
            *self._nni_routes.operations(),
        ]

    def app(self) -> Starlette:
        """The ASGI application."""
        operations = self.operations()
        routes = [operation.route() for operation in operations]
        body_limits = {(each.method, API_ROOT + each.path): each.most_body_bytes for each in operations}
        shown = [Route(path, self.file) for path in (*PLACES, "/page/{file:path}")]
        return Starlette(
            routes=[
                Mount(API_ROOT, routes=routes),
                *self._monitoring.routes(),
                Route("/", self.first_page),
                *shown,
            ],
            middleware=[
                Middleware(LingeringCloseMiddleware),
                Middleware(UrlPrefixMiddleware, prefix=self._url_prefix),
                Middleware(
                    AuthMiddleware,
                    session_auth=self._session_auth,
                    host=self._host,
                    most_body_bytes=lambda method, path: body_limits.get((method, path), MAX_BODY_BYTES),
                    is_public=self._is_public,
                    for_programs={(NEW_LINK[0], API_ROOT + NEW_LINK[1])},
                    require_token=self._require_token,
                    own_hosts=self._own_hosts,
                ),
            ],
            exception_handlers={**REFUSALS, HTTPException: self._refuse},
        )

    def operations_of_experiment(self) -> list[Operation]:
        """The operations on the experiment, for a server that has its own sessions."""
        own = self._session_routes.operations()
        return [each for each in self.operations() if each.path not in {session.path for session in own}]

    def _is_public(self, method: str, path: str) -> bool:
        """True for the page's files, an address that could be a page, the probes, and the exchange of a login code."""
        if (method, path) == (LOGIN[0], API_ROOT + LOGIN[1]):
            return True
        may_be_page = _PLAIN_PATH.fullmatch(path) is not None
        return method in ("GET", "HEAD") and (path == "/" or path in self._files or may_be_page)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        path = path_of(request.scope)
        is_for_people = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if error.status_code == 404 and is_for_people and not path.startswith((API_ROOT, "/page/")):
            # The page says that there is no such page.
            shown = await asyncio.to_thread(self._files.answer, PLACES[0], Headers(), self._url_prefix)
            shown.status_code = 404
            return shown
        return refused(request, error, self._url_prefix + API_ROOT)

    # ---- the page

    async def first_page(self, _: Request) -> Response:
        """Redirect to the overview page."""
        return RedirectResponse(f"{self._url_prefix}/oview")

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        path = path_of(request.scope)
        if path not in self._files:
            raise HTTPException(404, "cannot find this file of the page; reload the page")
        return await asyncio.to_thread(self._files.answer, path, request.headers, self._url_prefix)

    async def news(self, request: Request) -> Response:
        """The summary, and the trials that changed after the cursor `since`: all, if another process issued the cursor.

        `windows`: a client that reads windows of the trials; if there are many, it gets `windowed` instead of all of them.
        """
        pieces = self._live.delta(_since(request), may_window=is_true(request, "windows"))
        return streamed(request, pieces, Json.media_type)

    async def events(self, request: Request) -> Response:
        """The changes since a version as a stream of server-sent events, at most two per second."""
        since, may_window = _since(request), is_true(request, "windows")
        if self._live.followers >= MAX_FOLLOWERS:
            raise too_many_followers()
        mark_streaming(request.scope)
        # Counted here and not at the start of the stream: other requests are admitted in between. The response decrements the
        # count; nothing is awaited before it is called.
        self._live.followers += 1
        stream = self._live.follow(since, may_window=may_window)
        response = streamed(request, stream, "text/event-stream")
        # nginx would hold events back until its buffer is full.
        response.headers["X-Accel-Buffering"] = "no"
        return _Follower(self._live, response)

    async def description(self, _: Request) -> Response:
        """This description."""
        root = self._url_prefix + API_ROOT
        return Json(
            document(self.operations(), "the manager of one experiment", root, self._session_auth.cookie_name)
        )

    async def version(self, _: Request) -> Response:
        """The manager's version."""
        return PlainTextResponse(__version__)


def refused(request: Request, error: HTTPException, api_root: str) -> Response:
    """The error as a JSON document. `api_root`: the address of the API that the request did not match."""
    message = error.detail
    if not message.startswith("cannot"):  # of the router
        what = f"{request.method} {request.scope['path'][:_MAX_SHOWN_PATH]}"
        remedy = f"{api_root}/openapi.json lists the paths and their methods"
        message = f"cannot answer {what}: {message}; {remedy}"
    return Json({"error": message}, status_code=error.status_code, headers=dict(error.headers or {}))


def _since(request: Request) -> Cursor | None:
    return Cursor.read(request.query_params.get("since", ""))


class _Follower(Response):
    """An event stream that decrements the follower count when it ends, for any reason."""

    def __init__(self, live: ChangeFeed, stream: Response) -> None:
        self._live, self._stream = live, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        except StoreUnusable as error:
            # The view is closed, because a manager runs now. Or the store is damaged, which the client's next request reports.
            raise ResponseTruncated(str(error)) from error
        finally:
            self._live.followers -= 1


def _refuse_with(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def refuse(_: Request, error: Exception) -> Response:
        return Json({"error": str(error)}, status_code=status)

    return refuse


REFUSALS: dict[Any, Any] = {
    UserError: _refuse_with(400),
    FailedPrecondition: _refuse_with(409),
    RetryableError: _refuse_with(503),
    ViewOnly: _refuse_with(403),
}
"""The responses to errors of the manager."""
