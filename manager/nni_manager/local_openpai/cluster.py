"""The cluster: the interface that the HTTP layer calls. One object, used from one event loop; blocking calls run in threads.

A job is identified by its owner and its name. `user` is the caller; every caller may read every job.

Theory of operation. One worker takes all events of jobs from one queue. It drains the queue, passes the events to `core.job`,
and commits the outcome in one transaction. Only then does it execute the effects: start and stop containers, send
notifications. A cluster that is killed in between finds the pending work in its database. Reads use the database, so lists
and details agree.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nni_manager.clock import monotonic_epoch_s
from nni_manager.local_openpai.container_runtime import ContainerRuntime, StatePaths, mounts_work
from nni_manager.local_openpai.core.exits import PLACE_REFUSED, PORT_CONFLICT, TaskExit
from nni_manager.local_openpai.core.job import (
    Allocation,
    AllocationFailed,
    ContainerEnded,
    ContainerStarted,
    Effect,
    Event,
    LeaveQueue,
    Notify,
    PaiJob,
    Placed,
    RecordEvent,
    ReleaseAllocation,
    RequestAllocation,
    SaveTask,
    SaveTaskAttempt,
    StartContainer,
    StopAsked,
    StopContainer,
    Submitted,
    Task,
)
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.core.ports import PortsExhausted, chosen_ports
from nni_manager.local_openpai.core.queue import (
    Grant,
    Request,
    VirtualCluster,
    summed,
    virtual_clusters,
)
from nni_manager.local_openpai.core.states import EventType, ExecutionType, SubState
from nni_manager.local_openpai.errors import (
    ClusterClosed,
    JobExceedsCluster,
    JobForbidden,
    JobInvalid,
    StateBusy,
    StateDirUnusable,
    StillRunning,
    StorageUnknown,
    TagUnknown,
    VirtualClusterUnknown,
)
from nni_manager.local_openpai.jobs import (
    AttemptSummary,
    JobDetail,
    JobEventRecord,
    JobSummary,
    LogFile,
    LogPiece,
    StorageView,
    TaskAttempt,
    TaskDetail,
    VirtualClusterView,
)
from nni_manager.local_openpai.logs import log_files, read_log
from nni_manager.local_openpai.notifications import Notifier
from nni_manager.local_openpai.planning import planned
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.local_openpai.store import (
    JobStore,
    Write,
    attempt_write,
    event_write,
    job_write,
    task_write,
)
from nni_manager.training_services.openpai.job_checks import ProtocolDiagnostic, ProtocolInvalid

logger = logging.getLogger(__name__)

# The size that OpenPAI's log service returns in tail mode.
TAIL_BYTES = 16 * 1024
# Maximum number of events whose outcome one transaction holds.
_MAX_EVENTS = 1000
_TRY_RETRY_DELAY_S = 1.0
# A cluster that is killed while it starts a process keeps the lock until that process calls exec.
_LOCK_WAIT_S, _LOCK_LOOK_S = 1.0, 0.01
# Parsing a job's text takes 20 ms of a core; more threads would only take that core from other work.
_READERS_OF_JOBS = 2
_T = TypeVar("_T")


@dataclass(slots=True)
class _Batch:
    """The writes of one round of the worker, and the effects that follow the commit."""

    now_s: float
    writes: list[Write] = field(default_factory=list)
    jobs: dict[int, PaiJob] = field(default_factory=dict)
    done: list[asyncio.Future[None]] = field(default_factory=list)
    effects: list[tuple[PaiJob, StartContainer | StopContainer | ReleaseAllocation]] = field(
        default_factory=list
    )


@dataclass(frozen=True, slots=True)
class _Item:
    job_id: int
    event: Event
    done: asyncio.Future[None] | None = None


class Cluster:
    """OpenPAI on this machine. Tasks outlive this object and its process; the next cluster on the same folder adopts them."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Store the settings; no I/O."""
        self.settings = settings
        self._folders = StatePaths(settings.state_dir)
        self._virtual_clusters: dict[str, VirtualCluster] = virtual_clusters(settings.virtual_clusters)
        self._live: dict[int, PaiJob] = {}
        self._containers: dict[str, int] = {}
        self._ports: dict[str, frozenset[int]] = {}
        self._inbox: asyncio.Queue[_Item | None] = asyncio.Queue()
        self._database = ThreadPoolExecutor(1, thread_name_prefix="cluster-database")
        # A separate thread, so that a long list does not delay writes.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="cluster-reading")
        self._parsers = ThreadPoolExecutor(_READERS_OF_JOBS, thread_name_prefix="cluster-jobs")
        self._runner = ContainerRuntime(settings, self._container_started, self._container_ended)
        self._notifier = Notifier(
            settings.notification_url, settings.notification_file, self._to_tell, self._was_told
        )
        self._store: JobStore | None = None
        self._reader: JobStore | None = None
        self._lock: int | None = None
        self._worker: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._mounts_work = False
        self._is_closing = self._is_closed = False

    async def start(self) -> None:
        """Resume the jobs of the state directory, which is created if it does not exist.

        Raises:
            StateDirUnusable: the directory cannot be written, holds something else, or another cluster uses it.
        """
        self._lock = await asyncio.to_thread(self._prepared)
        try:
            loop = asyncio.get_running_loop()
            self._store = await loop.run_in_executor(self._database, JobStore, self._folders.database)
            self._reader = await loop.run_in_executor(self._reading, JobStore, self._folders.database)
            self._mounts_work = bool(self.settings.storages) and await asyncio.to_thread(mounts_work)
            found = self.settings.most_platform_retries
            jobs = await self._db(lambda store: store.unfinished(_new_id, found))
        except BaseException:
            await self.close()
            raise
        for job in jobs:
            self._take_up(job)
        await asyncio.to_thread(self._runner.remove_others, list(self._containers))
        self._worker = asyncio.create_task(self._work(), name="the cluster")
        self._worker.add_done_callback(_say_why)
        if self._notifier.is_wanted:
            self._telling = asyncio.create_task(self._notifier.run(), name="telling of changes of jobs")
            self._telling.add_done_callback(_say_why)

    async def close(self) -> None:
        """Release all resources; idempotent. Tasks continue, and the next cluster reads their outcome."""
        if self._is_closed:
            return
        self._is_closing = self._is_closed = True
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})
        try:
            if self._worker is not None:
                self._inbox.put_nowait(None)
                worker, self._worker = self._worker, None
                await worker
        finally:
            await self._runner.close()
            reader, self._reader = self._reader, None
            store, self._store = self._store, None
            for threads, each in ((self._reading, reader), (self._database, store)):
                if each is not None:
                    await asyncio.get_running_loop().run_in_executor(threads, each.close)
                threads.shutdown()
            self._parsers.shutdown()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def wait_until_broken(self) -> None:
        """Return when the worker has failed. The log has the reason; only a new cluster can continue."""
        if self._worker is not None:
            await asyncio.wait({self._worker})

    # ---- commands

    async def submit(self, user: str, config_text: bytes) -> str:
        """The name of the new job, which is durable and queued.

        Raises:
            JobInvalid: the job is invalid; the error lists all problems.
            JobExceedsCluster: the job can never fit into its virtual cluster.
            JobExists: the user already has a job of that name.
            VirtualClusterUnknown, StorageUnknown: the job names one that does not exist.
            StateBusy: the job could not be stored.
        """
        self._check_open()
        try:
            text = config_text.decode()
        except UnicodeDecodeError as error:
            message = f"cannot read the job: byte {error.start} is not UTF-8; save it as UTF-8"
            raise JobInvalid([ProtocolDiagnostic("", None, None, "", message)]) from error
        defaults = tuple(storage.name for storage in self.settings.storages if storage.is_default)
        loop = asyncio.get_running_loop()
        try:
            made = await loop.run_in_executor(self._parsers, planned, user, text, defaults)
        except ProtocolInvalid as error:
            raise JobInvalid(error.diagnostics) from error
        plan = made.plan
        _check_words(plan)
        self._check_places(plan)
        now_s = monotonic_epoch_s()
        notes = [RecordEvent(EventType.WARNING, "Unclear", warning, 0) for warning in made.warnings]
        job_id = await self._db(lambda store: store.add_job(plan, made.masked_text, now_s, notes))
        job = PaiJob(job_id, plan, now_s, _new_id, self.settings.most_platform_retries)
        self._live[job_id] = job
        self._inbox.put_nowait(_Item(job_id, Submitted()))
        return plan.name

    async def set_execution_type(
        self, user: str, owner: str, name: str, wanted: ExecutionType, *, is_admin: bool = False
    ) -> None:
        """Stop a job. START has no effect, neither on an active job nor on a stopped one.

        Returns when the stop is durable, or executed if the disk is full. It does not wait for the processes to end.

        Raises:
            JobNotFound, JobForbidden, StateBusy.
        """
        await self._own(user, owner, name, is_admin)
        job_id = await self._read(lambda store: store.job_id(owner, name))
        if wanted is ExecutionType.STOP and job_id in self._live:
            done = asyncio.get_running_loop().create_future()
            self._inbox.put_nowait(_Item(job_id, StopAsked(), done))
            assert self._worker is not None
            await asyncio.wait({done, self._worker}, return_when=asyncio.FIRST_COMPLETED)
            self._check_open()

    async def delete(self, user: str, owner: str, name: str, *, is_admin: bool = False) -> None:
        """Delete a terminal job and its logs; its name becomes available again.

        Raises:
            JobNotFound, JobForbidden, StateBusy.
            StillRunning: the job is not terminal.
        """
        summary = await self._own(user, owner, name, is_admin)
        job_id = await self._read(lambda store: store.job_id(owner, name))
        if summary.sub_state is not SubState.COMPLETED or job_id in self._live:
            raise StillRunning(
                f"cannot delete job {summary.framework_name}: it is {summary.state.value}; stop it first"
            )
        await self._db(lambda store: store.commit([Write("remove_job", {"job_id": job_id})]))
        await asyncio.to_thread(
            shutil.rmtree, self._folders.logs_of_job(summary.debug_id), ignore_errors=True
        )

    async def add_tag(self, user: str, owner: str, name: str, tag: str, *, is_admin: bool = False) -> None:
        """Add a tag to a job; idempotent.

        Raises:
            JobNotFound, JobForbidden, StateBusy.
        """
        await self._own(user, owner, name, is_admin)
        job_id = await self._read(lambda store: store.job_id(owner, name))
        await self._db(lambda store: store.commit([Write("add_tag", {"job_id": job_id, "tag": tag})]))

    async def remove_tag(self, user: str, owner: str, name: str, tag: str, *, is_admin: bool = False) -> None:
        """Remove a tag from a job.

        Raises:
            JobNotFound, JobForbidden, StateBusy.
            TagUnknown: the job has no such tag.
        """
        summary = await self._own(user, owner, name, is_admin)
        job_id = await self._read(lambda store: store.job_id(owner, name))
        if not await self._db(lambda store: store.remove_tag(job_id, tag)):
            raise TagUnknown(
                f"cannot remove tag {tag!r}: job {summary.framework_name} has {', '.join(summary.tags) or 'none'}"
            )

    # ---- queries

    async def jobs(self) -> list[JobSummary]:
        """All jobs, the newest first."""
        return await self._read(JobStore.jobs)

    async def job(self, owner: str, name: str, attempt_id: int | None = None) -> JobDetail:
        """A job with its newest attempt, or with the requested one.

        Raises:
            JobNotFound: no such job, or no such attempt.
        """
        return await self._read(lambda store: store.detail(owner, name, attempt_id))

    async def job_attempts(self, owner: str, name: str) -> list[AttemptSummary]:
        """All attempts of a job, the newest first.

        Raises:
            JobNotFound.
        """
        return await self._read(lambda store: store.attempts(owner, name))

    async def task_attempts(
        self, owner: str, name: str, attempt_id: int, role: str, index: int
    ) -> tuple[TaskDetail, list[TaskAttempt]]:
        """A task and all its attempts within one attempt of the job, the newest first. `role` in either spelling.

        Raises:
            JobNotFound: no such job, attempt or task.
        """
        return await self._read(lambda store: store.task_attempts(owner, name, attempt_id, role, index))

    async def config_text(self, owner: str, name: str) -> str:
        """The job's text as submitted, character for character, with its secrets masked.

        Raises:
            JobNotFound.
        """
        return await self._read(lambda store: store.config(owner, name))

    async def events(
        self, owner: str, name: str, event_type: EventType | None = None
    ) -> list[JobEventRecord]:
        """The events of a job, the oldest first; only those of `event_type` if given.

        Raises:
            JobNotFound.
        """
        return await self._read(lambda store: store.events(owner, name, event_type))

    async def log_files(
        self, owner: str, name: str, attempt_id: int, role: str, index: int, task_attempt_id: int
    ) -> list[LogFile]:
        """The logs of a task's attempt. `role` in either spelling.

        Raises:
            JobNotFound: no such job, attempt or task.
            LogUnknown: the attempt has no logs yet.
        """
        logs = await self._logs(owner, name, attempt_id, role, index, task_attempt_id)
        return await asyncio.to_thread(log_files, logs)

    async def read_log(
        self,
        owner: str,
        name: str,
        attempt_id: int,
        role: str,
        index: int,
        task_attempt_id: int,
        file_name: str,
        *,
        offset: int | None = None,
        most_bytes: int = TAIL_BYTES,
    ) -> LogPiece:
        """At most `most_bytes` bytes of a log, starting at `offset`; without an offset, the end of the log.

        `file_name` must be one that `log_files` returns, so a caller cannot read outside the task's folder.

        Raises:
            JobNotFound, LogUnknown.
        """
        logs = await self._logs(owner, name, attempt_id, role, index, task_attempt_id)
        return await asyncio.to_thread(read_log, logs, file_name, offset, most_bytes)

    async def virtual_clusters(self) -> list[VirtualClusterView]:
        """The virtual clusters, in the order of the settings."""
        return [
            VirtualClusterView(name, each.capacity, each.used, len({key[0] for key in each.waiting}))
            for name, each in self._virtual_clusters.items()
        ]

    async def storages(self) -> list[StorageView]:
        """The storages, in the order of the settings."""
        return [
            StorageView(each.name, str(each.path), each.is_default, each.is_read_only, self._mounts_work)
            for each in self.settings.storages
        ]

    # ---- the worker

    async def _work(self) -> None:
        """Process events: decide, commit, then execute the effects."""
        is_last = False
        while not is_last:
            items = [await self._inbox.get()]
            while not self._inbox.empty() and len(items) < _MAX_EVENTS:
                items.append(self._inbox.get_nowait())
            batch = _Batch(monotonic_epoch_s())
            for item in items:
                if item is None:
                    is_last = True
                    continue
                if item.done is not None:
                    batch.done.append(item.done)
                if item.job_id in self._live:
                    self._handle(self._live[item.job_id], item.event, batch)
            if not self._is_closing:
                self._grant(batch)  # when closing, the next cluster allocates instead
            if not await self._commit(batch):
                return
            for done in batch.done:
                if not done.done():
                    done.set_result(None)
            for job, effect in batch.effects:
                self._do(job, effect)
            for job in batch.jobs.values():
                if job.is_over:
                    self._live.pop(job.job_id, None)
            self._notifier.wake()

    def _handle(self, job: PaiJob, event: Event, batch: _Batch) -> None:
        if job.is_over:
            return
        batch.jobs[job.job_id] = job
        for effect in job.handle(event, batch.now_s):
            self._note(job, effect, batch)

    def _note(self, job: PaiJob, effect: Effect, batch: _Batch) -> None:
        """Add an effect to the batch. Effects that must follow the commit are deferred."""
        place = self._virtual_clusters.get(job.plan.virtual_cluster)
        match effect:
            case RequestAllocation():
                self._containers.update(dict.fromkeys(effect.request.needs, job.job_id))
                self._ask(job, effect.request)
            case LeaveQueue():
                if place is not None:
                    place.forget(effect.container_ids)
            case ReleaseAllocation():
                if place is not None:
                    place.release(effect.container_id)
                self._ports.pop(effect.container_id, None)
                self._containers.pop(effect.container_id, None)
                batch.effects.append((job, effect))
            case StartContainer() | StopContainer():
                batch.effects.append((job, effect))
            case SaveTask():
                batch.writes.append(task_write(job, effect))
            case SaveTaskAttempt():
                batch.writes.append(attempt_write(job.job_id, effect))
            case RecordEvent():
                batch.writes.append(event_write(job.job_id, effect, batch.now_s))
            case Notify():
                logger.info("%s: %s", job.plan.framework_name, effect.change.value)
                if effect.change.value in job.plan.tells and self._notifier.is_wanted:
                    body = json.dumps(_told(job, effect, batch.now_s))
                    batch.writes.append(Write("add_notification", {"body": body}))

    def _ask(self, job: PaiJob, request: Request) -> None:
        """Queue a request, or fail it if it can never be satisfied: a restarted cluster may have less capacity."""
        place = self._virtual_clusters.get(job.plan.virtual_cluster)
        if place is not None and request.total.fits_into(place.capacity):
            place.ask(request)
            return
        problem = (
            f"virtual cluster {job.plan.virtual_cluster} {'is gone' if place is None else 'has become too small for it'} "
            "since it was submitted; start the cluster as it was, and submit it again"
        )
        missing = AllocationFailed(tuple(request.needs), TaskExit(PLACE_REFUSED, diagnostics=problem))
        self._inbox.put_nowait(_Item(job.job_id, missing))

    def _grant(self, batch: _Batch) -> None:
        """Grant allocations until none fits. A task that cannot use its allocation releases it for the next."""
        while granted := [grant for each in self._virtual_clusters.values() for grant in each.grants()]:
            for grant in granted:
                self._handle(self._live[grant.request.job_id], self._placed(grant), batch)

    def _placed(self, grant: Grant) -> Placed | AllocationFailed:
        plan = self._live[grant.request.job_id].plan
        tasks = {task.container_id: task for task in self._live[grant.request.job_id].tasks.values()}
        places: dict[str, Allocation] = {}
        taken = {port for ports in self._ports.values() for port in ports}
        first, end = self.settings.first_port, self.settings.end_port
        try:
            for container_id, gpus in grant.gpus.items():
                ports = chosen_ports(
                    container_id,
                    plan.role(tasks[container_id].role).ports,
                    first,
                    end,
                    lambda port: port not in taken and _is_free(port),
                )
                own = frozenset(port for each in ports.values() for port in each)
                taken.update(own)
                self._ports[container_id] = own
                places[container_id] = Allocation(self.settings.host_ip, ports, gpus)
        except PortsExhausted as error:
            problem = f"{error}; free some ports from {first} to {end - 1}"
            return AllocationFailed(tuple(grant.gpus), TaskExit(PORT_CONFLICT, diagnostics=problem))
        return Placed(places)

    async def _commit(self, batch: _Batch) -> bool:
        """Commit the batch, retrying without limit; False if the cluster is closed first.

        Stops are executed while the commit fails, since a full disk must not delay them. Nothing is started meanwhile.
        """
        while writes := [*batch.writes, *map(job_write, batch.jobs.values())]:
            try:
                await self._db(partial(JobStore.commit, writes=writes))
                break
            except StateBusy as error:
                logger.warning("%s; trying again", error)
                if self._is_closing:
                    return False
                self._stop_unrecorded(batch)
                await asyncio.sleep(_TRY_RETRY_DELAY_S)
                self._take_more(batch)
        return True

    def _stop_unrecorded(self, batch: _Batch) -> None:
        """Execute the batch's stops and complete their requests. A container that has not started yet is excluded."""
        unstarted = {
            effect.task.container_id for _, effect in batch.effects if isinstance(effect, StartContainer)
        }
        stops = [
            (job, effect)
            for job, effect in batch.effects
            if isinstance(effect, StopContainer) and effect.container_id not in unstarted
        ]
        for each in stops:
            batch.effects.remove(each)
            self._do(*each)
        for done in batch.done:
            if not done.done():
                done.set_result(None)

    def _take_more(self, batch: _Batch) -> None:
        """Handle the events that have arrived since, without granting allocations."""
        for _ in range(self._inbox.qsize()):
            item = self._inbox.get_nowait()
            if item is None:
                self._inbox.put_nowait(None)  # closing: the worker receives it after this batch
                continue
            if item.done is not None:
                batch.done.append(item.done)
            if item.job_id in self._live:
                self._handle(self._live[item.job_id], item.event, batch)

    def _do(self, job: PaiJob, effect: StartContainer | StopContainer | ReleaseAllocation) -> None:
        match effect:
            case StartContainer():
                self._runner.start(job.plan, effect)
            case StopContainer():
                self._runner.stop(effect.container_id)
            case ReleaseAllocation():
                self._runner.forget(effect.container_id)

    def _container_started(self, container_id: str) -> None:
        self._put(container_id, ContainerStarted(container_id))

    def _container_ended(self, container_id: str, ended: TaskExit) -> None:
        self._put(container_id, ContainerEnded(container_id, ended))

    def _put(self, container_id: str, event: Event) -> None:
        job_id = self._containers.get(container_id)
        if job_id is not None:
            self._inbox.put_nowait(_Item(job_id, event))

    # ---- restart

    def _prepared(self) -> int:
        """Create the folders and lock them. Returns the descriptor that holds the lock while it is open."""
        try:
            for path in (self._folders.state_dir, self._folders.containers, self._folders.logs):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._folders.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateDirUnusable(
                f"cannot use {error.filename}: {error.strerror}; choose another state directory"
            ) from error
        deadline_s = time.monotonic() + _LOCK_WAIT_S
        while not _locked(descriptor):
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                raise StateDirUnusable(
                    f"cannot use {self._folders.state_dir}: another cluster does; "
                    "stop it, or choose another state directory"
                )
            time.sleep(_LOCK_LOOK_S)
        return descriptor

    def _take_up(self, job: PaiJob) -> None:
        """Resume a job of an earlier cluster."""
        self._live[job.job_id] = job
        place = self._virtual_clusters.get(job.plan.virtual_cluster)
        if not job.tasks:
            self._inbox.put_nowait(_Item(job.job_id, Submitted()))
            return
        for task in job.tasks.values():
            if not task.is_over:
                self._containers[task.container_id] = job.job_id
            if task.sub_state in _IN_PROCESSES and task.place is not None:
                self._take_up_container(job, task, place)
        for request in job.requests():
            self._ask(job, request)

    def _take_up_container(self, job: PaiJob, task: Task, place: VirtualCluster | None) -> None:
        assert task.place is not None
        if place is not None:
            place.hold(task.container_id, job.plan.role(task.role).need, task.place.gpus)
        self._ports[task.container_id] = frozenset(
            port for ports in task.place.ports.values() for port in ports
        )
        self._runner.adopt(job.plan, task)
        if task.stop_code is not None:
            self._runner.stop(task.container_id)

    # ---- helpers

    def _check_open(self) -> None:
        if self._is_closing or self._worker is None or self._worker.done():
            raise ClusterClosed

    def _check_places(self, plan: JobPlan) -> None:
        place = self._virtual_clusters.get(plan.virtual_cluster)
        if place is None:
            known = ", ".join(self._virtual_clusters)
            raise VirtualClusterUnknown(
                f"cannot find virtual cluster {plan.virtual_cluster}; use one of {known}"
            )
        for mount in plan.storages:
            if mount.name not in {storage.name for storage in self.settings.storages}:
                known = ", ".join(storage.name for storage in self.settings.storages) or "none"
                raise StorageUnknown(f"cannot find storage {mount.name}; there is {known}")
        together = summed(role.need for role in plan.roles for _ in range(role.tasks))
        largest = [together] if plan.is_gang else [role.need for role in plan.roles]
        for need in largest:
            if not need.fits_into(place.capacity):
                have = place.capacity
                message = (
                    f"cannot ever run this job: {'all its tasks' if plan.is_gang else 'one of its tasks'} "
                    f"need{'' if plan.is_gang else 's'} {need.cpu} CPUs, {need.memory_mb} MB and {need.gpu} GPUs, and "
                    f"virtual cluster {plan.virtual_cluster} has {have.cpu} CPUs, {have.memory_mb} MB and {have.gpu} GPUs; "
                    "ask for less, or start the cluster with more"
                )
                raise JobExceedsCluster([ProtocolDiagnostic("", None, None, "taskRoles", message)])

    async def _own(self, user: str, owner: str, name: str, is_admin: bool) -> JobSummary:
        self._check_open()
        summary = await self._read(lambda store: store.summary(owner, name))
        if user != owner and not is_admin:
            raise JobForbidden(
                f"cannot change job {summary.framework_name}: it is not {user}'s; ask {owner} or an administrator"
            )
        return summary

    async def _logs(
        self, owner: str, name: str, attempt_id: int, role: str, index: int, task_attempt_id: int
    ) -> Path:
        logs = await self._read(
            lambda store: store.container_of(owner, name, attempt_id, role, index, task_attempt_id)
        )
        return self._folders.logs_of(*logs)

    async def _db(self, call: Callable[[JobStore], _T]) -> _T:
        if self._store is None:
            raise ClusterClosed
        return await asyncio.get_running_loop().run_in_executor(self._database, call, self._store)

    async def _read(self, call: Callable[[JobStore], _T]) -> _T:
        if self._reader is None:
            raise ClusterClosed
        return await asyncio.get_running_loop().run_in_executor(self._reading, call, self._reader)

    async def _to_tell(self) -> list[tuple[int, str]]:
        return await self._read(JobStore.notifications)

    async def _was_told(self, number: int) -> None:
        write = Write("remove_notification", {"notification_id": number})
        await self._db(lambda store: store.commit([write]))


_IN_PROCESSES = frozenset(
    {SubState.ATTEMPT_PREPARING, SubState.ATTEMPT_RUNNING, SubState.ATTEMPT_DELETION_REQUESTED}
)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s stands still: this is a bug", task.get_name(), exc_info=task.exception())


def _new_id() -> str:
    return str(uuid.uuid4())


def _told(job: PaiJob, effect: Notify, now_s: float) -> dict[str, Any]:
    return {
        "user": job.plan.user,
        "job": job.plan.name,
        "change": effect.change.value,
        "attempt_id": effect.attempt_id,
        "exit_code": job.code if job.is_over else None,
        "at_s": now_s,
    }


def _is_free(port: int) -> bool:
    """True if a process could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _check_words(plan: JobPlan) -> None:
    """Reject values that a command line on this machine would interpret as options or separators."""
    problems = [
        f"cannot use image {role.image!r} of task role {role.name}: no name of an image begins so; write e.g. ubuntu:22.04"
        for role in plan.roles
        if role.image.startswith("-")
    ]
    problems += [
        f"cannot mount storage {mount.name} at {mount.mount_path!r}: it is no plain absolute path; write e.g. /mnt/{mount.name}"
        for mount in plan.storages
        if not mount.mount_path.startswith("/") or {":", ","} & set(mount.mount_path)
    ]
    if problems:
        raise JobInvalid([ProtocolDiagnostic("", None, None, "", problem) for problem in problems])
