"""Jobs on machines over SSH: placed, started, stopped, and adopted by a later manager."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.base import JobEnded, JobPresence, Placement, TrainingService
from nni_manager.training_services.remote.client import MachineClient
from nni_manager.training_services.remote.connection import RequestFailed
from nni_manager.training_services.remote.frames import Frame
from nni_manager.training_services.remote.job_records import Job, JobRecord, end_of
from nni_manager.training_services.remote.machine_jobs import JobState
from nni_manager.training_services.remote.placement import MachineView, Placements
from nni_manager.training_services.remote.pool import MachinePool, RemoteShare
from nni_manager.training_services.remote.section import RemoteSection
from nni_manager.training_services.reservations import NoRoom, ReservationQueue
from nni_manager.training_services.run_script import render_run_script
from nni_manager.training_services.ssh.client import MachineAway
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason

logger = logging.getLogger(__name__)

# The interval between looks at GPUs that other programs use. An ended job and a new connection are events.
_GPU_POLL_S = 2.0
# Jobs that wait together look at the GPUs once.
_MAX_VIEW_AGE_S = 1.0
# The time for the last jobs to end, after their trials; they need a second.
_SETTLE_S = 10.0
_SETTLE_POLL_S = 0.1
# A machine without free memory or descriptors answers, but cannot look at its jobs.
_RETRY_S = 5.0

Answer = TypeVar("Answer")


class RemoteService(TrainingService):
    """One experiment's jobs. Connections run on a thread of their own; all else on the loop that creates the service."""

    uses_snapshot = True
    runs_as_manager = (
        True  # as far as this machine's copy of the workspace is concerned: no other user needs it
    )
    stops_at_once = True

    def __init__(
        self,
        section: RemoteSection,
        folder: ExperimentFolder,
        gpus_per_trial: int | None,
        on_job_ended: Callable[[JobEnded], None],
    ) -> None:
        super().__init__(on_job_ended)
        self.run_script = render_run_script()
        self._gpus_per_trial, self._folder = gpus_per_trial, folder.jobs
        self._jobs: dict[str, Job] = {}
        """The jobs that run, or may run because their start was not answered."""
        self._reservations = ReservationQueue()
        self._missed_ends: dict[str, JobEnded] = {}
        """The ends of jobs that ended while no manager was running."""
        self._looking, self._looked_at_s = asyncio.Lock(), float("-inf")
        self._seen: dict[str, MachineView] = {}
        """The machines that answered the last question for their GPUs."""
        self._gpu_problems: dict[str, str] = {}
        """Why the GPUs of a machine cannot be determined."""
        self._tasks = TaskSet(lambda error: logger.critical("a bug: please report it", exc_info=error))
        self._loop = asyncio.get_running_loop()
        self._pool = MachinePool(section.machines, folder.workspace, self._on_event, self._on_up)
        self._clients = self._pool.clients
        machines = {key: client.machine for key, client in self._clients.items()}
        self._placements = Placements(machines, gpus_per_trial or 0)
        self.share = RemoteShare(self._pool)

    @property
    def problem(self) -> str:
        """The machines that cannot be reached or used, and why."""
        found = (client.problem or self._gpu_problems.get(key, "") for key, client in self._clients.items())
        return "\n".join(filter(None, found))

    def pending_reason(self, job_id: str) -> str:
        """What the job waits for."""
        if reason := self._reservations.pending_reason(job_id):
            return reason
        job = self._jobs.get(job_id)
        is_waiting = job is not None and job.settings is not None and not self._client(job).is_up
        return f"waits until {self._client(job).machine.address} can be reached" if job and is_waiting else ""

    def warning(self, job_id: str) -> str:
        """That the job's machine cannot be reached."""
        job = self._jobs.get(job_id)
        if job is None or not (problem := self._client(job).problem):
            return ""
        return f"its machine is away, where it continues: {problem}"

    # ---- placement

    async def reserve(self, job_id: str, trial_id: str | None = None) -> None:
        """Wait for a machine with room. A job whose start was not answered keeps its machine.

        A trial that is retried returns to a machine that has its checkpoints, if that one has room.
        """
        if job_id not in self._jobs:
            await self._reservations.reserve(job_id, partial(self._take, job_id, trial_id or ""))

    async def _take(self, job_id: str, trial_id: str) -> NoRoom | None:
        views, away = await self._views()
        preferred = self._pool.machines_of_trials.get(trial_id, ())
        if self._placements.take(job_id, views, preferred) is not None:
            return None
        return NoRoom(self._placements.why_pending(views, away), _GPU_POLL_S)

    async def _views(self) -> tuple[list[MachineView], list[str]]:
        """The machines that answer, in the order of the file, and the keys of the others."""
        clients = list(self._clients.values())
        await self._call(_all_tried(clients))
        views = {each.key: MachineView(each.key) for each in clients if each.is_up}
        if self._gpus_per_trial:
            async with self._looking:
                if time.monotonic() > self._looked_at_s + _MAX_VIEW_AGE_S:
                    looks = [self._look_at_gpus(client) for client in clients if client.is_up]
                    self._seen = dict(filter(None, await asyncio.gather(*looks)))
                    self._looked_at_s = time.monotonic()
                views = {key: self._seen[key] for key in views if key in self._seen}
        return list(views.values()), [each.key for each in clients if each.key not in views]

    async def _look_at_gpus(self, client: MachineClient) -> tuple[str, MachineView] | None:
        try:
            gpus = (await self._call(client.request("gpus"))).header
        except NniManagerError as error:
            if self._gpu_problems.get(client.key) != str(error):
                logger.warning("%s", error)
            self._gpu_problems[client.key] = str(error)
            return None
        self._gpu_problems.pop(client.key, None)
        return client.key, MachineView(client.key, tuple(gpus["present"]), frozenset(gpus["in_use"]))

    def placement(self, job_id: str) -> Placement:
        """A fresh copy of the code, and the job's GPUs on its machine."""
        return Placement(None, None if self._gpus_per_trial is None else self._placements.gpus_of(job_id))

    def release(self, job_id: str) -> None:
        """Free the job's machine, unless the job may run there."""
        if job_id not in self._jobs:
            self._placements.release(job_id)
            self._reservations.note_freed()

    def note_trial(self, job_id: str, trial_id: str) -> None:
        """Files of the trial belong to the job's machine."""
        if (key := self._placements.machine_of(job_id)) is not None:
            self._pool.note_trial(trial_id, key)

    # ---- jobs

    async def submit(self, settings: KeeperSettings) -> None:
        """Start the job on its machine.

        Raises:
            MachineAway: the machine does not answer. If the job may have been started, only this machine will run it.
            RequestFailed: the machine cannot start a process now.
        """
        job_id = settings.job_id
        job = self._jobs.get(job_id)
        if job is None:
            key = self._placements.machine_of(job_id) or self._placements.take(
                job_id, (await self._views())[0]
            )
            if key is None or not self._clients[key].is_up:
                raise MachineAway(
                    self.problem or "cannot reach any machine over SSH; wait, or check the machines"
                )
            JobRecord(key, self._placements.gpus_of(job_id)).write(self._file(job_id))
            job = self._jobs[job_id] = Job(job_id, key)
        job.settings, job.is_awaited = settings, True
        client = self._client(job)
        environ = replace(settings, workspace=client.root).to_environ()
        try:
            state = (await self._states(client.request("start", job_id=job_id, settings=environ)))[job_id]
        except RequestFailed:
            self._jobs.pop(job_id, None)
            raise
        finally:
            job.is_awaited = False
        job.settings = None
        job.pid = state.pid
        self._tasks.spawn(self._look_again([job]))  # at an end that was reported meanwhile
        logger.info("job %s runs on %s", job_id, client.machine.address)

    async def stop(self, job_id: str) -> bool:
        """Send SIGTERM to the keeper, at the latest when its machine answers again."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.stop_is_wanted = True
        self._tasks.spawn(self._look_again([job]))
        return True

    def wake(self, job_id: str) -> None:
        """Send SIGCONT to the keeper."""
        if (job := self._jobs.get(job_id)) is not None:
            self._tasks.spawn(
                self._ignoring_errors(
                    self._client(job).request("signal", job_id=job_id, signal_number=signal.SIGCONT)
                )
            )

    async def kill(self, job_id: str) -> None:
        """Kill the keeper and everything it started."""
        if (job := self._jobs.get(job_id)) is not None:
            job.stop_is_wanted = True
            await self._ignoring_errors(self._client(job).request("kill", job_id=job_id))

    def removal_command(self, job_id: str) -> str:
        """A kill command for the keeper's process over SSH. The keeper's orphan guard ends its descendants."""
        job = self._jobs.get(job_id)
        if job is None or job.pid is None:
            return "nnictl stop"
        return self._client(job).machine.command(f"kill -9 {job.pid}")

    async def adopt(self, job_id: str) -> JobPresence:
        """Find a job of an earlier manager. While its machine is away, it counts as running."""
        record = JobRecord.of(self._file(job_id))
        if record is None:
            return JobPresence.UNKNOWN
        if record.key not in self._clients:
            why = "its machine is no longer in machineList"
            self._missed_ends[job_id] = JobEnded(job_id, None, why, ExitReason.JOB_LOST, is_explained=True)
            return JobPresence.ENDED
        job = self._jobs[job_id] = Job(job_id, record.key)
        self._placements.hold(job_id, record.key, record.gpu_indices)
        try:
            state = (await self._states(self._client(job).request("watch", job_ids=[job_id])))[job_id]
        except NniManagerError:
            return JobPresence.RUNNING
        finally:
            job.is_awaited = False
        if not state.is_known:
            self._forget(job)
            return JobPresence.UNKNOWN
        if state.has_ended:
            self._forget(job)
            self._missed_ends[job_id] = end_of(job_id, state, self._client(job).machine.address)
            return JobPresence.ENDED
        job.pid = state.pid
        self._tasks.spawn(self._look_again([job]))  # at an end that was reported meanwhile
        return JobPresence.RUNNING

    def report_end(self, job_id: str, *, stop_was_asked: bool) -> None:
        """Report what the machine has recorded, or that it was restarted."""
        self.on_job_ended(self._missed_ends.pop(job_id))

    async def reap_orphans(self, job_id: str, trial_ids: Collection[str]) -> None:
        """Kill the remaining processes of the trials and of a killed keeper: without a container, nothing else ends them."""
        record = JobRecord.of(self._file(job_id))
        if record is not None and record.key in self._clients:
            work = self._clients[record.key].request("reap", job_id=job_id, trial_ids=list(trial_ids))
            await self._ignoring_errors(work)

    async def settle(self) -> None:
        """Wait until the jobs have ended on their machines."""
        deadline_s = time.monotonic() + _SETTLE_S
        while self._jobs and time.monotonic() < deadline_s:
            await asyncio.sleep(_SETTLE_POLL_S)

    async def close(self) -> None:
        """End the connections. Jobs continue."""
        await self._tasks.cancel()
        await asyncio.to_thread(self._pool.close)

    # ---- what machines report; the first two on the thread of the connections

    def _on_event(self, client: MachineClient, event: dict[str, Any]) -> None:
        state = JobState.from_json(event["job"])
        self._loop.call_soon_threadsafe(self._note, event["ended"], state)

    async def _on_up(self, client: MachineClient) -> None:
        resuming = asyncio.run_coroutine_threadsafe(self._resume(client), self._loop)
        await asyncio.wrap_future(resuming)

    def _note(self, job_id: str, state: JobState) -> None:
        if (job := self._jobs.get(job_id)) is not None:
            self._apply(job, state)

    async def _resume(self, client: MachineClient) -> None:
        """Look at all jobs of a machine that answers again."""
        self._reservations.note_freed()
        await self._look_again([job for job in self._jobs.values() if job.key == client.key])

    async def _look_again(self, jobs: list[Job]) -> None:
        """Note the present states of jobs of one machine, and send stop requests."""
        if not jobs:
            return
        request = self._client(jobs[0]).request("watch", job_ids=[job.job_id for job in jobs])
        try:
            states = await self._states(request)
        except MachineAway:
            return  # done after the next connection
        except RequestFailed as error:
            logger.warning("%s", error)
            self._tasks.spawn(self._poll_again(jobs))
            return
        for job in jobs:
            self._apply(job, states[job.job_id])

    async def _poll_again(self, jobs: list[Job]) -> None:
        await asyncio.sleep(_RETRY_S)
        await self._look_again([job for job in jobs if self._jobs.get(job.job_id) is job])

    def _apply(self, job: Job, state: JobState) -> None:
        if self._jobs.get(job.job_id) is not job or job.is_awaited:
            return
        if state.has_ended:
            self._report(job, end_of(job.job_id, state, self._client(job).machine.address))
        elif not state.is_known:
            # Its start did not arrive, and is repeated unless the job is to end. An earlier manager's is not.
            if job.stop_is_wanted or job.settings is None:
                how = "was stopped before it was created" if job.stop_is_wanted else "was never started"
                self._report(
                    job, JobEnded(job.job_id, None, f"job {job.job_id} {how}", ExitReason.JOB_LOST, True)
                )
        else:
            job.pid = state.pid
            if job.stop_is_wanted and not job.was_signalled:
                job.was_signalled = True
                self._tasks.spawn(self._terminate(job))

    async def _terminate(self, job: Job) -> None:
        try:
            await self._call(
                self._client(job).request("signal", job_id=job.job_id, signal_number=signal.SIGTERM)
            )
        except NniManagerError:
            job.was_signalled = False  # perhaps; it is sent after the next connection

    def _report(self, job: Job, end: JobEnded) -> None:
        self._forget(job)
        self.on_job_ended(end)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.job_id]
        self.release(job.job_id)

    # ---- internals

    def _client(self, job: Job) -> MachineClient:
        return self._clients[job.key]

    def _file(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.machine"

    async def _states(self, work: Coroutine[Any, Any, Frame]) -> dict[str, JobState]:
        """The states of jobs in the answer to a request."""
        answer = await self._call(work)
        return {job_id: JobState.from_json(state) for job_id, state in answer.header["jobs"].items()}

    async def _call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await self._pool.thread.call(work)

    async def _ignoring_errors(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await self._call(work)
        except NniManagerError as error:
            logger.warning("%s", error)


async def _all_tried(clients: Collection[MachineClient]) -> None:
    """Return once each machine was tried: the first that answers would get all jobs, which may run for days."""
    await asyncio.gather(*(client.was_tried() for client in clients))
