"""The cluster: the interface that the HTTP layer calls. One object, used from one event loop; blocking calls run in threads.

A job is identified by its owner and its name. Reads use the database, so lists and details agree; `JobWorker` processes the
events of jobs. The caller checks permissions.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nni_manager.local_openpai.allocator import Allocator
from nni_manager.local_openpai.container_runtime import StatePaths, mounts_work, no_ssh_here
from nni_manager.local_openpai.core.job import PaiJob, RecordEvent
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.core.states import EventType, SubState
from nni_manager.local_openpai.errors import ApiError, StateDirUnusable, invalid_job
from nni_manager.local_openpai.job_worker import JobWorker, log_failure
from nni_manager.local_openpai.jobs import JobSummary
from nni_manager.local_openpai.notifications import Notifier
from nni_manager.local_openpai.planning import planned
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.local_openpai.store import JobStore, StoreThread
from nni_manager.store.owner_lock import OwnerLock
from nni_manager.store.unusable_files import why_unusable, why_unusable_database
from nni_manager.support.clock import monotonic_epoch_s

# Parsing a job's text takes 20 ms of a core. More threads would only delay other work.
_PARSER_THREADS = 2


class Cluster:
    """OpenPAI on this machine. Tasks outlive this object and its process; the next cluster on the same folder adopts them."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Store the settings; no I/O.

        Raises:
            SandboxMissing: tasks are to run in containers, and no container tool is installed.
        """
        self.settings = settings
        self.mounts_work = False
        """True if storages are mounted at the requested paths; False if tasks must use the storages' own paths."""
        self._paths = StatePaths(settings.state_dir)
        self._database = StoreThread(self._paths.database, "cluster-database")
        # A separate thread, so that a long list does not delay writes.
        self._reader = StoreThread(self._paths.database, "cluster-reading")
        self.read = self._reader.call
        """Call a reading method of `JobStore`, such as `read(JobStore.detail, owner, name)`."""
        self.write = self._database.call
        """Call a writing method of `JobStore`, such as `write(JobStore.commit, writes)`."""
        self._parsers = ThreadPoolExecutor(_PARSER_THREADS, thread_name_prefix="cluster-jobs")
        self._notifier = Notifier(settings, self._database)
        self._allocator = Allocator(settings)
        self.virtual_clusters = list(self._allocator.virtual_clusters.values())
        """In the order of the settings."""
        self._worker = JobWorker(settings, self._allocator, self._database, self._notifier)
        self.wait_until_broken = self._worker.wait_until_broken
        self._lock = contextlib.ExitStack()
        self._notifying: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Resume the jobs of the state directory, which is created if it does not exist.

        Raises:
            StateDirUnusable: the directory cannot be written, has other content, or is in use by another cluster.
        """
        try:
            await asyncio.to_thread(self._prepare)
            await self._database.open()
            await self._reader.open()
            self.mounts_work = await asyncio.to_thread(mounts_work)
            retries = self.settings.most_platform_retries
            await self._worker.start(await self.write(JobStore.unfinished, _new_id, retries))
        except BaseException:
            await self.close()
            raise
        if self._notifier.is_enabled:
            self._notifying = asyncio.create_task(self._notifier.run(), name="notifications of job changes")
            self._notifying.add_done_callback(log_failure)

    def _prepare(self) -> None:
        """Create the folders and lock them."""
        try:
            for path in (self._paths.state_dir, self._paths.containers, self._paths.logs):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = why_unusable(self._paths.lock, "remove it") or why_unusable_database(
                self._paths.database,
                f"restore it from a copy, or remove {self._paths.database}* to start without any job",
            )
            if why:
                raise StateDirUnusable(why)
            self._lock.enter_context(OwnerLock(self._paths.lock).owned())
        except BlockingIOError as error:
            raise StateDirUnusable(
                f"cannot use {self._paths.state_dir}: another cluster uses this directory; "
                "stop that cluster, or choose another state directory"
            ) from error
        except OSError as error:
            raise StateDirUnusable(
                f"cannot use {error.filename}: {error.strerror}; choose another state directory"
            ) from error

    async def close(self) -> None:
        """Release all resources; idempotent. Tasks continue, and the next cluster reads their outcome.

        Raises the error that has ended the worker, if any.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._notifying is not None:
            self._notifying.cancel()
            await asyncio.wait({self._notifying})
        try:
            await self._worker.close()
        finally:
            await self._reader.close()
            await self._database.close()
            self._parsers.shutdown()
            self._lock.close()

    # ---- commands

    async def submit(self, user: str, config_text: bytes) -> str:
        """The name of the new job, which is durable and queued.

        Raises:
            ProtocolInvalid: the job is invalid, or can never fit into its virtual cluster; the error lists all problems.
            ApiError: ConflictJobError, the user already has a job of that name.
            ApiError: NoVirtualClusterError or NoStorageError, the job uses a name that does not exist.
            StateBusy: the job could not be stored.
        """
        self._worker.check_open()
        try:
            text = config_text.decode()
        except UnicodeDecodeError as error:
            raise invalid_job(
                f"cannot read the job: byte {error.start} is not UTF-8; save it as UTF-8"
            ) from error
        defaults = tuple(storage.name for storage in self.settings.storages if storage.is_default)
        loop = asyncio.get_running_loop()
        no_ssh = no_ssh_here(self.settings, self.mounts_work)
        made = await loop.run_in_executor(
            self._parsers, planned, user, text, defaults, self.settings.host_ip, no_ssh
        )
        plan = made.plan
        _check_arguments(plan)
        self._allocator.check(plan)
        self._check_storages(plan)
        now_s = monotonic_epoch_s()
        events = [RecordEvent(EventType.WARNING, "Unclear", warning, 0) for warning in made.warnings]
        job_id = await self.write(JobStore.add_job, plan, made.masked_text, now_s, events)
        self._worker.add(PaiJob(job_id, plan, now_s, _new_id, self.settings.most_platform_retries))
        return plan.name

    def _check_storages(self, plan: JobPlan) -> None:
        names = [storage.name for storage in self.settings.storages]
        for mount in plan.storages:
            if mount.name not in names:
                known = ", ".join(names) or "none"
                message = f"cannot find storage {mount.name}; the storages are: {known}"
                raise ApiError("NoStorageError", message)

    async def stop(self, job: JobSummary) -> None:
        """Stop a job; no-op if it is terminal.

        Returns when the stop is durable, or, on a full disk, when the stop is executed. Does not wait for the processes to end.

        Raises:
            StateBusy.
        """
        await self._worker.stop(job.job_id)

    async def delete(self, job: JobSummary) -> None:
        """Delete a terminal job and its logs; its name becomes available again.

        Raises:
            ApiError: ConflictJobError, the job is not terminal.
            StateBusy.
        """
        self._worker.check_open()
        if job.sub_state is not SubState.COMPLETED or job.job_id in self._worker:
            message = f"cannot delete job {job.framework_name}: it is {job.state.value}; stop it first"
            raise ApiError("ConflictJobError", message)
        await self.write(JobStore.commit, [("remove_job", {"job_id": job.job_id})])
        await asyncio.to_thread(shutil.rmtree, self._paths.logs / job.debug_id, ignore_errors=True)

    # ---- queries

    async def logs_of(
        self, owner: str, name: str, attempt_id: int, role: str, index: int, task_attempt_id: int
    ) -> Path:
        """The folder of the logs of a task's attempt. `role` in either spelling.

        Raises:
            ApiError: NoJobError, no such job, attempt or task.
        """
        container = await self.read(
            JobStore.container_of, owner, name, attempt_id, role, index, task_attempt_id
        )
        return self._paths.logs_of(*container)


def _new_id() -> str:
    return str(uuid.uuid4())


def _check_arguments(plan: JobPlan) -> None:
    """Reject values that a command line on this machine would interpret as options or separators."""
    problems = [
        f"cannot use image {role.image!r} of task role {role.name}: an image name cannot start with '-'; use e.g. ubuntu:22.04"
        for role in plan.roles
        if role.image.startswith("-")
    ]
    problems += [
        f"cannot mount storage {mount.name} at {mount.mount_path!r}; "
        f"use an absolute path without colon and comma, e.g. /mnt/{mount.name}"
        for mount in plan.storages
        if not mount.mount_path.startswith("/") or {":", ","} & set(mount.mount_path)
    ]
    if problems:
        raise invalid_job(*problems)
