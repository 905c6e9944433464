"""When an experiment ends, when its manager may end, and what a killed manager has stored."""

import asyncio

import pytest
from scripted_keeper import Cluster, a_connected_keeper, a_submitted_trial, play, until
from void_service import an_engine

from nni_manager.engine import engine as engine_module
from nni_manager.store.reader import StoreReader
from nni_manager.training_services.base import JobEnded
from trial_keeper.wire.messages import Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason

NOTHING = "pass\n"
ONE_TRIAL = {"trialConcurrency": 1, "maxTrialNum": 1}


async def is_waiting(task):
    """True if the task still runs after half a second. A manager that waits for nothing ends within this time."""
    await asyncio.wait({task}, timeout=0.5)
    return not task.done()


def succeed(keeper, key):
    keeper.send(TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, dict.fromkeys(Stream, 0)))


@pytest.mark.parametrize("closes", [True, False], ids=["close", "until_stopped"])
def test_a_manager_waits_for_the_end_of_the_last_job_of_its_experiment(a_real_experiment, closes):
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, key, keeper = await a_connected_keeper(engine, service)
        if not closes:
            stopped = asyncio.ensure_future(engine.until_stopped())
            assert await is_waiting(stopped), "a trial runs"
        succeed(keeper, key)
        await engine.finished.wait()
        assert (trial.state.value, len(engine.experiment.jobs.live)) == ("SUCCEEDED", 1)
        with StoreReader(experiment.folder.database) as reader:
            assert reader.experiment().ended_at_s is not None
        waiting = asyncio.ensure_future(engine.close()) if closes else stopped
        assert await is_waiting(waiting), "a job runs"
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await waiting
        if not closes:
            await engine.close()

    play(scenario)


def test_a_manager_does_not_end_if_the_user_extends_the_finished_experiment(a_real_experiment, monkeypatch):
    # With the real limits, which are minutes, a manager that wrongly ends would do so after the test.
    monkeypatch.setattr(engine_module, "RECORDED_TIMEOUT_S", 0.0)
    monkeypatch.setattr(engine_module, "MAX_STOP_S", 0.0)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial, key, keeper = await a_connected_keeper(engine, service)
        succeed(keeper, key)
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        await engine.until_stopped()
        await engine.commands.update("MAX_TRIAL_NUM", {"maxTrialNum": 2})
        stopped = asyncio.ensure_future(engine.until_stopped())
        assert await is_waiting(stopped)
        assert not engine.finished.is_set()
        stopped.cancel()
        await engine.close()

    play(scenario)


def test_a_killed_manager_has_stored_the_duration_of_its_experiment(a_real_experiment, monkeypatch):
    monkeypatch.setattr(engine_module, "_SAVE_DURATION_INTERVAL_S", 0.05)
    experiment = a_real_experiment(NOTHING, **ONE_TRIAL)

    def stored_s():
        with StoreReader(experiment.folder.database) as reader:
            return reader.experiment().active_s

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        await a_submitted_trial(engine, service)
        await until(lambda: stored_s() > 0.1)
        await engine.close()

    play(scenario)
