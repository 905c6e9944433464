"""What jobs leave: data in the workspace, and objects on the cluster. The training service runs no job."""

import asyncio
import contextlib
import time

import pytest
from attempts import attempt_id, sign_attempt
from deadlines import DEADLINE_S
from real_experiment import values
from scripted_keeper import (
    FIRST,
    SECOND,
    Cluster,
    ScriptedKeeper,
    a_blocked_store,
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

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import NodeReadinessChanged, TimePassed
from nni_manager.domain.stop_escalation import StopStage
from nni_manager.engine import job_recovery, job_submission, storage_poller
from nni_manager.errors import RetryableError
from nni_manager.store import leftover_jobs
from nni_manager.training_services.base import JobEnded, JobPresence
from nni_sdk.records import encode
from trial_keeper.wire.messages import AttemptKey, Chunk, Idle, RunTrial, Stream, TrialEnded, TrialStarted
from trial_keeper.wire.reasons import ExitReason

NOTHING = "pass\n"
ONE_TRIAL = {"trialConcurrency": 1, "maxTrialNum": 1}


def stored_leftovers(experiment):
    return leftover_jobs.read(experiment.folder)


async def a_job_with_a_prefetched_trial(engine, service):
    """Start the engine; return its only job and the job's keeper. The job has one trial to run and one prefetched trial."""
    job = await a_submitted_job(engine, service)
    keeper = ScriptedKeeper(engine, job.job_id)
    keeper.send(Idle())
    (first,) = await keeper.receive_until(RunTrial)
    keeper.run(first.trial_id)
    await until(lambda: len(job.trial_ids) == 2)
    return job, keeper


def write_line(experiment, key, stream):
    path = experiment.folder.workspace.attempt(key).stream(stream)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a line\n")


# ---- jobs that have ended


def test_a_trial_fails_with_a_remedy_if_the_manager_may_not_read_its_files(a_real_experiment, monkeypatch):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        forbid_reading(monkeypatch)
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        assert (trial.state.value, trial.run.reason) == ("FAILED", ExitReason.MOUNT)
        assert "leave their files readable to the manager's user" in trial.run.message
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_a_result_is_not_trusted_if_the_workspace_lacks_data_that_the_trial_has_written(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(storage_poller, "STORAGE_LAG_S", 0.0)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        metrics = encode(0, trial.trial_id, "FINAL", 0, 0.5)
        write_attempt(experiment, trial, metrics, sizes={Stream.METRICS: len(metrics) + 1})
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        assert (trial.state.value, trial.run.reason) == ("FAILED", ExitReason.MOUNT)
        assert "the workspace lacks data" in trial.run.message
        await engine.close()

    play(scenario)


class _TwoTasks(Cluster):
    completion = Completion((TaskRole("main", 2, min_succeeded_tasks=-1),))


@pytest.mark.usefixtures("no_polls")
def test_a_missing_exit_record_of_a_killed_task_is_not_reported_as_a_storage_fault(
    a_real_experiment, monkeypatch
):
    """The node of one task is lost, so its keeper records nothing. The cluster ends the other task; its keeper records why."""
    monkeypatch.setattr(storage_poller, "STORAGE_LAG_S", 0.0)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=_TwoTasks)
        trial = await a_submitted_trial(engine, service)
        write_attempt(experiment, trial, reason=ExitReason.JOB_LOST)
        killed = AttemptKey(trial.trial_id, FIRST, "main-1")
        sign_attempt(experiment.folder, killed, trial.job_id)
        service.on_job_ended(JobEnded(trial.job_id, None, "node n1 is lost"))
        await engine.finished.wait()
        assert (trial.state.value, trial.run.reason) == ("FAILED", ExitReason.JOB_LOST)
        assert trial.run.message == "its keeper is gone\nnode n1 is lost"
        await engine.close()

    play(scenario)


@pytest.mark.parametrize(
    ("exit_code", "is_explained", "lines"),
    [
        (9, True, ["evicted", "its keeper ended with exit code 9"]),
        (9, False, ["its keeper ended with exit code 9", "evicted"]),
        (None, True, ["evicted"]),
        (None, False, ["its keeper is gone", "evicted"]),
    ],
)
def test_the_message_of_a_lost_trial_starts_with_the_keepers_end_unless_the_cluster_explains_the_loss(
    a_real_experiment, exit_code, is_explained, lines
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        service.on_job_ended(JobEnded(trial.job_id, exit_code, "evicted", is_explained=is_explained))
        await engine.finished.wait()
        assert trial.run.message.split("\n") == lines
        await engine.close()

    play(scenario)


def test_the_trial_message_of_a_killed_job_says_that_the_trial_did_not_stop_in_time(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, key, _ = await a_connected_keeper(engine, service)
        job_id = trial.job_id
        sign_attempt(experiment.folder, key, job_id)
        engine.stop_trial(trial.trial_id)
        engine.experiment.handle(TimePassed(), time.monotonic() + 3600)
        assert engine.experiment.stops.stage(job_id) is StopStage.KILLED
        service.on_job_ended(JobEnded(job_id, 137, ""))
        await engine.finished.wait()
        assert "did not stop the trial in time, so the job was killed" in trial.run.message
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_a_stop_request_during_the_recovery_of_an_ended_job_does_not_discard_its_result(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        # The stop() of this fake service returns False, as for a job that the cluster no longer has.
        engine, service = an_engine(experiment)
        trial = await a_submitted_trial(engine, service)
        write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5))
        may_read = asyncio.Event()
        service.reap_orphans = lambda *_: may_read.wait()
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.submission.stop(trial.job_id)
        service.on_job_ended(JobEnded(trial.job_id, None, "reported twice"))
        may_read.set()
        await engine.finished.wait()
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await engine.close()

    play(scenario)


def test_a_job_that_has_run_is_not_submitted_again_during_its_recovery(a_real_experiment, monkeypatch):
    """The answer to its first submission was lost, so the submission is tried again while the job's files are read."""
    monkeypatch.setattr(job_submission, "FIRST_RESUBMIT_S", 0.01)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        submitted, may_read = [], asyncio.Event()

        async def submit(settings):
            submitted.append(settings.job_id)
            trial = engine.experiment.trials[settings.trial_id]
            write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5))
            service.on_job_ended(JobEnded(settings.job_id, 0, ""))
            raise RetryableError("the answer was lost")

        service.submit, service.reap_orphans = submit, lambda *_: may_read.wait()
        await start(engine)
        await until(lambda: engine.submission.problem)
        await until(lambda: len(submitted) > 1 or not engine.submission.problem)
        may_read.set()
        await engine.finished.wait()
        (trial,) = engine.experiment.trials.values()
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        assert submitted == [trial.job_id]
        await engine.close()

    play(scenario)


def test_a_running_trial_stays_running_if_the_manager_closes_during_the_submission_of_its_job(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        is_submitting = asyncio.Event()

        async def submit(settings):
            is_submitting.set()
            await asyncio.Event().wait()

        service.submit = submit
        await start(engine)
        await is_submitting.wait()
        (trial,) = engine.experiment.trials.values()
        key = AttemptKey(trial.trial_id, FIRST, "main-0")
        ScriptedKeeper(engine, trial.job_id).send(TrialStarted(key, 10.0))
        assert trial.state.value == "RUNNING"
        await engine.close()
        assert trial.state.value == "RUNNING"

    play(scenario)


def test_the_processes_of_a_trial_are_ended_before_its_files_are_read(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, _, _ = await a_connected_keeper(engine, service)

        async def end_processes(job_id, trial_ids):
            assert (job_id, trial_ids) == (trial.job_id, [trial.trial_id])
            # The processes of the trial can report a result until they have ended. This result arrives during the reaping.
            write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5))

        service.reap_orphans = end_processes
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_a_trial_of_a_lost_job_is_retried_although_another_trial_of_the_job_is_complete(a_real_experiment):
    experiment = a_real_experiment(
        NOTHING, trialConcurrency=1, maxTrialNum=3, maxTrialRetry=1, localConfig={"reuse": True}
    )

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        job, keeper = await a_job_with_a_prefetched_trial(engine, service)
        first, second = (engine.experiment.trials[trial_id] for trial_id in job.trial_ids)
        keeper.session.closed()
        write_attempt(experiment, first, encode(0, first.trial_id, "FINAL", 0, 0.5))
        started = AttemptKey(second.trial_id, FIRST, "main-0")
        sign_attempt(experiment.folder, started, job.job_id)
        write_line(experiment, started, Stream.KEEPER)
        service.on_job_ended(JobEnded(job.job_id, None, "the node is gone"))
        await until(lambda: job.job_id not in engine.experiment.jobs.live)
        assert (first.state.value, first.run.value) == ("SUCCEEDED", 0.5)
        assert (second.state.value, second.retries) == ("WAITING", 1)
        await engine.close()

    play(scenario)


def test_a_job_whose_processes_have_ended_is_not_killed_while_its_data_is_read(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, _, _ = await a_connected_keeper(engine, service)
        job_id, may_read = trial.job_id, asyncio.Event()
        scan = engine.storage_poller.scan_remaining

        async def scan_later(trial, *, may_be_late):
            await may_read.wait()
            return await scan(trial, may_be_late=may_be_late)

        engine.storage_poller.scan_remaining = scan_later
        engine.stop()
        service.on_job_ended(JobEnded(job_id, 0, ""))
        await until(lambda: engine.experiment.stops.stage(job_id) is StopStage.COLLECTING)
        may_read.set()
        await engine.finished.wait()
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_the_deadline_for_reading_the_data_of_an_ended_job_moves_with_each_stored_piece_of_the_data(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    deadlines_s = []

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, _, keeper = await a_connected_keeper(engine, service)
        keeper.session.closed()
        write_attempt(experiment, trial, encode(0, trial.trial_id, "PERIODICAL", 0, 0.5) * 20_000)
        drain = engine.storage_poller.drain

        async def drain_observed(trial, left, on_stored):
            def note():
                on_stored()
                deadlines_s.append(engine.experiment.stops.next_deadline_s)

            await drain(trial, left, note)

        engine.storage_poller.drain = drain_observed
        engine.stop()
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        await engine.close()

    play(scenario)
    assert len(deadlines_s) > 1
    assert deadlines_s == sorted(set(deadlines_s))


@pytest.mark.parametrize("exit_code", [0, 1], ids=["a clean exit", "a crash"])
def test_a_queued_trial_survives_two_clean_exits_of_its_jobs_but_fails_after_two_crashes(
    a_real_experiment, exit_code
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        await start(engine)
        for number in range(2):
            job_id = f"env-{number}"
            await until(lambda job_id=job_id: service.settings and service.settings.job_id == job_id)
            keeper = ScriptedKeeper(engine, job_id)
            keeper.send(Idle())
            (given,) = await keeper.receive_until(RunTrial)
            service.on_job_ended(JobEnded(job_id, exit_code, ""))
            await until(lambda job_id=job_id: job_id not in engine.experiment.jobs.live)
        (trial,) = engine.experiment.trials.values()
        assert trial.trial_id == given.trial_id
        assert trial.state.value == ("WAITING" if exit_code == 0 else "FAILED")
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("written", [None, Stream.KEEPER, Stream.STDOUT])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_job_crash_is_charged_to_a_trial_without_a_start_report_only_if_its_attempt_has_written_bytes(
    a_real_experiment, written, is_late
):
    """The keeper has claimed an attempt, and has written nothing, or a line of its own log, or output of the command."""
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        job = await a_submitted_job(engine, service)
        keeper = ScriptedKeeper(engine, job.job_id)
        keeper.send(Idle())
        (given,) = await keeper.receive_until(RunTrial)
        trial = engine.experiment.trials[given.trial_id]
        key = AttemptKey(given.trial_id, given.attempt_id, "main-0")
        sign_attempt(experiment.folder, key, job.job_id)
        poller, scan = engine.storage_poller, engine.storage_poller.scan_remaining

        def write():
            if written is not None:
                write_line(experiment, key, written)

        async def scan_and_write(*arguments, **how):
            found = await scan(*arguments, **how)
            write()
            return found

        if is_late:  # the storage shows the line only after the first scan
            poller.scan_remaining = scan_and_write
        else:
            write()
        service.on_job_ended(JobEnded(job.job_id, 1, ""))
        await until(lambda: job.job_id not in engine.experiment.jobs.live)
        assert trial.state.value == ("WAITING" if written is None else "FAILED")
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_the_results_before_a_checkpoint_are_stored_even_if_the_job_has_already_ended(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        first = write_attempt(experiment, trial, frames(("PERIODICAL", 1), ("CHECKPOINT", "000001")))
        experiment.folder.workspace.attempt(first).exit_json.unlink()
        source = {"trial_id": trial.trial_id, "attempt_id": first.attempt_id, "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        write_attempt(
            experiment,
            trial,
            frames(("CONTINUED", source), ("PERIODICAL", 2), ("FINAL", 2)),
            name=SECOND,
        )
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        assert trial.state.value == "SUCCEEDED", trial.run.message
        assert values(experiment.rows(trial.trial_id)) == [1, 2, 2]
        await engine.close()

    play(scenario)


# ---- attempts whose keeper is gone


async def a_forgotten_trial(engine, service):
    """Return a trial whose keeper has started it and then ended, and the id of its attempt."""
    await a_submitted_job(engine, service)
    keeper = ScriptedKeeper(engine, "env-0")
    keeper.send(Idle())
    (given,) = await keeper.receive_until(RunTrial)
    keeper.send(TrialStarted(AttemptKey(given.trial_id, given.attempt_id, "main-0"), 10.0))
    keeper.session.closed()
    return engine.experiment.trials[given.trial_id], given.attempt_id


@pytest.mark.usefixtures("no_polls")
@pytest.mark.usefixtures("late_storage")
def test_a_trial_missing_from_its_restarted_keepers_hello_has_the_result_in_the_workspace(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, name = await a_forgotten_trial(engine, service)
        write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5), name=name)
        ScriptedKeeper(engine, "env-0")
        await until(lambda: trial.state.is_terminal)
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_a_trial_missing_from_its_keepers_hello_is_dispatched_again_if_its_files_are_unreadable(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(job_recovery, "STORAGE_LAG_S", 0.1)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, name = await a_forgotten_trial(engine, service)
        forbid_reading(monkeypatch)
        (again,) = await ScriptedKeeper(engine, "env-0").receive_until(RunTrial)
        assert again.trial_id == trial.trial_id
        assert again.attempt_id != name
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_trial_that_starts_after_the_hello_of_its_keeper_is_not_lost(
    a_real_experiment, monkeypatch, is_reported
):
    """The storage had shown the start before the Hello arrived."""
    monkeypatch.setattr(job_recovery, "STORAGE_LAG_S", DEADLINE_S if is_reported else 0.1)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, localConfig={"reuse": True})
    looked = asyncio.Event()

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, name = await a_forgotten_trial(engine, service)
        key = AttemptKey(trial.trial_id, name, "main-0")
        scan = engine.storage_poller.scan_remaining

        async def scan_and_note(*arguments, **options):
            left = await scan(*arguments, **options)
            looked.set()
            return left

        monkeypatch.setattr(engine.storage_poller, "scan_remaining", scan_and_note)
        keeper = ScriptedKeeper(engine, "env-0")
        await looked.wait()
        if is_reported:
            ended = TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 10.5, dict.fromkeys(Stream, 0))
            earlier = AttemptKey(trial.trial_id, attempt_id(0), "main-0")
            keeper.send(TrialStarted(key, 10.0), Chunk(earlier, Stream.STDOUT, 0, b"its log follows"))
            keeper.send(ended)
            await until(lambda: trial.state.is_terminal)
            assert (trial.state.value, trial.run.attempt) == ("SUCCEEDED", 0)
        else:
            (again,) = await keeper.receive_until(RunTrial)
            assert again.attempt_id != name
        await engine.close()

    play(scenario)


# ---- jobs that the manager gives up


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("is_given_up", [True, False], ids=["given up", "ended"])
def test_a_trial_whose_job_is_given_up_or_ended_has_the_result_that_the_workspace_contains(
    a_real_experiment, is_given_up
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        (job,) = engine.experiment.jobs.live.values()
        # The manager stores the partial record only after it has read the end of the attempt, which takes a moment.
        write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5) + b"a partial record")
        store_is_blocked, end = contextlib.ExitStack(), engine.ingest.end

        def end_slowly(ended):
            store_is_blocked.enter_context(a_blocked_store(experiment))
            asyncio.get_running_loop().call_later(0.2, store_is_blocked.close)
            end(ended)

        engine.ingest.end = end_slowly
        if is_given_up:
            await engine.recovery.give_up(job)
        else:
            service.on_job_ended(JobEnded(job.job_id, 0, ""))
        await engine.finished.wait()
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("late_storage")
def test_the_manager_stops_a_given_up_job_and_lists_it_as_leftover_until_the_cluster_reports_its_end(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        (job,) = engine.experiment.jobs.live.values()
        service.trouble = "node7 does not answer"
        await engine.recovery.give_up(job)
        await engine.finished.wait()
        assert (trial.state.value, trial.run.reason) == ("FAILED", ExitReason.JOB_LOST)
        assert trial.run.message == "node7 does not answer"
        assert service.stopped == [job.job_id]
        (message,) = engine.snapshot().leftovers
        assert "node7 does not answer" in message
        assert f"end {job.job_id}" in message
        assert stored_leftovers(experiment) == {job.job_id: message}
        service.on_job_ended(JobEnded(job.job_id, None, "deleted"))
        assert engine.snapshot().leftovers == ()
        assert stored_leftovers(experiment) == {}
        await engine.close()

    play(scenario)


def test_a_given_up_job_that_the_cluster_does_not_have_is_not_listed_as_leftover(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        trial = await a_submitted_trial(engine, service)
        (job,) = engine.experiment.jobs.live.values()
        await engine.recovery.give_up(job)
        await engine.finished.wait()
        assert "the cluster has not reported" in trial.run.message
        assert engine.snapshot().leftovers == ()
        await engine.close()

    play(scenario)


def test_a_job_that_the_cluster_will_start_again_is_not_given_up(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL, lostNodeTimeout="1s")

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        lost = engine.experiment.scheduler.lost
        service.restarted.add(trial.job_id)
        engine.runtime.post(NodeReadinessChanged(trial.job_id, False))
        await until(lambda: lost.next_deadline_s is not None)
        await until(lambda: lost.next_deadline_s is None)
        assert (states(engine), service.stopped) == (["WAITING"], [])
        # The manager can give up the job after its restart as well, like a new job.
        service.restarted.clear()
        engine.runtime.post(NodeReadinessChanged(trial.job_id, False))
        await engine.finished.wait()
        assert trial.run.reason is ExitReason.JOB_LOST
        await engine.close()

    play(scenario)


def test_trials_that_a_given_up_job_never_started_return_to_the_queue(a_real_experiment):
    experiment = a_real_experiment(NOTHING, trialConcurrency=1, maxTrialNum=3, localConfig={"reuse": True})

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        job, keeper = await a_job_with_a_prefetched_trial(engine, service)
        running, queued = job.trial_ids
        keeper.send(TrialStarted(AttemptKey(running, FIRST, "main-0"), 10.0))
        await engine.recovery.give_up(job)
        trials = engine.experiment.trials
        await until(lambda: trials[running].state.is_terminal)
        assert trials[running].run.reason is ExitReason.JOB_LOST
        assert (trials[queued].state.value, trials[queued].retries) == ("WAITING", 0)
        assert trials[queued].job_id != job.job_id
        await engine.close()

    play(scenario)


# ---- jobs that cannot be ended


def test_a_job_that_cannot_be_ended_is_listed_as_leftover_and_its_results_count(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        (job,) = engine.experiment.jobs.live.values()
        write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5))
        engine.submission.escalate(job, StopStage.ABANDONED)
        await engine.finished.wait()
        assert (trial.state.value, trial.run.value) == ("SUCCEEDED", 0.5)
        await until(lambda: not engine.experiment.jobs.live)
        (message,) = stored_leftovers(experiment).values()
        assert f"end {job.job_id}" in message
        assert message in engine.snapshot().problems
        await engine.close()

    play(scenario)


# ---- a later manager


def test_a_later_manager_stops_a_leftover_job_and_removes_the_job_from_the_leftovers_after_its_end(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    leftover_jobs.write(experiment.folder, {"old": "remove it with `end old`"})

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.RUNNING, kind=Cluster)
        await start(engine)
        assert (service.woken, service.stopped) == (["old"], ["old"])
        assert engine.snapshot().leftovers == ("remove it with `end old`",)
        service.on_job_ended(JobEnded("old", 0, ""))
        assert (engine.snapshot().leftovers, stored_leftovers(experiment)) == ((), {})
        await engine.close()

    play(scenario)


def test_a_later_manager_removes_an_unknown_job_from_the_list_of_leftovers(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    leftover_jobs.write(experiment.folder, {"old": "remove it with `end old`"})

    async def scenario():
        engine, service = an_engine(experiment, state=JobPresence.UNKNOWN, kind=Cluster)
        await start(engine)
        assert (engine.snapshot().leftovers, service.stopped, stored_leftovers(experiment)) == ((), [], {})
        await engine.close()

    play(scenario)


def test_objects_that_may_remain_on_the_cluster_are_recorded_when_the_experiment_ends(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        trial = await a_submitted_trial(engine, service)

        async def settle():
            service.leftovers = lambda: {"pod7": "remove it with `end pod7`"}

        service.settle = settle
        engine.stop_trial(trial.trial_id)
        await engine.until_stopped()
        assert stored_leftovers(experiment) == {"pod7": "remove it with `end pod7`"}
        await engine.close()

    play(scenario)
