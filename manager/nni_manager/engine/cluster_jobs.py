"""Performs the effects on jobs: submit, dispatch, revoke, stop, adopt and recover.

The domain makes all decisions about trials; their outcomes are posted to the domain as events.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from nni_manager.backoff import delays_s
from nni_manager.domain import events
from nni_manager.domain.attempts import UNDELIVERED
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.stop_escalation import StopStage
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_lifecycle import STOPPED_BEFORE_START
from nni_manager.domain.trial_seed import trial_seed
from nni_manager.engine.connected_keepers import ConnectedKeepers
from nni_manager.engine.keeper_admission import KeeperAdmission
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.shared_files import STORAGE_LAG_S, AttemptReadout
from nni_manager.engine.storage_poller import SharedStoragePoller, StoragePermissionDenied
from nni_manager.engine.submission_gate import SubmissionGate
from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.store import leftover_jobs
from nni_manager.training_services.base import JobEnded, JobPresence
from nni_manager.training_services.errors import Unauthenticated
from trial_keeper.exit_codes import known
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.checkpoints import Checkpoint
from trial_keeper.wire.messages import AttemptKey, RevokeTrial
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# A machine out of memory or a lost mount needs time to recover; a delay of half a minute costs little.
_FIRST_RESUBMIT_S = 0.5
_MAX_RESUBMIT_S = 30.0
# A keeper receives a message within milliseconds, and on a busy machine within this time.
_KEEPER_HEAD_START_S = 0.5
# Bounds the wait for hanging storage or a full disk when a job is abandoned.
_ABANDONED_TIMEOUT_S = 5.0


class ClusterJobs:
    """The jobs of one experiment on its training service. Runs on the engine's loop."""

    def __init__(
        self,
        runtime: Runtime,
        admission: KeeperAdmission,
        keepers: ConnectedKeepers,
        ingest: KeeperIngest,
        storage_poller: SharedStoragePoller,
    ) -> None:
        self._runtime = runtime
        self._experiment = runtime.experiment
        self._service = runtime.service
        self._service.on_job_preempted = self.note_preempted
        self._post = runtime.post
        self._spawn = runtime.spawn
        self._admission = admission
        self._keepers = keepers
        self._ingest = ingest
        self._storage_poller = storage_poller
        self.problem = ""
        """Why jobs cannot be submitted at present; empty: no problem."""
        self.leftovers: dict[str, str] = {}
        """What may be left on the cluster of jobs that have ended for the experiment: a message for each, with the command that
        removes it.
        """
        self._recovering: set[str] = set()
        """The ended jobs whose files are being read. Only the recovery reports their end to the experiment."""
        self._killed: set[str] = set()
        """The jobs that were killed without grace."""
        self.code_snapshot: str | None = None
        """The file name of the packed training code; None if jobs do not need it."""
        self._gate = SubmissionGate()
        self._why_not_accepted: dict[str, str] = {}
        """Why the cluster has not accepted a job, for each job that is being resubmitted."""
        self._submitting: dict[str, asyncio.Task[None]] = {}
        """The cancellable submissions of jobs that do not exist yet."""
        self._dispatches: dict[str, asyncio.Task[None]] = {}
        """The last dispatch or revoke of each job. They are sent in this order, in which the keepers run the trials."""
        self._inflight_commands: set[tuple[str, str, str | None]] = set()
        """The dispatches in progress: job id, trial id, and the addressed task, or None for all tasks."""
        self._pending_revokes: dict[tuple[str, str], object] = {}
        """The newest pending revoke of each job and trial; it is sent after all earlier dispatches."""

    def start_submission(self, job: Job) -> None:
        """Submit the job to the cluster, with retries as long as the errors are transient."""
        self._submitting[job.job_id] = self._spawn(self._submit(job))

    async def _submit(self, job: Job) -> None:
        retry_delays_s = delays_s(_FIRST_RESUBMIT_S, _MAX_RESUBMIT_S)
        try:
            while self._is_wanted(job):
                async with self._gate.admitted():
                    try:
                        if self._is_wanted(job):
                            await self._submit_once(job)
                        break
                    except Unauthenticated as error:
                        self._why_not_accepted[job.job_id] = str(error)
                        self._note_problem(f"submission is suspended until the login is valid: {error}")
                        await self._gate.suspend()
                        continue
                    except (RetryableError, OSError) as error:
                        # Transient: the next job would fail in the same way, so the trial is not failed.
                        self._why_not_accepted[job.job_id] = str(error)
                        self._note_problem(f"cannot submit job {job.job_id}: {error}; retrying")
                await asyncio.sleep(next(retry_delays_s))
        except NniManagerError as error:
            is_refused = isinstance(error, UserError)
            log.warning("cannot submit job %s: %s; not retrying", job.job_id, error)
            self._report_terminated(job.job_id, ExitReason.COULD_NOT_START, str(error), is_refused=is_refused)
        except asyncio.CancelledError:
            if self._is_wanted(job):
                raise
            self._report_terminated(job.job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_START)
            return
        finally:
            self._submitting.pop(job.job_id, None)
            if self._why_not_accepted.pop(job.job_id, "") and not self._why_not_accepted:
                self.problem = ""
        # A keeper may connect before the training service answers; its trial runs then and must not be stopped.
        if job.job_id in self._experiment.jobs.live and self._is_to_end(job):
            await self.stop(job.job_id)

    def pending_reason(self, job_id: str) -> str:
        """Why the cluster has not accepted or started the job; empty if unknown."""
        return self._why_not_accepted.get(job_id) or self._service.pending_reason(job_id)

    def _note_problem(self, problem: str) -> None:
        if not self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _is_wanted(self, job: Job) -> bool:
        """True if a job that does not exist yet should be created. Lost jobs are never created again."""
        trial = self._trial_of(job)
        is_live = job.job_id in self._experiment.jobs.live and job.state is not JobState.DRAINING
        return is_live and (trial is None or trial.state is TrialState.WAITING)

    def _is_to_end(self, job: Job) -> bool:
        """True if the job was asked to end before it existed, or by an earlier manager."""
        trial = self._trial_of(job)
        return job.state is JobState.DRAINING or (trial is not None and trial.state is TrialState.STOPPING)

    def _trial_of(self, job: Job) -> Trial | None:
        return None if job.trial_id is None else self._experiment.trials[job.trial_id]

    def _trials_of(self, job: Job) -> list[Trial]:
        return [self._experiment.trials[trial_id] for trial_id in job.trial_ids]

    async def _submit_once(self, job: Job) -> None:
        if (saved := self._runtime.last_save) is not None:
            await asyncio.shield(saved)  # a job must not exist before it is stored
        is_submitted = False
        await self._service.place(job.job_id)
        try:
            trial = self._trial_of(job)
            if trial is not None:
                await self._write_trial(job, trial)
            if self._is_wanted(job):
                # From here on the job may exist, so only the training service can stop it.
                self._submitting.pop(job.job_id, None)
                self._experiment.transports.track(job.job_id, time.monotonic())
                await self._service.submit(self._settings(job))
                is_submitted = True
                self._gate.resume()
                self._post(events.JobAccepted(job.job_id))
                self.problem = ""
        finally:
            if not is_submitted:
                self._service.release(job.job_id)

    async def _write_trial(self, job: Job, trial: Trial) -> None:
        runtime, call = self._runtime, self._storage_poller.threads.call
        checkpoints: list[Checkpoint] = []
        if trial.continues or trial.retries or trial.registered.registered:
            checkpoints = await call(
                runtime.files.find_checkpoints, trial, self._storage_poller.signer_of(trial)
            )
        objectives = runtime.config.all_objectives
        document = (
            trial,
            runtime.config.trial_command,
            self._service.placement(job.job_id),
            self.code_snapshot,
            trial_seed(runtime.experiment.experiment_id, runtime.config.tuner.seed, trial.sequence_id),
            checkpoints,
            () if objectives.is_plain else objectives.metrics,
        )
        try:
            await call(runtime.files.write_trial, *document)
        except FileNotFoundError:  # the folder of trials may have been removed
            await call(runtime.open_workspace)
            await call(runtime.files.write_trial, *document)

    def dispatch(self, effect: events.DispatchTrial) -> None:
        """Dispatch a trial to the keepers of a job, after all earlier dispatches."""
        trial_id, job_id = effect.trial.trial_id, effect.job.job_id
        command = (job_id, trial_id, effect.task)
        if self._inflight_commands & {command, (job_id, trial_id, None)}:
            return  # the dispatch in progress serves this request as well
        self._inflight_commands.add(command)
        dispatched = self._in_order(job_id, partial(self._dispatch, effect, self._runtime.last_save))
        dispatched.add_done_callback(lambda _: self._inflight_commands.discard(command))

    def _in_order(
        self, job_id: str, command: Callable[[], Coroutine[None, None, None]]
    ) -> "asyncio.Task[None]":
        """Run a command to the keepers of a job after all earlier ones."""
        earlier = self._dispatches.get(job_id)

        async def run() -> None:
            if earlier is not None:
                await asyncio.wait({earlier})
            await command()

        task = self._dispatches[job_id] = self._spawn(run())
        return task

    async def _dispatch(self, effect: events.DispatchTrial, saved: "asyncio.Future[None] | None") -> None:
        job, trial, retry_delays_s = effect.job, effect.trial, delays_s(_FIRST_RESUBMIT_S, _MAX_RESUBMIT_S)
        while _runs_in(job, trial):
            try:
                await self._write_trial(job, trial)
                break
            except (OSError, RetryableError) as error:
                self._note_problem(f"cannot dispatch trial {trial.trial_id} to its job: {error}; retrying")
            await asyncio.sleep(next(retry_delays_s))
        if saved is not None:
            await asyncio.shield(saved)  # a trial must not run before it is stored
        self.problem = ""
        if _runs_in(job, trial):
            self._keepers.run(job.job_id, trial.trial_id, effect.task)
            if trial.stop_reason is not None:
                self._keepers.stop(trial, trial.stop_reason)

    def begin_revoke(self, effect: events.RevokePrefetched) -> None:
        """Revoke a trial from the keeper of a job, after its dispatch and before any later message."""
        # Replaces an older revoke, whose stream has ended: the trial may have been dispatched again since.
        newest = self._pending_revokes[effect.job.job_id, effect.trial.trial_id] = object()
        self._in_order(effect.job.job_id, partial(self._revoke, effect.job, effect.trial, newest))

    async def _revoke(self, job: Job, trial: Trial, newest: object) -> None:
        if self._pending_revokes.get((job.job_id, trial.trial_id)) is not newest:
            return
        del self._pending_revokes[job.job_id, trial.trial_id]
        if trial.trial_id in job.revoking_ids:
            log.info("trial %s: revoking it from job %s", trial.trial_id, job.job_id)
            self._keepers.send_all(job.job_id, RevokeTrial(trial.trial_id))

    def _settings(self, job: Job) -> KeeperSettings:
        return KeeperSettings(
            experiment_id=self._experiment.experiment_id,
            job_id=job.job_id,
            workspace=str(self._runtime.files.workspace.root),
            token=self._admission.token(job.job_id),
            trial_id=job.trial_id,
            collect_logs=self._runtime.config.log_collection == "http",
            version_check=bool(self._runtime.config.version_check),
            idle_timeout_s=self._runtime.config.reuse_idle_timeout,
            max_trials=self._runtime.config.max_trials_per_job,
            warm_imports=tuple(self._runtime.config.warm_imports),
        )

    def cancel(self, trial: Trial, reason: ExitReason, *, ends_job: bool) -> None:
        """Stop a trial that has a job. The job ends as well if `ends_job`, or if none of its keepers is connected."""
        job_id = trial.job_id
        is_connected = self._keepers.stop(trial, reason)
        job_must_end = ends_job or not is_connected
        self._service.wake(job_id)
        if job_id in self._submitting or self._experiment.transports.is_all_grpc(job_id):
            if job_must_end:
                has_head_start = is_connected and self._service.stops_at_once
                self._spawn(self._stop_after_keeper(job_id) if has_head_start else self.stop(job_id))
        else:
            self._spawn(self._stop_by_mount(trial, reason, job_must_end=job_must_end))

    async def _stop_after_keeper(self, job_id: str) -> None:
        """Stop a job whose keeper was just asked to stop its trial, unless the job ends by itself.

        A signal that arrives before the message would hide the reason of the stop from the training code.
        """
        await asyncio.sleep(_KEEPER_HEAD_START_S)
        if job_id in self._experiment.jobs.live:
            await self.stop(job_id)

    async def _stop_by_mount(self, trial: Trial, reason: ExitReason, *, job_must_end: bool) -> None:
        """Write the stop request to shared storage, then stop the job.

        In this order, an unconnected keeper can use the remaining grace period of the cluster.
        """
        await self._storage_poller.write_stop_request(trial.trial_id, reason)
        if job_must_end:
            await self.stop(trial.job_id)

    async def stop(self, job_id: str) -> None:
        """Stop a job, or cancel its submission if it does not exist yet."""
        submission = self._submitting.pop(job_id, None)
        if submission is not None:
            submission.cancel()
        elif not await self._service.stop(job_id) and job_id not in self._recovering:
            self._report_terminated(job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_START)

    def escalate(self, job: Job, stage: StopStage) -> None:
        """Take the next step against a job that missed a stop deadline."""
        job_id = job.job_id
        match stage:
            case StopStage.ENDING:
                log.warning(
                    "job %s has missed a stop deadline; ending it through the training service", job_id
                )
                self._service.wake(job_id)
                self._spawn(self.stop(job_id))
            case StopStage.KILLED:
                log.warning("job %s still runs after its stop deadline; killing it", job_id)
                self._killed.add(job_id)
                self._spawn(self._service.kill(job_id))
            case StopStage.ABANDONED:
                self._spawn(self._abandon(job))

    async def _abandon(self, job: Job) -> None:
        """Stop waiting for the job, and ingest the data of its trials that the workspace shows now."""
        self.leftovers[job.job_id] = message = (
            f"cannot end job {job.job_id}, which may still run; remove it with `{self._service.removal_command(job.job_id)}`"
        )
        log.error("%s", message)
        try:
            await asyncio.wait_for(self._ingest_visible(job), _ABANDONED_TIMEOUT_S)
        except (StoragePermissionDenied, TimeoutError, asyncio.TimeoutError) as error:
            log.warning("job %s: cannot read all files of its trials: %s", job.job_id, error)
        untouched = frozenset(job.trial_ids) - job.started_ids
        self._report_terminated(job.job_id, ExitReason.JOB_LOST, message, untouched=untouched)

    async def _ingest_visible(self, job: Job) -> None:
        unreported = JobEnded(job.job_id, None, "")
        for trial in self._experiment.scheduler.trials_of(job):
            await self._ingest_remaining(trial, unreported, may_be_late=False)
        await asyncio.shield(self._runtime.durable())

    def _report_terminated(self, job_id: str, reason: ExitReason, message: str, **how: Any) -> None:
        """Report the end of a job to the experiment; `how`: further fields of the event."""
        self._post(events.JobTerminated(job_id, reason, message, time.time(), **how))

    def note_ended(self, ended: JobEnded) -> None:
        """Handle the end of a job that the training service reports."""
        job = self._experiment.jobs.live.get(ended.job_id)
        self.leftovers.pop(ended.job_id, None)
        self._dispatches.pop(ended.job_id, None)
        if job is not None:
            self._start_recovery(job, ended)

    def note_preempted(self, job_id: str) -> None:
        """Pass on to the keepers of a job that the cluster preempts it: they stop its trial for that reason.

        The cluster's signal may reach them first. A keeper that is not connected stops the trial as one whose job is lost.
        """
        job = self._experiment.jobs.live.get(job_id)
        for trial in self._experiment.scheduler.trials_of(job) if job is not None else ():
            if trial.state is TrialState.RUNNING:
                self._keepers.stop(trial, ExitReason.PREEMPTED)

    async def adopt(self, job: Job) -> None:
        """Adopt a job of an earlier manager according to its present state."""
        presence = await self._service.adopt(job.job_id)
        trial = self._trial_of(job)
        is_untouched = all([await self._is_untouched(each) for each in self._trials_of(job)])
        log.info("job %s is %s", job.job_id, presence.value)
        if presence is JobPresence.RUNNING:
            is_to_end = self._is_to_end(job)
            self._experiment.transports.track(
                job.job_id, time.monotonic(), expects_keeper=not (is_to_end or job.ever_connected)
            )
            if is_to_end:
                await self.stop(job.job_id)
        elif self._experiment.scheduler.reuses_jobs and is_untouched:
            # Or the job never existed: the earlier manager ended before the submission.
            how = "it ended while no manager was running"
            self._report_terminated(job.job_id, ExitReason.JOB_LOST, how, is_clean=True, was_supervised=False)
        elif presence is JobPresence.UNKNOWN and trial is not None and is_untouched:
            self.start_submission(job)
        else:
            message = "its job no longer exists in the training service"
            if presence is not JobPresence.UNKNOWN:
                message = self._service.termination_message(job.job_id)
            self._start_recovery(job, JobEnded(job.job_id, None, message))

    async def adopt_leftovers(self) -> None:
        """End what an earlier manager may have left on the cluster.

        Raises:
            FolderUnreadable: its note cannot be read.
        """
        self.leftovers = leftover_jobs.read(self._runtime.folder)
        for job_id in list(self.leftovers):
            if await self._service.adopt(job_id) is JobPresence.RUNNING:
                self._service.wake(job_id)
                await self._service.stop(job_id)  # its end removes the message
            else:
                del self.leftovers[job_id]

    async def settle(self) -> None:
        """Wait until the cluster has deleted what is left of ended jobs, for a bounded time, and store what it may still have."""
        await self._service.settle()
        self.leftovers |= self._service.leftovers()
        try:
            leftover_jobs.write(self._runtime.folder, self.leftovers)
        except OSError as error:
            # The leftovers are named in the log and by the command that ends the experiment.
            log.warning("cannot store what is left on the cluster: %s; free some space", error)

    async def _is_untouched(self, trial: Trial) -> bool:
        """True if no keeper has started the trial."""
        try:
            return trial.state is TrialState.WAITING and not await self._storage_poller.scan_remaining(
                trial, may_be_late=False
            )
        except StoragePermissionDenied:
            return False

    def _start_recovery(self, job: Job, ended: JobEnded) -> None:
        if job.job_id not in self._recovering:
            self._recovering.add(job.job_id)
            self._spawn(self._recover(job, ended))

    async def _recover(self, job: Job, ended: JobEnded) -> None:
        """Read the data of an ended job that its keepers have not sent from the workspace, then report its end."""
        # From here on its trials must not move to another job, which would get the data of the files here.
        self._post(events.KeeperDisconnected(job.job_id))
        how, reason = "its keeper is gone", ended.reason
        if ended.exit_code is not None:
            how = f"its keeper ended with exit code {ended.exit_code}"
            if (own := known(ended.exit_code)) is not None:
                how, reason = f"{how}: {own.meaning}; {own.remedy}", own.reason
        if job.job_id in self._killed:
            self._killed.discard(job.job_id)
            how = "its keeper did not stop the trial in time, so the job was killed; see the end of the keeper's log"
        untouched: set[str] = set()
        scanned: set[str] = set()
        trials_of = self._experiment.scheduler.trials_of
        shows_all_at_s = time.monotonic() + STORAGE_LAG_S
        # A trial whose end is found here frees its slot, so the job may get further trials until its own end is posted.
        while trial := next((each for each in trials_of(job) if each.trial_id not in scanned), None):
            if not scanned:
                # Trials that the job gets from now on never start.
                await self._service.reap_orphans(job.job_id, [each.trial_id for each in trials_of(job)])
                self._post(events.JobProcessesEnded(job.job_id))
            scanned.add(trial.trial_id)
            try:
                may_be_late = time.monotonic() < shows_all_at_s
                left = await self._ingest_remaining(trial, ended, may_be_late=may_be_late)
            except StoragePermissionDenied as error:
                how, reason, left = str(error), ExitReason.MOUNT, []
            else:
                if not left:
                    untouched.add(trial.trial_id)
                files, trial_id = self._runtime.files, trial.trial_id
                has_attempts = bool(trial.registered.registered)
                call = self._storage_poller.threads.call
                if has_attempts and not await call(files.has_folder_of_attempts, trial_id):
                    how = f"{how}; the trial's files are gone: {files.workspace.trial(trial_id).attempts}"
            # Wait until everything read so far is stored and the experiment has received it.
            await asyncio.shield(self._runtime.durable())
            is_complete = trial.state.is_terminal or (
                trial.awaits_job_end and not trial.has_task_in(*UNDELIVERED)
            )
            if any(each.ended for each in left) and not is_complete:
                reason = ExitReason.MOUNT
                how = "the workspace lacks data that the trial has written; check the shared storage"
        if self._service.uses_snapshot:  # only then can other users write there
            for trial in self._trials_of(job):
                await self._storage_poller.report_rejected(trial)
        log.info("job %s has ended: %s", job.job_id, how)
        self._recovering.discard(job.job_id)
        message = "\n".join(part for part in (how, ended.message) if part)
        is_clean = ended.exit_code == 0
        self._report_terminated(
            job.job_id, reason, message, is_clean=is_clean, untouched=frozenset(untouched)
        )

    async def _ingest_remaining(
        self, trial: Trial, ended: JobEnded, *, may_be_late: bool
    ) -> list[AttemptReadout]:
        """Ingest all remaining data of a trial's attempts, to which nothing writes any more; returns their readouts.

        `may_be_late`: the storage may not show the last written data yet.

        Raises:
            StoragePermissionDenied: the manager has no read permission on the storage.
        """
        # An end that another machine has written may not be visible yet. A keeper that failed itself rarely writes an end.
        has_started = trial.state is not TrialState.WAITING or ended.exit_code == 0
        is_own = ended.exit_code is not None and known(ended.exit_code) is not None
        left = await self._storage_poller.scan_remaining(
            trial, may_be_late=may_be_late and self._service.uses_snapshot and has_started and not is_own
        )
        for each in left:
            at_s = time.time() if each.ended is None else each.ended.started_at_s
            self._post(events.AttemptStarted(each.key, at_s))
            await self._storage_poller.drain(
                trial, each, lambda: self._post(events.AttemptDrained(trial.job_id))
            )
        for each in left:
            if each.ended is not None:
                self._ingest.end(each.ended)
        return left

    async def drain(self, effect: events.DrainAttempt | events.DrainSource) -> None:
        """Read what is left of an attempt from the workspace."""
        if isinstance(effect, events.DrainAttempt):
            await self._drain_orphaned(effect.key)
        else:
            await self._drain_source(effect.key)

    async def _drain_orphaned(self, key: AttemptKey) -> None:
        """Drain an orphaned attempt from the workspace: the keeper of the attempt has ended, but the job still runs."""
        trial = self._experiment.trials[key.trial_id]
        try:
            left = await self._storage_poller.scan_remaining(trial, may_be_late=False)
            found = next((each for each in left if each.key == key and each.ended), None)
            if found is not None:
                await self._storage_poller.drain(trial, found)
        except StoragePermissionDenied as error:
            log.warning("trial %s: %s", key, error)
            found = None
        if found is None or found.ended is None:
            log.warning("trial %s: its keeper ended without reporting the end of the trial", key)
            self._post(events.AttemptLost(key, time.time()))
        else:
            self._ingest.end(found.ended)

    async def _drain_source(self, key: AttemptKey) -> None:
        """Read what is missing of the metrics of an ended attempt, from whose checkpoint a later one continues."""
        trial = self._experiment.trials[key.trial_id]
        try:
            await self._storage_poller.drain_source(trial, key)
        except StoragePermissionDenied as error:
            log.warning("trial %s: %s", key, error)
        await asyncio.shield(self._runtime.durable())
        if self._ingest.is_awaited(key):
            log.warning(
                "trial %s: its results before the checkpoint are missing: they are not in the workspace", key
            )


def _runs_in(job: Job, trial: Trial) -> bool:
    """True if the trial is unfinished and still assigned to the job; False for a job that has ended."""
    return trial.trial_id in job.trial_ids and trial.job_id == job.job_id and not trial.state.is_terminal
