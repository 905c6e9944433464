"""Dispatches trials to the keepers of reused jobs and revokes them, in the order of the decisions; stops trials of all jobs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial

from nni_manager.domain import events
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.jobs import Job
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.connected_keepers import ConnectedKeepers
from nni_manager.engine.job_submission import FIRST_RESUBMIT_S, MAX_RESUBMIT_S, JobSubmission
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.workspace_writer import WorkspaceWriter
from nni_manager.errors import RetryableError
from nni_manager.support.backoff import delays_s
from nni_manager.training_services.base import TrainingService
from trial_keeper.wire.messages import RevokeTrial, Shutdown
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# A keeper receives a message within milliseconds, and on a busy machine within this time.
_KEEPER_HEAD_START_S = 0.5


@dataclass(eq=False)
class TrialDispatch:
    """The commands to the keepers of one experiment. Runs on the engine's loop."""

    runtime: Runtime
    experiment: ExperimentCore
    service: TrainingService
    keepers: ConnectedKeepers
    writer: WorkspaceWriter
    submission: JobSubmission
    _last: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """The last dispatch or revoke of each job. They are sent in this order, in which the keepers run the trials."""
    _inflight: set[tuple[str, str, str | None]] = field(default_factory=set)
    """The dispatches in progress: job id, trial id, and the addressed task, or None for all tasks."""
    _pending_revokes: dict[tuple[str, str], object] = field(default_factory=dict)
    """The newest pending revoke of each job and trial; it is sent after all earlier dispatches."""

    # ---- dispatches and revokes

    def start(self, effect: events.DispatchTrial) -> None:
        """Dispatch a trial to the keepers of a job, after all earlier dispatches."""
        trial_id, job_id = effect.trial.trial_id, effect.job.job_id
        command = (job_id, trial_id, effect.task)
        if self._inflight & {command, (job_id, trial_id, None)}:
            return  # the dispatch in progress serves this request as well
        self._inflight.add(command)
        dispatched = self._in_order(job_id, partial(self._dispatch, effect, self.runtime.last_save))
        dispatched.add_done_callback(lambda _: self._inflight.discard(command))

    def start_revoke(self, effect: events.RevokePrefetched) -> None:
        """Revoke a trial from the keeper of a job, after its dispatch and before any later message."""
        # Replaces an older revoke, whose stream has ended: the trial may have been dispatched again since.
        newest = self._pending_revokes[effect.job.job_id, effect.trial.trial_id] = object()
        self._in_order(effect.job.job_id, partial(self._revoke, effect.job, effect.trial, newest))

    def forget(self, job_id: str) -> None:
        """Forget the order of a job that has ended."""
        self._last.pop(job_id, None)

    def _in_order(
        self, job_id: str, command: Callable[[], Coroutine[None, None, None]]
    ) -> "asyncio.Task[None]":
        """Run a command to the keepers of a job after all earlier ones."""
        earlier = self._last.get(job_id)

        async def run() -> None:
            if earlier is not None:
                await asyncio.wait({earlier})
            await command()

        task = self._last[job_id] = self.runtime.spawn(run())
        return task

    async def _dispatch(self, effect: events.DispatchTrial, saved: "asyncio.Future[None] | None") -> None:
        job, trial, retry_delays_s = effect.job, effect.trial, delays_s(FIRST_RESUBMIT_S, MAX_RESUBMIT_S)
        while _runs_in(job, trial):
            try:
                await self.writer.write_trial(job, trial)
                break
            except (OSError, RetryableError) as error:
                problem = f"cannot dispatch trial {trial.trial_id} to its job: {error}; retrying"
                self.submission.note_problem(problem)
            await asyncio.sleep(next(retry_delays_s))
        if saved is not None:
            await asyncio.shield(saved)  # a trial must not run before it is stored
        self.submission.problem = ""
        if _runs_in(job, trial):
            self.keepers.run(job.job_id, trial.trial_id, effect.task)
            if trial.stop_reason is not None:
                self.keepers.stop(trial, trial.stop_reason)
                if not self.experiment.transports.is_all_grpc(job.job_id):
                    # A stop request that was written while the trial was written is lost.
                    await self.writer.write_stop_request(trial.trial_id, trial.stop_reason)

    async def _revoke(self, job: Job, trial: Trial, newest: object) -> None:
        if self._pending_revokes.get((job.job_id, trial.trial_id)) is not newest:
            return
        del self._pending_revokes[job.job_id, trial.trial_id]
        if trial.trial_id in job.revoking_ids:
            log.info("trial %s: revoking it from job %s", trial.trial_id, job.job_id)
            self.keepers.send_all(job.job_id, RevokeTrial(trial.trial_id))

    # ---- stops

    def cancel(self, effect: events.CancelTrial) -> None:
        """Stop a trial that has a job. The job ends as well if the effect says so, or if none of its keepers is connected."""
        job_id = effect.trial.job_id
        is_connected = self.keepers.stop(effect.trial, effect.reason)
        job_must_end = effect.ends_job or not is_connected
        self.service.wake(job_id)
        if self.submission.is_pending(job_id) or self.experiment.transports.is_all_grpc(job_id):
            if job_must_end:
                has_head_start = is_connected and self.service.stops_at_once
                stop = self._stop_after_keeper if has_head_start else self.submission.stop
                self.runtime.spawn(stop(job_id))
        else:
            self.runtime.spawn(self._stop_by_mount(effect, job_must_end=job_must_end))

    async def _stop_after_keeper(self, job_id: str) -> None:
        """Stop a job whose keeper was just asked to stop its trial, unless the job ends by itself.

        A signal that arrives before the message would hide the reason of the stop from the training code.
        """
        await asyncio.sleep(_KEEPER_HEAD_START_S)
        if job_id in self.experiment.jobs.live:
            await self.submission.stop(job_id)

    async def _stop_by_mount(self, effect: events.CancelTrial, *, job_must_end: bool) -> None:
        """Write the stop request to shared storage, then stop the job.

        In this order, an unconnected keeper can use the remaining grace period of the cluster.
        """
        await self.writer.write_stop_request(effect.trial.trial_id, effect.reason)
        if job_must_end:
            await self.submission.stop(effect.trial.job_id)

    def drain(self, job: Job) -> None:
        """Let the job end after its trials; without a connected keeper, stop it."""
        if not self.keepers.send_all(job.job_id, Shutdown("there are no more trials")):
            self.runtime.spawn(self.submission.stop(job.job_id))

    def note_preempted(self, job_id: str) -> None:
        """Pass on to the keepers of a job that the cluster preempts it: they stop its trial for that reason.

        The cluster's signal may reach them first. A keeper that is not connected stops the trial as one whose job is lost.
        """
        job = self.experiment.jobs.live.get(job_id)
        for trial in self.experiment.scheduler.trials_of(job) if job is not None else ():
            if trial.state is TrialState.RUNNING:
                self.keepers.stop(trial, ExitReason.PREEMPTED)


def _runs_in(job: Job, trial: Trial) -> bool:
    """True if the trial is unfinished and still assigned to the job; False for a job that has ended."""
    return trial.trial_id in job.trial_ids and trial.job_id == job.job_id and not trial.state.is_terminal
