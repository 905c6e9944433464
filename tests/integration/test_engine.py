"""The engine over a training service that does what a test says: what it does when things go wrong."""

import asyncio

import pytest
from attempts import attempt_id, sign_attempt
from void_service import Void, an_engine, start

from nni_manager.domain.admission_errors import NotAccepting, ProtocolError
from nni_manager.domain.events import AttemptStarted, MetricsStored, TaskReported
from nni_manager.domain.trial_lifecycle import TrialLifecycle
from nni_manager.engine import cluster_jobs, commits, serializers
from nni_manager.engine import engine as engine_module
from nni_manager.engine.code_snapshot import CodeUnusable
from nni_manager.engine.keeper_ingest import MAX_ATTEMPTS
from nni_manager.errors import RetryableError, UserError
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import trial_row
from nni_manager.store.writer import Store
from nni_manager.training_services.base import JobEnded, Placement
from nni_manager.tuner.assessors import Medianstop
from nni_sdk.records import encode
from trial_keeper import __version__
from trial_keeper.exit_codes import KeeperExit
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
from trial_keeper.wire.workspace import TrialDocument

NOTHING = "pass\n"


def play(scenario):
    async def bounded():
        await asyncio.wait_for(scenario(), 90)

    asyncio.run(bounded())


async def until(is_true):
    while not is_true():
        await asyncio.sleep(0.01)


def states(engine):
    return [trial.state.value for trial in engine.experiment.trials.values()]


@pytest.mark.parametrize("event", [AttemptStarted, MetricsStored])
def test_a_bug_while_an_event_is_handled_ends_the_engine_whoever_posted_it(
    a_real_experiment, monkeypatch, event
):
    experiment = a_real_experiment(NOTHING)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        monkeypatch.setattr(TrialLifecycle, "note_started", lambda *_, **__: 1 / 0)
        monkeypatch.setattr(TrialLifecycle, "note_metrics", lambda *_: 1 / 0)
        key = AttemptKey(next(iter(engine.experiment.trials)), attempt_id(0), "main-0")
        engine.post(
            AttemptStarted(key, 1.0) if event is AttemptStarted else MetricsStored(key, ((False, "1"),))
        )
        assert engine.failed.is_set()
        await engine.close()

    play(scenario)


def test_an_assessor_that_fails_is_shown_and_what_runs_goes_on(a_real_experiment, monkeypatch):
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
            engine.post(event)
        await until(lambda: engine.experiment.state.value == "ERROR")
        assert "the assessor Medianstop failed, and no more trials are started" in engine.experiment.error
        assert "ZeroDivisionError" in engine.experiment.error
        assert states(engine) == ["RUNNING"]
        await engine.close()

    play(scenario)


class OneRoom(Void):
    """Has room for one job."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.holder = None
        self.made_room = asyncio.Event()

    async def place(self, job_id):
        while self.holder is not None:
            self.made_room.clear()
            await self.made_room.wait()
        self.holder = job_id
        return await super().place(job_id)

    def release(self, job_id):
        super().release(job_id)
        if self.holder == job_id:
            self.holder = None
            self.made_room.set()

    async def stop(self, job_id):
        if self.holder != job_id:
            return False
        self.release(job_id)
        asyncio.get_running_loop().call_soon(self.on_job_ended, JobEnded(job_id, None, "stopped"))
        return True


def test_a_trial_that_waits_for_room_can_be_stopped_and_leaves_its_place_to_the_next(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=3)

    async def scenario():
        engine, service = an_engine(experiment, kind=OneRoom)
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


class Faltering(Void):
    """Cannot take a job at first."""

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


def test_what_fails_for_the_moment_is_tried_again_and_shown_and_costs_no_trial(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(cluster_jobs, "_FIRST_RESUBMIT_S", 0.05)
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=Faltering)
        await start(engine)
        await until(lambda: "no memory" in engine.snapshot().problem)
        await service.submitted.wait()
        await until(lambda: not engine.jobs.problem)
        assert states(engine) == ["WAITING"]
        assert len(service.released) == 2
        await engine.close()

    play(scenario)


class Slow(Void):
    """Has begun a job long before it answers."""

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


def test_a_keeper_that_is_there_before_its_job_is_known_to_be_submitted_goes_on(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=Slow)
        await start(engine)
        await service.submitted.wait()
        (trial,) = engine.experiment.trials.values()
        engine.post(AttemptStarted(AttemptKey(trial.trial_id, attempt_id(0), "main-0"), 1.0))
        service.may_answer.set()
        await service.has_answered.wait()
        await engine.commits.add([])
        assert (states(engine), service.stopped) == (["RUNNING"], [])
        await engine.close()

    play(scenario)


class Refusing(Void):
    """Will never take a job."""

    async def submit(self, settings):
        raise UserError("cannot submit: the image does not exist; name another")


def test_what_will_never_work_fails_the_trial_with_its_reason(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=Refusing)
        await start(engine)
        await engine.finished.wait()
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, trial.message) == (
            "FAILED",
            "cannot submit: the image does not exist; name another",
        )
        assert service.released == [trial.trial_id]
        await engine.close()

    play(scenario)


def test_an_experiment_closed_while_a_trial_waits_keeps_it_waiting(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=2)

    async def scenario():
        engine, service = an_engine(experiment, kind=OneRoom)
        await start(engine)
        await service.submitted.wait()
        await until(lambda: len(engine.experiment.trials) == 2)
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        assert [trial.state.value for trial in reader.trials()] == ["WAITING", "WAITING"]


class Far(Void):
    """Its jobs see the workspace, and nothing else of this machine."""

    uses_snapshot = True

    def placement(self, job_id):
        return Placement(None, None)


def test_jobs_that_do_not_see_the_code_folder_get_a_snapshot_and_a_resume_makes_no_second_one(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)
    workspace = experiment.folder.workspace

    async def scenario():
        engine, service = an_engine(experiment, kind=Far)
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


def test_code_that_cannot_be_packed_ends_the_start_and_costs_no_trial(a_real_experiment):
    experiment = a_real_experiment(NOTHING)
    (experiment.code / "data").symlink_to("/no/such/place")

    async def scenario():
        engine, _ = an_engine(experiment, kind=Far)
        with pytest.raises(CodeUnusable, match="'data'"):
            await start(engine)
        assert states(engine) == []
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("own", [KeeperExit.MOUNT_FORBIDDEN, KeeperExit.VERSION, KeeperExit.COMMAND])
def test_the_exit_code_of_a_keeper_that_began_nothing_is_the_trials_reason(a_real_experiment, own):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        await start(engine)
        await service.submitted.wait()
        (trial,) = engine.experiment.trials.values()
        service.on_job_ended(JobEnded(trial.job_id, int(own), "trial-keeper: cannot go on; the way out"))
        await engine.finished.wait()
        assert (trial.state.value, trial.reason) == ("FAILED", own.reason)
        assert own.remedy in trial.message
        assert trial.message.endswith("trial-keeper: cannot go on; the way out")
        await engine.close()

    play(scenario)


def test_a_store_without_room_is_a_problem_that_every_view_shows_until_there_is_room(
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
        trial.message = "x" * 100_000  # more than the pages there are
        stored = engine.commits.add([trial_row(trial)])
        await until(lambda: engine.snapshot().problem)
        snapshot = engine.snapshot()
        for view in (
            serializers.status_view,
            serializers.profile_view,
            serializers.metadata_view,
            serializers.summary_view,
        ):
            assert "free some disk space" in view(snapshot)["problem"]
        connection.execute("PRAGMA max_page_count = 1000000")
        await stored
        snapshot = engine.snapshot()
        assert "problem" not in serializers.status_view(snapshot) | serializers.metadata_view(snapshot)
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        assert [len(trial.message) for trial in reader.trials()] == [100_000]


# ---- when keepers are let in


def hello_of(engine, trial, *attempts):
    keys = tuple(AttemptKey(trial.trial_id, attempt_id(number), "main-0") for number in attempts)
    token = engine.admission.token(trial.job_id)
    hello = Hello(__version__, engine.experiment.experiment_id, trial.job_id, "main-0", keys)
    return hello, trial.job_id, token


def test_keepers_are_let_in_from_when_the_experiment_goes_on_until_it_is_let_go_of(a_real_experiment):
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
        # What is still on its way finds no closed store.
        session.receive(Chunk(words[0].attempts[0], Stream.STDOUT, 0, b"late"))
        assert not engine.failed.is_set()

    play(scenario)


def test_a_keeper_that_is_refused_at_the_last_moment_leaves_no_session_behind(a_real_experiment):
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


def test_a_keeper_that_says_again_and_again_that_it_is_idle_is_told_once(a_real_experiment):
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


class Linked:
    """A keeper that says what a test wants, and notes what it is told."""

    def __init__(self, engine, job_id):
        hello = Hello(__version__, engine.experiment.experiment_id, job_id, "main-0", supports_revoke=True)
        self.session = engine.admission.admit(hello, job_id, engine.admission.token(job_id))

    def say(self, *messages):
        for message in messages:
            self.session.receive(message)

    def run(self, trial_id):
        """A trial of half a second that writes nothing."""
        key = AttemptKey(trial_id, attempt_id(0), "main-0")
        ended = TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 10.5, dict.fromkeys(Stream, 0))
        self.say(TrialStarted(key, 10.0), ended, Idle())

    async def hears(self, kind):
        """All that it is told about running and returning, until the first message of this kind."""
        told = []
        while not (told and isinstance(told[-1], kind)):
            message = await self.session.outgoing.get()
            if isinstance(message, RunTrial | RevokeTrial):
                told.append(message)
        return told


def test_a_trial_is_asked_back_after_its_keeper_was_told_of_it_and_no_answer_of_another_stream_counts(
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
        write = engine.jobs._write_trial

        async def slowly(job, trial):
            if job.job_id == "env-0":
                await may_write.wait()
            await write(job, trial)

        monkeypatch.setattr(engine.jobs, "_write_trial", slowly)
        first, second = Linked(engine, "env-0"), Linked(engine, "env-1")
        first.say(Idle())
        (given,) = await first.hears(RunTrial)
        may_write.clear()
        first.run(given.trial_id)
        await until(lambda: len(jobs.live["env-0"].trial_ids) == 4)
        second.say(Idle())
        (given,) = await second.hears(RunTrial)
        second.run(given.trial_id)
        await until(lambda: jobs.live["env-0"].revoking_ids)
        *_, last = trial_ids = jobs.live["env-0"].trial_ids
        may_write.set()
        *given, returned = await first.hears(RevokeTrial)
        assert ([each.trial_id for each in given], returned) == ([*trial_ids], RevokeTrial(last))

        again = Linked(engine, "env-0")
        first.say(TrialRevoked(last))
        assert jobs.live["env-0"].trial_ids == trial_ids
        assert await again.hears(RevokeTrial) == [RevokeTrial(last)]
        again.say(TrialRevoked(last))
        (given,) = await second.hears(RunTrial)
        assert given.trial_id == last
        await engine.durable()
        with StoreReader(experiment.folder.database) as reader:
            (trial,) = (trial for trial in reader.trials() if trial.trial_id == last)
        assert (trial.job_id, trial.state.value, trial.attempt) == ("env-1", "WAITING", None)
        await engine.close()

    play(scenario)


def test_a_keeper_of_the_same_version_that_cannot_return_trials_hears_nothing_of_it(a_real_experiment):
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


async def a_connected_keeper(engine, service):
    """The only trial, its running attempt, and its keeper."""
    await start(engine)
    await service.submitted.wait()
    (trial,) = engine.experiment.trials.values()
    keeper, key = Linked(engine, trial.job_id), AttemptKey(trial.trial_id, attempt_id(0), "main-0")
    keeper.say(TrialStarted(key, 10.0))
    return trial, key, keeper


def acknowledged(keeper):
    """The offsets of all acknowledgements that the keeper has not read yet."""
    offsets = []
    while not keeper.session.outgoing.empty():
        message = keeper.session.outgoing.get_nowait()
        if isinstance(message, Ack):
            offsets.append(dict(message.attempt.offsets))
    return offsets


def test_bytes_that_could_not_be_committed_are_never_acknowledged_and_their_results_do_not_count(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)
    metrics = encode(0, "any", "FINAL", 0, 0.5)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        keeper.say(Chunk(key, Stream.STDOUT, 0, b"stored\n"))
        await engine.durable()
        assert acknowledged(keeper) == [{Stream.STDOUT: 7}]

        # Another manager opens the store: each later commit of this one fails.
        Store(experiment.folder.database, experiment.folder.collected_logs).close()
        keeper.say(Chunk(key, Stream.STDOUT, 7, b"lost\n"), Chunk(key, Stream.METRICS, 0, metrics))
        await engine.failed.wait()
        assert (acknowledged(keeper), trial.final) == ([], None)
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        (trial_id,) = (trial.trial_id for trial in reader.trials())
        assert reader.offsets(AttemptKey(trial_id, attempt_id(0), "main-0")) == {Stream.STDOUT: 7}


def test_of_an_attempt_with_many_corrupt_spans_the_log_names_ten_and_says_that_it_stops(
    a_real_experiment, caplog
):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment)
        _, key, keeper = await a_connected_keeper(engine, service)
        garbage = b"no record\n" + encode(0, "any", "PERIODICAL", 0, 0.5)
        keeper.say(
            Chunk(key, Stream.METRICS, 0, garbage * 4),
            Chunk(key, Stream.METRICS, 4 * len(garbage), garbage * 9),
        )
        await engine.durable()
        await engine.close()

    play(scenario)
    lines = [record.getMessage() for record in caplog.records if "are not a record" in record.getMessage()]
    assert len(lines) == 10
    assert [line.endswith("further corrupt spans are not logged") for line in lines] == [False] * 9 + [True]


# ---- stops and restarted keepers


class Unhurried(Void):
    """Ends a job some time after its stop."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stopped = asyncio.Event()

    async def stop(self, job_id):
        self.stopped.set()
        return True


@pytest.mark.parametrize("kind", [Void, Unhurried], ids=["unknown to the cluster", "known to the cluster"])
def test_a_stopped_trial_ends_at_once_only_if_the_cluster_has_no_job_of_it(a_real_experiment, kind):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1)

    async def scenario():
        engine, service = an_engine(experiment, kind=kind)
        await start(engine)
        await service.submitted.wait()
        await until(lambda: not engine.jobs._submitting)
        (trial,) = engine.experiment.trials.values()
        engine.stop_trial(trial.trial_id)
        if kind is Unhurried:
            await service.stopped.wait()
            await engine.durable()
            assert states(engine) == ["STOPPING"]
            service.on_job_ended(JobEnded(trial.job_id, 0, "stopped"))
        await engine.finished.wait()
        assert states(engine) == ["USER_CANCELED"]
        await engine.close()

    play(scenario)


def test_a_trial_whose_keeper_restarted_without_it_is_dispatched_to_the_new_keeper(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=1, localConfig={"reuse": True})

    async def scenario():
        engine, _ = an_engine(experiment)
        await start(engine)
        await until(lambda: engine.experiment.jobs.live)
        keeper = Linked(engine, "env-0")
        keeper.say(Idle())
        (given,) = await keeper.hears(RunTrial)
        keeper.say(TrialStarted(AttemptKey(given.trial_id, given.attempt_id, "main-0"), 10.0))
        keeper.session.closed()

        (again,) = await Linked(engine, "env-0").hears(RunTrial)
        assert again.trial_id == given.trial_id
        assert again.attempt_id != given.attempt_id
        await engine.close()

    play(scenario)


# ---- time limits


@pytest.mark.parametrize(
    ("runs_out_at_s", "pause_s"), [(None, 2.0), (1000.0, 2.0), (101.5, 1.5), (100.0, 0.05), (40.0, 0.05)]
)
def test_time_limits_are_checked_when_the_first_runs_out_and_at_least_every_two_seconds(
    runs_out_at_s, pause_s
):
    assert engine_module._pause_s(runs_out_at_s, 100.0) == pause_s


def test_an_experiment_starts_no_more_trials_as_soon_as_its_time_is_up(a_real_experiment, monkeypatch):
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
        keeper.say(Chunk(key, Stream.STDOUT, 0, b"stored\n"))
        await engine.durable()
        hello, *credentials = hello_of(engine, trial, 0)
        session = engine.admission.admit(hello, *credentials)
        welcome = session.outgoing.get_nowait()
        assert welcome.attempts == (AttemptOffsets(key, {Stream.STDOUT: 7}, closed=False),)
        await engine.close()

    play(scenario)


# ---- keepers without a connection


def test_results_of_a_trial_whose_keeper_has_no_connection_count_while_it_runs(a_real_experiment):
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
        await until(lambda: trial.intermediate_count)
        assert states(engine) == ["RUNNING"]
        await engine.close()

    play(scenario)
