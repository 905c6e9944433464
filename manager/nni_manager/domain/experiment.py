"""One experiment: passes each event to the owner of the state that it concerns, and keeps the experiment's own state table.

Theory of operation. A running experiment keeps `concurrency` trials alive: each free slot becomes a question to the tuner
(`search_budget`), each answer a trial (`trial_lifecycle`), and each trial gets a job (`job_scheduler`). A slot becomes free when
its trial is terminal, that is when every byte of the trial is stored. A reached limit or an exhausted tuner ends the asking, not
the trials; the experiment is DONE when the last trial is terminal.

Events in, effects out. Times named `now_s` are monotonic; those inside events and trials are seconds since the epoch.
"""

from collections.abc import Iterable
from enum import Enum

from nni_manager.domain import events
from nni_manager.domain.change_log import ChangeLog
from nni_manager.domain.completion import Completion
from nni_manager.domain.events import Effect, Event
from nni_manager.domain.feedback import Feedback
from nni_manager.domain.job_scheduler import JobScheduler
from nni_manager.domain.jobs import Jobs
from nni_manager.domain.leaderboard import Leaderboard
from nni_manager.domain.lost_jobs import LossEvent
from nni_manager.domain.objectives import Objectives
from nni_manager.domain.remarks import NO_REMARKS, Remarks
from nni_manager.domain.search_budget import Limits, SearchBudget
from nni_manager.domain.state_tables import changes_by_event, pairs_by_event, with_ignored
from nni_manager.domain.stop_escalation import StopEscalation, StopEvent
from nni_manager.domain.transports import TransportTracker
from nni_manager.domain.trial import Trial
from nni_manager.domain.trial_lifecycle import TrialLifecycle

# One refusal may concern a single job, e.g. a duplicate name. Three in a row concern the template or the account.
MAX_REFUSALS_IN_A_ROW = 3
# A tuner that is computing usually answers within seconds. `nnictl stop` waits 100 s for the end of the experiment.
ANSWER_TIMEOUT_S = 30.0
"""How long a stopping experiment waits for the tuner's answers to open requests."""


class ExperimentState(str, Enum):
    """The state of an experiment, in NNI's words."""

    INITIALIZED = "INITIALIZED"
    """Created; no manager has started it yet."""
    RUNNING = "RUNNING"
    """Trials start as the limits and the tuner allow."""
    NO_MORE_TRIAL = "NO_MORE_TRIAL"
    """A limit of the experiment is reached; started trials run on."""
    TUNER_NO_MORE_TRIAL = "TUNER_NO_MORE_TRIAL"
    """The tuner proposes nothing more; started trials run on."""
    DONE = "DONE"
    """All trials have ended. A user may still extend it or add trials."""
    ERROR = "ERROR"
    """It cannot go on, for example because the cluster refused jobs; a resume tries again."""
    STOPPING = "STOPPING"
    """A user has stopped it; its trials and jobs are ending."""
    STOPPED = "STOPPED"
    """A user has stopped it, and all trials have ended."""

    @property
    def is_terminal(self) -> bool:
        """True if nothing more happens unless a user requests more."""
        return self in (ExperimentState.DONE, ExperimentState.ERROR, ExperimentState.STOPPED)

    @property
    def counts_time(self) -> bool:
        """True while the experiment runs: trials may start, and the time counts against maxExecDuration."""
        return self in (
            ExperimentState.RUNNING,
            ExperimentState.NO_MORE_TRIAL,
            ExperimentState.TUNER_NO_MORE_TRIAL,
        )


class ExperimentEvent(Enum):
    """The events of an experiment as a whole."""

    MANAGER_READY = "manager ready"
    LIMIT_REACHED = "limit reached"
    TUNER_EXHAUSTED = "tuner exhausted"
    EXTENDED = "extended"
    TRIAL_PROPOSED = "trial proposed"
    ALL_ENDED = "all ended"
    FAILED = "failed"
    STOP_ASKED = "stop asked"


_E, _X = ExperimentState, ExperimentEvent
_NO_MORE = (_E.NO_MORE_TRIAL, _E.TUNER_NO_MORE_TRIAL)
CHANGES: dict[tuple[ExperimentState, ExperimentEvent], ExperimentState] = changes_by_event(
    {
        # In every state except INITIALIZED: a resume.
        _X.MANAGER_READY: {
            _E.RUNNING: (_E.INITIALIZED, *_NO_MORE, _E.DONE, _E.ERROR, _E.STOPPING, _E.STOPPED)
        },
        _X.LIMIT_REACHED: {_E.NO_MORE_TRIAL: (_E.RUNNING,)},
        _X.TUNER_EXHAUSTED: {_E.TUNER_NO_MORE_TRIAL: (_E.RUNNING,)},
        _X.ALL_ENDED: {_E.DONE: _NO_MORE, _E.STOPPED: (_E.STOPPING,)},
        _X.FAILED: {_E.ERROR: (_E.INITIALIZED, _E.RUNNING, *_NO_MORE)},
        _X.STOP_ASKED: {_E.STOPPING: (_E.INITIALIZED, _E.RUNNING, *_NO_MORE)},
        # A limit was raised or the search space changed; the tuner may be exhausted again. A stopped or failed experiment
        # continues only after a resume.
        _X.EXTENDED: {_E.RUNNING: (*_NO_MORE, _E.DONE)},
        # Not possible in the states that start no trial.
        _X.TRIAL_PROPOSED: {_E.RUNNING: (_E.DONE,)},
    }
)
# Events that leave the state as it is.
IGNORED: frozenset[tuple[ExperimentState, ExperimentEvent]] = pairs_by_event(
    {
        _X.MANAGER_READY: (_E.RUNNING,),
        _X.LIMIT_REACHED: (_E.TUNER_NO_MORE_TRIAL,),
        # In STOPPING: the answer to a request that was sent before the stop.
        _X.TUNER_EXHAUSTED: (*_NO_MORE, _E.STOPPING, _E.ERROR),
        # The first error is shown. In DONE, the tuner rejected the last result; all results are stored.
        _X.FAILED: (_E.STOPPING, _E.STOPPED, _E.ERROR, _E.DONE),
        _X.STOP_ASKED: (_E.STOPPING, _E.STOPPED, _E.ERROR, _E.DONE),
        _X.EXTENDED: (_E.INITIALIZED, _E.RUNNING, _E.STOPPING, _E.STOPPED, _E.ERROR),
        # The initial trials of the experiment file are proposed before the start.
        _X.TRIAL_PROPOSED: (_E.INITIALIZED, _E.RUNNING, *_NO_MORE),
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)


class ExperimentCore:
    """One experiment. Its owners share `trials` (of `lifecycle`), `jobs`, `stops` and `transports` (of `scheduler`).

    `trials_per_job`: the number of trials a job may run; 0: unlimited. `cluster_grace_s`: see `StopEscalation`.
    """

    def __init__(
        self,
        experiment_id: str,
        limits: Limits,
        objectives: Objectives,
        *,
        reuses_jobs: bool = False,
        trials_per_job: int = 0,
        cluster_grace_s: float = 0.0,
        completion: Completion | None = None,
        may_prefetch: bool = False,
        feedback: Feedback | None = None,
        reports_preemption: bool = False,
        state: ExperimentState = ExperimentState.INITIALIZED,
        error: str = "",
        active_s: float = 0.0,
        any_compatible_keeper: bool = False,
        remarks: Remarks = NO_REMARKS,
    ) -> None:
        self.experiment_id = experiment_id
        self.state = state
        self.error = error
        self.remarks = remarks
        self.trials: dict[str, Trial] = {}
        completion = completion or Completion()
        self.jobs = Jobs(completion.tasks, trials_per_job)
        self.stops = StopEscalation(cluster_grace_s)
        self.transports = TransportTracker(completion.tasks, reuses_jobs)
        self.budget = SearchBudget(limits, active_s)
        self.leaderboard = Leaderboard(objectives)
        self.feedback = feedback or Feedback(objectives)
        self.scheduler = JobScheduler(
            self.trials,
            self.jobs,
            self.stops,
            self.transports,
            self.budget,
            reuses_jobs,
            may_prefetch,
            any_compatible_keeper,
        )
        self.lifecycle = TrialLifecycle(
            self.trials,
            self.budget,
            self.scheduler,
            self.leaderboard,
            completion,
            self.feedback,
            reports_preemption,
        )
        self.change_log = ChangeLog()
        """The changes of trials, for displays."""
        self.refusals = 0
        """The permanent refusals since the cluster last accepted a job."""
        self._answers_until_s: float | None = None
        """The deadline of the tuner's answers while the experiment stops; None: it does not stop."""
        self.ignores_answers = False
        """True once a stopping experiment waits no longer for the tuner's answers."""
        self._finish: events.Finish | None = None
        """The last `Finish`; None while trials may start."""

    # ---- queries

    @property
    def time_runs_out_at_s(self) -> float | None:
        """The monotonic time of the next time limit or stop deadline; None if there is none."""
        times = (
            self.budget.time_runs_out_at_s if self.state is ExperimentState.RUNNING else None,
            self.lifecycle.time_runs_out_at_s,
            self.stops.next_deadline_s,
            self.scheduler.lost.next_deadline_s,
            self._answers_until_s if self.budget.asked else None,
        )
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def accepts_trials(self) -> bool:
        """True while a user may propose a trial."""
        return (self.state, ExperimentEvent.TRIAL_PROPOSED) in TRANSITIONS

    # ---- events

    def restore(self, trials: Iterable[Trial]) -> None:
        """Restore the trials of an earlier manager. Call this before `JobScheduler.restore` and `ManagerReady`."""
        trials = list(trials)
        for trial in trials:
            self.change_log.note(trial.trial_id)
            if trial.run.final is not None and self.leaderboard.objectives.constraints:
                outcome = self.leaderboard.objectives.outcome(trial.run.final)
                trial.run.is_feasible = outcome is None or outcome.is_feasible
            self.budget.restore(trial.sequence_id, is_terminal=trial.state.is_terminal)
            self.leaderboard.add(trial)
        self.lifecycle.restore(trials)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """The effects of the event, in the order of their execution."""
        effects = self.lifecycle.register(event)
        effects += self._handle(event, now_s)
        if self.lifecycle.fatal_error:
            effects += self._fail(self.lifecycle.fatal_error, now_s)
            self.lifecycle.fatal_error = ""
        effects += self.scheduler.escalate(now_s)
        effects += self._schedule(now_s)
        self.change_log.note_changes(event, effects)
        return effects

    def _handle(self, event: Event, now_s: float) -> list[Effect]:
        lifecycle, scheduler = self.lifecycle, self.scheduler
        match event:
            case events.AttemptSeen() | events.TimePassed():
                return []
            case events.MetricsStored():
                return lifecycle.note_metrics(event, now_s)
            case events.AttemptContinued():
                return lifecycle.note_continued(event)
            case events.AttemptStarted():
                return lifecycle.note_started(
                    event, now_s, is_stopping=self.state is ExperimentState.STOPPING
                )
            case events.AttemptEnded():
                return lifecycle.note_ended(event.ended, now_s)
            case events.AttemptDelivered():
                return lifecycle.note_delivered(event.key, now_s)
            case events.TaskReported():
                return lifecycle.note_report(event.key)
            case events.ProblemFound():
                return lifecycle.note_problem(event)
            case events.AttemptOrphaned():
                return lifecycle.note_orphaned(event.key)
            case events.AttemptLost():
                return lifecycle.note_lost(event, now_s)
            case events.UsageReported():
                return lifecycle.note_usage(event.usage)
            case events.TrialReclaimed():
                return lifecycle.note_reclaimed(event, now_s)
            case events.TrialStopAsked():
                return lifecycle.stop(event.trial_id, event.reason, event.at_s, now_s)
            case events.EarlyStopRequested():
                return lifecycle.stop_early(event, now_s)
            case events.ParametersSuggested() | events.TunerExhausted() | events.TunerNotReady() if (
                self.ignores_answers
            ):
                return []
            case events.ParametersSuggested():
                # An error of the tuner in a stopping experiment is not the cause of the trial's end.
                error = self.error if self.state is ExperimentState.ERROR else ""
                return lifecycle.add_suggested(event, now_s, is_running=self.state.counts_time, error=error)
            case events.TrialProposed():
                return lifecycle.add_proposed(event) + self._move(ExperimentEvent.TRIAL_PROPOSED, now_s)
            case events.TunerExhausted():
                self.budget.note_exhausted(event.sequence_id)
                return self._move(ExperimentEvent.TUNER_EXHAUSTED, now_s)
            case events.TunerNotReady():
                self.budget.note_not_ready(event.sequence_id)
                return []
            case events.TunerFailed():
                self.budget.note_unanswered(event.was_asked and not self.ignores_answers)
                return self._fail(event.message, now_s)
            case events.KeeperIdle():
                return scheduler.note_idle(event, now_s)
            case events.KeeperConnected():
                return scheduler.note_connected(event)
            case events.KeeperDisconnected():
                scheduler.note_disconnected(event.job_id)
                return []
            case events.KeeperSeenOnStorage():
                return scheduler.note_found(event.job_id)
            case events.JobAccepted():
                self.refusals = 0
                return []
            case events.JobProcessesEnded():
                scheduler.note_processes_ended(event.job_id, now_s)
                return []
            case events.JobRequeued():
                scheduler.lost.apply(event.job_id, LossEvent.REQUEUED, now_s)
                return []
            case events.NodeReadinessChanged():
                scheduler.note_node(event, now_s)
                return []
            case events.AttemptDrained():
                self.stops.apply(event.job_id, StopEvent.PROGRESSED, now_s)
                return []
            case events.JobTerminated():
                return self._note_job_end(event, now_s)
            case events.LimitsChanged():
                return self._change_limits(event.limits, now_s)
            case events.SearchSpaceChanged():
                return self._resume_asking(now_s)
            case events.RemarksChanged():
                return self._change_remarks(event)
            case events.ExperimentStopAsked():
                return self._stop_all(event.at_s, now_s)
            case events.ManagerReady():
                return self._begin(now_s)

    def _begin(self, now_s: float) -> list[Effect]:
        self.error = ""
        self.refusals = 0
        self.stops.is_stopping = self.ignores_answers = False
        self._answers_until_s = None
        return self.lifecycle.begin(now_s) + self._move(ExperimentEvent.MANAGER_READY, now_s)

    def _stop_all(self, at_s: float, now_s: float) -> list[Effect]:
        effects = self._move(ExperimentEvent.STOP_ASKED, now_s)
        if self._answers_until_s is None:
            self._answers_until_s = now_s + ANSWER_TIMEOUT_S
        self.stops.begin_stopping(now_s)
        return effects + self.lifecycle.stop_all(at_s, now_s) + self.scheduler.end_all(now_s)

    def _note_job_end(self, event: events.JobTerminated, now_s: float) -> list[Effect]:
        job = self.scheduler.end(event.job_id)
        if job is None:
            return []
        effects: list[Effect] = [events.SaveJob(job, has_ended=True)]
        self.refusals += event.is_refused
        if event.is_refused and self.refusals >= MAX_REFUSALS_IN_A_ROW:
            # All jobs come from one template, so the cluster would refuse every other job as well.
            message = (
                f"cannot submit jobs: the cluster refused {self.refusals} jobs in a row, the last one with the message: "
                f"{event.message}; fix the cause, then run `nnictl resume`"
            )
            effects += self._fail(message, now_s)
        return effects + self.lifecycle.note_job_end(job, event, now_s, is_running=self.state.counts_time)

    def _change_limits(self, limits: Limits, now_s: float) -> list[Effect]:
        before, self.budget.limits = self.budget.limits, limits
        ends_asking = (limits.max_trials, limits.max_duration_s) != (before.max_trials, before.max_duration_s)
        return self._resume_asking(now_s) if ends_asking else []

    def _change_remarks(self, event: events.RemarksChanged) -> list[Effect]:
        owner = self if event.trial_id is None else self.trials[event.trial_id]
        owner.remarks = event.remarks
        return [events.SaveRemarks(event.trial_id, event.remarks)]

    def _resume_asking(self, now_s: float) -> list[Effect]:
        """Ask the tuner again, unless a limit is reached."""
        if self.budget.is_spent(now_s):
            return []
        self.budget.unblock()
        return self._move(ExperimentEvent.EXTENDED, now_s)

    def _fail(self, message: str, now_s: float) -> list[Effect]:
        self.error = self.error or message
        return self._move(ExperimentEvent.FAILED, now_s)

    # ---- after every event

    def _schedule(self, now_s: float) -> list[Effect]:
        if self._answers_until_s is not None and now_s >= self._answers_until_s:
            self.ignores_answers = True
            self.budget.note_unanswered(self.budget.asked)
        effects = self.lifecycle.stop_overdue(now_s) + self.scheduler.assign()
        if self.state is ExperimentState.RUNNING:
            if self.budget.has_ended_asking(now_s):
                effects += self._move(ExperimentEvent.LIMIT_REACHED, now_s)
            elif self.budget.is_exhausted:
                self.budget.unblock()
                effects += self._move(ExperimentEvent.TUNER_EXHAUSTED, now_s)
            else:
                effects += map(events.AskTuner, self.budget.ask(self.scheduler.prefetch_room))
        is_asking = self.state in (ExperimentState.INITIALIZED, ExperimentState.RUNNING)
        effects += self.scheduler.revoke() + self.scheduler.fit_jobs(is_asking=is_asking)
        if self.budget.is_idle:
            if (self.state, ExperimentEvent.ALL_ENDED) in TRANSITIONS:
                effects += self._move(ExperimentEvent.ALL_ENDED, now_s)
            if self.state.is_terminal and self._finish != events.Finish():
                self._finish = events.Finish()
                effects.append(self._finish)
        elif self.scheduler.is_stalled and self._finish is None:
            self._finish = events.Finish(is_recorded=False)
            effects.append(self._finish)
        return effects

    def _move(self, event: ExperimentEvent, now_s: float) -> list[Effect]:
        before, self.state = self.state, TRANSITIONS[self.state, event]
        if before.is_terminal and not self.state.is_terminal:
            self.error = ""  # of the tuner, after the last trial
        self.budget.count_time(now_s, counts=self.state.counts_time)
        if self.state.counts_time:
            self._finish = None
        return (
            [events.SaveExperiment()] if before is not self.state or event is ExperimentEvent.FAILED else []
        )
