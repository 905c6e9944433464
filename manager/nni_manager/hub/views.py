"""The stored experiments that browsers look at: each is read once and kept for a while, without a process of its own."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nni_manager.engine.stored_experiment import StoredExperimentReader
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.api import REFUSALS, ManagerApi, refused
from nni_manager.web.session_auth import SessionAuth

MAX_VIEWS = 8
"""Maximum number of experiments in memory beside those with an open request. 1,000 trials take 3 MB."""


class _View:
    """The operations on one stored experiment, as an application."""

    def __init__(
        self, reader: StoredExperimentReader, api: ManagerApi, database: tuple[int, int] | None
    ) -> None:
        """`database`: device and inode of the opened one; an experiment that was deleted and loaded again has another one."""
        self.reader, self.api, self.database = reader, api, database
        routes = [operation.route() for operation in api.operations_of_experiment()]
        self._app = Starlette(routes=routes, exception_handlers={**REFUSALS, HTTPException: _refuse})
        self.requests = 0
        """The number of open requests; an event stream is one for as long as a page shows it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.requests -= 1

    def close(self) -> None:
        self.reader.close()
        self.api.close()


class Views:
    """Views of stored experiments, the last used ones. Used on one event loop."""

    def __init__(self, web: WebServerOptions, port: int, session_auth: SessionAuth) -> None:
        self._web, self._port, self._session_auth = web, port, session_auth
        self._kept: OrderedDict[str, _View] = OrderedDict()

    def app_of(self, folder: ExperimentFolder) -> ASGIApp:
        """The operations on a stored experiment, with the paths of its API.

        Raises:
            StoreUnusable: the experiment cannot be read.
        """
        key, database = str(folder.path), _identity_of(folder.database)
        if key in self._kept and self._kept[key].database != database:
            self.forget(folder)
        if key not in self._kept:
            reader = StoredExperimentReader(folder)
            api = ManagerApi(reader, self._web, self._port, self._session_auth, lambda: None)
            self._kept[key] = _View(reader, api, database)
        self._kept.move_to_end(key)
        idle = [each for each, view in self._kept.items() if not view.requests and each != key]
        for each in idle[: max(len(self._kept) - MAX_VIEWS, 0)]:
            self._kept.pop(each).close()
        return self._kept[key]

    def forget(self, folder: ExperimentFolder) -> None:
        """Close the view of an experiment, if there is one: it runs, or is deleted."""
        if (view := self._kept.pop(str(folder.path), None)) is not None:
            view.close()

    def close(self) -> None:
        """Close all views."""
        while self._kept:
            self._kept.popitem()[1].close()


def _identity_of(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refused(request, error, request.scope["root_path"])
