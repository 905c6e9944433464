"""The worker of a cluster: it processes all events of jobs that are not terminal.

Theory of operation. The worker takes all events from one queue, passes them to `core.job`, and commits the outcome in one
transaction. Only then does it execute the effects: start and stop containers, send notifications. A cluster that is killed
in between finds the pending work in its database at the next start.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from nni_manager.local_openpai.allocator import Allocator
from nni_manager.local_openpai.container_runtime import ContainerRuntime
from nni_manager.local_openpai.core import job as core
from nni_manager.local_openpai.core.job import PaiJob
from nni_manager.local_openpai.core.queue import Request
from nni_manager.local_openpai.core.states import SubState
from nni_manager.local_openpai.errors import ClusterClosed, StateBusy
from nni_manager.local_openpai.notifications import Notifier
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.local_openpai.store import JobStore, StoreThread, Write, effect_write, job_write
from nni_manager.support.clock import monotonic_epoch_s
from trial_keeper.frozen_dataclass import dataclass

logger = logging.getLogger(__name__)

# Maximum number of events whose outcome one transaction holds.
_MAX_EVENTS = 1000
_COMMIT_RETRY_DELAY_S = 1.0
# Job ids start at 1.
_NO_JOB = 0
_WITH_PROCESSES = frozenset(
    {SubState.ATTEMPT_PREPARING, SubState.ATTEMPT_RUNNING, SubState.ATTEMPT_DELETION_REQUESTED}
)
_Deferred = core.StartContainer | core.StopContainer | core.ReleaseAllocation


@dataclass(slots=True)
class _Batch:
    """The writes of one round of the worker, and the effects that follow the commit."""

    now_s: float
    writes: list[Write] = field(default_factory=list)
    jobs: dict[int, PaiJob] = field(default_factory=dict)
    done: list[asyncio.Future[None]] = field(default_factory=list)
    effects: list[tuple[PaiJob, _Deferred]] = field(default_factory=list)

    def confirm(self) -> None:
        """Complete the requests of the batch."""
        for done in self.done:
            if not done.done():
                done.set_result(None)


@dataclass(frozen=True, slots=True)
class _Item:
    job_id: int
    event: core.Event
    done: asyncio.Future[None] | None = None


class JobWorker:
    """The jobs that are not terminal, their containers, and the queue of their events. Used from one event loop."""

    def __init__(
        self, settings: ClusterSettings, allocator: Allocator, database: StoreThread, notifier: Notifier
    ) -> None:
        """Store the arguments; no I/O. Raises what `ContainerRuntime` raises."""
        self._allocator = allocator
        self._database = database
        self._notifier = notifier
        self._runtime = ContainerRuntime(settings, self._put)
        self._jobs: dict[int, PaiJob] = {}
        self._containers: dict[str, int] = {}
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    async def start(self, jobs: Sequence[PaiJob]) -> None:
        """Resume the jobs of an earlier cluster, and process events."""
        for job in jobs:
            self._adopt(job)
        await asyncio.to_thread(self._runtime.remove_others, list(self._containers))
        self._task = asyncio.create_task(self._run(), name="the cluster")
        self._task.add_done_callback(log_failure)

    async def close(self) -> None:
        """Process the events so far, and release all resources; containers continue. Raises the worker's error, if any."""
        self._is_closing = True
        try:
            if self._task is not None:
                self._inbox.put_nowait(_Item(_NO_JOB, core.StopAsked()))  # wakes the worker
                await self._task
        finally:
            await self._runtime.close()

    async def wait_until_broken(self) -> None:
        """Return when the worker has failed. The log has the reason; only a new cluster can resume the jobs."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def check_open(self) -> None:
        """Raise ClusterClosed unless events are processed."""
        if self._is_closing or self._task is None or self._task.done():
            raise ClusterClosed

    def __contains__(self, job_id: int) -> bool:
        """True if the job is not terminal."""
        return job_id in self._jobs

    def add(self, job: PaiJob) -> None:
        """Start a new job, which is stored."""
        self._jobs[job.job_id] = job
        self._inbox.put_nowait(_Item(job.job_id, core.Submitted()))

    async def stop(self, job_id: int) -> None:
        """Stop a job; no-op if it is terminal. Returns when the stop is durable, or, on a full disk, when it is executed.

        Raises:
            ClusterClosed.
        """
        self.check_open()
        if job_id not in self:
            return
        done = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Item(job_id, core.StopAsked(), done))
        assert self._task is not None
        await asyncio.wait({done, self._task}, return_when=asyncio.FIRST_COMPLETED)
        self.check_open()

    # ---- events

    async def _run(self) -> None:
        """Process events: decide, commit, then execute the effects."""
        while not self._is_closing or not self._inbox.empty():
            items = [await self._inbox.get()]
            while not self._inbox.empty() and len(items) < _MAX_EVENTS:
                items.append(self._inbox.get_nowait())
            batch = _Batch(monotonic_epoch_s())
            self._process(items, batch)
            if not self._is_closing:
                self._grant(batch)  # when closing, the next cluster allocates instead
            if not await self._commit(batch):
                return
            batch.confirm()
            for effect in batch.effects:
                self._execute(*effect)
            for job in batch.jobs.values():
                if job.is_terminal:
                    self._jobs.pop(job.job_id, None)
            self._notifier.wake()

    def _process(self, items: Sequence[_Item], batch: _Batch) -> None:
        for item in items:
            if item.done is not None:
                batch.done.append(item.done)
            if item.job_id in self._jobs:
                self._handle(self._jobs[item.job_id], item.event, batch)

    def _handle(self, job: PaiJob, event: core.Event, batch: _Batch) -> None:
        if job.is_terminal:
            return
        batch.jobs[job.job_id] = job
        for effect in job.handle(event, batch.now_s):
            self._collect(job, effect, batch)

    def _collect(self, job: PaiJob, effect: core.Effect, batch: _Batch) -> None:
        """Add an effect to the batch. Effects that must follow the commit are deferred."""
        match effect:
            case Request():
                self._containers.update(dict.fromkeys(effect.needs, job.job_id))
                self._request(job, effect)
            case core.LeaveQueue():
                self._allocator.cancel(effect.container_ids)
            case core.ReleaseAllocation():
                self._allocator.release(effect.container_id)
                self._containers.pop(effect.container_id, None)
                batch.effects.append((job, effect))
            case core.StartContainer() | core.StopContainer():
                batch.effects.append((job, effect))
            case core.SaveTask() | core.SaveAttempt() | core.RecordEvent():
                batch.writes.append(effect_write(job, effect, batch.now_s))
            case core.Notify():
                logger.info("%s: %s", job.plan.framework_name, effect.change.value)
                if effect.change.value in job.plan.tells and self._notifier.is_enabled:
                    body = json.dumps(_notification(job, effect, batch.now_s))
                    batch.writes.append(("add_notification", {"body": body}))

    def _request(self, job: PaiJob, request: Request) -> None:
        for event in self._allocator.request(job, request):
            self._inbox.put_nowait(_Item(job.job_id, event))

    def _grant(self, batch: _Batch) -> None:
        """Grant allocations until none fits. A task that cannot use its allocation releases the resources for the next task."""
        for grant in self._allocator.grants():
            job = self._jobs[grant.request.job_id]
            for event in self._allocator.allocated(job, grant):
                self._handle(job, event, batch)

    async def _commit(self, batch: _Batch) -> bool:
        """Commit the batch, retrying without limit; False if the cluster is closed first.

        Stops are executed while the commit fails, since a full disk must not delay them. Nothing is started meanwhile.
        """
        while writes := [*batch.writes, *map(job_write, batch.jobs.values())]:
            try:
                await self._database.call(JobStore.commit, writes)
                break
            except StateBusy as error:
                logger.warning("%s; trying again", error)
                if self._is_closing:
                    return False
                self._stop_unrecorded(batch)
                await asyncio.sleep(_COMMIT_RETRY_DELAY_S)
                # Process the events that have arrived meanwhile, without granting allocations.
                self._process([self._inbox.get_nowait() for _ in range(self._inbox.qsize())], batch)
        return True

    def _stop_unrecorded(self, batch: _Batch) -> None:
        """Execute the batch's stops, except of containers that have not started, and complete the requests of the batch."""
        unstarted = {
            effect.task.container_id for _, effect in batch.effects if isinstance(effect, core.StartContainer)
        }
        for job, effect in list(batch.effects):
            if isinstance(effect, core.StopContainer) and effect.container_id not in unstarted:
                batch.effects.remove((job, effect))
                self._execute(job, effect)
        batch.confirm()

    def _execute(self, job: PaiJob, effect: _Deferred) -> None:
        match effect:
            case core.StartContainer():
                self._runtime.start(job.plan, effect)
            case core.StopContainer():
                self._runtime.stop(effect.container_id)
            case core.ReleaseAllocation():
                self._runtime.remove_folder(effect.container_id)

    def _put(self, event: core.ContainerStarted | core.ContainerEnded) -> None:
        job_id = self._containers.get(event.container_id)
        if job_id is not None:
            self._inbox.put_nowait(_Item(job_id, event))

    # ---- restart

    def _adopt(self, job: PaiJob) -> None:
        """Resume a job of an earlier cluster."""
        if not job.tasks:
            self.add(job)
            return
        self._jobs[job.job_id] = job
        for task in job.tasks.values():
            if not task.is_terminal:
                self._containers[task.container_id] = job.job_id
            if task.sub_state in _WITH_PROCESSES and task.allocation is not None:
                self._allocator.adopt(job.plan, task, task.allocation)
                self._runtime.adopt(job.plan, task)
                if task.stop_code is not None:
                    self._runtime.stop(task.container_id)
        for request in job.requests():
            self._request(job, request)


def log_failure(task: asyncio.Task[None]) -> None:
    """Log the error that has ended a task."""
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s has stopped: this is a bug", task.get_name(), exc_info=task.exception())


def _notification(job: PaiJob, effect: core.Notify, now_s: float) -> dict[str, Any]:
    return {
        "user": job.plan.user,
        "job": job.plan.name,
        "change": effect.change.value,
        "attempt_id": effect.attempt_id,
        "exit_code": job.attempt.code if job.is_terminal else None,
        "at_s": now_s,
    }
