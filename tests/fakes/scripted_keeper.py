"""Engines whose training service runs no job, and whose keepers send what the test says."""

import asyncio
import contextlib
import json
import sqlite3

from attempts import attempt_id, sign_attempt
from deadlines import DEADLINE_S
from void_service import Void, start

from nni_manager.engine.shared_files import SharedFiles
from nni_sdk.frame import frame, frame_head
from trial_keeper import __version__
from trial_keeper.wire.documents import exit_to_bytes
from trial_keeper.wire.messages import (
    AttemptKey,
    Hello,
    Idle,
    RevokeTrial,
    RunTrial,
    Stream,
    TrialEnded,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason

FIRST, SECOND = attempt_id(0), attempt_id(1)


def play(scenario):
    """Run a scenario with a deadline."""

    async def bounded():
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(bounded())


async def until(is_true):
    """Wait until a condition holds."""
    while not is_true():
        await asyncio.sleep(0.01)


def states(engine):
    """The states of all trials."""
    return [trial.state.value for trial in engine.experiment.trials.values()]


def frames(*records):
    """The metrics of an attempt; each record is its type and value."""
    return b"".join(
        frame(frame_head(0, "t", type_), number, json.dumps(value))
        for number, (type_, value) in enumerate(records)
    )


class Cluster(Void):
    """A training service whose jobs run until the test ends them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stopped = []
        self.woken = []
        self.restarted = set()
        self.left = {}
        self.trouble = ""

    async def stop(self, job_id):
        self.stopped.append(job_id)
        return True

    def wake(self, job_id):
        self.woken.append(job_id)

    def warning(self, job_id):
        return self.trouble

    def will_restart(self, job_id):
        return job_id in self.restarted

    def leftovers(self):
        return self.left


def write_attempt(experiment, trial, metrics=b"", *, sizes=None, name=FIRST, reason=ExitReason.SUCCEEDED):
    """Write the files of an ended attempt as its keeper does; return its key. `sizes`: default, those of the files."""
    key = AttemptKey(trial.trial_id, name, "main-0")
    token = sign_attempt(experiment.folder, key, trial.job_id)
    attempt = experiment.folder.workspace.attempt(key)
    path = attempt.stream(Stream.METRICS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(metrics)
    all_sizes = dict.fromkeys(Stream, 0) | {Stream.METRICS: len(metrics)} | (sizes or {})
    code = 0 if reason is ExitReason.SUCCEEDED else 1
    ended = TrialEnded(key, reason, code, 10.0, 11.0, all_sizes)
    attempt.exit_json.write_bytes(exit_to_bytes(ended, token))
    return key


def forbid_reading(monkeypatch):
    """Let each search for attempts fail, as in a folder that the manager's user may not read."""

    def refuse(self, trial_id, signer):
        raise PermissionError(13, "Permission denied", "attempts")

    monkeypatch.setattr(SharedFiles, "find_attempts", refuse)


@contextlib.contextmanager
def a_blocked_store(experiment):
    """During the block, the manager's database cannot be written."""
    with contextlib.closing(sqlite3.connect(experiment.folder.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield  # closing() then closes the connection, which ends the transaction


class ScriptedKeeper:
    """A keeper that sends the test's messages, and returns the messages of the manager."""

    def __init__(self, engine, job_id, *attempts, task="main-0"):
        hello = Hello(
            __version__, engine.experiment.experiment_id, job_id, task, attempts, supports_revoke=True
        )
        self.session = engine.admission.admit(hello, job_id, engine.admission.token(job_id))

    def send(self, *messages):
        for message in messages:
            self.session.receive(message)

    def run(self, trial_id):
        """Send the messages of a trial that ran for half a second without output."""
        key = AttemptKey(trial_id, attempt_id(0), "main-0")
        ended = TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 10.5, dict.fromkeys(Stream, 0))
        self.send(TrialStarted(key, 10.0), ended, Idle())

    def received(self):
        """Return all messages that the manager has queued."""
        outgoing = self.session.outgoing
        return [outgoing.get_nowait() for _ in range(outgoing.qsize())]

    async def receive_until(self, kind):
        """Return all RunTrial and RevokeTrial messages up to and including the first one of type `kind`."""
        told = []
        while not (told and isinstance(told[-1], kind)):
            message = await self.session.outgoing.get()
            if isinstance(message, RunTrial | RevokeTrial):
                told.append(message)
        return told


async def a_submitted_job(engine, service):
    """Start the engine; return its only job, which is submitted."""
    await start(engine)
    await service.submitted.wait()
    await until(lambda: not engine.submission.is_pending(service.settings.job_id))
    return engine.experiment.jobs.live[service.settings.job_id]


async def a_submitted_trial(engine, service):
    """Start the engine; return its only trial, whose job is submitted."""
    await a_submitted_job(engine, service)
    (trial,) = engine.experiment.trials.values()
    return trial


async def a_connected_keeper(engine, service):
    """Return the only trial, the key of its running attempt, and its keeper."""
    trial = await a_submitted_trial(engine, service)
    keeper, key = ScriptedKeeper(engine, trial.job_id), AttemptKey(trial.trial_id, attempt_id(0), "main-0")
    keeper.send(TrialStarted(key, 10.0))
    return trial, key, keeper
