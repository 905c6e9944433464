"""Jobs that the cluster accepts but whose keeper never connects to the manager."""

import asyncio
import time

from deadlines import DEADLINE_S
from void_service import an_engine, start

from nni_manager.domain.transports import MAX_SILENCE_S
from nni_manager.engine import serializers
from nni_manager.training_services.base import JobPresence
from trial_keeper import __version__
from trial_keeper.wire.messages import Hello


def problem_in_a_minute(engine):
    return engine.experiment.transports.problem(time.monotonic() + MAX_SILENCE_S)


def hello(settings, **fields):
    values = {"version": __version__, "experiment_id": settings.experiment_id, "job_id": settings.job_id}
    return Hello(**values | {"task": "main-0"} | fields)


def test_a_job_without_a_connection_is_reported_as_a_problem_until_its_keeper_connects(a_real_experiment):
    experiment = a_real_experiment("", trialConcurrency=1, maxTrialNum=1)

    async def play():
        engine, service = an_engine(experiment)
        assert problem_in_a_minute(engine) == ""
        await start(engine, ("192.0.2.1:8081",))
        await asyncio.wait_for(service.submitted.wait(), DEADLINE_S)
        settings = service.settings
        assert serializers.summary_view(engine.snapshot())["problem"] == "", "too early"
        problem = problem_in_a_minute(engine)
        assert f"job {settings.job_id}" in problem
        assert "192.0.2.1:8081" in problem

        engine.admission.admit(hello(settings, is_probe=True), settings.job_id, settings.token)
        assert problem_in_a_minute(engine) == problem, "a probe of the doctor must not count"
        assert (len(engine.keepers), engine.experiment.scheduler.any_compatible_keeper) == (0, False)

        engine.admission.admit(hello(settings), settings.job_id, settings.token)
        assert problem_in_a_minute(engine) == ""
        await engine.close()

    asyncio.run(play())


def test_the_summary_shows_the_problem_of_a_job_without_a_connection(a_real_experiment):
    experiment = a_real_experiment("", trialConcurrency=1, maxTrialNum=1)

    async def play():
        engine, service = an_engine(experiment)
        await start(engine, ("192.0.2.1:8081",))
        await asyncio.wait_for(service.submitted.wait(), DEADLINE_S)
        # Change the stored time, as if the job had been submitted a minute ago.
        engine.experiment.transports.forget(service.settings.job_id)
        engine.experiment.transports.track(service.settings.job_id, time.monotonic() - MAX_SILENCE_S)
        assert "trial-keeper doctor" in serializers.summary_view(engine.snapshot())["problem"]
        await engine.close()

    asyncio.run(play())


def test_a_resumed_manager_reports_a_job_without_a_connection_until_the_experiment_is_stopped(
    a_real_experiment,
):
    experiment = a_real_experiment("", trialConcurrency=1, maxTrialNum=1)

    async def begin():
        engine, service = an_engine(experiment)
        await start(engine, ("192.0.2.1:8081",))
        await asyncio.wait_for(service.submitted.wait(), DEADLINE_S)
        await engine.close()

    async def resume():
        engine, _ = an_engine(experiment, JobPresence.RUNNING)
        await start(engine, ("192.0.2.2:8081",))
        assert "192.0.2.2:8081" in problem_in_a_minute(engine)
        engine.stop()
        await asyncio.wait_for(engine.finished.wait(), DEADLINE_S)
        assert problem_in_a_minute(engine) == ""
        await engine.close()

    asyncio.run(begin())
    asyncio.run(resume())
