"""A fake cluster whose jobs have several tasks: one real keeper per task, identified by PAI_* variables."""

import asyncio
import contextlib
import os
import signal
from collections import defaultdict

from forked_programs import ForkedProcess, Program

from nni_manager.domain.completion import Completion
from nni_manager.training_services.base import JobEnded, JobPresence, Placement, TrainingService
from trial_keeper.settings import without_settings


class TeamService(TrainingService):
    """A training service that starts a process for each task in `completion`. A job ends when all its processes have exited.

    A role fails its job if more of its processes have failed than the role tolerates.
    """

    run_script = "# Keepers are started directly.\n"

    def __init__(self, completion: Completion, code_dir: str, on_job_ended):
        super().__init__(on_job_ended)
        self.completion = completion
        self._code_dir = code_dir
        self.keepers: dict[str, dict[str, ForkedProcess]] = {}
        self._environs: dict[tuple[str, str], dict[str, str]] = {}
        self._watching: set[asyncio.Task[None]] = set()

    async def reserve(self, job_id, trial_id=None):
        pass

    def placement(self, job_id):
        return Placement(self._code_dir, None)

    def release(self, job_id):
        pass

    async def submit(self, settings):
        roles = self.completion.roles
        job = {
            "PAI_JOB_NAME": f"tests~{settings.job_id}",
            "PAI_TASK_ROLE_LIST": ",".join(role.name for role in roles),
            **{f"PAI_TASK_ROLE_TASK_COUNT_{role.name}": str(role.tasks) for role in roles},
        }
        self.keepers[settings.job_id] = {}
        for role in roles:
            for index in range(role.tasks):
                task = {
                    "PAI_CURRENT_TASK_ROLE_NAME": role.name,
                    "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": str(index),
                }
                environ = without_settings(os.environ) | settings.to_environ() | job | task
                self._start(settings.job_id, f"{role.name}-{index}", environ)
        watch = asyncio.ensure_future(self._until_end(settings.job_id))
        self._watching.add(watch)
        watch.add_done_callback(self._watching.discard)

    def _start(self, job_id: str, task: str, environ: dict[str, str]) -> None:
        self._environs[job_id, task] = environ
        with open(os.devnull, "wb") as nowhere:
            self.keepers[job_id][task] = ForkedProcess(
                Program.KEEPER, stdout=nowhere, stderr=nowhere, environ=environ, start_new_session=True
            )

    def replace_keeper(self, job_id: str, task: str) -> None:
        """Kill a task's keeper and start another, like a cluster that restarts a container within its job."""
        keeper = self.keepers[job_id][task]
        # The new keeper starts before the old keeper ends, so that the job never ends.
        self._start(job_id, task, self._environs[job_id, task])
        keeper.kill()
        keeper.wait()

    async def stop(self, job_id):
        for keeper in self.keepers.get(job_id, {}).values():
            with contextlib.suppress(ProcessLookupError):
                keeper.send_signal(signal.SIGTERM)
        return job_id in self.keepers

    def removal_command(self, job_id):
        return f"end {job_id}"

    async def adopt(self, job_id):
        return JobPresence.UNKNOWN

    async def reap_orphans(self, job_id, trial_ids):
        """Do nothing: the guard of each keeper has already killed the orphans."""

    async def close(self):
        for watch in list(self._watching):
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for team in self.keepers.values():
            for keeper in team.values():
                if keeper.poll() is None:
                    keeper.terminate()
                    await asyncio.to_thread(keeper.wait)

    async def _until_end(self, job_id: str) -> None:
        failed = defaultdict[str, list[int]](list)
        for task in list(self.keepers[job_id]):
            if code := await self._code_of(job_id, task):
                failed[task.rpartition("-")[0]].append(code)
        decisive = [
            code
            for role in self.completion.roles
            if len(failed[role.name]) >= role.min_failed_tasks
            for code in failed[role.name]
        ]
        self.on_job_ended(JobEnded(job_id, max(decisive, key=abs, default=0), ""))

    async def _code_of(self, job_id: str, task: str) -> int:
        keeper = None
        while keeper is not self.keepers[job_id][task]:  # the keeper may have been replaced
            keeper = self.keepers[job_id][task]
            code = await asyncio.to_thread(keeper.wait)
        return code
