"""The server of all experiments in a thread of the test, for the experiments of a home."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from deadlines import DEADLINE_S

from nni_manager.client.hub_folder import hub_folder, make_folder, secret_of
from nni_manager.client.manager_client import session_with
from nni_manager.hub.api import HubApi
from nni_manager.store.folders import ManagerProcess
from nni_manager.support.http_server import HttpServer, listen
from nni_manager.support.server_tls import RenewableCertificate
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__


class ServedHub:
    """The server, with the state folder of the environment."""

    def __init__(self, web: WebServerOptions | None = None) -> None:
        web = web or WebServerOptions()
        folder = hub_folder()
        make_folder(folder)
        listener = listen("127.0.0.1", 0, "")
        self.port = listener.getsockname()[1]
        self.session_auth = SessionAuth(secret_of(folder), folder.experiment_id, folder.ended_sessions)
        self.process = ManagerProcess(
            *(os.getpid(), "127.0.0.1", self.port, __version__, self.session_auth.token),
            certificate_sha256=None if web.tls is None else web.tls.read().sha256,
            url_prefix=web.url_prefix,
        )
        self.verify = True if web.tls is None else str(web.tls.certificate)
        self.origin = self.process.base_url
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listener, web)))
        self._thread.start()
        self._is_ready.wait(DEADLINE_S)

    async def _serve(self, listener: Any, web: WebServerOptions) -> None:
        hub = HubApi("web", web, self.port, self.session_auth)
        with contextlib.closing(hub):
            tls = None if web.tls is None else RenewableCertificate(web.tls, lambda _: None)
            self.server = HttpServer(hub.app(), tls)
            self._is_ready.set()
            await self.server.serve(sockets=[listener])

    def link(self, experiment_id: str = "") -> str:
        """A login link for one browser, to the list or to an experiment."""
        below = f"/experiments/{experiment_id}" if experiment_id else ""
        return f"{self.origin}{below}/enter#{self.session_auth.new_login_code()}"

    def ask(self, verb: str, path: str, **options: Any) -> requests.Response:
        """Send a request with the owner's token; return the response."""
        with session_with(self.process) as session:
            url = self.origin + path
            return session.request(verb, url, **{"timeout": 60, "allow_redirects": False, **options})

    def get(self, path: str) -> Any:
        """A document."""
        response = self.ask("GET", f"/api/v1/nni{path}")
        assert response.status_code == 200, response.text
        return response.json()

    def close(self) -> None:
        """End the server with all connections."""
        self.server.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def served_hub(home: Path, monkeypatch: Any, **options: Any) -> Iterator[ServedHub]:
    """The server for the experiments of this home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("HOME", str(home))
    served = ServedHub(**options)
    try:
        yield served
    finally:
        served.close()
