"""The application of the server of all experiments.

`/` is the list. Below `/experiments/ID` are the page and the API of one experiment: those of its manager, to which requests are
passed on, or those of a view of its store if no manager runs. A browser logs in once for all of them.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nni_manager.client.hub_folder import hub_folder
from nni_manager.hub.commands import CommandFailed, run_nnictl
from nni_manager.hub.experiments import Experiments
from nni_manager.hub.forward import Forwarding
from nni_manager.hub.views import Views
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.http_server import LingeringCloseMiddleware
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.api import API_ROOT, REFUSALS, refused
from nni_manager.web.auth_middleware import MAX_BODY_BYTES, AuthMiddleware
from nni_manager.web.files import PLACES, Files
from nni_manager.web.json_encoding import Json, body_of
from nni_manager.web.monitoring_routes import LIVE, READY
from nni_manager.web.openapi import MANY, MAPPING, ONE, Operation, document
from nni_manager.web.session_auth import SessionAuth
from nni_manager.web.session_routes import LOGIN, MAX_CODE_BYTES, NEW_LINK, SessionRoutes
from nni_manager.web.url_prefix import UrlPrefixMiddleware, path_of
from trial_keeper.wire.safe_open import is_safe_name

_OF_EXPERIMENT = re.compile(r"/experiments/([^/]+)(/.*)?")
# No segment is empty or moves up: a client of the manager would resolve these, also towards what a session may not do.
_PASSED_ON = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[^/]+)+")
# The page of all experiments.
_HOME = "/all"
_ACTIONS = {"resume": ("resume",), "stop": ("stop",)}
# The maximum of any operation of a manager, which checks the size of what it receives.
_MAX_FORWARDED_BYTES = 4 * 2**20


class HubApi:
    """The routes. `name`: the id that clients expect. `own_hosts`: see `AuthMiddleware`."""

    def __init__(
        self,
        name: str,
        web: WebServerOptions,
        port: int,
        session_auth: SessionAuth,
        own_hosts: Collection[str] = (),
    ) -> None:
        self._id = name
        self._host, self._url_prefix, self._session_auth = web.host, web.url_prefix, session_auth
        self._own_hosts = own_hosts
        self._files = Files()
        self._sessions = SessionRoutes(session_auth, web.url_prefix, "nnictl web")
        routes = [operation.route() for operation in self._sessions.operations()]
        self._session_app = Starlette(routes=routes, exception_handlers={HTTPException: self._refuse})
        self._experiments = Experiments()
        self._listing = asyncio.Lock()
        self._views = Views(web, port, session_auth)
        self._forwarding = Forwarding()

    def operations(self) -> list[Operation]:
        """The operations on all experiments."""
        return [
            Operation("/openapi.json", self.description, ONE),
            *self._sessions.operations(),
            Operation("/summary", self.summary, ONE),
            Operation("/all", self.all, MANY),
            Operation("/all", self.create, ONE, "POST", body=MAPPING),
            Operation("/curves", self.curves, MANY, query={"ids": {"type": "string"}}),
            Operation("/all/{experiment_id}/{action}", self.act, ONE, "POST", refusals=(404, 409)),
            Operation("/all/{experiment_id}", self.delete, ONE, "DELETE", refusals=(404, 409)),
        ]

    def app(self) -> Starlette:
        """The ASGI application."""
        operations = [operation.route() for operation in self.operations()]
        return Starlette(
            routes=[
                Mount(API_ROOT, routes=operations),
                Route(LIVE, self.live),
                Route(READY, self.ready),
                Route("/", self.first_page),
                *(Route(path, self.file) for path in (_HOME, "/enter", "/page/{file:path}")),
                Mount("/experiments/{experiment_id}", app=self.of_experiment),
            ],
            middleware=[
                Middleware(LingeringCloseMiddleware),
                Middleware(UrlPrefixMiddleware, prefix=self._url_prefix),
                Middleware(
                    AuthMiddleware,
                    session_auth=self._session_auth,
                    host=self._host,
                    most_body_bytes=_most_body_bytes,
                    is_public=self._is_public,
                    for_programs={(NEW_LINK[0], API_ROOT + NEW_LINK[1])},
                    own_hosts=self._own_hosts,
                ),
            ],
            exception_handlers={**REFUSALS, HTTPException: self._refuse, CommandFailed: self._refuse_command},
        )

    async def warm_up(self) -> None:
        """Read the list once, so that the first browser does not wait for it."""
        await self._lines()

    def close(self) -> None:
        """Close the views of stored experiments."""
        self._views.close()
        self._forwarding.close()

    # ---- all experiments

    async def summary(self, _: Request) -> Response:
        """The id of this server, by which its client recognises it, and the number of experiments."""
        return Json({"id": self._id, "experimentCount": len(await self._lines())})

    async def all(self, _: Request) -> Response:
        """All experiments of the user, the latest first, each with its best result so far."""
        return Json(await self._lines())

    async def curves(self, request: Request) -> Response:
        """The best result so far of some experiments, over the number of results and over the time."""
        ids = [each for each in request.query_params.get("ids", "").split(",") if each]
        async with self._listing:
            return Json(await asyncio.to_thread(self._experiments.curves, ids))

    async def create(self, request: Request) -> Response:
        """Start an experiment; the body names its file on the machine of this server: {"config": PATH}."""
        sent = await body_of(request)
        path = sent.get("config") if isinstance(sent, dict) else None
        if not isinstance(path, str) or not path.startswith(("/", "~")) or "\0" in path:
            raise HTTPException(
                400,
                'cannot start an experiment: the body names no file; send {"config": "/path/to/config.yml"}',
            )
        return Json({"message": await run_nnictl("create", f"--config={os.path.expanduser(path)}")})

    async def act(self, request: Request) -> Response:
        """Resume or stop an experiment; the response is sent when that is done."""
        folder, action = self._folder_of(request), request.path_params["action"]
        if action not in _ACTIONS:
            raise HTTPException(404, f"cannot do {action!r}; the actions are {' and '.join(_ACTIONS)}")
        message = await run_nnictl(*_ACTIONS[action], folder.experiment_id)
        self._views.forget(folder)
        return Json({"message": message})

    async def delete(self, request: Request) -> Response:
        """Delete an experiment that does not run, with all of its data."""
        folder = self._folder_of(request)
        self._views.forget(folder)
        return Json({"message": await run_nnictl("experiment", "delete", folder.experiment_id, "--yes")})

    async def _lines(self) -> list[dict[str, Any]]:
        async with self._listing:
            return await asyncio.to_thread(self._experiments.lines)

    # ---- one experiment

    async def of_experiment(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The page or the API of one experiment."""
        request = Request(scope, receive, send)
        folder = self._folder_of(request)
        path = scope["path"].removeprefix(scope["root_path"]) or "/"
        if path.startswith(f"{API_ROOT}/"):
            app = await self._api_of(folder, path.removeprefix(API_ROOT), request)
            scope = {**scope, "root_path": scope["root_path"] + API_ROOT}
        elif path in self._files:
            prefix = f"{self._url_prefix}/experiments/{folder.experiment_id}"
            answer = self._files.answer
            app = await asyncio.to_thread(answer, path, request.headers, prefix, self._url_prefix)
        elif path == "/":
            app = RedirectResponse(f"{self._url_prefix}/experiments/{folder.experiment_id}/oview")
        else:
            raise HTTPException(404, f"cannot find this address of experiment {folder.experiment_id}")
        await app(scope, receive, send)

    async def _api_of(self, folder: ExperimentFolder, path: str, request: Request) -> ASGIApp:
        """The application, or the response, of the experiment's API."""
        if path == LOGIN[1]:
            # The page of an experiment logs in and out of all of them.
            return self._session_app
        if path == NEW_LINK[1]:
            raise HTTPException(403, "cannot accept this request from a web page; use nnictl")
        if _PASSED_ON.fullmatch(path) is None:
            raise HTTPException(404, f"cannot find this address of experiment {folder.experiment_id}")
        manager = await asyncio.to_thread(folder.running_process)
        if manager is not None:
            self._views.forget(folder)
            return await self._forwarding.pass_on(request, path, manager)
        return self._views.app_of(folder)

    def _folder_of(self, request: Request) -> ExperimentFolder:
        experiment_id = request.path_params["experiment_id"]
        folder = self._experiments.folder(experiment_id) if is_safe_name(experiment_id) else None
        if folder is None or not folder.has_database():
            raise HTTPException(404, f"cannot find experiment {experiment_id!r}; it may have been deleted")
        return folder

    # ---- pages and access

    def _is_public(self, method: str, path: str) -> bool:
        """True for the pages' files, the probes, and the exchange of a login code for a session."""
        found = _OF_EXPERIMENT.fullmatch(path)
        rest = path if found is None else found[2] or "/"
        if (method, rest) == (LOGIN[0], API_ROOT + LOGIN[1]):
            return True
        if path in (LIVE, READY):
            return method in ("GET", "HEAD")
        return method in ("GET", "HEAD") and (rest == "/" or rest in self._files or rest == _HOME)

    async def live(self, _: Request) -> Response:
        """Respond, which shows that the event loop runs."""
        return PlainTextResponse("ok\n")

    async def ready(self, _: Request) -> Response:
        """Respond with 503 while the state folder is missing or read-only, for example with its storage unmounted."""
        if await asyncio.to_thread(os.access, hub_folder().path, os.W_OK):
            return PlainTextResponse("ok\n")
        return PlainTextResponse("cannot write to the state folder; mount its storage\n", 503)

    async def description(self, _: Request) -> Response:
        """This description."""
        root = self._url_prefix + API_ROOT
        return Json(document(self.operations(), "all experiments", root, self._session_auth.cookie_name))

    async def first_page(self, _: Request) -> Response:
        """Redirect to the list."""
        return RedirectResponse(f"{self._url_prefix}{_HOME}")

    async def file(self, request: Request) -> Response:
        """A file of the page of all experiments."""
        path = path_of(request.scope)
        if path == _HOME or path in PLACES:
            return await self._page(request.headers)
        if path not in self._files:
            raise HTTPException(404, "cannot find this file of the page; reload the page")
        return await asyncio.to_thread(self._files.answer, path, request.headers)

    async def _page(self, headers: Headers) -> Response:
        prefix = self._url_prefix
        return await asyncio.to_thread(self._files.answer, "/page/hub.html", headers, prefix, prefix)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        is_for_people = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if error.status_code == 404 and is_for_people:
            shown = await self._page(Headers())
            shown.status_code = 404
            return shown
        return refused(request, error, self._url_prefix + API_ROOT)

    async def _refuse_command(self, _: Request, error: Exception) -> Response:
        return Json({"error": str(error)}, status_code=409)


def _most_body_bytes(method: str, path: str) -> int:
    """The body limit. Only a manager knows those of its operations."""
    found = _OF_EXPERIMENT.fullmatch(path)
    if (method, path if found is None else found[2]) == (LOGIN[0], API_ROOT + LOGIN[1]):
        return MAX_CODE_BYTES
    return MAX_BODY_BYTES if found is None else _MAX_FORWARDED_BYTES
