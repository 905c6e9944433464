"""A firewall is between containers and manager. All data arrives over the shared storage, once and in order."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from attempts import AttemptNumbers, attempt_id, sign_attempt
from deadlines import DEADLINE_S, scaled_s
from fault_plan import Need
from fault_site import has_fuse
from jobs_here import JobsHere
from real_experiment import a_manager_here, assert_rows_are_what_was_written, until, values
from void_service import an_engine, start

from nni_manager.domain import transports as transports_module
from nni_manager.engine import profiles, serializers, storage_executor, storage_poller
from nni_manager.training_services.base import JobEnded
from nni_sdk.records import encode
from trial_keeper.wire.documents import exit_from_bytes, exit_to_bytes
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.small_files import replace_file

NO_MANAGER = "127.0.0.1:9"  # the discard port: no program listens there in a test
TRAIN = """
import os
import nni_sdk as nni
nni.get_next_parameter()
for i in range(200):
    nni.report_intermediate_result(i)
    print("line", i)
if os.environ["NNI_TRIAL_SEQ_ID"] == "0":
    open("gate").read()
for i in range(200, 400):
    nni.report_intermediate_result(i)
nni.report_final_result(400)
"""
PACED = """
import time
import nni_sdk as nni
nni.get_next_parameter()
for i in range(3000):
    nni.report_intermediate_result(i)
    if i % 10 == 0:
        time.sleep(0.05)
nni.report_final_result(3000)
"""
SAVES_ON_SIGTERM = """
import signal, sys, time
import nni_sdk as nni
nni.get_next_parameter()
def save(*_):
    nni.report_intermediate_result("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
nni.report_intermediate_result("ready")
while True:
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    """Short timeouts of the transports."""
    monkeypatch.setattr(transports_module, "RECONNECT_GRACE_S", 0.5)
    monkeypatch.setattr(transports_module, "POLL_INTERVAL_S", 0.2)


@pytest.fixture(autouse=True)
def ended_keepers():
    yield
    JobsHere.end_keepers()


class NoSignals(JobsHere):
    """A training service like OpenPAI, which never forwards a signal into containers."""

    async def stop(self, job_id):
        return job_id in self._running


def jobs_here(experiment, kind=JobsHere):
    return partial(kind, experiment.config, experiment.folder.workspace, experiment.folder.jobs)


def trial_of(engine, sequence_id):
    trials = engine.experiment.trials.values()
    return next((trial for trial in trials if trial.sequence_id == sequence_id), None)


def transports(engine):
    return {
        trial.sequence_id: serializers.transport_view(engine.snapshot(), trial)["transport"]
        for trial in engine.experiment.trials.values()
    }


def exit_of(experiment, trial):
    key = AttemptKey(trial.trial_id, attempt_id(0), "main-0")
    return exit_from_bytes(AttemptNumbers(experiment.folder.workspace).folder(key).exit_json.read_bytes())


@pytest.mark.smoke
def test_the_results_of_a_running_experiment_are_collected_over_the_shared_storage(a_real_experiment):
    experiment = a_real_experiment(TRAIN, maxTrialNum=4, trialConcurrency=2, logCollection="http")
    os.mkfifo(experiment.code / "gate")

    async def play():
        async with a_manager_here(experiment, jobs_here(experiment), told=NO_MANAGER) as engine:
            await until(
                lambda: (trial := trial_of(engine, 0)) and trial.run.intermediate_count == 200,
                "half of the results are stored",
            )
            first = trial_of(engine, 0)
            assert len(experiment.rows(first.trial_id)) == 200
            assert (first.state.value, transports(engine)[0]) == ("RUNNING", "shared_storage")
            shown = profiles.profile_view(engine.snapshot())["trialTransports"][first.trial_id]
            assert (shown["transport"], shown["road"]) == ("shared_storage", "mount")
            assert 0 <= shown["lastContactAgoS"] < 60
            assert len(engine.keepers) == 0
            with (experiment.code / "gate").open("w"):
                pass
            await until(engine.finished.is_set, "the experiment is over")
            return list(engine.experiment.trials.values())

    trials = asyncio.run(play())
    assert [trial.state.value for trial in trials] == ["SUCCEEDED"] * 4
    for trial in trials:
        rows = assert_rows_are_what_was_written(experiment, trial.trial_id)
        assert values(rows) == [*range(400), 400]
        ended = exit_of(experiment, trial)
        assert (trial.run.started_at_s, trial.run.ended_at_s) == (ended.started_at_s, ended.ended_at_s)
        collected = experiment.folder.collected_logs / trial.trial_id
        (stdout,) = [path for path in collected.rglob("*") if path.is_file() and "stdout" in str(path)]
        assert stdout.read_bytes() == experiment.stream(trial.trial_id, Stream.STDOUT).read_bytes()


def test_a_second_manager_continues_at_the_offset_that_the_first_manager_stored(a_real_experiment):
    experiment = a_real_experiment(TRAIN, maxTrialNum=1, trialConcurrency=1)
    os.mkfifo(experiment.code / "gate")

    async def play():
        async with a_manager_here(experiment, jobs_here(experiment), told=NO_MANAGER):
            await until(lambda: experiment.row_count() == 200, "half of the results are stored")
        async with a_manager_here(experiment, jobs_here(experiment), told=NO_MANAGER) as engine:
            await until(
                lambda: transports(engine) == {0: "shared_storage"}, "the second manager polls the storage"
            )
            with (experiment.code / "gate").open("w"):
                pass
            await until(engine.finished.is_set, "the experiment is over")
            return trial_of(engine, 0)

    trial = asyncio.run(play())
    assert (trial.state.value, trial.run.attempt) == ("SUCCEEDED", 0)
    assert values(assert_rows_are_what_was_written(experiment, trial.trial_id)) == [*range(400), 400]


def test_a_stop_request_over_the_shared_storage_ends_the_trial(a_real_experiment):
    experiment = a_real_experiment(SAVES_ON_SIGTERM, maxTrialNum=1, trialConcurrency=1)

    async def play():
        async with a_manager_here(experiment, jobs_here(experiment, NoSignals), told=NO_MANAGER) as engine:
            await until(lambda: experiment.row_count() == 1, "the trial is ready")
            trial = trial_of(engine, 0)
            engine.stop_trial(trial.trial_id)
            await until(engine.finished.is_set, "the experiment is over")
            return trial

    trial = asyncio.run(play())
    assert (trial.state.value, trial.run.exit_code) == ("USER_CANCELED", 0)
    assert exit_of(experiment, trial).reason is ExitReason.STOPPED_BY_USER
    assert values(assert_rows_are_what_was_written(experiment, trial.trial_id)) == ["ready", "saved"]


class LinkProxy:
    """A TCP proxy on the event loop of the test, which can open and close the link."""

    def __init__(self, port):
        self.to = port
        self.is_open = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def carry(self, reader, writer):
        with contextlib.suppress(OSError):
            if self.is_open:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to)
                self._writers |= {writer, far_writer}
                await asyncio.gather(self._pour(reader, far_writer), self._pour(far_reader, writer))
        writer.transport.abort()

    async def _pour(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    def shut(self):
        self.is_open = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


def test_results_are_complete_even_if_the_transport_changes_because_a_connection_opens_or_closes(
    a_real_experiment,
):
    experiment = a_real_experiment(PACED, maxTrialNum=2, trialConcurrency=2, logCollection="http")
    seen = []

    async def play():
        proxy_link = LinkProxy(0)
        proxy = await asyncio.start_server(proxy_link.carry, "127.0.0.1", 0)
        told = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with a_manager_here(experiment, jobs_here(experiment), told=told) as engine, proxy:
            proxy_link.to = experiment.port
            for transport in ("shared_storage", "grpc", "shared_storage", "grpc", "shared_storage"):
                before = experiment.row_count()
                proxy_link.is_open = transport == "grpc"
                if not proxy_link.is_open:
                    proxy_link.shut()
                await until(
                    lambda each=transport: set(transports(engine).values()) == {each}, f"both use {transport}"
                )
                await until(
                    lambda before=before: experiment.row_count() > before + 50,
                    "rows arrive over this transport",
                )
                seen.append(transport)
            proxy_link.is_open = True
            await until(engine.finished.is_set, "the experiment is over")
            proxy_link.shut()
            return list(engine.experiment.trials.values())

    trials = asyncio.run(play())
    assert seen == ["shared_storage", "grpc", "shared_storage", "grpc", "shared_storage"]
    for trial in trials:
        assert (trial.state.value, trial.run.attempt) == ("SUCCEEDED", 0)
        assert values(assert_rows_are_what_was_written(experiment, trial.trial_id)) == [*range(3000), 3000]


# ---- storage that shows files late, wrongly or never


def frames(*numbers):
    return b"".join(encode(number, "x", "PERIODICAL", number, number) for number in numbers)


class RemoteFiles:
    """The files of an attempt as the manager's machine sees them. The test writes these files; no keeper runs."""

    def __init__(self, experiment, trial_id, attempt=0):
        self.key = AttemptKey(trial_id, attempt_id(attempt), "main-0")
        self.folder = experiment.folder.workspace.attempt(self.key)
        self.token = sign_attempt(experiment.folder, self.key)
        for path in (self.folder.stream(Stream.METRICS).parent, self.folder.output):
            path.mkdir(parents=True)
        for stream in Stream:
            self.folder.stream(stream).touch()

    def show(self, metrics, stream=Stream.METRICS):
        replace_file(self.folder.stream(stream), metrics)

    def end(self, size):
        ended = TrialEnded(self.key, ExitReason.SUCCEEDED, 0, 10.0, 20.0, {Stream.METRICS: size})
        replace_file(self.folder.exit_json, exit_to_bytes(ended, self.token))


async def a_trial(engine, service):
    await asyncio.wait_for(service.submitted.wait(), DEADLINE_S)
    return engine.experiment.trials[service.settings.trial_id]


@contextlib.asynccontextmanager
async def no_keepers(experiment):
    engine, service = an_engine(experiment)
    await start(engine)
    try:
        yield engine, service
    finally:
        await engine.close()
        assert not engine.runtime.failed.is_set()


async def several_polls():
    """Wait for the time of several polls, during which the state must not change."""
    await asyncio.sleep(1.0)


def test_a_trial_with_a_visible_exit_record_does_not_end_before_all_its_bytes_are_visible(a_real_experiment):
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1)
    whole = frames(1, 2, 3) + encode(4, "x", "FINAL", 0, 7.0)

    async def play():
        async with no_keepers(experiment) as (engine, service):
            trial = await a_trial(engine, service)
            await several_polls()
            assert trial.state.value == "WAITING"
            shown = RemoteFiles(experiment, trial.trial_id)
            shown.show(b"the command runs\n", Stream.KEEPER)
            await until(lambda: trial.state.value == "RUNNING", "the trial runs")
            shown.end(len(whole))
            await until(lambda: trial.state.value == "CLOSING", "its exit record is found")
            for size in (len(frames(1)) + 9, len(frames(1, 2))):
                shown.show(whole[:size])
                await until(
                    lambda size=size: engine.ingest.received(shown.key, Stream.METRICS) == size,
                    "the bytes are read",
                )
            await several_polls()
            assert trial.state.value == "CLOSING"
            shown.show(whole)
            await until(lambda: trial.state.is_terminal, "the trial has ended")
            return trial

    trial = asyncio.run(play())
    assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 7.0)
    assert (trial.run.started_at_s, trial.run.ended_at_s) == (10.0, 20.0)
    assert values(experiment.rows(trial.trial_id)) == [1, 2, 3, 7.0]


def test_zeros_in_place_of_missing_bytes_are_not_read_as_metrics(a_real_experiment):
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1)

    async def play():
        async with no_keepers(experiment) as (engine, service):
            trial = await a_trial(engine, service)
            shown = RemoteFiles(experiment, trial.trial_id)
            shown.show(frames(1) + bytes(len(frames(2))) + frames(3))
            await until(lambda: len(experiment.rows(trial.trial_id)) == 1, "the first record is stored")
            await several_polls()
            shown.show(frames(1, 2, 3))
            await until(lambda: len(experiment.rows(trial.trial_id)) == 3, "all records are stored")
            return trial

    assert values(experiment.rows(asyncio.run(play()).trial_id)) == [1, 2, 3]


def test_a_trial_does_not_end_until_its_files_are_complete_although_its_job_has_ended(
    a_real_experiment, monkeypatch, caplog
):
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1)

    async def play():
        async with no_keepers(experiment) as (engine, service):
            monkeypatch.setattr(type(service), "uses_snapshot", True)
            trial = await a_trial(engine, service)
            # The long RECONNECT_GRACE_S delays the first poll of the storage, so the job ends before that poll.
            monkeypatch.setattr(transports_module, "RECONNECT_GRACE_S", 1e6)
            service.on_job_ended(JobEnded(trial.job_id, 0, ""))
            await several_polls()
            assert not trial.state.is_terminal
            shown = RemoteFiles(experiment, trial.trial_id)
            shown.end(len(frames(1, 2)))
            await several_polls()
            assert not trial.state.is_terminal
            shown.show(frames(1, 2))
            await until(lambda: not engine.experiment.jobs.live, "the end of the job is reported")
            return trial

    with caplog.at_level(logging.INFO):
        trial = asyncio.run(play())
    assert trial.state.value == "SUCCEEDED"
    assert values(experiment.rows(trial.trial_id)) == [1, 2]
    (ended,) = (line for line in caplog.messages if line.startswith(f"job {trial.job_id} has ended: "))
    assert "the workspace lacks data" not in ended


HANGING = """
import sys
import mfusepy
class Empty(mfusepy.Operations):
    pass
mfusepy.FUSE(Empty(), sys.argv[1], foreground=True, nothreads=True)
"""


@pytest.fixture
def hang():
    """Return a function that mounts a file system on a folder; the file system does not respond."""
    if not has_fuse():
        pytest.skip(f"needs {Need.FUSE.value}")
    mounted: list[tuple[Path, subprocess.Popen[bytes]]] = []

    async def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        server = subprocess.Popen([sys.executable, "-c", HANGING, folder])
        mounted.append((folder, server))
        await until(lambda: os.path.ismount(folder), "the folder is mounted")
        server.send_signal(signal.SIGSTOP)

    yield make
    for folder, server in mounted:
        server.kill()
        server.wait()
        subprocess.run(["fusermount3", "-u", "-z", folder], check=True)


@pytest.mark.any_machine
def test_an_unresponsive_attempt_folder_blocks_neither_other_trials_nor_the_manager(
    a_real_experiment, hang, monkeypatch
):
    monkeypatch.setattr(storage_executor, "STALL_TIMEOUT_S", 1.0)
    experiment = a_real_experiment(TRAIN, maxTrialNum=3, trialConcurrency=2)
    os.mkfifo(experiment.code / "gate")

    async def play():
        async with a_manager_here(experiment, jobs_here(experiment), told=NO_MANAGER) as engine:
            await until(
                lambda: (trial := trial_of(engine, 0)) and len(experiment.rows(trial.trial_id)) == 200,
                "half of the results are stored",
            )
            first = trial_of(engine, 0)
            # The trial gets another attempt folder, which hangs when the manager reads it.
            await hang(experiment.folder.workspace.trial(first.trial_id).attempts / "1")
            # A poll may report another problem before the folder hangs, so wait for this text.
            await until(
                lambda: "shared storage has not answered" in (engine.snapshot().problem or ""),
                "the problem is reported",
            )
            await until(
                lambda: (third := trial_of(engine, 2)) and third.state.is_terminal, "the other trials end"
            )
            others = [trial_of(engine, number) for number in (1, 2)]
            assert [trial.state.value for trial in others] == ["SUCCEEDED"] * 2
            assert not first.state.is_terminal
            return others

    for trial in asyncio.run(asyncio.wait_for(play(), scaled_s(120))):
        assert values(assert_rows_are_what_was_written(experiment, trial.trial_id)) == [*range(400), 400]
    with (experiment.code / "gate").open("w"):
        pass


def test_a_storage_error_is_reported_and_retried_and_no_result_is_lost(a_real_experiment, monkeypatch):
    monkeypatch.setattr(storage_poller, "_FAILED_POLL_RETRY_DELAY_S", 0.1)
    experiment = a_real_experiment("", maxTrialNum=1, trialConcurrency=1)

    async def play():
        async with no_keepers(experiment) as (engine, service):
            trial = await a_trial(engine, service)
            shown = RemoteFiles(experiment, trial.trial_id)
            attempts = experiment.folder.workspace.trial(trial.trial_id).attempts
            away = attempts.rename(attempts.with_name("away"))
            os.symlink(attempts.name, attempts)  # a symlink loop, so that every access raises an error
            await until(lambda: "cannot read" in engine.snapshot().problem, "the problem is reported")
            service.on_job_ended(JobEnded(trial.job_id, 1, ""))
            await several_polls()
            assert not trial.state.is_terminal
            assert "check the shared storage" in engine.snapshot().problem
            attempts.unlink()
            away.rename(attempts)
            shown.show(frames(1, 2))
            shown.end(len(frames(1, 2)))
            await until(lambda: trial.state.is_terminal, "the trial has ended")
            assert engine.snapshot().problem == ""
            return trial

    trial = asyncio.run(play())
    assert trial.state.value == "SUCCEEDED"
    assert values(experiment.rows(trial.trial_id)) == [1, 2]
