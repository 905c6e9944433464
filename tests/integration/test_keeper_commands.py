"""What the manager sends to keepers, and what it accepts from them. The training service runs no job."""

import asyncio
import contextlib

import pytest
from deadlines import DEADLINE_S
from scripted_keeper import (
    FIRST,
    SECOND,
    Cluster,
    ScriptedKeeper,
    a_blocked_store,
    a_connected_keeper,
    a_submitted_job,
    a_submitted_trial,
    frames,
    play,
    until,
)
from void_service import an_engine

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import AttemptDelivered, AttemptEnded
from nni_manager.engine import commits, trial_dispatch
from nni_manager.store.reader import StoreReader
from nni_manager.training_services.base import JobEnded
from nni_sdk.records import encode
from trial_keeper.wire.documents import stop_from_bytes
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import (
    AttemptKey,
    Chunk,
    Idle,
    RunTrial,
    Shutdown,
    StopTrial,
    Stream,
    TrialEnded,
    TrialStarted,
    Usage,
)
from trial_keeper.wire.reasons import ExitReason

NOTHING = "pass\n"
ONE_TRIAL = {"trialConcurrency": 1, "maxTrialNum": 1}
REUSED = ONE_TRIAL | {"localConfig": {"reuse": True}}


async def a_reused_job(engine, service):
    """Start the engine; return the keeper of its only job, and the trial that is assigned to the job."""
    job = await a_submitted_job(engine, service)
    keeper = ScriptedKeeper(engine, "env-0")
    keeper.send(Idle())
    await until(lambda: job.trial_ids)
    (trial_id,) = job.trial_ids
    return keeper, engine.experiment.trials[trial_id]


def of_kind(kind, messages):
    return [message for message in messages if isinstance(message, kind)]


# ---- dispatches


def test_a_dispatch_is_repeated_until_the_files_of_the_trial_can_be_written(a_real_experiment, monkeypatch):
    monkeypatch.setattr(trial_dispatch, "FIRST_RESUBMIT_S", 0.05)
    experiment = a_real_experiment(NOTHING, **REUSED)

    async def scenario():
        engine, service = an_engine(experiment)
        write, failures = engine.writer.write_trial, [OSError(28, "No space left on device")]

        async def write_later(job, trial):
            if failures:
                raise failures.pop()
            assert "No space left" in engine.snapshot().problem
            await write(job, trial)

        engine.writer.write_trial = write_later
        keeper, trial = await a_reused_job(engine, service)
        (given,) = await keeper.receive_until(RunTrial)
        assert given.trial_id == trial.trial_id
        assert experiment.folder.workspace.trial(trial.trial_id).trial_json.exists()
        assert engine.snapshot().problem == ""
        await engine.close()

    play(scenario)


def test_a_stop_request_during_a_dispatch_reaches_the_keeper_after_the_dispatch(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **REUSED)

    async def scenario():
        engine, service = an_engine(experiment)
        write, may_write = engine.writer.write_trial, asyncio.Event()

        async def write_later(job, trial):
            await may_write.wait()
            await write(job, trial)

        engine.writer.write_trial = write_later
        keeper, trial = await a_reused_job(engine, service)
        engine.stop_trial(trial.trial_id)
        keeper.received()
        may_write.set()
        await keeper.receive_until(RunTrial)
        assert keeper.received() == [StopTrial(trial.trial_id, ExitReason.STOPPED_BY_USER)]
        await engine.close()

    play(scenario)


def test_a_trial_is_sent_to_its_keeper_only_after_it_is_stored(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **REUSED)

    async def scenario():
        engine, service = an_engine(experiment)
        await a_submitted_job(engine, service)
        await engine.runtime.durable()
        is_written = asyncio.Event()
        write = engine.writer.write_trial

        async def note_written(job, trial):
            await write(job, trial)
            is_written.set()

        engine.writer.write_trial = note_written
        with a_blocked_store(experiment):
            keeper = ScriptedKeeper(engine, "env-0")
            keeper.send(Idle())
            await is_written.wait()
            for _ in range(10):
                await asyncio.sleep(0)
            assert of_kind(RunTrial, keeper.received()) == []
        await keeper.receive_until(RunTrial)
        await engine.close()

    play(scenario)


def test_a_job_is_submitted_only_after_it_is_stored(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        await engine.restore()
        with a_blocked_store(experiment):
            await engine.start(("192.0.2.1:8081",))
            await until(lambda: engine.experiment.jobs.live)
            # A submission that does not wait for the store would be finished within this time.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(service.submitted.wait(), 1)
            assert not service.submitted.is_set()
        await service.submitted.wait()
        await engine.close()

    play(scenario)


# ---- stops


def test_the_keeper_receives_the_stop_command_before_a_cluster_without_a_grace_period_stops_the_job(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(trial_dispatch, "_KEEPER_HEAD_START_S", 0.05)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=StopsAtOnce)
        trial, _, keeper = await a_connected_keeper(engine, service)
        keeper.received()
        engine.stop_trial(trial.trial_id)
        assert keeper.received() == [StopTrial(trial.trial_id, ExitReason.STOPPED_BY_USER)]
        assert (service.woken, service.stopped) == ([trial.job_id], [])
        await until(lambda: service.stopped == [trial.job_id])
        await engine.close()

    play(scenario)


def test_the_job_of_a_stopped_trial_is_stopped_without_delay_if_the_cluster_has_a_grace_period(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(trial_dispatch, "_KEEPER_HEAD_START_S", 3600.0)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, _, _ = await a_connected_keeper(engine, service)
        engine.stop_trial(trial.trial_id)
        await until(lambda: service.stopped == [trial.job_id])
        await engine.close()

    play(scenario)


def test_the_manager_does_not_stop_the_job_of_a_stopped_trial_if_the_job_has_already_ended(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(trial_dispatch, "_KEEPER_HEAD_START_S", 3600.0)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=StopsAtOnce)
        trial, _, _ = await a_connected_keeper(engine, service)
        engine.stop_trial(trial.trial_id)
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        monkeypatch.setattr(trial_dispatch, "_KEEPER_HEAD_START_S", 0.0)
        # The keeper gets a head start before the manager stops the job. Here the job ends during the head start.
        await engine.dispatch._stop_after_keeper(trial.job_id)
        assert service.stopped == []
        await engine.close()

    play(scenario)


class StopsAtOnce(Cluster):
    """A training service that ends a job immediately when the manager stops it, without a grace period."""

    stops_at_once = True


def test_a_keeper_that_reconnects_while_its_trial_is_stopping_receives_the_stop_command(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, key, keeper = await a_connected_keeper(engine, service)
        keeper.session.closed()
        engine.stop_trial(trial.trial_id)
        again = ScriptedKeeper(engine, trial.job_id, key)
        assert again.received()[1:] == [StopTrial(trial.trial_id, ExitReason.STOPPED_BY_USER)]
        await engine.close()

    play(scenario)


def test_the_stop_request_for_a_disconnected_keeper_is_written_before_the_cluster_stops_its_job(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, _, keeper = await a_connected_keeper(engine, service)
        keeper.session.closed()
        path, found = experiment.folder.workspace.trial(trial.trial_id).stop_json, []

        async def stop(job_id):
            found.append((job_id, stop_from_bytes(path.read_bytes())))
            return True

        service.stop = stop
        engine.stop_trial(trial.trial_id)
        await until(lambda: found)
        assert found == [(trial.job_id, StopTrial(trial.trial_id, ExitReason.STOPPED_BY_USER))]
        await engine.close()

    play(scenario)


class TwoTasks(Cluster):
    """A training service whose jobs have two tasks. The first task that ends decides the result of the trial."""

    completion = Completion((TaskRole("main", 2),))


def test_a_task_is_stopped_when_its_keeper_reconnects_after_another_task_has_ended_the_trial(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=TwoTasks)
        trial, key, keeper = await a_connected_keeper(engine, service)
        other = AttemptKey(trial.trial_id, FIRST, "main-1")
        second = ScriptedKeeper(engine, trial.job_id, task="main-1")
        second.send(TrialStarted(other, 10.0))
        second.session.closed()
        keeper.send(TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, dict.fromkeys(Stream, 0)))
        stopped = [
            of_kind(StopTrial, ScriptedKeeper(engine, trial.job_id, each, task=each.task).received())
            for each in (key, other)
        ]
        assert stopped == [[], [StopTrial(trial.trial_id, ExitReason.TRIAL_OVER)]]
        await engine.close()

    play(scenario)


def test_the_keeper_of_a_preempted_job_receives_a_stop_command_with_the_reason_preempted(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        keeper = ScriptedKeeper(engine, trial.job_id)
        keeper.received()
        service.on_job_preempted(trial.job_id)
        service.on_job_preempted("a job of another manager")
        assert keeper.received() == [], "the trial has not started"
        keeper.send(TrialStarted(AttemptKey(trial.trial_id, FIRST, "main-0"), 10.0))
        service.on_job_preempted(trial.job_id)
        assert of_kind(StopTrial, keeper.received()) == [StopTrial(trial.trial_id, ExitReason.PREEMPTED)]
        await engine.close()

    play(scenario)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_reused_job_without_further_trials_is_ended_by_its_connected_keeper_or_else_by_the_cluster(
    a_real_experiment, is_connected
):
    experiment = a_real_experiment(NOTHING, **REUSED)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        keeper, trial = await a_reused_job(engine, service)
        (given,) = await keeper.receive_until(RunTrial)
        key = AttemptKey(trial.trial_id, given.attempt_id, "main-0")
        keeper.send(TrialStarted(key, 10.0))
        keeper.received()
        if not is_connected:
            keeper.session.closed()
        engine.runtime.post(AttemptEnded(TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, {})))
        engine.runtime.post(AttemptDelivered(key))
        await until(lambda: of_kind(Shutdown, keeper.received()) or service.stopped)
        assert service.stopped == ([] if is_connected else ["env-0"])
        await engine.close()

    play(scenario)


# ---- reports


def test_reported_usage_is_stored_and_shown(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        keeper.send(Usage(key, 50.0, 1 << 20))
        assert trial.run.latest_usage.rss_bytes == 1 << 20
        await engine.close()
        with StoreReader(experiment.folder.database) as reader:
            ((_, row),) = reader.usage_of(trial.trial_id)
        assert row.usage == Usage(key, 50.0, 1 << 20)

    play(scenario)


@pytest.mark.parametrize("stream", [Stream.STDOUT, Stream.METRICS])
def test_a_stream_that_exceeds_its_quota_is_cut_and_the_trial_has_a_warning(
    a_real_experiment, monkeypatch, stream
):
    record = encode(0, "any", "PERIODICAL", 0, 0.5)
    monkeypatch.setitem(QUOTA_BYTES, stream, len(record))
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, keeper = await a_connected_keeper(engine, service)
        keeper.send(Chunk(key, stream, 0, record * 2))
        await engine.runtime.durable()
        assert f"at {len(record)} bytes" in trial.warning
        assert str(experiment.folder.workspace.attempt(key).stream(stream)) in trial.warning
        await engine.close()
        return trial.trial_id, key

    async def checked():
        trial_id, _ = await scenario()
        if stream is Stream.METRICS:
            assert len(experiment.rows(trial_id)) == 1
        else:
            (log,) = (path for path in experiment.folder.collected_logs.rglob("*stdout*") if path.is_file())
            assert log.read_bytes().startswith(record + b"\n[trial-keeper] its stdout is cut")

    play(checked)


def test_a_final_result_before_a_checkpoint_counts_for_the_attempt_that_continues_from_the_checkpoint(
    a_real_experiment,
):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, lost, keeper = await a_connected_keeper(engine, service)
        keeper.send(
            Chunk(lost, Stream.METRICS, 0, frames(("FINAL", 5), ("FINAL", 6), ("CHECKPOINT", "000001")))
        )
        key = AttemptKey(trial.trial_id, SECOND, "main-0")
        source = {"trial_id": trial.trial_id, "attempt_id": lost.attempt_id, "task": "main-0"}
        source |= {"checkpoint": "000001", "load": "a"}
        keeper.send(TrialStarted(key, 11.0))
        await engine.runtime.durable()
        assert trial.run.final is None
        keeper.send(Chunk(key, Stream.METRICS, 0, frames(("CONTINUED", source), ("PERIODICAL", 3))))
        await until(lambda: trial.run.intermediate_count)
        assert (trial.run.final, trial.run.value) == ("5", 5.0)
        await engine.close()

    play(scenario)


def test_a_keeper_with_too_much_unstored_data_waits_for_the_store(a_real_experiment):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)
    piece = b"x" * (1 << 20)

    async def scenario():
        engine, service = an_engine(experiment)
        _, key, keeper = await a_connected_keeper(engine, service)
        await engine.runtime.durable()
        with a_blocked_store(experiment):
            for number in range(commits.MAX_OF_ONE_BYTES // len(piece)):
                await asyncio.wait_for(keeper.session.ready(), DEADLINE_S)
                keeper.send(Chunk(key, Stream.STDOUT, number * len(piece), piece))
            waiting = asyncio.ensure_future(keeper.session.ready())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        await engine.close()

    play(scenario)
