"""A training service that runs each job as a podman container of the keeper's image on this machine.

The containers mount the storage at a different path than the manager, and see no other files of the manager. They continue when
the manager exits. The service of a later manager finds them by their names.
"""

import asyncio
import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from real_containers import MAX_LIFE_S, STEP_TIMEOUT_S, Podman

from nni_manager.errors import RetryableError
from nni_manager.training_services.base import JobEnded, JobPresence, Placement, TrainingService

MOUNT = "/mnt/confignfs-data"
_STOP_GRACE_S = 20


class ContainerService(TrainingService):
    """One container per job."""

    uses_snapshot = True
    run_script = "# The image has an entry point.\n"

    def __init__(self, podman: Podman, prefix: str, storage: Path, options: tuple[str, ...], on_job_ended):
        """`prefix` is the start of all container names. `storage` is mounted at MOUNT in the containers. `options` are options of
        podman.
        """
        super().__init__(on_job_ended)
        self._podman = podman
        self._prefix = prefix
        self._storage = storage
        self._options = options
        self._image = podman.image("keeper")
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[str]] = set()

    def name(self, job_id: str) -> str:
        """The name of a job's container."""
        return self._prefix + job_id

    async def reserve(self, job_id, trial_id=None):
        pass

    def placement(self, job_id):
        return Placement(None, None)

    def release(self, job_id):
        pass

    async def submit(self, settings):
        seen = replace(
            settings, workspace=f"{MOUNT}/{Path(settings.workspace).name}", mount=MOUNT, relay_output=True
        )
        await self._run(
            *("podman", "run", "--detach", "--pull=never", "--network=host", f"--timeout={MAX_LIFE_S}"),
            *("--name", self.name(settings.job_id), f"--volume={self._storage}:{MOUNT}", *self._options),
            *(f"--env={name}={value}" for name, value in seen.to_environ().items()),
            self._image,
        )
        self._watch(settings.job_id)

    async def stop(self, job_id):
        if job_id not in self._watched:
            return False
        # `podman stop` returns only when the container has exited, so it runs in the background. `_until_end` reports the end of
        # the job.
        stop = asyncio.ensure_future(
            self._run("podman", "stop", "--time", str(_STOP_GRACE_S), self.name(job_id))
        )
        self._stopping.add(stop)
        stop.add_done_callback(self._stopping.discard)
        return True

    def removal_command(self, job_id):
        return f"end {job_id}"

    async def adopt(self, job_id):
        try:
            await self._run("podman", "container", "inspect", self.name(job_id))
        except RetryableError:
            return JobPresence.UNKNOWN
        self._watch(job_id)
        return JobPresence.RUNNING

    async def reap_orphans(self, job_id, trial_ids):
        """Do nothing: a container that has ended leaves no process."""

    async def close(self):
        tasks = [*self._watched.values(), *self._stopping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, job_id: str) -> None:
        self._watched[job_id] = asyncio.ensure_future(self._until_end(job_id))

    async def _until_end(self, job_id: str) -> None:
        name = self.name(job_id)
        exit_code = int(await self._run("podman", "wait", name, within_s=MAX_LIFE_S))
        termination_message = await self._run("podman", "logs", "--tail", "5", name)
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await self._run("podman", "rm", "--force", "--time", "0", name)
        del self._watched[job_id]
        self.on_job_ended(JobEnded(job_id, exit_code, termination_message.strip()))

    async def _run(self, *command: str, within_s: float = STEP_TIMEOUT_S) -> str:
        """The output of the command, stdout and stderr."""
        # A file is used instead of a pipe, because processes that podman leaves running could keep a pipe open.
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._podman.environ,
                cwd=self._podman.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                await asyncio.wait_for(process.wait(), within_s)
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            output.seek(0)
            said = output.read().decode()
        if process.returncode:
            raise RetryableError(f"{command[:3]} ended with {process.returncode}: {said}")
        return said
