"""The experiment: when to ask the tuner, when to submit, when it is over. Events in, effects out.

Theory of operation. As long as the experiment runs it keeps `concurrency` trials alive: each free place becomes a question
to the tuner, each answer a trial. Each trial is a job, or with reuse is given to a job that has nothing to do. A trial's place
is free when the trial has its final state, which is when every byte it wrote is stored. Reaching a limit or an exhausted
tuner ends the asking, not the trials; the experiment is DONE when the last of them is final. A tuner that has nothing at
present is asked again, by the same number, when a trial has ended or another question was answered; when neither can come, it
is exhausted. Nothing here looks at all trials, so the ten-thousandth costs what the tenth did.

An assessor, if there is one, hears the numbers of intermediate results and may refuse a trial, which is then stopped early.

With reuse and a tuner that does not learn, trials that are short are asked for ahead: each busy job gets one more, or some when
they are very short, which its keeper begins by itself, so that no trial waits for a word from here. What turns out to wait
there while another job has nothing to do, and nothing is coming for it, is asked back; see `jobs`.

Times named `now_s` are monotonic; those inside events and trials are seconds since the epoch.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from nni_manager.domain.completion import Completion
from nni_manager.domain.events import (
    AskAssessor,
    AskBack,
    AskTuner,
    AttemptDelivered,
    AttemptEnded,
    AttemptLost,
    AttemptMissing,
    AttemptStarted,
    Begun,
    CancelTrial,
    CloseAttempt,
    CollectionEnded,
    DismissJob,
    Effect,
    Event,
    ExperimentStopAsked,
    Finish,
    ForgetTrial,
    GiveTrial,
    JobGone,
    JobSubmitted,
    KeeperCutOff,
    KeeperFound,
    KeeperIdle,
    KeeperMatched,
    LimitsChanged,
    MetricsStored,
    ParametersSuggested,
    RecallTrial,
    SaveExperiment,
    SaveJob,
    SaveTrial,
    SaveUsage,
    SearchSpaceChanged,
    SubmitJob,
    TakeRest,
    TaskReported,
    TeachTuner,
    TellAssessor,
    TellTuner,
    TimePassed,
    TrialGivenBack,
    TrialProposed,
    TrialRefused,
    TrialStopAsked,
    TunerExhausted,
    TunerFailed,
    TunerNotReady,
    UsageReported,
)
from nni_manager.domain.jobs import MOST_AHEAD, Job, Jobs, JobState
from nni_manager.domain.limits import Limits
from nni_manager.domain.metrics import Reported, newest_shown, reward
from nni_manager.domain.revisions import Revisions
from nni_manager.domain.silence import Silence
from nni_manager.domain.trial import Trial, TrialEvent, TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded, Usage
from trial_keeper.wire.reasons import ExitReason

# What a person sees at a glance. Kept as the trials end, so that a look costs the same at any number of them.
TOP_TRIALS = 10
LATEST_FAILURES = 3

# How many trials may follow the one that a job runs, if the last to succeed took less than so long. Longer ones gain nothing by
# being asked for ahead. Of short ones several are over while one is asked for, stored and given; and of those that are over in a
# moment so many follow that all this is done for some of them at once. Should they turn out long, whoever is idle is given them.
_AHEAD_BY_DURATION_S = ((0.1, MOST_AHEAD), (1.0, 3), (60.0, 1))

# Of these the training code is not to blame, and another try may go well.
_FAULTS_OF_CLUSTER = (ExitReason.KEEPER_LOST, ExitReason.JOB_LOST)

STOPPED_BEFORE_IT_BEGAN = "stopped before it began"
_KEEPER_RESTARTED = "its keeper was started anew while the trial was being stopped"


class ExperimentState(str, Enum):
    """Where an experiment is, in NNI's words."""

    INITIALIZED = "INITIALIZED"
    RUNNING = "RUNNING"
    NO_MORE_TRIAL = "NO_MORE_TRIAL"
    TUNER_NO_MORE_TRIAL = "TUNER_NO_MORE_TRIAL"
    DONE = "DONE"
    ERROR = "ERROR"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens without a `resume`."""
        return self in (ExperimentState.DONE, ExperimentState.ERROR, ExperimentState.STOPPED)

    @property
    def counts_time(self) -> bool:
        """Whether time spent here counts against maxExecDuration."""
        return self in (
            ExperimentState.RUNNING,
            ExperimentState.NO_MORE_TRIAL,
            ExperimentState.TUNER_NO_MORE_TRIAL,
        )


class ExperimentEvent(Enum):
    """What can happen to an experiment as a whole."""

    BEGUN = "begun"
    LIMIT_REACHED = "limit reached"
    TUNER_EXHAUSTED = "tuner exhausted"
    MORE_WANTED = "more wanted"
    TRIAL_PROPOSED = "trial proposed"
    ALL_ENDED = "all ended"
    FAILED = "failed"
    STOP_ASKED = "stop asked"


_E, _X = ExperimentState, ExperimentEvent
NEXT: dict[tuple[ExperimentState, ExperimentEvent], ExperimentState] = {
    (_E.INITIALIZED, _X.BEGUN): _E.RUNNING,
    (_E.INITIALIZED, _X.FAILED): _E.ERROR,
    (_E.INITIALIZED, _X.STOP_ASKED): _E.STOPPING,
    (_E.RUNNING, _X.LIMIT_REACHED): _E.NO_MORE_TRIAL,
    (_E.RUNNING, _X.TUNER_EXHAUSTED): _E.TUNER_NO_MORE_TRIAL,
    (_E.RUNNING, _X.FAILED): _E.ERROR,
    (_E.RUNNING, _X.STOP_ASKED): _E.STOPPING,
    (_E.NO_MORE_TRIAL, _X.ALL_ENDED): _E.DONE,
    (_E.NO_MORE_TRIAL, _X.TUNER_EXHAUSTED): _E.NO_MORE_TRIAL,
    (_E.NO_MORE_TRIAL, _X.FAILED): _E.ERROR,
    (_E.NO_MORE_TRIAL, _X.STOP_ASKED): _E.STOPPING,
    (_E.TUNER_NO_MORE_TRIAL, _X.ALL_ENDED): _E.DONE,
    (_E.TUNER_NO_MORE_TRIAL, _X.TUNER_EXHAUSTED): _E.TUNER_NO_MORE_TRIAL,
    (_E.TUNER_NO_MORE_TRIAL, _X.LIMIT_REACHED): _E.TUNER_NO_MORE_TRIAL,
    (_E.TUNER_NO_MORE_TRIAL, _X.FAILED): _E.ERROR,
    (_E.TUNER_NO_MORE_TRIAL, _X.STOP_ASKED): _E.STOPPING,
    (_E.STOPPING, _X.STOP_ASKED): _E.STOPPING,
    (_E.STOPPING, _X.FAILED): _E.STOPPING,
    (_E.STOPPING, _X.TUNER_EXHAUSTED): _E.STOPPING,  # the answer to a question of before
    (_E.STOPPING, _X.ALL_ENDED): _E.STOPPED,
    (_E.ERROR, _X.FAILED): _E.ERROR,  # the first error is the one shown
    (_E.ERROR, _X.TUNER_EXHAUSTED): _E.ERROR,
    (_E.ERROR, _X.STOP_ASKED): _E.ERROR,
    (_E.DONE, _X.STOP_ASKED): _E.DONE,
    (_E.STOPPED, _X.STOP_ASKED): _E.STOPPED,
    (_E.DONE, _X.FAILED): _E.DONE,  # the tuner did not take the last result; all results are there
    (_E.STOPPED, _X.FAILED): _E.STOPPED,
    # A limit was raised, or the search space is another one. What is stopped or has failed goes on with a resume only.
    (_E.INITIALIZED, _X.MORE_WANTED): _E.INITIALIZED,
    (_E.RUNNING, _X.MORE_WANTED): _E.RUNNING,
    (_E.NO_MORE_TRIAL, _X.MORE_WANTED): _E.RUNNING,
    (_E.TUNER_NO_MORE_TRIAL, _X.MORE_WANTED): _E.RUNNING,  # it is asked again, and may say the same
    (_E.DONE, _X.MORE_WANTED): _E.RUNNING,
    (_E.STOPPING, _X.MORE_WANTED): _E.STOPPING,
    (_E.STOPPED, _X.MORE_WANTED): _E.STOPPED,
    (_E.ERROR, _X.MORE_WANTED): _E.ERROR,
    # Not in the others: no trial is begun there.
    (_E.RUNNING, _X.TRIAL_PROPOSED): _E.RUNNING,
    (_E.NO_MORE_TRIAL, _X.TRIAL_PROPOSED): _E.NO_MORE_TRIAL,
    (_E.TUNER_NO_MORE_TRIAL, _X.TRIAL_PROPOSED): _E.TUNER_NO_MORE_TRIAL,
    (_E.DONE, _X.TRIAL_PROPOSED): _E.RUNNING,
    # resume
    (_E.STOPPING, _X.BEGUN): _E.RUNNING,
    (_E.STOPPED, _X.BEGUN): _E.RUNNING,
    (_E.ERROR, _X.BEGUN): _E.RUNNING,
    (_E.DONE, _X.BEGUN): _E.RUNNING,
    (_E.RUNNING, _X.BEGUN): _E.RUNNING,
    (_E.NO_MORE_TRIAL, _X.BEGUN): _E.RUNNING,
    (_E.TUNER_NO_MORE_TRIAL, _X.BEGUN): _E.RUNNING,
}


@dataclass(slots=True)
class Experiment:
    """One experiment with all its trials. `active_s` is the time it spent running, before `_running_since_s`."""

    experiment_id: str
    limits: Limits
    maximize: bool
    reuses_jobs: bool = False
    completion: Completion = field(default_factory=Completion)
    looks_ahead: bool = False
    """Whether parameters may be asked for before earlier results are known: the tuner does not learn from them."""
    is_assessed: bool = False
    """Whether an assessor hears intermediate results, and may stop trials early."""
    assessor_sees_all: bool = False
    """Whether the assessor is shown whole results, and not their numbers alone."""
    learns_from_early_stopped: bool = False
    """Whether the last intermediate result of a trial that was stopped early is the tuner's to learn from."""
    state: ExperimentState = ExperimentState.INITIALIZED
    error: str = ""
    active_s: float = 0.0
    trials: dict[str, Trial] = field(default_factory=dict)
    counts: Counter[TrialState] = field(default_factory=Counter)
    top: list[Trial] = field(default_factory=list)
    """The best trials that succeeded, best first; no more than TOP_TRIALS."""
    latest_failures: deque[Trial] = field(default_factory=lambda: deque(maxlen=LATEST_FAILURES))
    """The last trials that failed, newest first."""
    latest_without_result: Trial | None = None
    """The last trial that succeeded without a number to learn from."""
    keeper_has_matched: bool = False
    silence: Silence = field(default_factory=Silence)
    jobs: Jobs = field(default_factory=Jobs)
    revisions: Revisions = field(default_factory=Revisions)
    """Which trials have changed, for those who show them."""
    _running_since_s: float | None = None
    _asked: int = 0
    _put_off: list[int] = field(default_factory=list)
    """Numbers of questions that the tuner had no answer to yet."""
    _tuner_waits: bool = False
    """Whether asking now would be no use: nothing has happened since it had no answer."""
    _ends: int = 0
    _ends_when_asked: int = 0
    """How many trials were over when the last question was asked: an answer may be older than an end."""
    _next_sequence_id: int = 0
    _live: int = 0
    _timed: dict[str, None] = field(default_factory=dict)
    """Trials that run, by when their start was heard of; among them some that do not run any more."""
    _ahead: int = 0
    """How many trials may follow the one that a job runs, as long as trials last as they did of late."""
    _finished: bool = False

    # ---- what others may look at

    def duration_s(self, now_s: float) -> float:
        """Seconds spent running so far."""
        return self.active_s + (0.0 if self._running_since_s is None else now_s - self._running_since_s)

    @property
    def time_runs_out_at_s(self) -> float | None:
        """When a limit of time will be reached next, by the monotonic clock; None when nothing would change then."""
        limits, times = self.limits, []
        if (
            self.state is ExperimentState.RUNNING
            and self._running_since_s is not None
            and limits.max_duration_s is not None
        ):
            times.append(self._running_since_s + limits.max_duration_s - self.active_s)
        if limits.max_trial_duration_s is not None and (longest := self._runs_longest()) is not None:
            times.append(longest[1] + limits.max_trial_duration_s)
        return min(times, default=None)

    @property
    def takes_trials(self) -> bool:
        """Whether somebody may propose a trial now."""
        return (self.state, ExperimentEvent.TRIAL_PROPOSED) in NEXT

    @property
    def best(self) -> Trial | None:
        """The best trial that succeeded; of equals, the first."""
        return self.top[0] if self.top else None

    def lesson_of(self, trial: Trial) -> float | None:
        """What the tuner learns from a trial that is over; None: nothing."""
        if trial.state is TrialState.SUCCEEDED:
            return trial.value
        if self._is_cut_and_counts(trial):
            return trial.value if trial.value is not None else reward(trial.intermediate or "")
        return None

    def seen_by_assessor(self, value: str) -> float | None:
        """An intermediate result as the assessor is shown it; None: not at all."""
        return Reported(value) if self.assessor_sees_all else reward(value)

    def metric_of(self, trial: Trial) -> str | None:
        """All that the tuner may know of the result of a trial that is over, as JSON text; None: it has none."""
        if trial.state is TrialState.SUCCEEDED:
            return trial.final
        if self._is_cut_and_counts(trial):
            return trial.final if trial.final is not None else trial.intermediate
        return None

    def _is_cut_and_counts(self, trial: Trial) -> bool:
        # NNI calls a trial that ran for too long early stopped as well.
        is_cut = trial.state in (TrialState.EARLY_STOPPED, TrialState.SYS_CANCELED)
        return is_cut and self.learns_from_early_stopped

    @property
    def trials_with_jobs(self) -> list[Trial]:
        """Those that a job is to run, or runs."""
        return [trial for job in self.jobs.live.values() for trial in self.trials_of(job)]

    def restore(self, trials: Iterable[Trial]) -> None:
        """Take over the trials of an earlier manager, before `Begun` and before its jobs."""
        trials = list(trials)
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        self._timed = dict.fromkeys(
            trial.trial_id for trial in sorted(running, key=lambda trial: trial.heard_s or 0.0)
        )
        for trial in trials:
            self.trials[trial.trial_id] = trial
            self.revisions.note(trial.trial_id)
            self.counts[trial.state] += 1
            self._live += not trial.state.is_final
            self._next_sequence_id = max(self._next_sequence_id, trial.sequence_id + 1)
            self._note_outcome(trial)
            if not trial.state.is_final and not trial.job_id:
                self.jobs.queue.append(trial.trial_id)

    def restore_jobs(self, jobs: Iterable[Job], ended: Iterable[str]) -> None:
        """Take over the jobs of an earlier manager that had not ended; those that had are known by their ids."""
        for job_id in ended:
            self.jobs.remember(job_id)
        for job in jobs:
            self.jobs.add(job)
        # In the order in which they were given, as far as that is known: what has begun came first.
        for trial in sorted(self.trials.values(), key=lambda trial: trial.state is TrialState.WAITING):
            if not trial.state.is_final and (given := self.jobs.live.get(trial.job_id)) is not None:
                give = self.jobs.give if given.trial_id is None else self.jobs.give_ahead
                give(given, trial.trial_id)
                if trial.state is not TrialState.WAITING:
                    self.jobs.note_begun(given.job_id, trial.trial_id)
        for trial in self.trials.values():
            if trial.state.is_final and (had := self.jobs.live.get(trial.job_id)) is not None:
                had.taken += 1
        if not self.reuses_jobs:
            for job in self.jobs.spare:  # its trial is over: nothing is left for it to do
                self.jobs.dismiss(job)

    # ---- events

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do about the event, in this order."""
        effects = self._handle(event, now_s)
        effects += self._go_on(now_s)
        self._note_changes(event, effects)
        return effects

    def _note_changes(self, event: Event, effects: Iterable[Effect]) -> None:
        """What is stored of a trial has changed; and what is not, by what its keepers tell."""
        match event:
            case MetricsStored(key=key) | AttemptStarted(key=key) | TaskReported(key=key):
                self.revisions.note(key.trial_id)
            case AttemptEnded(ended=ended):
                self.revisions.note(ended.key.trial_id)
            case _:
                pass
        for effect in effects:
            if isinstance(effect, SaveTrial):
                self.revisions.note(effect.trial.trial_id)

    def _handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case MetricsStored():
                return self._note_metrics(event)
            case AttemptStarted():
                return self._note_start(event, now_s)
            case AttemptEnded():
                return self._note_end(event.ended)
            case AttemptDelivered():
                return self._note_delivery(event.key, now_s)
            case ParametersSuggested():
                return self._add_trial(event, now_s)
            case TunerExhausted():
                self._asked -= 1
                return self._move(ExperimentEvent.TUNER_EXHAUSTED, now_s)
            case TunerNotReady():
                self._asked -= 1
                insort(self._put_off, event.sequence_id)
                self._tuner_waits = self._ends_when_asked == self._ends
                return []
            case TunerFailed():
                self._asked -= event.was_asked
                return self._fail(event.message, now_s)
            case TaskReported():
                return self._note_report(event.key)
            case CollectionEnded():
                return self._note_cut(event)
            case KeeperIdle():
                return self._note_idle(event)
            case AttemptMissing():
                return self._note_missing(event.key)
            case AttemptLost():
                return self._note_loss(event, now_s)
            case JobGone():
                return self._note_job_end(event, now_s)
            case UsageReported():
                return self._note_usage(event.usage)
            case JobSubmitted():
                self.silence.submitted(event.job_id, now_s)
                return []
            case KeeperMatched():
                self.keeper_has_matched = True
                self.silence.broken(event.job_id)
                return self._note_matched(event)
            case KeeperCutOff():
                if (job := self.jobs.live.get(event.job_id)) is not None:
                    self.jobs.note_link(job, is_up=False)
                return []
            case TrialGivenBack():
                return self._note_given_back(event, now_s)
            case KeeperFound():
                return self._note_found(event.job_id)
            case TrialStopAsked():
                return self._stop_trial(event.trial_id, event.reason, event.at_s, now_s)
            case TrialRefused():
                return self._stop_early(event, now_s)
            case ExperimentStopAsked():
                return self._stop_all(event.at_s, now_s)
            case LimitsChanged():
                return self._change_limits(event.limits, now_s)
            case SearchSpaceChanged():
                return self._seek_more(now_s)
            case TrialProposed():
                return self._add_proposed(event, now_s)
            case Begun():
                return self._begin(now_s)
            case TimePassed():
                return []

    def _begin(self, now_s: float) -> list[Effect]:
        self.error = ""
        self._finished = False
        effects: list[Effect] = []
        for trial in [trial for trial in self.trials.values() if trial.ends and not trial.state.is_final]:
            effects += self._decide(trial) + self._close_when_complete(trial, now_s)
        return effects + self._move(ExperimentEvent.BEGUN, now_s)

    def _add_trial(self, event: ParametersSuggested, now_s: float) -> list[Effect]:
        self._asked -= 1
        self._tuner_waits = False
        trial = Trial(
            event.trial_id,
            event.sequence_id,
            event.parameters,
            event.memo,
            event.at_s,
            job_id="",
        )
        self._know(trial)
        if not self._wants_trials:
            # The answer came after the experiment was stopped: the trial ends before it begins.
            trial.stop_reason = ExitReason.STOPPED_BY_USER
            return self._lose(
                trial, ExitReason.STOPPED_BY_USER, "the experiment was stopped", event.at_s, now_s
            )
        if self.reuses_jobs:
            self.jobs.queue.append(trial.trial_id)
            return [SaveTrial(trial)]
        return self._submit_alone(trial)

    def _add_proposed(self, event: TrialProposed, now_s: float) -> list[Effect]:
        trial = Trial(
            event.trial_id,
            self._next_sequence_id,
            event.parameters,
            {},
            event.at_s,
            job_id="",
            is_customized=True,
        )
        self._next_sequence_id += 1
        self._know(trial)
        self._finished = False
        # It is given a job before the tuner is asked for anything.
        self.jobs.queue.append(trial.trial_id)
        return [SaveTrial(trial), *self._move(ExperimentEvent.TRIAL_PROPOSED, now_s)]

    def _know(self, trial: Trial) -> None:
        self.trials[trial.trial_id] = trial
        self.counts[trial.state] += 1
        self._live += 1

    # ---- limits

    def _change_limits(self, limits: Limits, now_s: float) -> list[Effect]:
        before, self.limits = self.limits, limits
        ends_asking = (limits.max_trials, limits.max_duration_s) != (before.max_trials, before.max_duration_s)
        return self._seek_more(now_s) if ends_asking else []

    def _seek_more(self, now_s: float) -> list[Effect]:
        """Ask the tuner again, unless a limit stands against it."""
        left = self._trials_left
        if self._is_out_of_time(now_s) or (left is not None and left <= 0):
            return []
        self._tuner_waits = False
        effects = self._move(ExperimentEvent.MORE_WANTED, now_s)
        self._finished = self._finished and self.state.is_over
        return effects

    def _is_out_of_time(self, now_s: float) -> bool:
        limit_s = self.limits.max_duration_s
        return limit_s is not None and self.duration_s(now_s) >= limit_s

    @property
    def _trials_left(self) -> int | None:
        """How many more the tuner may be asked for; None: any number."""
        most = self.limits.max_trials
        return None if most is None else most - len(self.trials) - self._asked

    def _runs_longest(self) -> tuple[Trial, float] | None:
        """The trial that has run for longest, and when its start was heard of."""
        while self._timed:
            trial = self.trials[next(iter(self._timed))]
            if trial.state is TrialState.RUNNING and trial.heard_s is not None:
                return trial, trial.heard_s
            del self._timed[trial.trial_id]
        return None

    def _stop_overdue(self, now_s: float) -> list[Effect]:
        """Stop those that have run for too long."""
        limit_s, effects = self.limits.max_trial_duration_s, list[Effect]()
        while limit_s is not None and (longest := self._runs_longest()) is not None:
            trial, heard_s = longest
            if now_s - heard_s < limit_s:
                break
            del self._timed[trial.trial_id]
            at_s = (trial.started_at_s or 0.0) + limit_s
            effects += self._stop_trial(trial.trial_id, ExitReason.TIME_LIMIT, at_s, now_s)
        return effects

    # ---- what keepers tell

    def _note_start(self, event: AttemptStarted, now_s: float) -> list[Effect]:
        trial, key = self.trials[event.key.trial_id], event.key
        if trial.state.is_final:
            return [CloseAttempt(key)]  # too late: its keeper ends it
        if not trial.counts(key) or trial.knows(key):
            return []
        self.jobs.note_begun(trial.job_id, trial.trial_id)
        if trial.state is not TrialState.WAITING and not trial.restarts_with(key):
            # One more task of the attempt that runs, or the same one, told to a manager that has just been started.
            trial.joined(key)
            is_too_late = trial.reason is not None and self.completion.tasks > 1
            return [CancelTrial(trial, trial.reason_for_others)] if is_too_late else []
        with self._counted(trial):
            trial.began(key, event.at_s, now_s)
        self._timed.pop(trial.trial_id, None)
        self._timed[trial.trial_id] = None
        stopped_before = trial.stop_reason or (
            ExitReason.STOPPED_BY_USER if self.state is ExperimentState.STOPPING else None
        )
        if trial.state is TrialState.RUNNING and stopped_before is not None:
            # The cluster began a new attempt of what was to be stopped.
            trial.stop_reason = None
            return self._stop_trial(trial.trial_id, stopped_before, event.at_s, now_s)
        return [SaveTrial(trial)]

    def _note_report(self, key: AttemptKey) -> list[Effect]:
        trial = self.trials[key.trial_id]
        if trial.state.is_final or not trial.counts(key):
            return []
        before = trial.reporter, trial.warning
        trial.warn(trial.reported(key))
        return [SaveTrial(trial)] if before != (trial.reporter, trial.warning) else []

    def _note_cut(self, event: CollectionEnded) -> list[Effect]:
        trial = self.trials[event.key.trial_id]
        is_news = not trial.state.is_final and trial.counts(event.key) and trial.warn(event.message)
        return [SaveTrial(trial)] if is_news else []

    def _note_metrics(self, event: MetricsStored) -> list[Effect]:
        trial = self.trials[event.key.trial_id]
        if trial.state.is_final or not trial.counts(event.key) or trial.reporter != event.key.task:
            return []
        has_news = False
        numbers: list[float] = []
        newest: str | None = None
        for is_final, value in event.records:
            if not is_final:
                newest = value
                trial.intermediate_count += 1
                if self.is_assessed and (number := self.seen_by_assessor(value)) is not None:
                    numbers.append(number)
            elif trial.final is None:  # a second final result is kept as a row, but the first one counts
                trial.final = value
                trial.value = reward(value)
                has_news = True
        if newest is not None:
            trial.intermediate = newest_shown(newest)
        effects: list[Effect] = [SaveTrial(trial)] if has_news else []
        if numbers:
            effects.append(AskAssessor(trial.trial_id, event.key.attempt, tuple(numbers)))
        return effects

    def _note_usage(self, usage: Usage) -> list[Effect]:
        trial = self.trials[usage.key.trial_id]
        if trial.state.is_final or trial.attempt_of(usage.key.task) != usage.key.attempt:
            return []
        is_higher = trial.used(usage)
        return [SaveUsage(usage), *([SaveTrial(trial)] if is_higher else [])]

    def _note_end(self, ended: TrialEnded) -> list[Effect]:
        trial, key = self.trials[ended.key.trial_id], ended.key
        if trial.state.is_final:
            return [CloseAttempt(key)]
        is_told_again = trial.attempt_of(key.task) == key.attempt and key.task in trial.ends
        if is_told_again or not trial.counts(key):
            return []
        trial.ended_in(ended)
        self.jobs.note_begun(trial.job_id, trial.trial_id)  # one that could not be started has no start
        return self._decide(trial)

    def _decide(self, trial: Trial) -> list[Effect]:
        """See whether the ends that were told end the trial."""
        decisive = self.completion.decisive(trial.ends.values()) if trial.ended is None else None
        if decisive is None:
            return []
        with self._counted(trial):
            trial.finished(decisive)
        goes_on_elsewhere = trial.undelivered - trial.ends.keys()
        effects: list[Effect] = [SaveTrial(trial)]
        if goes_on_elsewhere:
            effects.append(CancelTrial(trial, trial.reason_for_others))
        return effects

    def _note_delivery(self, key: AttemptKey, now_s: float) -> list[Effect]:
        trial = self.trials[key.trial_id]
        if trial.state.is_final or not trial.counts(key) or key.task not in trial.ends:
            return [CloseAttempt(key)]
        trial.undelivered.discard(key.task)
        return [*self._close_when_complete(trial, now_s), CloseAttempt(key)]

    def _close_when_complete(self, trial: Trial, now_s: float) -> list[Effect]:
        """Unless other tasks of the trial go on."""
        return [] if trial.ended is None or trial.undelivered else self._close(trial, now_s)

    def _note_missing(self, key: AttemptKey) -> list[Effect]:
        trial = self.trials[key.trial_id]
        is_of_job = self.reuses_jobs and not trial.state.is_final and trial.knows(key)
        return [TakeRest(key)] if is_of_job and key.task in trial.undelivered else []

    def _note_loss(self, event: AttemptLost, now_s: float) -> list[Effect]:
        trial, key = self.trials[event.key.trial_id], event.key
        job = self.jobs.live.get(trial.job_id)
        if trial.state.is_final or job is None or not trial.knows(key) or key.task in trial.ends:
            return []
        if trial.stop_reason is not None:
            return self._lose(trial, trial.stop_reason, _KEEPER_RESTARTED, event.at_s, now_s)
        trial.undelivered.discard(key.task)
        if trial.ended is not None:
            return self._close_when_complete(trial, now_s)
        job.idle_tasks.discard(key.task)
        return [GiveTrial(job, trial, key.task)]

    def _close(self, trial: Trial, now_s: float) -> list[Effect]:
        with self._counted(trial):
            trial.happened(TrialEvent.CLOSED)
        return self._settle(trial, now_s)

    def _lose(
        self, trial: Trial, reason: ExitReason, message: str, at_s: float, now_s: float
    ) -> list[Effect]:
        with self._counted(trial):
            trial.gone(reason, message, at_s, now_s)
        return [*self._settle(trial, now_s), ForgetTrial(trial, trial.job_id)]

    # ---- jobs

    def _note_matched(self, event: KeeperMatched) -> list[Effect]:
        if (job := self.jobs.live.get(event.job_id)) is not None:
            self.jobs.note_link(job, is_up=True, returns_trials=event.returns_trials)
        return self._note_heard(event.job_id)

    def _note_heard(self, job_id: str) -> list[Effect]:
        job = self.jobs.live.get(job_id)
        if job is None or job.was_heard:
            return []
        job.was_heard = True
        return [SaveJob(job)]

    def _note_found(self, job_id: str) -> list[Effect]:
        job = self.jobs.live.get(job_id)
        if job is None:
            return []
        job.was_found = True
        # It has compared its version with the one that the workspace tells before it began.
        self.keeper_has_matched = True
        self.silence.found(job_id)
        return self._note_heard(job_id)

    def _note_idle(self, event: KeeperIdle) -> list[Effect]:
        job = self.jobs.live.get(event.job_id)
        if job is None:
            return []
        if job.state is JobState.LEAVING:
            return [DismissJob(job)]  # the word was lost with a link
        for trial in self.trials_of(job):
            if trial.trial_id in job.asked_ids:
                continue  # it gives it back, or had not heard of it when it said this: it says which in a moment
            if event.task not in trial.ends and event.task not in trial.undelivered:
                # It never heard of the trial: the word was lost with a link or a manager, or is on its way.
                return [GiveTrial(job, trial, event.task)]
        self.jobs.note_idle(job, event.task)
        return []

    def _note_given_back(self, event: TrialGivenBack, now_s: float) -> list[Effect]:
        job = self.jobs.live.get(event.job_id)
        if job is None or event.trial_id not in job.asked_ids:
            return []  # it is over, or is another job's by now
        trial = self.trials[event.trial_id]
        if trial.stop_reason is not None:
            return self._lose(trial, trial.stop_reason, STOPPED_BEFORE_IT_BEGAN, event.at_s, now_s)
        self.jobs.take_back(job, trial.trial_id)
        trial.job_id = ""
        return [SaveTrial(trial)]

    def _ask_back(self) -> list[Effect]:
        """Whoever is idle gets what waits elsewhere, unless the tuner is about to propose something."""
        asked = self.jobs.ask_back(self._asked) if self.reuses_jobs else []
        return [AskBack(job, self.trials[trial_id]) for job, trial_id in asked]

    def _note_job_end(self, event: JobGone, now_s: float) -> list[Effect]:
        job = self.jobs.end(event.job_id)
        if job is None:
            return []
        self.silence.broken(event.job_id)
        effects: list[Effect] = [SaveJob(job, is_over=True)]
        trials = self.trials_of(job)
        is_a_bad_sign = event.was_watched and not (job.was_heard or job.state is JobState.LEAVING)
        if self.reuses_jobs and not trials and is_a_bad_sign and self.jobs.queue:
            # The next one would fail in the same way; so the search ends at some time, with this reason on each trial.
            trial = self.trials[self.jobs.queue.popleft()]
            return effects + self._lose_to_cluster(trial, event, now_s)
        suspect = self._suspect(trials, event)
        for trial in reversed(trials):  # so that those that return to the queue keep their order
            effects += self._lose_job(trial, event, now_s, is_suspect=trial is suspect)
        return effects

    def _suspect(self, trials: list[Trial], event: JobGone) -> Trial | None:
        """The trial that the job may have died of, although it had not begun it: the next one.

        None when it had begun another, which pays for this death, or has left by itself. So each death of a job that had trials
        costs one of them something that it has only so often: its end, a retry, or its innocence.
        """
        has_begun = any(trial.trial_id not in event.untouched for trial in trials)
        return None if event.is_clean or has_begun or not trials else trials[0]

    def _lose_job(self, trial: Trial, event: JobGone, now_s: float, *, is_suspect: bool) -> list[Effect]:
        is_untouched = trial.trial_id in event.untouched
        may_return = event.is_clean or (is_untouched and not (is_suspect and trial.was_returned))
        if self.reuses_jobs and may_return and trial.state is TrialState.WAITING:
            # It left, having been idle for long enough, or died while the trial was on its way to it. A trial that two jobs died
            # of is not given to a third.
            trial.was_returned |= is_suspect
            trial.job_id = ""
            self.jobs.queue.appendleft(trial.trial_id)
            return [SaveTrial(trial)]
        if trial.ended is not None and not trial.undelivered & trial.ends.keys():
            # Those that have told no end never will, and the end that counts is known.
            return [*self._close(trial, now_s), ForgetTrial(trial, trial.job_id)]
        return self._lose_to_cluster(trial, event, now_s)

    def _lose_to_cluster(self, trial: Trial, event: JobGone, now_s: float) -> list[Effect]:
        is_clusters_fault = event.reason in _FAULTS_OF_CLUSTER and trial.stop_reason is None
        # A trial whose command has ended by itself would end so again.
        if not (is_clusters_fault and trial.ended is None and self._wants_trials) or (
            trial.retries >= self.limits.max_retries
        ):
            return self._lose(trial, event.reason, event.message, event.at_s, now_s)
        number = trial.retries + 1
        with self._counted(trial):
            trial.lost(
                f"the cluster lost it ({event.reason.value}); begun again, {number} of {self.limits.max_retries}"
            )
        self.jobs.queue.appendleft(trial.trial_id)
        return [SaveTrial(trial), ForgetTrial(trial, event.job_id)]

    def trials_of(self, job: Job) -> list[Trial]:
        """The trials that the job still has to finish, in order."""
        trials = [self.trials[trial_id] for trial_id in job.trial_ids]
        return [trial for trial in trials if not trial.state.is_final]

    def _give(self) -> list[Effect]:
        """Give what waits to who is idle, and what is asked for ahead to who is busy. Jobs that are too many by now go first."""
        effects: list[Effect] = []
        jobs = self.jobs
        excess = jobs.staying - self.limits.concurrency if self.reuses_jobs else 0
        if excess > 0:
            for spare in jobs.spare[:excess]:
                jobs.dismiss(spare)
                effects.append(DismissJob(spare))
        while jobs.queue and (job := jobs.next_idle()) is not None:
            jobs.give(job, jobs.queue[0])
            effects += self._give_first(job)
        while excess <= 0 and jobs.missing > 0 and (job := jobs.next_with_room(self._most_ahead)) is not None:
            jobs.give_ahead(job, jobs.queue[0])
            effects += self._give_first(job)
        return effects

    def _give_first(self, job: Job) -> list[Effect]:
        trial = self.trials[self.jobs.queue.popleft()]
        trial.job_id = job.job_id
        return [SaveTrial(trial), GiveTrial(job, trial)]

    def _submit_alone(self, trial: Trial) -> list[Effect]:
        """Without reuse there is one job per trial, so the trial's name serves both, until the job is lost."""
        trial.job_id = f"{trial.trial_id}-{trial.retries}" if trial.retries else trial.trial_id
        job = self.jobs.add(Job(trial.job_id))
        self.jobs.give(job, trial.trial_id)
        return [SaveTrial(trial), SaveJob(job), SubmitJob(job)]

    def _fit_jobs(self) -> list[Effect]:
        """Ask for as many jobs as are missing, or let those go that are not needed any more."""
        effects: list[Effect] = []
        jobs = self.jobs
        if not self.reuses_jobs:
            # What waits is what a person proposed, or the cluster lost.
            while jobs.queue and self._live - len(jobs.queue) + self._asked < self.limits.concurrency:
                effects += self._submit_alone(self.trials[jobs.queue.popleft()])
            return effects
        for _ in range(min(jobs.missing, self.limits.concurrency - jobs.staying)):
            job = jobs.add(Job(jobs.new_id()))
            effects += [SaveJob(job), SubmitJob(job)]
        will_more_come = self.state in (ExperimentState.INITIALIZED, ExperimentState.RUNNING) or self._asked
        if not will_more_come and not jobs.queue and jobs.needless > 0:
            for job in jobs.spare[: jobs.needless]:
                jobs.dismiss(job)
                effects.append(DismissJob(job))
        return effects

    # ---- the end of a trial

    def _settle(self, trial: Trial, now_s: float) -> list[Effect]:
        """The trial is final: its place is free, and the tuner learns of it."""
        self._live -= 1
        self._timed.pop(trial.trial_id, None)
        self._ends += 1
        self._tuner_waits = False
        self._note_outcome(trial)
        if self.reuses_jobs:
            self.jobs.free(trial.job_id, trial.trial_id)
            if trial.ended is not None and trial.started_at_s is not None and trial.ended_at_s is not None:
                lasted_s = trial.ended_at_s - trial.started_at_s
                most = next((most for below_s, most in _AHEAD_BY_DURATION_S if lasted_s < below_s), 0)
                # One that failed at once says nothing of how long the others last.
                self._ahead = most if trial.state is TrialState.SUCCEEDED else min(most, self._ahead)
        elif (job := self.jobs.live.get(trial.job_id)) is not None:
            self.silence.broken(job.job_id)
            self.jobs.dismiss(job)  # its keeper ends by itself
        effects: list[Effect] = [SaveTrial(trial)]
        lesson = self.lesson_of(trial)
        if not trial.is_customized:
            effects.append(TellTuner(trial.sequence_id, lesson, trial.trial_id))
        elif lesson is not None:
            effects.append(TeachTuner(trial.trial_id, lesson))
        if self.is_assessed:
            effects.append(TellAssessor(trial.trial_id, trial.state is TrialState.SUCCEEDED))
        if trial.reason is ExitReason.VERSION and not self.keeper_has_matched:
            # Every other job would fail in the same way.
            effects += self._fail(trial.message, now_s)
        return effects

    def _note_outcome(self, trial: Trial) -> None:
        if trial.state is TrialState.FAILED:
            self.latest_failures.appendleft(trial)
        elif trial.is_without_result:
            self.latest_without_result = trial
        elif trial.state is TrialState.SUCCEEDED:
            insort(self.top, trial, key=self._rank)
            del self.top[TOP_TRIALS:]

    def _rank(self, trial: Trial) -> float:
        value = trial.value or 0.0
        return -value if self.maximize else value

    def _stop_trial(self, trial_id: str, reason: ExitReason, at_s: float, now_s: float) -> list[Effect]:
        trial = self.trials[trial_id]
        if trial.state.is_final:
            return []
        with self._counted(trial):
            trial.happened(TrialEvent.STOP_ASKED)
        if trial.stop_reason is not None or trial.state is not TrialState.STOPPING:
            return []
        trial.stop_reason = reason
        if not trial.job_id:
            self.jobs.queue.remove(trial_id)
            return self._lose(trial, reason, STOPPED_BEFORE_IT_BEGAN, at_s, now_s)
        job = self.jobs.live.get(trial.job_id)
        if job is not None and trial_id in job.next_ids and trial.started_at_s is None:
            lost = self._lose(trial, reason, STOPPED_BEFORE_IT_BEGAN, at_s, now_s)
            return [*lost, RecallTrial(trial, reason)]
        return [SaveTrial(trial), CancelTrial(trial, reason)]

    def _stop_early(self, event: TrialRefused, now_s: float) -> list[Effect]:
        if self.trials[event.trial_id].attempt != event.attempt:
            return []  # it has begun anew meanwhile
        return self._stop_trial(event.trial_id, ExitReason.EARLY_STOPPED, event.at_s, now_s)

    def _stop_all(self, at_s: float, now_s: float) -> list[Effect]:
        effects = self._move(ExperimentEvent.STOP_ASKED, now_s)
        for trial in [trial for trial in self.trials.values() if not trial.state.is_final]:
            effects += self._stop_trial(trial.trial_id, ExitReason.STOPPED_BY_USER, at_s, now_s)
        return effects

    def _fail(self, message: str, now_s: float) -> list[Effect]:
        self.error = self.error or message
        return self._move(ExperimentEvent.FAILED, now_s)

    # ---- after every event

    @property
    def _most_ahead(self) -> int:
        return self._ahead if self.looks_ahead and self.reuses_jobs and self.jobs.tasks == 1 else 0

    @property
    def _wants_trials(self) -> bool:
        return self.state in (
            ExperimentState.RUNNING,
            ExperimentState.TUNER_NO_MORE_TRIAL,
            ExperimentState.NO_MORE_TRIAL,
        )

    def _go_on(self, now_s: float) -> list[Effect]:
        effects = self._stop_overdue(now_s) + self._give()
        if self.state is ExperimentState.RUNNING:
            left = self._trials_left
            if self._is_out_of_time(now_s) or (left is not None and left <= 0 and not self._asked):
                effects += self._move(ExperimentEvent.LIMIT_REACHED, now_s)
            elif self._tuner_waits:
                if not self._live and not self._asked:
                    self._tuner_waits = False
                    effects += self._move(ExperimentEvent.TUNER_EXHAUSTED, now_s)
            else:
                ahead = self.jobs.busy * self._most_ahead
                free = self.limits.concurrency + ahead - self._live - self._asked
                for _ in range(free if left is None else min(free, left)):
                    self._asked += 1
                    self._ends_when_asked = self._ends
                    effects.append(AskTuner(self._new_sequence_id()))
        effects += self._ask_back() + self._fit_jobs()
        if self._live == 0 and self._asked == 0:
            if (self.state, ExperimentEvent.ALL_ENDED) in NEXT:
                effects += self._move(ExperimentEvent.ALL_ENDED, now_s)
            if self.state.is_over and not self._finished:
                self._finished = True
                effects.append(Finish())
        return effects

    def _new_sequence_id(self) -> int:
        if self._put_off:
            return self._put_off.pop(0)
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    def _move(self, event: ExperimentEvent, now_s: float) -> list[Effect]:
        before, self.state = self.state, NEXT[self.state, event]
        if before.counts_time and self._running_since_s is not None and not self.state.counts_time:
            self.active_s += now_s - self._running_since_s
            self._running_since_s = None
        elif self.state.counts_time and self._running_since_s is None:
            self._running_since_s = now_s
        return [SaveExperiment()] if before is not self.state or event is ExperimentEvent.FAILED else []

    def _counted(self, trial: Trial) -> "_Counted":
        return _Counted(self.counts, trial)


@dataclass(slots=True)
class _Counted:
    """Keeps the counts by state right while a trial changes its own."""

    counts: Counter[TrialState]
    trial: Trial

    def __enter__(self) -> None:
        self.counts[self.trial.state] -= 1

    def __exit__(self, *_: object) -> None:
        self.counts[self.trial.state] += 1
