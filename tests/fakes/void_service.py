"""A training service that accepts jobs without running them, and engines that use it."""

import asyncio

from nni_manager.engine.engine import Engine
from nni_manager.training_services.base import JobPresence, Placement, TrainingService
from nni_manager.tuner.registry import make_assessment, make_tuner


class Void(TrainingService):
    """Accepts every job and runs none."""

    run_script = "#!/bin/bash\n"

    def __init__(self, on_job_ended, state=JobPresence.UNKNOWN):
        super().__init__(on_job_ended)
        self.submitted = asyncio.Event()
        self.settings = None
        self.state = state
        self.released = []

    async def reserve(self, job_id, trial_id=None):
        pass

    def placement(self, job_id):
        return Placement("/code", None)

    async def submit(self, settings):
        self.settings = settings
        self.submitted.set()

    async def stop(self, job_id):
        return False

    def removal_command(self, job_id):
        return f"end {job_id}"

    async def adopt(self, job_id):
        return self.state

    def release(self, job_id):
        self.released.append(job_id)

    async def reap_orphans(self, job_id, trial_ids):
        pass

    async def close(self):
        pass


def an_engine(experiment, state=JobPresence.UNKNOWN, kind=Void, make_tuner=make_tuner):
    services = []

    def make(on_job_ended):
        services.append(kind(on_job_ended, state))
        return services[0]

    return Engine(
        experiment.config,
        experiment.folder,
        make,
        make_tuner,
        make_assessment(experiment.config),
    ), services[0]


async def start(engine, addresses=("192.0.2.1:8081",)):
    """Start the engine like a manager process does."""
    await engine.restore()
    await engine.start(addresses)
