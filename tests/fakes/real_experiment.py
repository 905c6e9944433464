"""A whole experiment, as a user would run it: a folder with code and configuration, a manager process, and keeper processes.

The code, the manager and the keepers are real. Many tests share this module.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from attempts import AttemptNumbers, attempt_id, metrics_of
from deadlines import DEADLINE_S
from forked_programs import ForkedProcess, Program, is_of_tests
from free_ports import free_port_pair

from nni_manager.client.manager_client import api_url, session_with
from nni_manager.config.reader import read_experiment_file
from nni_manager.engine.engine import Engine
from nni_manager.grpc_server.servicer import KeeperServer
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import MetricRow
from nni_manager.store.writer import Store
from nni_manager.training_services.base import JobEnded, TrainingService
from nni_manager.training_services.platform import platform_of
from nni_manager.tuner.registry import make_assessment, make_tuner
from nni_sdk.records import decode
from trial_keeper.wire.messages import AttemptKey, Stream

_RETRY_DELAY_S = 0.05


def wait_until(
    is_true: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, every_s: float = _RETRY_DELAY_S
) -> Any:
    """Poll `is_true` until it returns a true value, and return that value. Polling is necessary, because other processes send no
    events to the test.
    """
    deadline_s = time.monotonic() + timeout_s
    never = threading.Event()
    while not (result := is_true()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        never.wait(every_s)
    return result


async def until(is_true: Callable[[], Any], what: str, within_s: float = DEADLINE_S) -> None:
    """Like `wait_until`, for coroutines that share an event loop with an engine."""
    deadline_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"after {within_s:g} s still not: {what}"
        await asyncio.sleep(_RETRY_DELAY_S)


@contextlib.asynccontextmanager
async def a_manager_here(
    experiment: "RealExperiment",
    make_service: Callable[[Callable[[JobEnded], None]], TrainingService],
    told: str | None = None,
) -> AsyncIterator[Engine]:
    """Run the parts of a manager process in this process, with the given training service.

    `told`: the address in manager.json, if it is not the manager's own.
    """
    port = experiment.port = free_port_pair()
    engine = Engine(
        experiment.config,
        experiment.folder,
        make_service,
        make_tuner,
        make_assessment(experiment.config),
    )
    server = KeeperServer(engine.admission)
    await engine.restore()
    await server.start("127.0.0.1", port)
    try:
        await engine.start((told or f"127.0.0.1:{port}",))
        yield engine
    finally:
        await engine.close()
        await server.stop()
        assert not engine.runtime.failed.is_set()


def values(rows: list[MetricRow]) -> list[Any]:
    """The reported values."""
    return [json.loads(row.value) for row in rows]


PROGRAM = ["-m", "nni_manager"]


class RealExperiment:
    """One experiment in a temporary folder."""

    is_forked = "pytest" in sys.modules
    """Whether a manager may be a fork. A measurement needs a manager as nnictl starts it."""

    def __init__(
        self,
        folder: Path,
        train: str,
        *,
        space: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        experiment_id: str = "TESTEXPT",
        **config: Any,
    ) -> None:
        """`train` is the training script. `files` are stored in the folder of the script. `config` overrides keys of the
        experiment file.
        """
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        (self.code / "train.py").write_text(train)
        for name, content in (files or {}).items():
            (self.code / name).write_text(content)
        (self.code / "search_space.json").write_text(
            json.dumps(space or {"x": {"_type": "uniform", "_value": [0, 1]}})
        )
        document = {
            "authorName": "tests",
            "experimentName": "tests",
            "trialConcurrency": 2,
            "maxTrialNum": 4,
            "trainingServicePlatform": "local",
            "searchSpacePath": "search_space.json",
            "logDir": str(folder / "experiments"),
            "tuner": {"builtinTunerName": "Random", "classArgs": {"seed": 1}},
            "trial": {"command": f"{sys.executable} train.py", "codeDir": "."},
        } | config
        self.config_file = self.code / "config.yml"
        # The file contains JSON, which is valid YAML.
        self.config_file.write_text(json.dumps(document))
        self.config = read_experiment_file(self.config_file)
        self.folder = ExperimentFolder(self.config.log_dir / experiment_id)
        self.environ = os.environ | (environ or {})
        self.program = PROGRAM
        """Python's arguments that run the manager."""
        self.port = 0
        self.manager: subprocess.Popen[bytes] | ForkedProcess | None = None

    def create(self) -> None:
        """Create the experiment's folder and database."""
        self.folder.make(platform_of(self.config).storage_here())
        Store.create(
            self.folder.database,
            self.folder.collected_logs,
            self.folder.experiment_id,
            self.config.to_json(),
            secrets.token_bytes(32),
            time.time(),
        ).close()

    def start(self, port: int | None = None, host: str = "127.0.0.1", options: Sequence[str] = ()) -> None:
        """Start a manager: the first, or one that resumes. `options`: further options of its program."""
        self.port = port or free_port_pair()
        arguments = ("--folder", str(self.folder.path), "--host", host, "--port", f"{self.port}", *options)
        with self.folder.manager_stderr.open("ab") as output:
            if self.program == PROGRAM and self.is_forked and is_of_tests(self.environ):
                self.manager = ForkedProcess(Program.MANAGER, arguments, stdout=output, stderr=output)
            else:
                self.manager = subprocess.Popen(
                    [sys.executable, *self.program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environ,
                )
        wait_until(self._is_ready, "the manager is ready")

    def _is_ready(self) -> bool:
        assert self.manager is not None
        assert self.manager.poll() is None, self.folder.manager_stderr.read_text()
        process = self.folder.process()
        return process is not None and process.pid == self.manager.pid

    def kill_manager(self) -> None:
        """Kill the manager, as if its machine were lost."""
        assert self.manager is not None
        self.manager.kill()
        self.manager.wait()

    def get(self, path: str) -> Any:
        """A GET of the HTTP API."""
        response = self.ask("GET", path)
        response.raise_for_status()
        return response.json()

    def ask(self, verb: str, path: str, **options: Any) -> requests.Response:
        """Send a request to the HTTP API with the owner's token; return the response. `options` are arguments of requests."""
        process = self.folder.process()
        assert process is not None
        with session_with(process) as session:
            return session.request(verb, api_url(process) + path, **{"timeout": 10, **options})

    def delete(self, path: str) -> None:
        """A DELETE of the HTTP API."""
        self.ask("DELETE", path).raise_for_status()

    def summary(self) -> dict[str, Any]:
        """The summary of the experiment."""
        summary: dict[str, Any] = self.get("/summary")
        return summary

    def wait_for_status(
        self,
        *statuses: str,
        timeout_s: float = 90.0,
        every_s: float = _RETRY_DELAY_S,
        is_stored: bool = False,
    ) -> dict[str, Any]:
        """Wait for a state of the experiment; return the summary.

        If `is_stored`, also wait until the store has this state. The manager may show a state before it has committed the
        transaction with this state.
        """
        summary = wait_until(
            lambda: (seen := self.summary())["status"] in statuses and seen,
            f"the experiment is {statuses}",
            timeout_s,
            every_s,
        )
        assert isinstance(summary, dict)
        if is_stored:
            wait_until(lambda: self.stored_status() in statuses, f"the store has {statuses}", timeout_s)
        return summary

    def stored_status(self) -> str:
        """The state of the experiment in the store."""
        with StoreReader(self.folder.database) as reader:
            return reader.experiment().state.value

    def rows(self, trial_id: str) -> list[MetricRow]:
        """The metric records from the attempts that determine the trial's result."""
        with StoreReader(self.folder.database) as reader:
            return metrics_of(reader, trial_id)

    def row_count(self) -> int:
        """The number of metric records of all trials, from the attempts that determine the results."""
        with StoreReader(self.folder.database) as reader:
            return len(reader.metrics())

    def keeper_pids(self) -> list[int]:
        """The pids of all keepers, running or not."""
        pids = []
        for entry in self.folder.jobs.glob("*.json"):
            # Some tests truncate these files.
            with contextlib.suppress(ValueError):
                pids.append(json.loads(entry.read_bytes())["pid"])
        return pids

    def stream(self, trial_id: str, stream: Stream, attempt: int = 0) -> Path:
        """The file of this stream that an attempt of the trial wrote."""
        key = AttemptKey(trial_id, attempt_id(attempt), "main-0")
        return AttemptNumbers(self.folder.workspace).folder(key).stream(stream)

    def close(self) -> None:
        """End every process that this experiment started."""
        if self.manager is not None and self.manager.poll() is None:
            with contextlib.suppress(requests.RequestException):
                self.ask("DELETE", "/experiment", timeout=5)
            try:
                self.manager.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill_manager()
        for pid in self.keeper_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


@contextlib.contextmanager
def a_started_experiment(folder: Path, train: str, **options: Any) -> Iterator[RealExperiment]:
    """An experiment for all tests of a file; its processes end with it."""
    experiment = RealExperiment(folder, train, **options)
    experiment.create()
    try:
        experiment.start()
        yield experiment
    finally:
        experiment.close()


def assert_rows_are_what_was_written(
    experiment: RealExperiment, trial_id: str, attempt: int = 0
) -> list[MetricRow]:
    """Compare the stored records of a trial with its metrics file; return the records."""
    written = decode(experiment.stream(trial_id, Stream.METRICS, attempt).read_bytes(), 0)
    assert not written.garbage
    rows = experiment.rows(trial_id)
    assert [(row.record_offset, row.value) for row in rows] == [
        (record.offset, record.value) for record in written.records
    ]
    return rows
