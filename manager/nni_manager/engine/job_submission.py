"""Submits the jobs of an experiment to its training service, adopts those of an earlier manager, and ends single jobs.

The domain makes all decisions about trials; their outcomes are posted to the domain as events.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain import events
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.stop_escalation import StopStage
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_lifecycle import STOPPED_BEFORE_START
from nni_manager.engine.job_recovery import JobRecovery
from nni_manager.engine.keeper_admission import KeeperAdmission
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.submission_gate import Slot, SubmissionGate
from nni_manager.engine.workspace_writer import WorkspaceWriter
from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.support.backoff import delays_s
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.errors import Unauthenticated
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# A machine out of memory or a lost mount needs time to recover; a delay of half a minute costs little.
FIRST_RESUBMIT_S = 0.5
MAX_RESUBMIT_S = 30.0


@dataclass(eq=False)
class JobSubmission:
    """The jobs of one experiment that do not exist yet, or that an earlier manager submitted. Runs on the engine's loop."""

    runtime: Runtime
    experiment: ExperimentCore
    config: ExperimentSpec
    service: TrainingService
    admission: KeeperAdmission
    writer: WorkspaceWriter
    recovery: JobRecovery
    problem: str = ""
    """Why jobs cannot be submitted, or trials not dispatched, at present; empty: no problem."""
    _gate: SubmissionGate = field(default_factory=SubmissionGate)
    _why_not_accepted: dict[str, str] = field(default_factory=dict)
    """Why the cluster has not accepted a job, for each job that is being resubmitted."""
    _submitting: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """The cancellable submissions of jobs that do not exist yet."""
    _cancelled: set[str] = field(default_factory=set)
    """The jobs whose submissions `stop` has cancelled."""
    _to_adopt: set[str] = field(default_factory=set)
    """Jobs of an earlier manager that the training service does not know yet."""

    def start(self, job: Job) -> None:
        """Submit the job to the cluster, with retries as long as the errors are transient."""
        self._submitting[job.job_id] = self.runtime.spawn(self._submit(job))

    def is_pending(self, job_id: str) -> bool:
        """True while the job does not exist and its submission can be cancelled."""
        return job_id in self._submitting

    async def stop(self, job_id: str) -> None:
        """Stop a job, or cancel its submission if it does not exist yet. `adopt` stops a job that is not adopted yet."""
        if job_id in self._to_adopt:
            return
        submission = self._submitting.pop(job_id, None)
        if submission is not None:
            self._cancelled.add(job_id)
            submission.cancel()
        elif not await self.service.stop(job_id) and not self.recovery.is_recovering(job_id):
            self.recovery.report(job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_START)

    def escalate(self, job: Job, stage: StopStage) -> None:
        """Take the next step against a job that missed a stop deadline."""
        job_id = job.job_id
        match stage:
            case StopStage.ENDING:
                log.warning(
                    "job %s has missed a stop deadline; ending it through the training service", job_id
                )
                self.service.wake(job_id)
                self.runtime.spawn(self.stop(job_id))
            case StopStage.KILLED:
                log.warning("job %s still runs after its stop deadline; killing it", job_id)
                self.runtime.spawn(self.service.kill(job_id))
            case StopStage.ABANDONED:
                self.runtime.spawn(self.recovery.abandon(job))

    def expect(self, jobs: Iterable[Job]) -> None:
        """Note jobs of an earlier manager, each of which `adopt` will adopt."""
        self._to_adopt.update(job.job_id for job in jobs)

    async def adopt(self, job: Job) -> None:
        """Adopt a job of an earlier manager according to its present state."""
        presence = await self.service.adopt(job.job_id)
        log.info("job %s is %s", job.job_id, presence.value)
        if presence is JobPresence.RUNNING:
            self._to_adopt.discard(job.job_id)
            is_to_end = self._is_to_end(job)
            self.experiment.transports.track(
                job.job_id, time.monotonic(), expects_keeper=not (is_to_end or job.ever_connected)
            )
            if is_to_end:
                await self.stop(job.job_id)
            return
        is_unknown = presence is JobPresence.UNKNOWN
        message = "its job no longer exists in the training service"
        if not await self.resubmit(job, is_unknown=is_unknown):
            if is_unknown:
                self.recovery.start(job, JobEnded(job.job_id, None, message))
            else:
                self.service.report_end(job.job_id, stop_was_asked=self._is_to_end(job))

    async def resubmit(self, job: Job, *, is_unknown: bool) -> bool:
        """Replace a job of an earlier manager that has ended, and that costs no trial. False: it may have run one.

        `is_unknown`: the job may never have existed, because the earlier manager ended before the submission.
        """
        self._to_adopt.add(job.job_id)
        trials = [self.experiment.trials[trial_id] for trial_id in job.trial_ids]
        is_untouched = all([await self.recovery.is_untouched(each) for each in trials])
        self._to_adopt.discard(job.job_id)
        if not is_untouched:
            return False
        if self.experiment.scheduler.reuses_jobs:
            how = "it ended while no manager was running"
            self.recovery.report(job.job_id, ExitReason.JOB_LOST, how, is_clean=True, was_supervised=False)
            return True
        if is_unknown and job.trial_id is not None:
            self.experiment.transports.forget(job.job_id)
            self.start(job)
            return True
        return False

    def pending_reason(self, job_id: str) -> str:
        """Why the cluster has not accepted or started the job; empty if unknown."""
        waits_for_others = self._gate.reason if job_id in self._submitting else ""
        return self._why_not_accepted.get(job_id) or waits_for_others or self.service.pending_reason(job_id)

    def note_problem(self, problem: str) -> None:
        """Show a problem until a submission or a dispatch succeeds."""
        if not self.problem:
            log.warning("%s", problem)
        self.problem = problem

    # ---- internals

    async def _submit(self, job: Job) -> None:
        retry_delays_s = delays_s(FIRST_RESUBMIT_S, MAX_RESUBMIT_S)
        try:
            while self._is_wanted(job):
                try:
                    await self._gate.submit(partial(self._submit_once, job), partial(self._note_refusal, job))
                    break
                except (RetryableError, OSError) as error:
                    # Transient: the next job would fail in the same way, so the trial is not failed.
                    self._note_refusal(job, error)
                await asyncio.sleep(next(retry_delays_s))
        except NniManagerError as error:
            is_refused = isinstance(error, UserError)
            log.warning("cannot submit job %s: %s; not retrying", job.job_id, error)
            self.recovery.report(job.job_id, ExitReason.COULD_NOT_START, str(error), is_refused=is_refused)
        except asyncio.CancelledError:
            may_exist = job.job_id not in self._submitting and job.job_id not in self._cancelled
            if may_exist or self._is_wanted(job):
                raise  # the manager ends; the next one adopts the job
            self.recovery.report(job.job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_START)
            return
        finally:
            self._submitting.pop(job.job_id, None)
            self._cancelled.discard(job.job_id)
            if self._why_not_accepted.pop(job.job_id, "") and not self._why_not_accepted:
                self.problem = ""
        # A keeper may connect before the training service answers; its trial runs then and must not be stopped.
        if job.job_id in self.experiment.jobs.live and self._is_to_end(job):
            await self.stop(job.job_id)

    def _is_wanted(self, job: Job) -> bool:
        """True if a job that does not exist yet should be created. Lost and ended jobs are never created again."""
        trial = self._trial_of(job)
        is_live = job.job_id in self.experiment.jobs.live and job.state is not JobState.DRAINING
        is_live = is_live and not self.recovery.is_recovering(job.job_id)
        return is_live and (trial is None or trial.state is TrialState.WAITING)

    def _is_to_end(self, job: Job) -> bool:
        """True if the job was asked to end before it existed, or by an earlier manager."""
        trial = self._trial_of(job)
        return job.state is JobState.DRAINING or (trial is not None and trial.state is TrialState.STOPPING)

    def _trial_of(self, job: Job) -> Trial | None:
        return None if job.trial_id is None else self.experiment.trials[job.trial_id]

    def _note_refusal(self, job: Job, error: Exception) -> None:
        self._why_not_accepted[job.job_id] = str(error)
        if isinstance(error, Unauthenticated):
            self.note_problem(f"submission is suspended until the login is valid: {error}")
        else:
            self.note_problem(f"cannot submit job {job.job_id}: {error}; retrying")

    async def _submit_once(self, job: Job, slot: Slot) -> bool:
        """True if the job exists then, False if it is not wanted any more."""
        if not self._is_wanted(job):
            return False
        if (saved := self.runtime.last_save) is not None:
            await asyncio.shield(saved)  # a job must not exist before it is stored
        is_submitted = False
        await self.service.reserve(job.job_id, job.trial_id)
        try:
            trial = self._trial_of(job)
            if trial is not None:
                await self.writer.write_trial(job, trial)
            async with slot:
                if self._is_wanted(job):
                    # From here on the job may exist, so only the training service can stop it.
                    self._submitting.pop(job.job_id, None)
                    self.experiment.transports.track(job.job_id, time.monotonic())
                    await self.service.submit(self._settings(job))
                    is_submitted = True
                    self.runtime.post(events.JobAccepted(job.job_id))
                    self.problem = ""
        finally:
            if not is_submitted:
                self.service.release(job.job_id)
        return is_submitted

    def _settings(self, job: Job) -> KeeperSettings:
        return KeeperSettings(
            experiment_id=self.experiment.experiment_id,
            job_id=job.job_id,
            workspace=str(self.writer.folder.workspace.root),
            token=self.admission.token(job.job_id),
            trial_id=job.trial_id,
            collect_logs=self.config.log_collection == "http",
            version_check=bool(self.config.version_check),
            idle_timeout_s=self.config.reuse_idle_timeout,
            max_trials=self.config.max_trials_per_job,
            warm_imports=tuple(self.config.warm_imports),
        )
