"""Experiments that never ran: their stores are written directly, with any number of trials, and served as
a view.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests
from deadlines import DEADLINE_S
from real_experiment import RealExperiment

from nni_manager.client.manager_client import session_with
from nni_manager.domain.events import Event, ManagerReady
from nni_manager.domain.experiment import ExperimentCore, ExperimentState
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.stored_experiment import StoredExperimentReader
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import experiment_row, trial_row
from nni_manager.store.writer import Store
from nni_manager.support.http_server import HttpServer, listen
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.training_services.base import ManagedGpu
from nni_manager.web.api import ManagerApi
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__
from trial_keeper.wire.reasons import ExitReason

REQUIRES_TOKEN = WebServerOptions(require_token=True)
NUMBERS = [f"x{number}" for number in range(8)]


def made_trial(number: int, now_s: float, result: float | None = None) -> Trial:
    """A trial that has succeeded."""
    value = number / 7
    result = value if result is None else result
    return Trial(
        trial_id=f"{number:05d}",
        sequence_id=number,
        parameters=dict.fromkeys(NUMBERS, value),
        metadata={f"/{name}": value for name in NUMBERS},
        created_at_s=now_s,
        job_id=f"{number:05d}",
        state=TrialState.SUCCEEDED,
        run=TrialRun(
            attempt=0,
            started_at_s=now_s,
            ended_at_s=now_s + 1,
            reason=ExitReason.SUCCEEDED,
            exit_code=0,
            final=str(result),
            value=result,
            reporter="main-0",
        ),
    )


def made_trial_of_two_objectives(number: int, now_s: float) -> Trial:
    """A trial with random parameters: `width` is its accuracy, `depth` its latency, and 1 - `depth` its speed."""
    chosen = random.Random(number)
    trial = made_trial(number, now_s)
    width, depth = chosen.random(), chosen.random()
    trial.parameters = {"width": width, "depth": depth}
    trial.run.value = width
    trial.run.final = json.dumps({"accuracy": width, "latency_ms": depth, "speed": 1 - depth})
    return trial


def made_experiment(
    folder: Path,
    trials: int,
    make_trial: Callable[[int, float], Trial] = made_trial,
    **config: Any,
) -> RealExperiment:
    """A finished experiment, as its manager left it."""
    experiment = RealExperiment(folder, "pass\n", maxTrialNum=min(max(trials, 1), 99_999), **config)
    experiment.create()
    now_s = time.time()
    write(
        experiment.folder,
        *(trial_row(make_trial(number, now_s)) for number in range(trials)),
        experiment_row(ExperimentState.DONE, "", 60.0, now_s, any_compatible_keeper=True),
    )
    return experiment


def write(folder: ExperimentFolder, *rows: Any) -> None:
    """Store these rows as a manager would."""
    with contextlib.closing(Store(folder.database, folder.collected_logs)) as store:
        store.commit(rows, time.time())


class ServedView:
    """Serves a view of an experiment, or a scripted experiment, from a thread of this process."""

    def __init__(
        self,
        folder: ExperimentFolder,
        view: "StoredExperimentReader | Played | None" = None,
        web: WebServerOptions = REQUIRES_TOKEN,
    ) -> None:
        self.folder = folder
        listener = listen("127.0.0.1", 0, "")
        self.port = listener.getsockname()[1]
        with StoreReader(folder.database) as reader:
            self.session_auth = SessionAuth(
                reader.experiment().secret, folder.experiment_id, folder.ended_sessions
            )
        self.process = ManagerProcess(
            os.getpid(),
            "127.0.0.1",
            self.port,
            __version__,
            self.session_auth.token,
            url_prefix=web.url_prefix,
        )
        self.view: Any = StoredExperimentReader(folder) if view is None else view
        self.server = HttpServer(ManagerApi(self.view, web, self.port, self.session_auth, lambda: None).app())
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listener)))
        self._thread.start()

    async def _serve(self, listener: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[listener])

    @property
    def origin(self) -> str:
        """The start of the URLs of the view's pages."""
        return self.process.base_url

    def link(self) -> str:
        """A login link for one browser."""
        return f"{self.origin}/enter#{self.session_auth.new_login_code()}"

    def ask(self, verb: str, path: str, **options: Any) -> requests.Response:
        """Send a request to the HTTP API with the owner's token; return the response."""
        with session_with(self.process) as session:
            url = f"{self.origin}/api/v1/nni{path}"
            return session.request(verb, url, **{"timeout": 30, **options})

    def get(self, path: str) -> Any:
        """A document of the HTTP API."""
        response = self.ask("GET", path)
        assert response.status_code == 200, response.text
        return response.json()

    def close(self) -> None:
        """End the server with all connections."""
        self.server.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.view.close()


@contextlib.contextmanager
def served_view(
    folder: ExperimentFolder, view: "Played | None" = None, **options: Any
) -> Iterator[ServedView]:
    """A served view of an experiment, or of a scripted one. `options`: further arguments of `ServedView`."""
    served = ServedView(folder, view, **options)
    try:
        yield served
    finally:
        served.close()


def events_of(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The documents of a text/event-stream, as they arrive."""
    lines = response.iter_lines(chunk_size=None)
    for line in lines:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


class Played:
    """A scripted experiment. It provides the engine's interface for the HTTP API without running an engine."""

    def __init__(self, folder: ExperimentFolder) -> None:
        """`folder`: the folder of an experiment without trials."""
        self.folder = folder
        stored = ExperimentSnapshot.stored(folder)
        self.experiment = ExperimentCore("TESTEXPT", Limits(100, None, 20_000, None, 0), MAXIMIZE)
        self.experiment.handle(ManagerReady(), time.monotonic())
        self.problems: tuple[str, ...] = ()
        self.pending_reasons: dict[str, str] = {}
        self.gpus: list[ManagedGpu] = []
        self._picture = dataclasses.replace(stored, experiment=self.experiment)

    def snapshot(self) -> ExperimentSnapshot:
        """The current state of the experiment."""
        now_s = time.monotonic()
        duration_s = self.experiment.budget.duration_s(now_s)
        return dataclasses.replace(
            self._picture,
            duration_s=duration_s,
            now_s=now_s,
            problems=self.problems,
            pending_reason=lambda job_id: self.pending_reasons.get(job_id, ""),
            gpus=self._read_gpus,
        )

    async def _read_gpus(self) -> list[ManagedGpu]:
        return self.gpus

    def apply(self, *events: Event) -> None:
        """Apply events, on the loop that serves the experiment."""
        for event in events:
            self.experiment.handle(event, time.monotonic())

    def close(self) -> None:
        """Nothing to release."""
