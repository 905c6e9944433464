"""The engine with scripted training services. In most tests a component fails."""

import asyncio
import json

import pytest
from attempts import attempt_id, sign_attempt
from real_experiment import values
from scripted_keeper import ScriptedKeeper, a_connected_keeper, frames, play, states, until
from void_service import Void, an_engine, start

from nni_manager.domain.admission_errors import NotAccepting, ProtocolError
from nni_manager.domain.events import AttemptStarted, MetricsStored, TaskReported
from nni_manager.domain.stop_escalation import StopStage
from nni_manager.domain.trial import TrialState
from nni_manager.domain.trial_lifecycle import TrialLifecycle
from nni_manager.engine import commits, job_submission, profiles, serializers
from nni_manager.engine import engine as engine_module
from nni_manager.engine.code_snapshot import CodeUnusable
from nni_manager.engine.keeper_ingest import MAX_ATTEMPTS
from nni_manager.errors import RetryableError, UserError
from nni_manager.store.lease import LeaseLost
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import trial_row
from nni_manager.store.writer import Store
from nni_manager.training_services.base import JobEnded, Placement
from nni_manager.tuner.assessors.medianstop import Medianstop
from nni_sdk.frame import frame, frame_head
from nni_sdk.records import encode
from trial_keeper import __version__
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Chunk,
    Hello,
    Idle,
    RevokeTrial,
    RunTrial,
    Shutdown,
    Stream,
    TrialEnded,
    TrialRevoked,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason

NOTHING = "pass\n"


@pytest.mark.parametrize("event", [AttemptStarted, MetricsStored])
def test_an_exception_in_an_event_handler_marks_the_engine_as_failed(a_real_experiment, monkeypatch, event):
    experiment = a_real_experiment(NOTHING)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        monkeypatch.setattr(TrialLifecycle, "note_started", lambda *_, **__: 1 / 0)
        monkeypatch.setattr(TrialLifecycle, "note_metrics", lambda *_: 1 / 0)
        key = AttemptKey(next(iter(engine.experiment.trials)), attempt_id(0), "main-0")
        engine.runtime.post(
            AttemptStarted(key, 1.0) if event is AttemptStarted else MetricsStored(key, ((False, "1"),))
        )
        assert engine.runtime.failed.is_set()
        await engine.close()

    play(scenario)


def test_a_failing_assessor_is_reported_and_running_trials_continue(a_real_experiment, monkeypatch):
    experiment = a_real_experiment(
        NOTHING, trialConcurrency=1, assessor={"builtinAssessorName": "Medianstop"}
    )
    monkeypatch.setattr(Medianstop, "may_go_on", lambda *_: 1 / 0)
    monkeypatch.setattr(engine_module, "_LAST_KEEPERS_S", 0.1)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        key = AttemptKey(next(iter(engine.experiment.trials)), attempt_id(0), "main-0")
        for event in (AttemptStarted(key, 1.0), TaskReported(key), MetricsStored(key, ((False, "1"),))):
            engine.runtime.post(event)
        await until(lambda: engine.experiment.state.value == "ERROR")
        assert "the assessor Medianstop failed, and no more trials are started" in engine.experiment.error
        assert "ZeroDivisionError" in engine.experiment.error
        assert states(engine) == ["RUNNING"]
        await engine.close()

    play(scenario)


class OnePlace(Void):
    """A training service that runs one job at a time. The other jobs wait for a reservation."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.holder = None
        self.place_is_free = asyncio.Event()

    async def reserve(self, job_id, trial_id=None):
        while self.holder is not None:
            self.place_is_free.clear()
            await self.place_is_free.wait()
        self.holder = job_id
        return await super().reserve(job_id, trial_id)

    def release(self, job_id):
        super().release(job_id)
        if self.holder == job_id:
            self.holder = None
            self.place_is_free.set()

    async def stop(self, job_id):
        if self.holder != job_id:
            return False
        self.release(job_id)
        asyncio.get_running_loop().call_soon(self.on_job_ended, JobEnded(job_id, None, "stopped"))
        return True


def test_stopping_a_waiting_trial_cancels_the_trial_and_releases_its_reservation(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=3)

    async def scenario():
        engine, service = an_engine(experiment, kind=OnePlace)
        await start(engine)
        await service.submitted.wait()
        await until(lambda: len(engine.experiment.trials) == 2)
        waiting = next(
            trial for trial in engine.experiment.trials.values() if trial.trial_id != service.holder
        )
        engine.stop_trial(waiting.trial_id)
        await until(lambda: waiting.state.value == "USER_CANCELED")
        holder = service.holder
        engine.stop_trial(holder)
        await until(lambda: service.holder not in (None, holder))
        engine.stop()
        await engine.finished.wait()
        assert states(engine) == ["USER_CANCELED"] * 3
        assert service.holder is None
        await engine.close()

    play(scenario)


class FailsTwice(Void):
    """A training service whose first two submissions fail."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.failures = [
            RetryableError("cannot start a keeper: no memory"),
            OSError(28, "No space left on device"),
        ]

    async def submit(self, settings):
        if self.failures:
            raise self.failures.pop(0)
        await super().submit(settings)


def test_a_temporary_submission_error_is_reported_and_the_submission_is_retried(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(job_submission, "FIRST_RESUBMIT_S", 0.05)
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=FailsTwice)
        await start(engine)
        await until(lambda: "no memory" in engine.snapshot().problem)
        await service.submitted.wait()
        await until(lambda: not engine.submission.problem)
        assert states(engine) == ["WAITING"]
        assert len(service.released) == 2
        await engine.close()

    play(scenario)


class SlowSubmit(Void):
    """A training service whose job starts long before submit() returns."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may_answer = asyncio.Event()
        self.has_answered = asyncio.Event()
        self.stopped = []

    async def stop(self, job_id):
        self.stopped.append(job_id)
        return True

    async def submit(self, settings):
        await super().submit(settings)
        await self.may_answer.wait()
        self.has_answered.set()


def test_a_trial_keeps_running_if_its_keeper_connects_before_the_submission_returns(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=SlowSubmit)
        await start(engine)
        await service.submitted.wait()
        (trial,) = engine.experiment.trials.values()
        engine.runtime.post(AttemptStarted(AttemptKey(trial.trial_id, attempt_id(0), "main-0"), 1.0))
        service.may_answer.set()
        await service.has_answered.wait()
        await engine.commits.add([])
        assert (states(engine), service.stopped) == (["RUNNING"], [])
        await engine.close()

    play(scenario)


class Refusing(Void):
    """A training service that refuses each submitted job."""

    async def submit(self, settings):
        raise UserError("cannot submit: the image does not exist; name another")


def test_a_refused_submission_fails_the_trial_with_the_reason_of_the_refusal(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=Refusing)
        await start(engine)
        await engine.finished.wait()
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, trial.run.message) == (
            "FAILED",
            "cannot submit: the image does not exist; name another",
        )
        assert service.released == [trial.trial_id]
        await engine.close()

    play(scenario)


def test_a_lost_lease_ends_the_manager_and_is_not_reported_as_an_internal_error(a_real_experiment, caplog):
    experiment = a_real_experiment(NOTHING)
    lost = LeaseLost("process 7 on node7 holds it now")

    async def finds_it_lost():
        raise lost

    async def scenario():
        engine, _ = an_engine(experiment)
        await start(engine)
        engine.runtime.spawn(finds_it_lost())
        await engine.runtime.failed.wait()
        assert engine.runtime.lease_lost is lost
        await engine.close()

    play(scenario)
    assert "process 7 on node7 holds it now" in caplog.text
    assert "internal error" not in caplog.text


class AcceptsTheThird(Void):
    """A training service that refuses the first two jobs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.submissions = 0

    async def submit(self, settings):
        self.submissions += 1
        if self.submissions < 3:
            raise UserError("cannot submit: the image does not exist; name another")


def test_an_accepted_job_resets_the_number_of_consecutive_refusals(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=4)

    async def scenario():
        engine, service = an_engine(experiment, kind=AcceptsTheThird)
        await start(engine)
        await until(lambda: service.submissions == 3 and engine.experiment.refusals == 0)
        assert states(engine) == ["FAILED", "FAILED", "WAITING"]
        await engine.close()

    play(scenario)


def test_a_waiting_trial_stays_waiting_when_the_experiment_is_closed(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=2)

    async def scenario():
        engine, service = an_engine(experiment, kind=OnePlace)
        await start(engine)
        await service.submitted.wait()
        await until(lambda: len(engine.experiment.trials) == 2)
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        assert [trial.state.value for trial in reader.trials()] == ["WAITING", "WAITING"]


def test_no_trial_is_submitted_after_the_manager_closes(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=2)

    async def scenario():
        before = asyncio.all_tasks()
        engine, service = an_engine(experiment, kind=SlowSubmit)
        blocked = asyncio.Event()

        async def reserve(job_id, trial_id):
            blocked.set()
            await asyncio.Event().wait()

        service.reserve = reserve
        await start(engine)
        await blocked.wait()
        (trial_id,) = engine.experiment.trials
        # stop_trial() cancels the blocked submission. Then close() must prevent the submission of the next trial.
        engine.stop_trial(trial_id)
        await engine.close()
        assert not engine.runtime.failed.is_set()
        assert asyncio.all_tasks() == before

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        assert reader.trials()[0].state.value == "USER_CANCELED"


class Remote(Void):
    """A training service whose jobs can access only the workspace of this machine."""

    uses_snapshot = True

    def placement(self, job_id):
        return Placement(None, None)


def test_remote_jobs_get_a_code_snapshot_and_a_resume_reuses_the_snapshot(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)
    workspace = experiment.folder.workspace

    async def scenario():
        engine, service = an_engine(experiment, kind=Remote)
        await start(engine)
        await service.submitted.wait()
        await engine.close()

    for _ in range(2):
        play(scenario)
        (snapshot,) = workspace.root.glob("code-*.tar.gz")
    with StoreReader(experiment.folder.database) as reader:
        (trial,) = reader.trials()
    document = TrialDocument.from_bytes(workspace.trial(trial.trial_id).trial_json.read_bytes())
    assert (document.code_dir, document.code_snapshot) == ("", snapshot.name)


def test_an_experiment_does_not_start_if_its_code_cannot_be_packed(a_real_experiment):
    experiment = a_real_experiment(NOTHING)
    (experiment.code / "data").symlink_to("/no/such/place")

    async def scenario():
        engine, _ = an_engine(experiment, kind=Remote)
        with pytest.raises(CodeUnusable, match="'data'"):
            await start(engine)
        assert states(engine) == []
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("own", [KeeperExit.MOUNT_FORBIDDEN, KeeperExit.VERSION, KeeperExit.COMMAND])
def test_the_exit_code_of_a_keeper_that_started_no_attempt_determines_the_exit_reason_of_its_trial(
    a_real_experiment, own
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        (trial,) = engine.experiment.trials.values()
        service.on_job_ended(JobEnded(trial.job_id, int(own), "trial-keeper: cannot go on; the way out"))
        await engine.finished.wait()
        assert (trial.state.value, trial.run.reason) == ("FAILED", own.reason)
        assert own.remedy in trial.run.message
        assert trial.run.message.endswith("trial-keeper: cannot go on; the way out")
        await engine.close()

    play(scenario)


def test_a_full_disk_of_the_store_is_reported_in_every_status_response_until_space_is_free(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(commits, "RETRY_S", 0.05)
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        await engine.commits.add([])
        connection = engine.commits._store._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        (trial,) = engine.experiment.trials.values()
        # A write of this message needs more pages than max_page_count allows, so the commit fails.
        trial.run.message = "x" * 100_000
        stored = engine.commits.add([trial_row(trial)])
        await until(lambda: engine.snapshot().problem)
        snapshot = engine.snapshot()
        for view in (
            serializers.status_view,
            profiles.profile_view,
            profiles.metadata_view,
            serializers.summary_view,
        ):
            assert "free some disk space" in view(snapshot)["problem"]
        connection.execute("PRAGMA max_page_count = 1000000")
        await stored
        snapshot = engine.snapshot()
        assert "problem" not in serializers.status_view(snapshot) | profiles.metadata_view(snapshot)
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        assert [len(trial.run.message) for trial in reader.trials()] == [100_000]


# ---- admission of keepers


def hello_of(engine, trial, *attempts):
    keys = tuple(AttemptKey(trial.trial_id, attempt_id(number), "main-0") for number in attempts)
    token = engine.admission.token(trial.job_id)
    hello = Hello(__version__, engine.experiment.experiment_id, trial.job_id, "main-0", keys)
    return hello, trial.job_id, token


def test_the_manager_accepts_keepers_only_between_start_and_close(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1)

    async def scenario():
        first, service = an_engine(experiment)
        await start(first)
        await service.submitted.wait()
        (trial,) = first.experiment.trials.values()
        await first.close()

        engine, _ = an_engine(experiment)
        await engine.restore()
        words = hello_of(engine, trial, 0)
        with pytest.raises(NotAccepting):
            engine.admission.admit(*words)
        await engine.start(("127.0.0.1:1",))
        session = engine.admission.admit(*words)
        session.receive(TrialStarted(words[0].attempts[0], 10.0))
        await engine.close()
        with pytest.raises(NotAccepting):
            engine.admission.admit(*words)
        # After close() the store is closed, so the manager must drop a message that arrives now.
        session.receive(Chunk(words[0].attempts[0], Stream.STDOUT, 0, b"late"))
        assert not engine.runtime.failed.is_set()

    play(scenario)


def test_a_keeper_with_too_many_attempts_is_refused_and_leaves_no_session(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        (trial,) = engine.experiment.trials.values()
        with pytest.raises(ProtocolError):
            engine.admission.admit(*hello_of(engine, trial, *range(MAX_ATTEMPTS + 1)))
        assert len(engine.keepers) == 0
        assert not engine.keepers.send_all(trial.job_id, Shutdown("there are no more trials"))
        await engine.close()

    play(scenario)


def test_a_trial_is_dispatched_only_once_if_idle_messages_are_repeated(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, localConfig={"reuse": True})

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        (job_id,) = engine.experiment.jobs.live
        hello = Hello(__version__, engine.experiment.experiment_id, job_id, "main-0")
        session = engine.admission.admit(hello, job_id, engine.admission.token(job_id))
        for _ in range(1000):
            session.receive(Idle())
        assert len(asyncio.all_tasks()) < 50
        told = []
        while RunTrial not in map(type, told):
            told.append(await session.outgoing.get())
        await engine.close()
        while not session.outgoing.empty():
            told.append(session.outgoing.get_nowait())
        assert sum(isinstance(word, RunTrial) for word in told) < 5

    play(scenario)


def test_a_revoke_is_sent_after_the_dispatch_and_a_response_on_a_superseded_stream_is_ignored(
    a_real_experiment, monkeypatch
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=6, localConfig={"reuse": True})

    async def scenario():
        engine, _ = an_engine(experiment)
        await start(engine)
        jobs = engine.experiment.jobs
        await until(lambda: len(jobs.live) == 2)
        may_write = asyncio.Event()
        may_write.set()
        write = engine.writer.write_trial

        async def slowly(job, trial):
            if job.job_id == "env-0":
                await may_write.wait()
            await write(job, trial)

        monkeypatch.setattr(engine.writer, "write_trial", slowly)
        first, second = ScriptedKeeper(engine, "env-0"), ScriptedKeeper(engine, "env-1")
        first.send(Idle())
        (given,) = await first.receive_until(RunTrial)
        may_write.clear()
        first.run(given.trial_id)
        await until(lambda: len(jobs.live["env-0"].trial_ids) == 4)
        second.send(Idle())
        (given,) = await second.receive_until(RunTrial)
        second.run(given.trial_id)
        await until(lambda: jobs.live["env-0"].revoking_ids)
        *_, last = trial_ids = jobs.live["env-0"].trial_ids
        may_write.set()
        *given, returned = await first.receive_until(RevokeTrial)
        assert ([each.trial_id for each in given], returned) == ([*trial_ids], RevokeTrial(last))

        again = ScriptedKeeper(engine, "env-0")
        first.send(TrialRevoked(last))
        assert jobs.live["env-0"].trial_ids == trial_ids
        assert await again.receive_until(RevokeTrial) == [RevokeTrial(last)]
        again.send(TrialRevoked(last))
        (given,) = await second.receive_until(RunTrial)
        assert given.trial_id == last
        await engine.runtime.durable()
        with StoreReader(experiment.folder.database) as reader:
            (trial,) = (trial for trial in reader.trials() if trial.trial_id == last)
        assert (trial.job_id, trial.state.value, trial.run.attempt) == ("env-1", "WAITING", None)
        await engine.close()

    play(scenario)


def test_the_manager_records_whether_a_keeper_supports_revokes(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, localConfig={"reuse": True})

    async def scenario():
        engine, _ = an_engine(experiment)
        await start(engine)
        jobs = engine.experiment.jobs
        await until(lambda: jobs.live)
        hello = Hello(__version__, engine.experiment.experiment_id, "env-0", "main-0")
        session = engine.admission.admit(hello, "env-0", engine.admission.token("env-0"))
        assert (jobs.live["env-0"].is_linked, jobs.live["env-0"].supports_revoke) == (True, False)
        session.closed()
        assert not jobs.live["env-0"].is_linked
        await engine.close()

    play(scenario)


# ---- acknowledgements


def acknowledged(keeper):
    """The offsets of all acknowledgements that are queued for the keeper."""
    offsets = []
    while not keeper.session.outgoing.empty():
        message = keeper.session.outgoing.get_nowait()
        if isinstance(message, Ack):
            offsets.append(dict(message.attempt.offsets))
    return offsets


def test_uncommitted_bytes_are_not_acknowledged_and_their_results_do_not_count(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)
    metrics = encode(0, "any", "FINAL", 0, 0.5)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        keeper.send(Chunk(key, Stream.STDOUT, 0, b"stored\n"))
        await engine.runtime.durable()
        assert acknowledged(keeper) == [{Stream.STDOUT: 7}]

        # Another manager opens the store. From then on, every commit of this manager fails.
        Store(experiment.folder.database, experiment.folder.collected_logs).close()
        keeper.send(Chunk(key, Stream.STDOUT, 7, b"lost\n"), Chunk(key, Stream.METRICS, 0, metrics))
        await engine.runtime.failed.wait()
        assert (acknowledged(keeper), trial.run.final) == ([], None)
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        (trial_id,) = (trial.trial_id for trial in reader.trials())
        assert reader.offsets(AttemptKey(trial_id, attempt_id(0), "main-0")) == {Stream.STDOUT: 7}


def test_the_log_reports_at_most_ten_corrupt_spans_in_the_metrics_of_an_attempt(a_real_experiment, caplog):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        _, key, keeper = await a_connected_keeper(engine, service)
        garbage = b"no record\n" + encode(0, "any", "PERIODICAL", 0, 0.5)
        keeper.send(
            Chunk(key, Stream.METRICS, 0, garbage * 4),
            Chunk(key, Stream.METRICS, 4 * len(garbage), garbage * 9),
        )
        await engine.runtime.durable()
        await engine.close()

    play(scenario)
    lines = [record.getMessage() for record in caplog.records if "are not a record" in record.getMessage()]
    assert len(lines) == 10
    assert [line.endswith("further corrupt spans are not logged") for line in lines] == [False] * 9 + [True]


def test_a_new_version_of_the_code_is_recorded_only_if_the_code_has_changed(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1)

    async def recorded():
        engine, _ = an_engine(experiment)
        await engine.restore()
        await engine.provenance.record_code(engine.config, experiment.folder.workspace)
        await engine.close()
        with StoreReader(experiment.folder.database) as reader:
            return [version.digest for version in reader.code()]

    async def scenario():
        (first,) = await recorded()
        assert await recorded() == [first]
        (experiment.code / "train.py").write_text("1\n")
        assert (await recorded())[0] == first
        (experiment.code / "train.py").write_text("2\n")
        assert len(set(await recorded())) == 3

    play(scenario)


# ---- stops and restarted keepers


class Unhurried(Void):
    """A training service whose jobs end some time after they were stopped."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stopped = asyncio.Event()

        self.killed = []

    async def stop(self, job_id):
        self.stopped.set()
        return True

    async def kill(self, job_id):
        self.killed.append(job_id)


@pytest.mark.parametrize("kind", [Void, Unhurried], ids=["unknown to the cluster", "known to the cluster"])
def test_a_stopped_trial_ends_immediately_only_if_the_cluster_has_no_job_for_the_trial(
    a_real_experiment, kind
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=kind)
        await start(engine)
        await service.submitted.wait()
        await until(lambda: not engine.submission._submitting)
        (trial,) = engine.experiment.trials.values()
        engine.stop_trial(trial.trial_id)
        if kind is Unhurried:
            await service.stopped.wait()
            await engine.runtime.durable()
            assert states(engine) == ["STOPPING"]
            service.on_job_ended(JobEnded(trial.job_id, 0, "stopped"))
        await engine.finished.wait()
        assert states(engine) == ["USER_CANCELED"]
        await engine.close()

    play(scenario)


def test_a_job_that_misses_its_stop_deadlines_is_stopped_through_the_cluster_and_later_killed(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=Unhurried)
        await start(engine)
        await service.submitted.wait()
        (job,) = engine.experiment.jobs.live.values()
        await until(lambda: not engine.submission.is_pending(job.job_id))
        engine.submission.escalate(job, StopStage.ENDING)
        await service.stopped.wait()
        assert service.killed == []
        engine.submission.escalate(job, StopStage.KILLED)
        await until(lambda: service.killed == [job.job_id])
        await engine.close()

    play(scenario)


def test_the_manager_dispatches_a_trial_again_if_its_keeper_restarted_without_an_attempt(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, localConfig={"reuse": True})

    async def scenario():
        engine, _ = an_engine(experiment)
        await start(engine)
        await until(lambda: engine.experiment.jobs.live)
        keeper = ScriptedKeeper(engine, "env-0")
        keeper.send(Idle())
        (given,) = await keeper.receive_until(RunTrial)
        keeper.send(TrialStarted(AttemptKey(given.trial_id, given.attempt_id, "main-0"), 10.0))
        keeper.session.closed()

        (again,) = await ScriptedKeeper(engine, "env-0").receive_until(RunTrial)
        assert again.trial_id == given.trial_id
        assert again.attempt_id != given.attempt_id
        await engine.close()

    play(scenario)


# ---- time limits


@pytest.mark.parametrize(
    ("runs_out_at_s", "pause_s"), [(None, 2.0), (1000.0, 2.0), (101.5, 1.5), (100.0, 0.05), (40.0, 0.05)]
)
def test_the_engine_sleeps_for_at_most_two_seconds_and_wakes_when_the_next_time_limit_expires(
    runs_out_at_s, pause_s
):
    assert engine_module._pause_s(runs_out_at_s, 100.0) == pause_s


def test_an_experiment_starts_no_more_trials_after_max_exec_duration(a_real_experiment, monkeypatch):
    monkeypatch.setattr(engine_module, "_SAVE_DURATION_INTERVAL_S", 3600.0)
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxExecDuration="1s")

    async def scenario():
        engine, _ = an_engine(experiment)
        await start(engine)
        await until(lambda: engine.experiment.state.value == "NO_MORE_TRIAL")
        await engine.close()

    play(scenario)


# ---- reconnected keepers


def test_a_keeper_that_reconnects_continues_from_the_durable_offsets(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        keeper.send(Chunk(key, Stream.STDOUT, 0, b"stored\n"))
        await engine.runtime.durable()
        hello, *credentials = hello_of(engine, trial, 0)
        session = engine.admission.admit(hello, *credentials)
        welcome = session.outgoing.get_nowait()
        assert welcome.attempts == (AttemptOffsets(key, {Stream.STDOUT: 7}, closed=False),)
        await engine.close()

    play(scenario)


# ---- keepers without a connection


def test_results_of_a_running_trial_count_even_if_its_keeper_is_disconnected(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        (trial,) = engine.experiment.trials.values()
        key = AttemptKey(trial.trial_id, attempt_id(0), "main-0")
        attempt = experiment.folder.workspace.attempt(key)
        (attempt.path / ".nni").mkdir(parents=True)
        attempt.stream(Stream.METRICS).write_bytes(encode(0, trial.trial_id, "PERIODICAL", 0, 0.5))
        sign_attempt(experiment.folder, key, trial.job_id)
        await until(lambda: trial.run.intermediate_count)
        assert states(engine) == ["RUNNING"]
        await engine.close()

    play(scenario)


# ---- checkpoints


@pytest.mark.parametrize("was_delivered", [True, False], ids=["delivered", "only in the workspace"])
def test_a_continued_attempt_includes_the_results_that_precede_its_checkpoint(
    a_real_experiment, was_delivered
):
    experiment = a_real_experiment(
        NOTHING, trialConcurrency=1, maxTrialNum=1, assessor={"builtinAssessorName": "Medianstop"}
    )

    async def scenario():
        engine, service = an_engine(experiment)
        trial, lost, keeper = await a_connected_keeper(engine, service)
        sign_attempt(experiment.folder, lost)
        path = experiment.folder.workspace.attempt(lost).stream(Stream.METRICS)
        path.parent.mkdir()
        first = frames(("PERIODICAL", 1))
        written = first + frames(("PERIODICAL", 2), ("CHECKPOINT", "000001"), ("PERIODICAL", 30))
        path.write_bytes(written)
        keeper.send(Chunk(lost, Stream.METRICS, 0, written if was_delivered else first))
        await engine.runtime.durable()

        # The cluster restarts the container, so the keeper starts the second attempt.
        key = AttemptKey(trial.trial_id, attempt_id(1), "main-0")
        source = {"trial_id": trial.trial_id, "attempt_id": lost.attempt_id, "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        keeper.send(TrialStarted(key, 11.0))
        keeper.send(Chunk(key, Stream.METRICS, 0, frames(("CONTINUED", source), ("PERIODICAL", 3))))
        await until(lambda: trial.run.intermediate_count == 3)
        assert trial.run.intermediate == "3"
        assert values(experiment.rows(trial.trial_id)) == [1, 2, 3]
        assert [row.attempt for row in experiment.rows(trial.trial_id)] == [0, 0, 1]

        # A restored manager reads the same results from the store.
        (restored,) = engine.reader.trials()
        assert (restored.run.intermediate_count, restored.run.intermediate) == (3, "3")
        curves = engine.history.learning_curves([restored])
        assert [list(curve.learning_curve) for curve in curves] == [[1.0, 2.0, 3.0]]
        await engine.close()

    play(scenario)


def test_a_continued_attempt_keeps_the_results_before_its_checkpoint_even_if_it_ends_immediately(
    a_real_experiment,
):
    """The keeper of the continued attempt sends all its messages before the manager has read the metrics of the earlier
    attempt.
    """
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, lost, keeper = await a_connected_keeper(engine, service)
        sign_attempt(experiment.folder, lost)
        path = experiment.folder.workspace.attempt(lost).stream(Stream.METRICS)
        path.parent.mkdir()
        path.write_bytes(frames(("PERIODICAL", 1), ("CHECKPOINT", "000001"), ("PERIODICAL", 30)))
        keeper.send(TrialStarted(lost, 10.0))

        key = AttemptKey(trial.trial_id, attempt_id(1), "main-0")
        source = {"trial_id": trial.trial_id, "attempt_id": lost.attempt_id, "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        metrics = frames(("CONTINUED", source), ("PERIODICAL", 2), ("FINAL", 2))
        keeper.send(TrialStarted(key, 11.0))
        keeper.send(Chunk(key, Stream.METRICS, 0, metrics))
        sizes = dict.fromkeys(Stream, 0) | {Stream.METRICS: len(metrics)}
        keeper.send(TrialEnded(key, ExitReason.SUCCEEDED, 0, 11.0, 11.5, sizes))
        await until(lambda: trial.state is TrialState.SUCCEEDED)
        await engine.runtime.durable()
        assert values(experiment.rows(trial.trial_id)) == [1, 2, 2]
        assert trial.run.intermediate_count == 2
        await engine.close()

    play(scenario)


def test_the_manager_reads_no_stored_intermediate_results_if_an_attempt_reloads_its_own_checkpoint(
    a_real_experiment,
):
    experiment = a_real_experiment(
        NOTHING, trialConcurrency=1, maxTrialNum=1, assessor={"builtinAssessorName": "Medianstop"}
    )

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        read, pages = [], engine.reader.segment_pages

        def segment_pages(trial_id, segment, is_final=None):
            for page in pages(trial_id, segment, is_final):
                read.extend(page)
                yield page

        engine.reader.segment_pages = segment_pages
        before = frames(("PERIODICAL", 1), ("FINAL", 9), ("CHECKPOINT", "000001"), ("PERIODICAL", 30))
        keeper.send(Chunk(key, Stream.METRICS, 0, before))
        await engine.runtime.durable()
        source = {"trial_id": trial.trial_id, "attempt_id": key.attempt_id, "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        keeper.send(Chunk(key, Stream.METRICS, len(before), frames(("CONTINUED", source), ("PERIODICAL", 2))))
        await until(lambda: trial.run.intermediate == "2")
        assert (trial.run.intermediate_count, trial.run.final) == (2, "9")
        assert [row.value for row in read] == ["9"]
        await engine.close()

    play(scenario)


def test_each_result_is_counted_once_if_several_attempts_continue_from_each_others_checkpoints(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, first, keeper = await a_connected_keeper(engine, service)

        def continued(number):
            source = {"trial_id": trial.trial_id, "attempt_id": attempt_id(number), "task": "main-0"}
            return ("CONTINUED", source | {"checkpoint": "000001", "load": str(number)})

        saved = ("CHECKPOINT", "000001")
        second = AttemptKey(trial.trial_id, attempt_id(1), "main-0")
        for key, records in (
            (first, [("PERIODICAL", 1), ("PERIODICAL", 2), saved]),
            (second, [continued(0), ("PERIODICAL", 3), ("PERIODICAL", 4), ("PERIODICAL", 5), saved]),
        ):
            sign_attempt(experiment.folder, key)
            path = experiment.folder.workspace.attempt(key).stream(Stream.METRICS)
            path.parent.mkdir()
            path.write_bytes(frames(*records))

        third = AttemptKey(trial.trial_id, attempt_id(2), "main-0")
        keeper.send(TrialStarted(third, 11.0))
        keeper.send(Chunk(third, Stream.METRICS, 0, frames(continued(1), ("PERIODICAL", 6))))
        await until(lambda: not engine.ingest.awaited and len(experiment.rows(trial.trial_id)) == 6)
        await engine.runtime.durable()
        assert values(experiment.rows(trial.trial_id)) == [1, 2, 3, 4, 5, 6]
        (restored,) = engine.reader.trials()
        assert (trial.run.intermediate_count, restored.run.intermediate_count) == (6, 6)
        await engine.close()

    play(scenario)


def test_missing_results_before_a_checkpoint_are_logged(a_real_experiment, caplog):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        source = {"trial_id": trial.trial_id, "attempt_id": attempt_id(7), "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        keeper.send(
            Chunk(key, Stream.METRICS, 0, frame(frame_head(0, "t", "CONTINUED"), 0, json.dumps(source)))
        )
        await until(lambda: "its results before the checkpoint are missing" in caplog.text)
        await engine.close()

    play(scenario)
