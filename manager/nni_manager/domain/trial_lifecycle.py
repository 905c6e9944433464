"""Decides about trials, from their first attempt to their end: starts, results, stops, losses and retries.

A trial is terminal when its end is decided and every byte of it is stored. Then its slot is free and the tuner receives its
reward. The optional assessor receives intermediate results and may request an early stop of a trial. No event iterates over all
trials, so its cost does not depend on their number.

Times named `now_s` are monotonic; those inside events and trials are seconds since the epoch.

More than 500 lines in one file: every handler ends trials and counts their states, which have this one owner.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nni_manager.domain import events
from nni_manager.domain.attempts import (
    HAVE_ENDED,
    HAVE_STARTED,
    UNDELIVERED,
    AttemptPhase,
    AttemptReport,
    RegisteredAttempt,
)
from nni_manager.domain.completion import Completion
from nni_manager.domain.events import Effect, Event
from nni_manager.domain.fail_fast import FailFast
from nni_manager.domain.feedback import Feedback
from nni_manager.domain.job_scheduler import JobScheduler
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.leaderboard import Leaderboard
from nni_manager.domain.lost_jobs import LossEvent
from nni_manager.domain.metrics import truncate_for_display
from nni_manager.domain.running_trials import RunningTrials
from nni_manager.domain.search_budget import SearchBudget
from nni_manager.domain.stop_escalation import StopEvent
from nni_manager.domain.trial import SEVERAL_FINAL_RESULTS, Trial, TrialEvent, TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded, Usage
from trial_keeper.wire.reasons import FAULTS_OF_CLUSTER, LOSSES, ExitReason

_NewTrial = events.ParametersSuggested | events.TrialProposed

STOPPED_BEFORE_START = "stopped before it started"
_KEEPER_RESTARTED = "its keeper restarted while the trial was being stopped"


@dataclass(slots=True)
class TrialLifecycle:
    """All trials of the experiment, and the handlers of their events."""

    trials: dict[str, Trial]
    budget: SearchBudget
    scheduler: JobScheduler
    leaderboard: Leaderboard
    completion: Completion
    feedback: Feedback
    reports_preemption: bool
    """True if the cluster reports at a job's end that it preempted the job."""
    counts: Counter[TrialState] = field(default_factory=Counter)
    fatal_error: str = ""
    """The message of a trial after which the experiment cannot continue; the experiment clears it."""
    fail_fast: FailFast = field(default_factory=FailFast)
    _running: RunningTrials = field(default_factory=RunningTrials)

    # ---- restored trials

    def restore(self, trials: Sequence[Trial]) -> None:
        """Restore the trials of an earlier manager."""
        for trial in sorted(trials, key=lambda trial: trial.run.start_received_at_s or 0.0):
            if trial.state is TrialState.RUNNING:
                self._running.add(trial)
        for trial in trials:
            self._add(trial)
            if trial.state.is_terminal:
                self.fail_fast.note(trial, 0)
            if not trial.state.is_terminal and not trial.job_id:
                self.scheduler.enqueue(trial)

    def begin(self, now_s: float) -> list[Effect]:
        """Continue the unfinished trials of an earlier manager."""
        self.fail_fast.restart()
        for trial in self.scheduler.trials_with_jobs:
            # The stop was requested from an earlier manager.
            if trial.state is TrialState.STOPPING and not self.scheduler.is_queued_in_job(trial):
                self.scheduler.stops.stop_asked(trial.job_id, now_s, ends_job=True)
        effects: list[Effect] = []
        for trial in [trial for trial in self.trials.values() if trial.ends and not trial.state.is_terminal]:
            effects += self._evaluate_completion(trial, now_s) + self._close_when_complete(trial, now_s)
        return effects

    # ---- new trials and attempts

    def add_suggested(
        self, event: events.ParametersSuggested, now_s: float, *, is_running: bool, error: str
    ) -> list[Effect]:
        """Add a trial that the tuner proposed.

        `is_running`: the experiment still starts trials. `error`: why the experiment failed; empty if it did not.
        """
        self.budget.note_suggested()
        trial = self._new(event, event.sequence_id, event.metadata)
        if is_running:
            return self.scheduler.schedule(trial)
        # The answer arrived after the experiment failed or was stopped: the trial ends before it starts.
        if error:
            return self._lose(trial, ExitReason.COULD_NOT_START, error, event.at_s, now_s)
        trial.stop_reason = ExitReason.EXPERIMENT_STOPPED
        return self._lose(trial, trial.stop_reason, "the experiment was stopped", event.at_s, now_s)

    def add_proposed(self, event: events.TrialProposed) -> list[Effect]:
        """Add a trial that a user proposed. It gets a job before the tuner is asked again."""
        trial = self._new(event, self.budget.note_proposed(), {})
        self.scheduler.enqueue(trial)
        return [events.SaveTrial(trial)]

    def register(self, event: Event) -> list[Effect]:
        """Number an attempt when its first event arrives."""
        match event:
            case events.AttemptSeen(key=key) | events.AttemptStarted(key=key) | events.TaskReported(key=key):
                pass
            case events.AttemptEnded(ended=TrialEnded(key=key)):
                pass
            case _:
                return []
        trial = self.trials[key.trial_id]
        new = None if trial.state.is_terminal else trial.registered.register(key)
        return [] if new is None else [_save_attempt(new)]

    def _new(self, event: _NewTrial, sequence_id: int, metadata: Mapping[str, Any]) -> Trial:
        trial = Trial(event.trial_id, sequence_id, event.parameters, metadata, event.at_s, job_id="")
        trial.continues, trial.is_customized = event.continues, isinstance(event, events.TrialProposed)
        self._add(trial)
        return trial

    def _add(self, trial: Trial) -> None:
        self.trials[trial.trial_id] = trial
        trial.metrics = self.leaderboard.objectives.metrics
        self.counts[trial.state] += 1

    # ---- the time limit of a trial

    @property
    def time_runs_out_at_s(self) -> float | None:
        """When the next trial reaches the time limit of a trial; None: no trial runs, or there is no limit."""
        limit_s = self.budget.limits.max_trial_duration_s
        longest = None if limit_s is None else self._running.longest
        return None if limit_s is None or longest is None else longest[1] + limit_s

    def stop_overdue(self, now_s: float) -> list[Effect]:
        """Stop the trials that exceed the time limit of a trial."""
        limit_s, effects = self.budget.limits.max_trial_duration_s, list[Effect]()
        while limit_s is not None and (longest := self._running.longest) is not None:
            trial, start_received_at_s = longest
            if now_s - start_received_at_s < limit_s:
                break
            at_s = (trial.run.started_at_s or 0.0) + limit_s
            effects += self.stop(trial.trial_id, ExitReason.TIME_LIMIT, at_s, now_s)
        return effects

    # ---- reports of keepers

    def note_started(self, event: events.AttemptStarted, now_s: float, *, is_stopping: bool) -> list[Effect]:
        """Record that a task of a trial has started. `is_stopping`: the experiment stops."""
        trial, key = self.trials[event.key.trial_id], event.key
        if trial.state.is_terminal or trial.registered.is_lost(key):
            return [events.CloseAttempt(key)]  # the report is too late: the keeper ends the attempt
        if not trial.is_current(key) or trial.phase_of(key) in HAVE_STARTED:
            return []
        self.scheduler.jobs.note_started(trial.job_id, trial.trial_id)
        is_first = trial.state is TrialState.WAITING or trial.run.started_at_s is None
        if not is_first and not trial.supersedes(key):
            # One more task of the running attempt, or a repeated report to a manager that has just started.
            trial.add_task(key)
            # A job that the cluster has started again also starts its tasks in any order.
            may_be_restart = self._cluster_decides_job(trial)
            is_too_late = trial.run.reason is not None and self.completion.tasks > 1 and not may_be_restart
            return [self.scheduler.cancel(trial, trial.reason_for_others, now_s)] if is_too_late else []
        with self._counted(trial):
            trial.began(key, event.at_s, now_s)
        self.scheduler.lost.apply(trial.job_id, LossEvent.KEEPER_RETURNED, now_s)
        self._running.add(trial)
        stopped_before = trial.stop_reason or trial.late_stop_reason
        if is_stopping:
            stopped_before = stopped_before or ExitReason.EXPERIMENT_STOPPED
        if trial.state is TrialState.RUNNING and stopped_before is not None:
            # The cluster started a new attempt of a trial that was to be stopped.
            trial.stop_reason = trial.late_stop_reason = None
            return self.stop(trial.trial_id, stopped_before, event.at_s, now_s)
        effects: list[Effect] = [events.SaveTrial(trial)]
        if trial.stop_reason is not None and self.scheduler.reuses_jobs:
            # The keeper had started the trial before it received the revoke.
            effects.append(self.scheduler.cancel(trial, trial.stop_reason, now_s))
        return effects

    def note_report(self, key: AttemptKey) -> list[Effect]:
        """Record that a task reports metrics; only those of one task count."""
        trial = self.trials[key.trial_id]
        if trial.state.is_terminal or not trial.is_current(key):
            return []
        before = trial.run.reporter, trial.warning
        trial.warn(trial.reported(key))
        return [events.SaveTrial(trial)] if before != (trial.run.reporter, trial.warning) else []

    def note_problem(self, event: events.ProblemFound) -> list[Effect]:
        """Add a warning to the trial, unless it concerns an attempt that does not count any more."""
        trial, key = self.trials[event.trial_id], event.key
        counts = key is None or (not trial.state.is_terminal and trial.is_current(key))
        return [events.SaveTrial(trial)] if counts and trial.warn(event.message) else []

    def note_metrics(self, event: events.MetricsStored, now_s: float) -> list[Effect]:
        """Record stored results; the assessor receives the intermediate ones."""
        trial = self.trials[event.key.trial_id]
        if trial.state.is_terminal or not trial.is_current(event.key) or trial.run.reporter != event.key.task:
            return []
        self.scheduler.stops.apply(trial.job_id, StopEvent.PROGRESSED, now_s)
        has_changed = False
        numbers: list[float] = []
        newest: str | None = None
        for is_final, value in event.records:
            if not is_final:
                newest = value
                trial.run.intermediate_count += 1
                if (number := self.feedback.seen_by_assessor(value)) is not None:
                    numbers.append(number)
            elif trial.run.final is None:  # later final results are stored as rows, but the first one counts
                trial.run.set_final(value, event.final_offset, self.leaderboard.objectives)
                has_changed = True
            else:
                has_changed = trial.warn(SEVERAL_FINAL_RESULTS) or has_changed
        if newest is not None:
            trial.run.intermediate = truncate_for_display(newest)
        saved = [events.SaveTrial(trial)] if has_changed else []
        return [*saved, *self.feedback.assess(trial, numbers)]

    def note_continued(self, event: events.AttemptContinued) -> list[Effect]:
        """Record that the attempt continues from a checkpoint. An assessor to which it is new gets the results before."""
        trial, inherited = self.trials[event.key.trial_id], event.inherited
        if trial.state.is_terminal or not trial.is_current(event.key) or trial.run.reporter != event.key.task:
            return []
        is_new = not trial.run.intermediate_count
        trial.run.continue_from(inherited, self.leaderboard.objectives, is_late=event.is_late)
        effects: list[Effect] = [events.SaveTrial(trial)]
        if is_new:
            effects += self.feedback.assess(trial, inherited.numbers)
        if event.missing is not None:
            effects.append(events.DrainSource(event.missing))
        return effects

    def note_usage(self, usage: Usage) -> list[Effect]:
        """Record the usage of an attempt."""
        trial = self.trials[usage.key.trial_id]
        if trial.state.is_terminal or not trial.describes(usage.key):
            return []
        is_higher = trial.run.used(usage)
        return [events.SaveUsage(usage), *([events.SaveTrial(trial)] if is_higher else [])]

    def note_ended(self, ended: TrialEnded, now_s: float) -> list[Effect]:
        """Record that the command of a task has ended."""
        trial, key = self.trials[ended.key.trial_id], ended.key
        if trial.state.is_terminal or trial.registered.is_lost(key):
            return [events.CloseAttempt(key)]
        if not trial.is_current(key):
            return []
        if trial.phase_of(key) in HAVE_ENDED:  # a repeated report
            return [events.SaveTrial(trial)] if trial.warn_of_files(ended) else []
        trial.ended_in(ended)
        # A command that could not be started has no start.
        self.scheduler.jobs.note_started(trial.job_id, trial.trial_id)
        effects = self._evaluate_completion(trial, now_s)
        self.scheduler.note_stopped(trial, now_s)
        return effects

    def _evaluate_completion(self, trial: Trial, now_s: float) -> list[Effect]:
        """End the trial if the reported ends of its tasks are decisive."""
        decisive = self.completion.decisive(trial.ends) if trial.run.ended is None else None
        if decisive is None:
            return []
        with self._counted(trial):
            trial.finished(decisive)
        effects: list[Effect] = [events.SaveTrial(trial)]
        if not trial.has_task_in(AttemptPhase.RUNNING):
            return effects
        if self._cluster_decides_job(trial):
            # A stop by the manager would look like a user's.
            self.scheduler.lost.apply(trial.job_id, LossEvent.KEEPER_ENDED, now_s)
            return effects
        return [*effects, self.scheduler.cancel(trial, trial.reason_for_others, now_s)]

    def note_delivered(self, key: AttemptKey, now_s: float) -> list[Effect]:
        """Record that the last byte of a task is stored."""
        trial = self.trials[key.trial_id]
        if trial.state.is_terminal or not trial.is_current(key) or trial.phase_in(key.task) not in HAVE_ENDED:
            return [events.CloseAttempt(key)]
        trial.attempts[key.task].apply(AttemptReport.DELIVERED)
        return [*self._close_when_complete(trial, now_s), events.CloseAttempt(key)]

    def _close_when_complete(self, trial: Trial, now_s: float) -> list[Effect]:
        """Close the trial unless another of its tasks still runs, or the end of its job will explain its end."""
        if trial.run.ended is None or trial.has_task_in(*UNDELIVERED):
            return []
        if self._awaits_job_end(trial):
            self.scheduler.lost.apply(trial.job_id, LossEvent.KEEPER_ENDED, now_s)
            return []
        return self._close(trial, now_s)

    def _awaits_job_end(self, trial: Trial) -> bool:
        """True if the end of the job decides: the trial may be restarted then, as preempted or as a retry."""
        may_restart = self.reports_preemption or trial.retries < self.budget.limits.max_retries
        return may_restart and trial.awaits_job_end and trial.job_id in self.scheduler.jobs.live

    def _cluster_decides_job(self, trial: Trial) -> bool:
        """True if the cluster ends the whole job or starts it again, and the job runs no other trial."""
        return not self.scheduler.reuses_jobs and self._awaits_job_end(trial)

    def note_orphaned(self, key: AttemptKey) -> list[Effect]:
        """Read the remaining data of an attempt from the shared storage, after its keeper has ended."""
        trial = self.trials[key.trial_id]
        is_of_job = self.scheduler.reuses_jobs and not trial.state.is_terminal
        return [events.DrainAttempt(key)] if is_of_job and trial.phase_of(key) in UNDELIVERED else []

    def note_lost(self, event: events.AttemptLost, now_s: float) -> list[Effect]:
        """Dispatch a trial again whose attempt was lost with its keeper."""
        trial, key = self.trials[event.key.trial_id], event.key
        job = self.scheduler.jobs.live.get(trial.job_id)
        if trial.state.is_terminal or job is None or trial.phase_of(key) is not AttemptPhase.RUNNING:
            return []
        if trial.stop_reason is not None:
            return self._lose(trial, trial.stop_reason, _KEEPER_RESTARTED, event.at_s, now_s)
        trial.attempts[key.task].apply(AttemptReport.DISCARDED)
        if trial.run.ended is not None:
            return self._close_when_complete(trial, now_s)
        job.idle_tasks.discard(key.task)
        return [
            *map(_save_attempt, trial.registered.mark_lost(key)),
            events.DispatchTrial(job, trial, key.task),
        ]

    def _close(self, trial: Trial, now_s: float) -> list[Effect]:
        with self._counted(trial):
            trial.apply(TrialEvent.CLOSED)
        return self._finalize(trial, now_s)

    def _lose(
        self, trial: Trial, reason: ExitReason, message: str, at_s: float, now_s: float
    ) -> list[Effect]:
        with self._counted(trial):
            trial.gone(reason, message, at_s, now_s)
        return [*self._finalize(trial, now_s), events.DetachTrial(trial, trial.job_id)]

    # ---- lost jobs

    def note_reclaimed(self, event: events.TrialReclaimed, now_s: float) -> list[Effect]:
        """Queue a revoked trial that its keeper has returned."""
        job = self.scheduler.jobs.live.get(event.job_id)
        if job is None or event.trial_id not in job.revoking_ids:
            return []  # the trial is terminal, or assigned to another job already
        trial = self.trials[event.trial_id]
        if trial.stop_reason is not None:
            return self._lose(trial, trial.stop_reason, STOPPED_BEFORE_START, event.at_s, now_s)
        self.scheduler.reclaim(job, trial)
        return [events.SaveTrial(trial)]

    def note_job_end(
        self, job: Job, event: events.JobTerminated, now_s: float, *, is_running: bool
    ) -> list[Effect]:
        """Return, retry or fail the trials of a job that has ended. `is_running`: the experiment still starts trials."""
        trials = self.scheduler.trials_of(job)
        may_retry = is_running and event.reason in FAULTS_OF_CLUSTER
        is_suspicious = event.was_supervised and not (job.ever_connected or job.state is JobState.DRAINING)
        if self.scheduler.reuses_jobs and not trials and is_suspicious:
            # The next job would fail in the same way. One queued trial fails per dead job, which limits the resubmissions.
            first = self.scheduler.take_first()
            if first is None:
                return []
            if self._may_restart_preempted(first, event, may_retry=may_retry):
                return self._restart(first, event, is_preempted=True)
            return self._lose_to_cluster(first, event, now_s, may_retry=may_retry)
        suspect, effects = self._suspect(trials, event), list[Effect]()
        for trial in reversed(trials):  # trials that return to the queue keep their order
            effects += self._lose_job(trial, event, now_s, is_suspect=trial is suspect, may_retry=may_retry)
        return effects

    def _suspect(self, trials: list[Trial], event: events.JobTerminated) -> Trial | None:
        """The queued trial that is charged for the job's crash: the next one to start.

        None if the job exited cleanly or had started a trial, which is charged instead (failure or retry). A queued trial may
        survive one crash. So each crash of a job with trials is charged to exactly one of them.
        """
        has_started = any(trial.trial_id not in event.untouched for trial in trials)
        return None if event.is_clean or has_started or not trials else trials[0]

    def _lose_job(
        self, trial: Trial, event: events.JobTerminated, now_s: float, *, is_suspect: bool, may_retry: bool
    ) -> list[Effect]:
        is_untouched = trial.trial_id in event.untouched
        may_return = event.is_clean or (is_untouched and not (is_suspect and trial.was_returned))
        if self.scheduler.reuses_jobs and may_return and trial.state is TrialState.WAITING:
            # The job ended after its idle timeout, or crashed before it started the trial. A trial that was charged for two
            # crashes is not dispatched to a third job.
            trial.was_returned |= is_suspect
            self.scheduler.requeue_first(trial)
            return [events.SaveTrial(trial)]
        if is_untouched and trial.stop_reason is not None:
            message = ": ".join(filter(None, (STOPPED_BEFORE_START, event.pending_reason)))
            return self._lose(trial, trial.stop_reason, message, event.at_s, now_s)
        if self._may_restart_preempted(trial, event, may_retry=may_retry):
            return self._restart(trial, event, is_preempted=True)
        if event.is_clean and not self.scheduler.reuses_jobs:
            self._follow_success(trial)
        if (
            trial.run.ended is not None
            and not trial.has_task_in(AttemptPhase.ENDED)
            and not trial.awaits_job_end
        ):
            # Tasks without a reported end will not report one, and the decisive end is known.
            return [*self._close(trial, now_s), events.DetachTrial(trial, trial.job_id)]
        return self._lose_to_cluster(trial, event, now_s, may_retry=may_retry)

    def _follow_success(self, trial: Trial) -> None:
        """Let a trial succeed whose job has succeeded without some of its tasks: the completion policy tolerates their loss.

        A task that was lost may have had the final result. A retry may deliver it, so the trial is then lost.
        """
        run, ends = trial.run, trial.ends
        has_result = run.final is not None or any(ended.key.task == run.reporter for ended in ends)
        decisive = self.completion.decisive(ends, are_all=True) if run.ended is None and has_result else None
        if decisive is None or decisive.reason is not ExitReason.SUCCEEDED:
            return
        tasks = ", ".join(self.completion.unreported(ends))
        trial.warn(
            f"lost without a report of their end: {tasks}; the completion policy of the job tolerates that"
        )
        with self._counted(trial):
            trial.finished(decisive)

    def _lose_to_cluster(
        self, trial: Trial, event: events.JobTerminated, now_s: float, *, may_retry: bool
    ) -> list[Effect]:
        # A retry of a trial whose command ended by itself would end in the same way.
        ended_by_itself = trial.run.ended is not None and not trial.awaits_job_end
        may_retry = may_retry and not trial.is_to_stop and not ended_by_itself
        if event.reason is ExitReason.PREEMPTED or trial.retries >= self.budget.limits.max_retries:
            may_retry = False
        if not may_retry:
            reason, message = event.reason, event.message
            if trial.awaits_job_end and trial.run.reason is not None and reason in LOSSES:
                # The keeper knows how the trial ended, and the cluster why.
                reason, message = trial.run.reason, message or trial.run.message
            return self._lose(trial, reason, message, event.at_s, now_s)
        return self._restart(trial, event, is_preempted=False)

    def _may_restart_preempted(self, trial: Trial, event: events.JobTerminated, *, may_retry: bool) -> bool:
        """True for a trial that the cluster has preempted and that neither ended by itself nor was to be stopped."""
        is_cut_off = not trial.is_to_stop and (trial.run.reason is None or trial.awaits_job_end)
        is_preempted = event.reason is ExitReason.PREEMPTED and is_cut_off and may_retry
        return is_preempted and trial.preemptions < self.budget.limits.max_preemptions

    def _restart(self, trial: Trial, event: events.JobTerminated, *, is_preempted: bool) -> list[Effect]:
        limits = self.budget.limits
        if is_preempted:
            how = f"the cluster preempted it; restart {trial.preemptions + 1} of {limits.max_preemptions}"
        else:
            number = trial.retries + 1
            how = f"the cluster lost it ({event.reason.value}); retry {number} of {limits.max_retries}"
        with self._counted(trial):
            lost = trial.lost(how, is_preempted=is_preempted)
        self.scheduler.requeue_first(trial)
        return [events.SaveTrial(trial), *map(_save_attempt, lost), events.DetachTrial(trial, event.job_id)]

    # ---- ends and stops

    def _finalize(self, trial: Trial, now_s: float) -> list[Effect]:
        """Free the slot of a terminal trial and notify the tuner."""
        self.budget.note_ended()
        self._running.remove(trial)
        self.leaderboard.add(trial)
        self.scheduler.free(trial, now_s)
        trial.release()
        self.fatal_error = self.fail_fast.note(trial, self.budget.limits.fail_fast) or self.fatal_error
        if trial.run.reason is ExitReason.VERSION and not self.scheduler.any_compatible_keeper:
            # Every other job would fail in the same way.
            self.fatal_error = trial.run.message
        return [events.SaveTrial(trial), *self.feedback.report(trial)]

    def stop(self, trial_id: str, reason: ExitReason, at_s: float, now_s: float) -> list[Effect]:
        """Stop a trial; ignored for one that has ended or is being stopped."""
        trial = self.trials[trial_id]
        if trial.state.is_terminal:
            return []
        if self._awaits_job_end(trial):
            may_run_again = self._cluster_decides_job(trial)  # until the trial has the reason of its stop
            trial.stop_reason = trial.run.reason = reason
            effects = self._close_when_complete(trial, now_s)
            if may_run_again:  # in a job that the cluster has only suspended
                self.scheduler.lost.forget(trial.job_id)
                effects.append(self.scheduler.cancel(trial, reason, now_s))
            return effects
        with self._counted(trial):
            trial.apply(TrialEvent.STOP_ASKED)
        if trial.stop_reason is not None:
            return []
        if trial.state is not TrialState.STOPPING:
            trial.late_stop_reason = reason
            return []
        trial.stop_reason, trial.stop_asked_at_s = reason, trial.stop_asked_at_s or at_s
        if not trial.job_id:
            self.scheduler.remove(trial)
            return self._lose(trial, reason, STOPPED_BEFORE_START, at_s, now_s)
        job = self.scheduler.jobs.live.get(trial.job_id)
        if job is not None and trial_id in job.prefetched_ids and trial.run.started_at_s is None:
            # Its keeper may have started it, and even reported results, that the manager has not received.
            return [events.SaveTrial(trial), *self.scheduler.revoke_stopped(job)]
        return [events.SaveTrial(trial), self.scheduler.cancel(trial, reason, now_s)]

    def stop_early(self, event: events.EarlyStopRequested, now_s: float) -> list[Effect]:
        """Stop the attempt that the assessor found unpromising. An advisor may name any trial, also one that does not exist."""
        trial = self.trials.get(event.trial_id)
        if trial is None or event.attempt not in (None, trial.run.attempt):
            return []  # a new attempt has started in the meantime
        return self.stop(event.trial_id, ExitReason.EARLY_STOPPED, event.at_s, now_s)

    def stop_all(self, at_s: float, now_s: float) -> list[Effect]:
        """Stop every trial, on request of a user."""
        effects: list[Effect] = []
        for trial in [trial for trial in self.trials.values() if not trial.state.is_terminal]:
            effects += self.stop(trial.trial_id, ExitReason.EXPERIMENT_STOPPED, at_s, now_s)
        return effects

    @contextmanager
    def _counted(self, trial: Trial) -> Iterator[None]:
        """Keep `counts` consistent while the trial changes its state."""
        self.counts[trial.state] -= 1
        try:
            yield
        finally:
            self.counts[trial.state] += 1


def _save_attempt(attempt: RegisteredAttempt) -> events.SaveTrialAttempt:
    return events.SaveTrialAttempt(attempt.key, attempt.number, attempt.is_lost)
