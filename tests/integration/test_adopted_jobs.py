"""What a manager restores of the trials and jobs of an earlier manager. The training service runs no job."""

import asyncio
import contextlib
import sqlite3
import time

import pytest
from attempts import sign_attempt
from real_experiment import values
from scripted_keeper import (
    FIRST,
    SECOND,
    Cluster,
    ScriptedKeeper,
    a_connected_keeper,
    a_submitted_job,
    a_submitted_trial,
    forbid_reading,
    frames,
    play,
    states,
    until,
    write_attempt,
)
from void_service import an_engine, start

from nni_manager.domain.events import AttemptSeen
from nni_manager.domain.trial import Trial
from nni_manager.engine import engine as engine_module
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import trial_row
from nni_manager.store.writer import Store
from nni_manager.training_services.base import JobEnded, JobPresence
from nni_sdk.records import encode
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.wire.messages import AttemptKey, Chunk, Idle, RunTrial, Stream, TrialEnded, TrialStarted
from trial_keeper.wire.reasons import ExitReason

NOTHING = "pass\n"
ONE_TRIAL = {"trialConcurrency": 1, "maxTrialNum": 1}
pytestmark = pytest.mark.usefixtures("no_polls", "late_storage")


def run_first(experiment, use=None):
    """Run a first manager, until the keeper has started the only trial and `use` has returned; return the trial's id."""
    seen = []

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, key, keeper = await a_connected_keeper(engine, service)
        sign_attempt(experiment.folder, key, trial.job_id)
        if use is not None:
            await use(engine, trial, key, keeper)
        await engine.runtime.durable()
        await engine.close()
        seen.append(trial.trial_id)

    play(scenario)
    return seen[0]


# ---- jobs


@pytest.mark.parametrize(
    ("presence", "message"),
    [(JobPresence.ENDED, "out of memory"), (JobPresence.UNKNOWN, "its job no longer exists")],
)
def test_a_started_trial_fails_with_an_explanation_if_its_job_ended_while_no_manager_ran(
    a_real_experiment, presence, message
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    run_first(experiment)

    async def scenario():
        engine, service = an_engine(experiment, state=presence, kind=Cluster)
        service.termination_message = lambda job_id: "out of memory"
        await start(engine)
        await engine.finished.wait()
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, trial.run.reason) == ("FAILED", ExitReason.KEEPER_LOST)
        assert message in trial.run.message
        assert not service.submitted.is_set()
        await engine.close()

    play(scenario)


@pytest.mark.parametrize(
    ("exit_code", "reason", "ends_as"),
    [
        (None, ExitReason.PREEMPTED, ("WAITING", None, 1)),
        (137, ExitReason.OUT_OF_MEMORY, ("FAILED", ExitReason.OUT_OF_MEMORY, 0)),
        (KeeperExit.WORKSPACE, ExitReason.KEEPER_LOST, ("FAILED", ExitReason.MOUNT, 0)),
    ],
)
def test_a_started_trial_gets_the_exit_code_and_reason_of_a_job_that_ended_while_no_manager_ran(
    a_real_experiment, exit_code, reason, ends_as
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    run_first(experiment)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.ENDED, kind=Cluster)

        def report_end(job_id, *, stop_was_asked):
            service.on_job_ended(JobEnded(job_id, exit_code, "", reason))

        service.report_end = report_end
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        await until(lambda: trial.state.is_terminal or trial.preemptions)
        assert (trial.state.value, trial.run.reason, trial.preemptions) == ends_as
        await engine.close()

    play(scenario)


def test_a_job_that_ended_while_no_manager_ran_is_not_submitted_again_even_if_its_trial_never_started(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def submit():
        engine, service = an_engine(experiment, kind=Cluster)
        await a_submitted_trial(engine, service)
        await engine.close()

    play(submit)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.ENDED, kind=Cluster)
        reported = []

        def report_end(job_id, *, stop_was_asked):
            reported.append(job_id)

        service.report_end = report_end
        await start(engine)
        await until(lambda: reported or service.submitted.is_set())
        assert not service.submitted.is_set()
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("has_started", [True, False])
def test_an_adopted_job_unknown_to_the_cluster_is_submitted_again_unless_its_trial_has_started(
    a_real_experiment, has_started
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def submit():
        engine, service = an_engine(experiment, kind=Cluster)
        await a_submitted_trial(engine, service)
        await engine.close()

    if has_started:
        run_first(experiment)
    else:
        play(submit)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        service.on_job_ended(
            JobEnded(trial.job_id, None, "deleted", ExitReason.JOB_LOST, True, is_unknown=True)
        )
        await until(lambda: trial.state.is_terminal or service.submitted.is_set())
        assert trial.state.value == ("FAILED" if has_started else "WAITING")
        assert service.submitted.is_set() is not has_started
        if has_started:
            assert (trial.run.reason, trial.run.message) == (ExitReason.JOB_LOST, "deleted")
        await engine.close()

    play(scenario)


def test_a_job_is_not_submitted_again_if_the_manager_cannot_read_whether_its_trial_has_started(
    a_real_experiment, monkeypatch
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def first():
        engine, service = an_engine(experiment, kind=Cluster)
        await a_submitted_trial(engine, service)
        await engine.close()

    async def second():
        engine, service = an_engine(experiment, state=JobPresence.UNKNOWN, kind=Cluster)
        await start(engine)
        await engine.finished.wait()
        assert states(engine) == ["FAILED"]
        assert not service.submitted.is_set()
        await engine.close()

    play(first)
    forbid_reading(monkeypatch)
    play(second)


def test_the_next_manager_stops_a_trial_that_the_previous_manager_was_asked_to_stop(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def stop(engine, trial, key, keeper):
        engine.stop_trial(trial.trial_id)

    run_first(experiment, stop)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, service.stopped) == ("STOPPING", [trial.job_id])
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("has_connected", [True, False])
def test_a_missing_connection_of_an_adopted_job_is_a_problem_only_if_its_keeper_never_connected(
    a_real_experiment, has_connected
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def first():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        if has_connected:
            ScriptedKeeper(engine, trial.job_id)
        await engine.close()

    async def second():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        problems = engine.experiment.transports.problems(time.monotonic() + 3600)
        assert bool(problems) is not has_connected
        await engine.close()

    play(first)
    play(second)


def test_a_queued_trial_survives_any_number_of_jobs_that_ended_while_no_manager_was_running(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def scenario():
        for number in range(3):
            engine, _ = an_engine(experiment, state=JobPresence.UNKNOWN, kind=Cluster)
            await start(engine)
            await until(
                lambda engine=engine, job_id=f"env-{number}": [*engine.experiment.jobs.live] == [job_id]
            )
            assert states(engine) == ["WAITING"]
            keeper = ScriptedKeeper(engine, f"env-{number}")
            keeper.send(Idle())
            await keeper.receive_until(RunTrial)
            await engine.close()

    play(scenario)


def test_no_trial_fails_if_a_reused_job_ended_while_no_manager_ran_and_before_its_keeper_connected(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def scenario():
        for number in range(2):
            engine, service = an_engine(experiment, state=JobPresence.UNKNOWN, kind=Cluster)
            await start(engine)
            await service.submitted.wait()
            assert service.settings.job_id == f"env-{number}"
            assert states(engine) == ["WAITING"]
            await engine.close()

    play(scenario)


# ---- trials


def test_a_running_trial_keeps_the_final_result_that_an_earlier_manager_stored(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    metrics = encode(0, "any", "FINAL", 0, 0.5)

    async def report(engine, trial, key, keeper):
        keeper.send(Chunk(key, Stream.METRICS, 0, metrics))
        # From here on, no trial is saved. So the store is as after a kill of the manager that has stored the record and not yet
        # the trial.
        engine.runtime.save = lambda write: None

    run_first(experiment, report)

    async def scenario():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await engine.restore()
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, trial.run.value) == ("RUNNING", 0.5)
        await engine.close()

    play(scenario)


def create_in_1970(experiment):
    """Set the creation time of the trials to 1970, the year of the starts that `run_first` reports."""
    with contextlib.closing(sqlite3.connect(experiment.folder.database, isolation_level=None)) as store:
        store.execute("UPDATE trial SET created_at_s = 1.0")


def test_a_reported_start_before_the_creation_of_a_trial_does_not_shorten_its_time_limit(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, maxTrialDuration="100s")
    run_first(experiment)  # the keeper reports that the trial started in 1970

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        assert 90 < engine.experiment.time_runs_out_at_s - time.monotonic() <= 100
        assert (states(engine), service.stopped) == (["RUNNING"], [])
        await engine.close()

    play(scenario)


def test_the_time_before_a_resume_counts_towards_the_time_limit_of_a_running_trial(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, maxTrialDuration="100s")
    run_first(experiment)  # the keeper reports that the trial started in 1970
    create_in_1970(experiment)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        await until(lambda: service.stopped)
        assert states(engine) == ["STOPPING"]
        await engine.close()

    play(scenario)


def test_a_trial_that_exceeded_its_time_limit_is_stopped_after_its_job_is_adopted(a_real_experiment):
    """The cluster answers late. Until its answer, the training service cannot stop the job."""
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, maxTrialDuration="100s")
    run_first(experiment)  # the keeper reports that the trial started in 1970
    create_in_1970(experiment)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        known, answers, stop = set(), asyncio.Event(), service.stop

        async def adopt(job_id):
            await answers.wait()
            known.add(job_id)
            return JobPresence.RUNNING

        async def stop_known(job_id):
            return job_id in known and await stop(job_id)

        service.adopt, service.stop = adopt, stop_known
        starting = asyncio.create_task(start(engine))
        workspace = experiment.folder.workspace
        await until(lambda: states(engine) == ["STOPPING"])
        (trial,) = engine.experiment.trials.values()
        await until(workspace.trial(trial.trial_id).stop_json.exists)
        await asyncio.sleep(0)
        answers.set()
        await starting
        assert states(engine) == ["STOPPING"]
        assert service.stopped == [trial.job_id]
        await engine.close()

    play(scenario)


def test_a_trial_that_ended_while_no_manager_ran_is_terminal_after_the_start_of_the_next_manager(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    metrics = encode(0, "any", "FINAL", 0, 0.5)

    async def end(engine, trial, key, keeper):
        keeper.send(Chunk(key, Stream.METRICS, 0, metrics))
        await engine.runtime.durable()
        write_attempt(experiment, trial, metrics)

    run_first(experiment, end)

    async def scenario():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("stream", [Stream.METRICS, Stream.STDOUT])
def test_a_trial_that_ended_while_no_manager_ran_is_not_terminal_before_all_its_data_is_stored(
    a_real_experiment, stream
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    metrics = encode(0, "any", "FINAL", 0, 0.5)
    written = {Stream.METRICS: metrics, Stream.STDOUT: b"x"}
    sizes = dict.fromkeys(Stream, 0) | {each: len(data) for each, data in written.items()}

    async def end(engine, trial, key, keeper):
        for each, data in written.items():
            if each is not stream:
                keeper.send(Chunk(key, each, 0, data))
        write_attempt(experiment, trial, metrics, sizes=sizes)

    run_first(experiment, end)

    async def scenario():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        assert trial.state.value == "CLOSING"
        key = AttemptKey(trial.trial_id, FIRST, "main-0")
        ended = TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, sizes)
        ScriptedKeeper(engine, trial.job_id, key).send(Chunk(key, stream, 0, written[stream]), ended)
        await until(lambda: trial.state.is_terminal)
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("has_ended", [False, True], ids=["ends later", "ended without a manager"])
def test_the_results_before_a_checkpoint_are_stored_even_if_a_manager_ended_while_reading_these_results(
    a_real_experiment, has_ended
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    before = frames(("PERIODICAL", 1), ("PERIODICAL", 2), ("CHECKPOINT", "000001"), ("PERIODICAL", 30))
    seen = []

    async def continue_from_checkpoint(engine, trial, first, keeper):
        path = experiment.folder.workspace.attempt(first).stream(Stream.METRICS)
        path.parent.mkdir()
        path.write_bytes(before)
        is_reading = asyncio.Event()

        async def hang(trial, source):
            is_reading.set()
            await asyncio.Event().wait()

        engine.storage_poller.drain_source = hang  # this simulates a storage that does not respond
        source = {"trial_id": trial.trial_id, "attempt_id": FIRST, "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        metrics = frames(("CONTINUED", source), ("PERIODICAL", 3), ("FINAL", 3))
        key = AttemptKey(trial.trial_id, SECOND, "main-0")
        sizes = dict.fromkeys(Stream, 0) | {Stream.METRICS: len(metrics)}
        seen.extend((key, TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, sizes)))
        keeper.send(TrialStarted(key, 11.0), Chunk(key, Stream.METRICS, 0, metrics))
        await is_reading.wait()
        if has_ended:
            write_attempt(experiment, trial, metrics, name=SECOND)

    run_first(experiment, continue_from_checkpoint)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        key, ended = seen
        ScriptedKeeper(engine, trial.job_id, key).send(ended)
        await until(lambda: trial.state.is_terminal)
        assert (trial.state.value, trial.run.intermediate_count) == ("SUCCEEDED", 3)
        await engine.runtime.durable()
        assert values(experiment.rows(trial.trial_id)) == [1, 2, 3, 3]
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.close()

    play(scenario)


def test_the_next_manager_dispatches_a_trial_again_if_the_keeper_does_not_report_the_trial(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def first():
        engine, service = an_engine(experiment, kind=Cluster)
        await a_submitted_job(engine, service)
        keeper = ScriptedKeeper(engine, "env-0")
        keeper.send(Idle())
        (given,) = await keeper.receive_until(RunTrial)
        key = AttemptKey(given.trial_id, given.attempt_id, "main-0")
        keeper.send(TrialStarted(key, 10.0))
        sign_attempt(experiment.folder, key, "env-0")
        await engine.close()

    async def second():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (again,) = await ScriptedKeeper(engine, "env-0").receive_until(RunTrial)
        assert [again.trial_id] == [*engine.experiment.trials]
        await engine.close()

    play(first)
    play(second)


def test_an_attempt_that_started_while_no_manager_ran_is_registered_by_the_next_manager(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def restart(engine, trial, key, keeper):
        sign_attempt(experiment.folder, AttemptKey(trial.trial_id, SECOND, "main-0"), trial.job_id)

    trial_id = run_first(experiment, restart)

    async def scenario():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await engine.restore()
        await engine.close()

    play(scenario)
    with StoreReader(experiment.folder.database) as reader:
        found = [(each.key.attempt_id, each.number) for each in reader.attempts(trial_id)]
    assert found == [(FIRST, 0), (SECOND, 1)]


def write_start(experiment, trial):
    """Write the files of an attempt that a restarted container has started; return its key."""
    key = AttemptKey(trial.trial_id, SECOND, "main-0")
    sign_attempt(experiment.folder, key, trial.job_id)
    path = experiment.folder.workspace.attempt(key).stream(Stream.KEEPER)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"started\n")
    return key


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_run_that_a_restarted_container_started_while_no_manager_ran_has_its_own_time_limit(
    a_real_experiment, is_registered
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, maxTrialDuration="100s")

    async def restart(engine, trial, first, keeper):
        key = write_start(experiment, trial)
        if is_registered:  # the manager knows the attempt, but not that it has started
            engine.runtime.post(AttemptSeen(key))

    run_first(experiment, restart)  # the keeper's start report says that the trial started in 1970
    create_in_1970(experiment)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        assert 90 < engine.experiment.time_runs_out_at_s - time.monotonic() <= 100
        assert (trial.state.value, trial.run.attempt, service.stopped) == ("RUNNING", 1, [])
        assert trial.run.started_at_s == pytest.approx(time.time(), abs=60)
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("was_to_stop", [False, True])
def test_a_closing_trial_is_running_or_stopping_again_if_its_container_restarted_while_no_manager_ran(
    a_real_experiment, was_to_stop
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def restart(engine, trial, first, keeper):
        if was_to_stop:
            engine.stop_trial(trial.trial_id)
        # The keeper reports one byte of stdout that the manager has not received, so the trial stays CLOSING.
        sizes = dict.fromkeys(Stream, 0) | {Stream.STDOUT: 1}
        keeper.send(TrialEnded(first, ExitReason.JOB_LOST, 143, 10.0, 11.0, sizes))
        assert trial.state.value == "CLOSING"
        write_start(experiment, trial)

    run_first(experiment, restart)

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        (trial,) = engine.experiment.trials.values()
        if not was_to_stop:
            assert states(engine) == ["RUNNING"]
            engine.stop_trial(trial.trial_id)
        assert states(engine) == ["STOPPING"]
        await until(lambda: service.stopped)
        await engine.close()

    play(scenario)


def test_an_experiment_is_resumed_even_if_the_manager_cannot_read_the_files_of_a_trial(
    a_real_experiment, monkeypatch
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    run_first(experiment)
    forbid_reading(monkeypatch)

    async def scenario():
        engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        assert states(engine) == ["RUNNING"]
        await engine.close()

    play(scenario)


# ---- the first start


def test_initial_trials_are_proposed_only_once_even_after_a_manager_restart(a_real_experiment):
    initial = [{"x": 0.25}, {"x": 0.75}]
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=4, initialTrials=initial)

    async def scenario():
        for _ in range(2):
            engine, _ = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
            await start(engine)
            trials = engine.experiment.trials.values()
            assert [trial.parameters for trial in trials] == initial
            assert all(trial.is_customized for trial in trials)
            await engine.close()

    play(scenario)


def test_initial_trials_are_not_proposed_again_if_the_previous_manager_was_killed_during_its_start(
    a_real_experiment,
):
    experiment = a_real_experiment(
        NOTHING, trialConcurrency=1, maxTrialNum=4, initialTrials=[{"x": 0.25}, {"x": 0.75}]
    )
    with contextlib.closing(Store(experiment.folder.database, experiment.folder.collected_logs)) as store:
        store.commit([trial_row(Trial("aaaaa", 0, {"x": 0.25}, {}, 0.0, "", is_customized=True))], 0.0)

    async def scenario():
        engine, _ = an_engine(experiment, kind=Cluster)
        await start(engine)
        assert [*engine.experiment.trials] == ["aaaaa"]
        await engine.close()

    play(scenario)


def test_two_trials_never_have_the_same_id(a_real_experiment, monkeypatch):
    experiment = a_real_experiment(NOTHING, trialConcurrency=2, maxTrialNum=2)
    drawn = iter(["aaaaa", "aaaaa", "aaaaa", "bbbbb"])
    monkeypatch.setattr(engine_module, "new_id", lambda length: next(drawn))

    async def scenario():
        engine, _ = an_engine(experiment, kind=Cluster)
        await start(engine)
        await until(lambda: len(engine.experiment.trials) == 2)
        assert [*engine.experiment.trials] == ["aaaaa", "bbbbb"]
        await engine.close()

    play(scenario)
