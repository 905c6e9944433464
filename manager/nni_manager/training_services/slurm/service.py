"""Jobs on Slurm: submitted, polled with one squeue for all of them, stopped, and adopted by a later manager."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.errors import QuotaExceeded
from nni_manager.training_services.run_script import render_run_script
from nni_manager.training_services.slurm import render
from nni_manager.training_services.slurm.client import Slurm
from nni_manager.training_services.slurm.jobs import (
    Job,
    JobArray,
    JobFiles,
    ListedJobs,
    MissedEnd,
    queue_problem,
)
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.slurm.states import JobEndState, JobRow, end_of, end_of_forgotten_task
from nni_manager.training_services.slurm.submissions import Submissions
from trial_keeper.settings import KeeperSettings
from trial_keeper.timeouts import set_within
from trial_keeper.wire.reasons import ExitReason

logger = logging.getLogger(__name__)

# slurmctld serves all users of a cluster, and keepers report the ends of trials themselves.
POLL_S = 5.0
# Concurrent commands: three calls of sbatch do not delay squeue.
_THREADS = 4
# A slurmctld that has just restarted may know less in its first answer.
_MISSING_POLLS = 2
# Accounting is late after a job's end. A job that it calls running, but that squeue has not shown for a minute, is lost.
_RUNAWAY_POLLS = 12
# The time for the last jobs to end, after their trials; they need a second.
_SETTLE_S = 10.0
_SETTLE_POLL_S = 0.5

Answer = TypeVar("Answer")


class SlurmService(TrainingService):
    """One experiment's jobs. Slurm's commands run on worker threads."""

    uses_snapshot = True
    runs_as_manager = True
    stops_at_once = True
    reports_preemption = True

    def __init__(
        self,
        section: SlurmSection,
        folder: ExperimentFolder,
        on_job_ended: Callable[[JobEnded], None],
    ) -> None:
        super().__init__(on_job_ended)
        has_image = section.container_image is not None
        self.bundle = bundle_for(section.keeper) if has_image else None
        self.run_script = render_run_script(self.bundle, None if has_image else sys.executable)
        self._slurm, self._section = Slurm(section.ssh_login), section
        self._workspace, self._files = folder.workspace, JobFiles(folder.jobs)
        self._experiment_id = folder.workspace.root.name
        self._jobs: dict[str, Job] = {}
        self._listed: ListedJobs | None = None
        """The jobs of earlier managers, during adoption. None: not listed."""
        self._has_read_arrays = False
        self._missed_ends: dict[str, MissedEnd] = {}
        """The jobs that ended while no manager was running."""
        self._unreported: dict[str, bool] = {}
        """Those of them that `report_end` names, until their ends are reported: True for one that was to be stopped."""
        self._problem = ""
        self._wake = asyncio.Event()
        self._submissions = Submissions(self._submit)
        self._tasks = TaskSet(self._note_bug)
        self._resubmissions, self._reports = TaskSet(self._note_bug), TaskSet(self._note_bug)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="slurm")

    @property
    def problem(self) -> str:
        """Why Slurm cannot be polled, or why the job that has been pending longest has not started."""
        return self._problem or queue_problem(list(self._jobs.values()), time.monotonic())

    def pending_reason(self, job_id: str) -> str:
        """The reason in squeue's words, such as Resources, Priority or QOSMaxJobsPerUserLimit."""
        row = self._row(job_id)
        return "" if row is None else row.pending_reason

    def warning(self, job_id: str) -> str:
        """That Slurm has suspended the job, or will preempt it."""
        row = self._row(job_id)
        return "" if row is None else row.warning

    def _row(self, job_id: str) -> JobRow | None:
        job = self._jobs.get(job_id)
        return None if job is None else job.row

    async def submit(self, settings: KeeperSettings) -> None:
        """Submit the job; with others that wait for sbatch, it becomes a job array.

        Raises:
            UserError: Slurm refuses it permanently, so the job does not exist; has what sbatch printed.
            RetryableError: a later submit may succeed. The job may exist already; submitting again is harmless.
        """
        is_repeated = settings.job_id in self._jobs
        job = self._jobs.setdefault(settings.job_id, self._new(settings.job_id))
        job.settings, job.is_submitting, job.is_repeated = settings, True, is_repeated
        try:
            if not job.slurm_id:
                await self._submissions.submit(job)
        except (UserError, QuotaExceeded):  # sbatch has answered, so the job does not exist
            self._jobs.pop(job.job_id, None)
            raise
        finally:
            job.is_submitting = False
        self._watch()

    async def _submit(self, jobs: Sequence[Job]) -> None:
        if any(job.is_repeated for job in jobs):
            # An earlier call that sbatch did not answer may have created them.
            try:
                listed = await self._list()
            except UserError as error:  # of squeue: sbatch has refused nothing
                raise RetryableError(str(error)) from error
            for job in jobs:
                row = listed.row(job.job_id)
                job.slurm_id = "" if row is None else row.slurm_id
        missing = [job for job in jobs if not job.slurm_id]
        if len(missing) == 1:
            await self._submit_alone(missing[0])
        elif missing:
            await self._submit_array(missing)

    async def _submit_alone(self, job: Job) -> None:
        assert job.settings is not None
        log, started = self._files.log(job.job_id), self._files.started(job.job_id)
        job.name = render.job_name(self._experiment_id, job.job_id)
        command = render.sbatch_command(self._section, job.name, str(self._workspace.root), str(log))
        script = render.batch_script(str(self._workspace.run_sh), str(started), self._container)
        # sbatch passes its environment to the job.
        job.slurm_id = await self._call(self._slurm.submit, command, script, job.settings.to_environ())
        job.missing_polls = 0
        logger.info("job %s is job %s of Slurm", job.job_id, job.slurm_id)

    async def _submit_array(self, jobs: Sequence[Job]) -> None:
        # The name is new: an array of an earlier call may exist, and has other tasks.
        name = render.job_name(self._experiment_id, f"array-{secrets.token_hex(4)}")
        array = JobArray(name, tuple(job.job_id for job in jobs))
        environs = [job.settings.to_environ() for job in jobs if job.settings is not None]
        folder, root = self._files.folder, str(self._workspace.root)
        command = render.sbatch_command(self._section, name, root, str(folder / name), len(jobs))
        task = render.task_snippet(environs)
        script = render.batch_script(str(self._workspace.run_sh), str(folder), self._container, task)
        try:
            await self._call(self._files.write_array, array)
        except OSError as error:
            raise RetryableError(f"cannot write to {folder}: {error.strerror}; fix the disk") from error
        self._files.note(array)
        try:
            array_id = await self._call(self._slurm.submit, command, script, render.array_environ(environs))
        except (UserError, QuotaExceeded):  # sbatch has answered, so the array does not exist
            self._files.forget(array)
            raise
        for number, job in enumerate(jobs):
            job.name, job.slurm_id, job.missing_polls = name, f"{array_id}_{number}", 0
        logger.info("jobs %s are the tasks of job array %s of Slurm", ", ".join(array.job_ids), array_id)

    @property
    def _container(self) -> str:
        return render.container_snippet(self._section, str(self._workspace.root))

    async def stop(self, job_id: str) -> bool:
        """Signal the job's keeper as soon as possible, or cancel the job if it has not started."""
        job = self._jobs.get(job_id)
        if job is None:
            return job_id in self._unreported
        job.stop_is_wanted = True
        self._watch()
        self._wake.set()
        return True

    async def kill(self, job_id: str) -> None:
        """Kill the keeper, and cancel the job. Slurm alone would wait 30 s (its KillWait) for a keeper that is stuck."""
        await self.stop(job_id)
        if (job := self._jobs.get(job_id)) is not None and job.slurm_id:
            try:
                await self._call(self._slurm.kill, job.slurm_id)
            except NniManagerError as error:
                logger.warning("%s", error)

    def removal_command(self, job_id: str) -> str:
        """A scancel command; names of jobs are unique, but array tasks have the name of their array."""
        job, array = self._jobs.get(job_id), self._files.array_of(job_id)
        which = job.slurm_id if job is not None else ""
        if not which and array is not None:
            which = f"$(squeue -h --me -n {array.name} -o %F | head -1)_{array.job_ids.index(job_id)}"
        command = f"scancel {which or f'--name={self._new(job_id).name}'}"
        login = self._section.ssh_login
        return command if login is None else login.command(command)

    async def adopt(self, job_id: str) -> JobPresence:
        """Find a job of an earlier manager. While slurmctld is unreachable, jobs count as running and are polled later.

        Slurm forgets ended jobs. A forgotten job that has not started is unknown: it can be submitted again.
        """
        if not self._has_read_arrays:
            for each in await self._call(self._files.read_arrays):
                self._files.note(each)
            self._has_read_arrays = True
        if self._listed is None and not self._problem:
            try:
                self._listed = await self._list()
            except NniManagerError as error:
                self._set_problem(str(error))
        job = self._new(job_id)
        if self._listed is not None:
            row, array = self._listed.row(job_id), self._files.array_of(job_id)
            if row is None:
                started_as = await self._call(self._files.started_as, job_id)
                slurm_id = self._listed.task_id(array, job_id) if started_as is None else started_as
                if slurm_id is None:
                    return JobPresence.UNKNOWN
                self._missed_ends[job_id] = MissedEnd(slurm_id, array if started_as is None else None)
                return JobPresence.ENDED
            if row.has_ended:
                self._missed_ends[job_id] = MissedEnd(row.slurm_id, None, row)
                return JobPresence.ENDED
            job.slurm_id, job.name = row.slurm_id, row.name
        self._jobs[job_id] = job
        self._watch()
        return JobPresence.RUNNING

    def report_end(self, job_id: str, *, stop_was_asked: bool) -> None:
        """Report what squeue showed at the adoption, or what the accounting has: the manager's start does not wait for that."""
        self._unreported[job_id] = stop_was_asked
        if len(self._unreported) == 1:
            self._reports.spawn(self._report_missed_ends())

    async def _report_missed_ends(self) -> None:
        while asked := dict(self._unreported):
            missed = {job_id: self._missed_ends.pop(job_id) for job_id in asked}
            ids = [each.slurm_id for each in missed.values() if each.row is None and each.slurm_id]
            try:
                accounted = self._listed_in(await self._call(self._slurm.ended_jobs, ids))
            except RetryableError as error:
                logger.warning("%s", error)
                accounted = self._listed_in([])
            for job_id, each in missed.items():
                log = await self._call(self._files.log_tail, job_id)
                row = each.row or accounted.row(job_id)
                del self._unreported[job_id]
                self._on_ended(job_id, each.end(row, log, was_stopped=asked[job_id]))

    async def settle(self) -> None:
        """Wait until the jobs have ended in Slurm."""
        deadline_s = time.monotonic() + _SETTLE_S
        while self._jobs and time.monotonic() < deadline_s:
            self._wake.set()
            await asyncio.sleep(_SETTLE_POLL_S)

    async def close(self) -> None:
        """Stop polling. Jobs continue."""
        await self._submissions.close()
        await self._resubmissions.cancel()
        await self._reports.cancel()
        await self._tasks.cancel()
        self._slurm.close()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    # ---- polling

    def _watch(self) -> None:
        if not self._tasks:
            self._tasks.spawn(self._poll())

    async def _poll(self) -> None:
        while True:
            self._wake.clear()
            problem = ""
            try:
                if self._jobs:
                    await self._poll_once()
                self._listed = None
            except NniManagerError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot read the files of jobs on Slurm: {error}; check the shared folder"
            self._set_problem(problem)
            await set_within(self._wake, POLL_S)

    async def _poll_once(self) -> None:
        listed = await self._list()
        missing = []
        for job in [job for job in self._jobs.values() if not job.is_submitting]:
            row = listed.row(job.job_id)
            if row is None:
                missing.append(job)
            elif row.has_ended:
                await self._end(job, row)
            else:
                self._note(job, row)
        await self._resolve_missing(missing, listed)
        await self._send_stops()

    def _note(self, job: Job, row: JobRow) -> None:
        job.note(row, time.monotonic())
        if row.is_preempted and not job.is_preemption_announced:
            job.is_preemption_announced = True
            self.on_job_preempted(job.job_id)

    async def _resolve_missing(self, missing: list[Job], listed: ListedJobs) -> None:
        """Handle jobs that squeue does not show: they ended long ago, were not created, or slurmctld has lost them."""
        gone = []
        for job in missing:
            job.missing_polls += 1
            if job.missing_polls >= _MISSING_POLLS and not job.awaits_submit:
                gone.append(job)
        rows = await self._call(self._slurm.ended_jobs, [job.slurm_id for job in gone if job.slurm_id])
        accounted = self._listed_in(rows)  # ids start at 1 again after a reset
        for job in gone:
            row = accounted.row(job.job_id)
            if row is not None and row.has_ended:
                await self._end(job, row)
            elif row is None or job.missing_polls >= _RUNAWAY_POLLS:
                await self._resolve_forgotten(job, listed)

    async def _resolve_forgotten(self, job: Job, listed: ListedJobs) -> None:
        has_started = self._files.started(job.job_id).exists()
        array = self._files.array_of(job.job_id) if job.is_array_task else None
        if array is not None and not has_started and listed.task_id(array, job.job_id) is not None:
            stopped = job.stop_is_wanted
            self._report(job, end_of_forgotten_task(job.slurm_id, array.name, was_stopped=stopped))
            return
        if has_started or job.stop_is_wanted or job.settings is None:
            was_created = job.slurm_id or job.settings is None
            what = "is not known to Slurm any more" if was_created else "was stopped before it was created"
            # Of a job that was adopted during an outage, no answer has confirmed that an earlier manager submitted it.
            is_unknown = job.settings is None and not (has_started or job.stop_is_wanted or job.slurm_id)
            end = JobEndState(None, f"job {job.name} {what}", ExitReason.JOB_LOST)
            self._report(job, end, is_unknown=is_unknown)
            return
        # A slurmctld that is killed forgets what it accepted in the last seconds.
        logger.warning("slurmctld has lost job %s before it started; submitting it again", job.slurm_id)
        job.is_submitting = True
        self._resubmissions.spawn(self._resubmit(job))

    async def _resubmit(self, job: Job) -> None:
        lost_id, job.slurm_id, job.is_repeated = job.slurm_id, "", False
        try:
            await self._submissions.submit(job)
        except UserError as error:
            self._report(job, JobEndState(None, str(error), ExitReason.COULD_NOT_START))
        except RetryableError as error:
            logger.warning("cannot submit job %s again: %s; retrying", job.job_id, error)
            job.slurm_id = lost_id  # so that the next poll finds it lost again
        finally:
            job.is_submitting = False

    async def _send_stops(self) -> None:
        stopping = [job for job in self._jobs.values() if job.stop_is_wanted and job.row is not None]
        pending = [job for job in stopping if job.row is not None and job.row.is_pending]
        running = [job for job in stopping if job not in pending and not job.was_signalled]
        try:
            # First, so that none of them starts in the place of another. One that has started is signalled after the next poll.
            await self._cancel_pending(pending)
        finally:
            signalled = await self._call(self._slurm.terminate, [job.slurm_id for job in running])
            for job in running:
                job.was_signalled = job.slurm_id in signalled

    async def _cancel_pending(self, pending: Sequence[Job]) -> None:
        if alone := [job.slurm_id for job in pending if not job.is_array_task]:
            await self._call(partial(self._slurm.cancel, alone, if_pending=True))
        if tasks := [job.slurm_id for job in pending if job.is_array_task]:
            await self._call(self._slurm.cancel_pending_tasks, tasks)

    async def _end(self, job: Job, row: JobRow) -> None:
        log = await asyncio.to_thread(self._files.log_tail, job.job_id)
        self._report(job, end_of(row, log, was_stopped=job.stop_is_wanted))

    def _report(self, job: Job, end: JobEndState, *, is_unknown: bool = False) -> None:
        why = self.pending_reason(job.job_id)
        if self._jobs.pop(job.job_id, None) is not None:
            self._on_ended(job.job_id, end, why, is_unknown)

    def _on_ended(
        self, job_id: str, end: JobEndState, why_pending: str = "", is_unknown: bool = False
    ) -> None:
        how = (end.exit_code, end.message, end.reason, end.is_explained)
        self.on_job_ended(JobEnded(job_id, *how, why_pending, is_unknown))

    async def _list(self) -> ListedJobs:
        """This experiment's jobs in Slurm."""
        return self._listed_in(await self._call(self._slurm.jobs, render.job_prefix(self._experiment_id)))

    def _listed_in(self, rows: Sequence[JobRow]) -> ListedJobs:
        return ListedJobs(rows, render.job_prefix(self._experiment_id), self._files.arrays)

    # ---- internals

    def _new(self, job_id: str) -> Job:
        return Job(job_id, render.job_name(self._experiment_id, job_id))

    def _set_problem(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("%s", problem)
        elif self._problem and not problem:
            logger.info("Slurm answers again")
        self._problem = problem

    async def _call(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))

    def _note_bug(self, error: BaseException) -> None:
        self._problem = (
            "cannot poll jobs on Slurm because of a bug; stop and resume the experiment, and report the bug"
        )
        logger.critical("%s", self._problem, exc_info=error)
