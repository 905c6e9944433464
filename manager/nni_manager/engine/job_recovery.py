"""Recovers the data of jobs and attempts that have ended from the workspace, and reports the ends of jobs to the experiment."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from nni_manager.domain import events
from nni_manager.domain.attempts import AttemptPhase
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.jobs import Job
from nni_manager.domain.lost_jobs import END_REASON_TIMEOUT_S
from nni_manager.domain.stop_escalation import StopStage
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.shared_files import STORAGE_LAG_S, AttemptReadout
from nni_manager.engine.storage_poller import SharedStoragePoller, StoragePermissionDenied
from nni_manager.store import leftover_jobs
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from trial_keeper.exit_codes import known
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# Bounds the wait for hanging storage or a full disk when a job is abandoned.
_ABANDONED_TIMEOUT_S = 5.0
_RETRY_DELAY_S = 0.2


@dataclass(eq=False)
class JobRecovery:
    """The ended jobs of one experiment, and what they leave: data in the workspace, objects on the cluster.

    Runs on the engine's loop.
    """

    runtime: Runtime
    experiment: ExperimentCore
    folder: ExperimentFolder
    service: TrainingService
    ingest: KeeperIngest
    storage_poller: SharedStoragePoller
    leftovers: dict[str, str] = field(default_factory=dict)
    """What may be left on the cluster of jobs that have ended for the experiment: a message for each, with the command that
    removes it.
    """
    _recovering: set[str] = field(default_factory=set)
    """The ended jobs whose files are being read. Only the recovery reports their end to the experiment."""
    _sources: dict[AttemptKey, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks that read the metrics before a checkpoint, by the attempt that saved it."""

    # ---- ends of jobs

    def is_recovering(self, job_id: str) -> bool:
        """True while the files of the ended job are being read."""
        return job_id in self._recovering

    def report(self, job_id: str, reason: ExitReason, message: str, **how: Any) -> None:
        """Report the end of a job to the experiment; `how`: further fields of the event."""
        self.runtime.post(events.JobTerminated(job_id, reason, message, time.time(), **how))

    def note_ended(self, ended: JobEnded) -> None:
        """Handle the end of a job that the training service reports."""
        job = self.experiment.jobs.live.get(ended.job_id)
        if self.leftovers.pop(ended.job_id, ""):
            self._store_leftovers()
        if job is not None:
            self.start(job, ended)

    def start(self, job: Job, ended: JobEnded) -> None:
        """Read the data of an ended job that its keepers have not sent from the workspace, then report its end."""
        if job.job_id not in self._recovering:
            self._recovering.add(job.job_id)
            self.runtime.spawn(self._recover(job, ended))

    async def _recover(self, job: Job, ended: JobEnded) -> None:
        was_killed = self.experiment.stops.stage(job.job_id) is StopStage.KILLED
        # From here on its trials must not move to another job, which would get the data of the files here.
        self.runtime.post(events.KeeperDisconnected(job.job_id))
        how, reason = "" if ended.is_explained else "its keeper is gone", ended.reason
        if ended.exit_code is not None:
            how = f"its keeper ended with exit code {ended.exit_code}"
            if (own := known(ended.exit_code)) is not None:
                how, reason = f"{how}: {own.meaning}; {own.remedy}", own.reason
        if was_killed:
            how = "its keeper did not stop the trial in time, so the job was killed; see the end of the keeper's log"
        untouched: set[str] = set()
        scanned: set[str] = set()
        trials_of = self.experiment.scheduler.trials_of
        shows_all_at_s = time.monotonic() + STORAGE_LAG_S
        # A trial whose end is found here frees its slot, so the job may get further trials until its own end is posted.
        while trial := next((each for each in trials_of(job) if each.trial_id not in scanned), None):
            if not scanned:
                # Trials that the job gets from now on never start.
                await self.service.reap_orphans(job.job_id, [each.trial_id for each in trials_of(job)])
                self.runtime.post(events.JobProcessesEnded(job.job_id))
            scanned.add(trial.trial_id)
            try:
                may_be_late = time.monotonic() < shows_all_at_s
                left = await self._ingest_remaining(trial, ended, may_be_late=may_be_late)
            except StoragePermissionDenied as error:
                how, reason, left = str(error), ExitReason.MOUNT, []
            else:
                if not left:
                    untouched.add(trial.trial_id)
                if (gone := await self.storage_poller.missing_attempts(trial)) is not None:
                    how = "; ".join(filter(None, (how, f"the trial's files are gone: {gone}")))
            # Wait until everything read so far is stored and the experiment has received it.
            await asyncio.shield(self.runtime.durable())
            # A task without a recorded end was killed; its data has no known size.
            lacks_data = trial.has_task_in(AttemptPhase.ENDED) and not trial.state.is_terminal
            if any(each.ended for each in left) and lacks_data:
                reason = ExitReason.MOUNT
                how = "the workspace lacks data that the trial has written; check the shared storage"
        if self.service.uses_snapshot:  # only then can other users write there
            for trial_id in job.trial_ids:
                await self.storage_poller.report_rejected(self.experiment.trials[trial_id])
        # Displays of one line show the first one.
        parts = (ended.message, how) if ended.is_explained else (how, ended.message)
        message = "\n".join(filter(None, parts))
        log.info("job %s has ended: %s", job.job_id, message.partition("\n")[0])
        self._recovering.discard(job.job_id)
        is_clean = ended.exit_code == 0
        how_reported = {"is_clean": is_clean, "pending_reason": ended.pending_reason}
        self.report(job.job_id, reason, message, untouched=frozenset(untouched), **how_reported)

    async def abandon(self, job: Job) -> None:
        """Stop waiting for the job, and ingest the data of its trials that the workspace shows now."""
        self.leftovers[job.job_id] = message = (
            f"cannot end job {job.job_id}, which may still run; remove it with `{self.service.removal_command(job.job_id)}`"
        )
        log.error("%s", message)
        self._store_leftovers()
        await self._report_lost(job, message)

    async def give_up(self, job: Job) -> None:
        """Stop waiting for the end of a job that seems to be lost. The cluster is asked to end it if it still can.

        A job that the cluster will start again is not given up, nor one whose end is known and whose files are being read.
        """
        if self.is_recovering(job.job_id):
            return
        if self.service.will_restart(job.job_id):
            self.runtime.post(events.JobRequeued(job.job_id))
            return
        why = self.service.warning(job.job_id) or (
            "its keeper was asked to end, but not by this manager, and the cluster has not reported within "
            f"{END_REASON_TIMEOUT_S:.0f} s why"
        )
        log.error("job %s is given up: %s", job.job_id, why)
        if await self.service.stop(job.job_id):
            self.leftovers[job.job_id] = (
                f"cannot confirm the end of job {job.job_id}: {why}; "
                f"remove it with `{self.service.removal_command(job.job_id)}`"
            )
            self._store_leftovers()
        await self._report_lost(job, why)

    async def _report_lost(self, job: Job, message: str) -> None:
        try:
            await asyncio.wait_for(self._ingest_visible(job), _ABANDONED_TIMEOUT_S)
        except (StoragePermissionDenied, TimeoutError, asyncio.TimeoutError) as error:
            log.warning("job %s: cannot read all files of its trials: %s", job.job_id, error)
        untouched = frozenset(job.trial_ids) - job.started_ids
        self.report(job.job_id, ExitReason.JOB_LOST, message, untouched=untouched)

    async def _ingest_visible(self, job: Job) -> None:
        unreported = JobEnded(job.job_id, None, "")
        for trial in self.experiment.scheduler.trials_of(job):
            await self._ingest_remaining(trial, unreported, may_be_late=False)
        await asyncio.shield(self.runtime.durable())

    async def is_untouched(self, trial: Trial) -> bool:
        """True if no keeper has started the trial."""
        try:
            return trial.state is TrialState.WAITING and not await self.storage_poller.scan_remaining(
                trial, may_be_late=False
            )
        except StoragePermissionDenied:
            return False

    async def _ingest_remaining(
        self, trial: Trial, ended: JobEnded, *, may_be_late: bool
    ) -> list[AttemptReadout]:
        """Ingest all remaining data of a trial's attempts, to which nothing writes any more; returns their readouts.

        Empty for a queued trial whose keepers claimed attempts but started no command, e.g. still unpacked the code.
        `may_be_late`: the storage may not show the last written data yet.

        Raises:
            StoragePermissionDenied: the manager has no read permission on the storage.
        """
        # An end that another machine has written may not be visible yet. A keeper that failed itself rarely writes an end.
        has_started = trial.state is not TrialState.WAITING or ended.exit_code == 0
        is_own = ended.exit_code is not None and known(ended.exit_code) is not None
        left = await self.storage_poller.scan_remaining(
            trial, may_be_late=may_be_late and self.service.uses_snapshot and has_started and not is_own
        )
        if _is_only_claimed(trial, left) and self.experiment.scheduler.reuses_jobs:
            if may_be_late:
                await asyncio.sleep(self.storage_poller.lag_s)
                left = await self.storage_poller.scan_remaining(trial, may_be_late=False)
            if _is_only_claimed(trial, left):
                return []
        for each in left:
            at_s = time.time() if each.ended is None else each.ended.started_at_s
            self.runtime.post(events.AttemptStarted(each.key, at_s))
            await self.storage_poller.drain(
                trial, each, lambda: self.runtime.post(events.AttemptDrained(trial.job_id))
            )
        for each in left:
            if each.ended is not None:
                self.ingest.end(each.ended)
        while sources := [task for key, task in self._sources.items() if key.trial_id == trial.trial_id]:
            await asyncio.wait(sources)
        return left

    # ---- single attempts

    async def drain_orphaned(self, key: AttemptKey) -> None:
        """Drain an orphaned attempt from the workspace: the keeper of the attempt has ended, but the job still runs."""
        trial = self.experiment.trials[key.trial_id]
        try:
            left = await self.storage_poller.scan_remaining(trial, may_be_late=False)
            found = next((each for each in left if each.key == key and each.ended), None)
            if found is not None:
                await self.storage_poller.drain(trial, found)
        except StoragePermissionDenied as error:
            log.warning("trial %s: %s", key, error)
            found = None
        if found is not None and found.ended is not None:
            self.ingest.end(found.ended)
        elif not await self._is_reported(trial, key):
            log.warning("trial %s: its keeper ended without reporting the end of the trial", key)
            self.runtime.post(events.AttemptLost(key, time.time()))

    async def _is_reported(self, trial: Trial, key: AttemptKey) -> bool:
        """True if the keeper reports the attempt after all: it had started it while its Hello was on the way.

        The storage may have shown that start before the Hello arrived. So the report of a recent start is awaited.
        """
        until_s = (trial.run.start_received_at_s or 0.0) + STORAGE_LAG_S
        while not (is_reported := self.ingest.keepers.reports(trial.job_id, key)):
            if time.monotonic() >= until_s:
                break
            await asyncio.sleep(_RETRY_DELAY_S)
        return is_reported

    def drain_source(self, key: AttemptKey) -> None:
        """Read what is missing of the metrics of an ended attempt, from whose checkpoint a later one continues.

        The later attempt is delivered only then: a trial that ends at once would otherwise lose these results.
        """
        if key in self._sources:
            return  # another continuation of the same attempt has started the reading
        self.ingest.begin_source(key)
        self._sources[key] = self.runtime.spawn(self._drain_source(key))

    async def _drain_source(self, key: AttemptKey) -> None:
        trial = self.experiment.trials[key.trial_id]
        # The manager may have closed the attempt with writes that are not stored; the stored offsets would repeat them.
        await asyncio.shield(self.runtime.durable())
        try:
            await self.storage_poller.drain_source(trial, key)
        except StoragePermissionDenied as error:
            log.warning("trial %s: %s", key, error)
        await asyncio.shield(self.runtime.durable())
        if self.ingest.is_awaited(key):
            log.warning(
                "trial %s: its results before the checkpoint are missing: they are not in the workspace", key
            )
        del self._sources[key]
        self.ingest.end_source(key)

    # ---- what is left on the cluster

    async def adopt_leftovers(self) -> None:
        """End what an earlier manager may have left on the cluster.

        Raises:
            FolderUnreadable: its note cannot be read.
        """
        self.leftovers = leftover_jobs.read(self.folder)
        for job_id in list(self.leftovers):
            if await self.service.adopt(job_id) is JobPresence.RUNNING:
                self.service.wake(job_id)
                await self.service.stop(job_id)  # its end removes the message
            else:
                del self.leftovers[job_id]
        self._store_leftovers()

    async def settle(self) -> None:
        """Wait until the cluster has deleted what is left of ended jobs, for a bounded time, and store what it may still have."""
        await self.service.settle()
        self.leftovers |= self.service.leftovers()
        self._store_leftovers()

    def _store_leftovers(self) -> None:
        """Store what may be left, for a later manager and for users, also if this manager dies."""
        try:
            leftover_jobs.write(self.folder, self.leftovers)
        except OSError as error:
            # The leftovers are named in the log and by the command that ends the experiment.
            log.warning("cannot store what is left on the cluster: %s; free some space", error)


def _is_only_claimed(trial: Trial, left: list[AttemptReadout]) -> bool:
    """True if keepers have claimed attempts of a queued trial, and the workspace shows no start of its command."""
    return trial.state is TrialState.WAITING and bool(left) and not any(each.has_started for each in left)
