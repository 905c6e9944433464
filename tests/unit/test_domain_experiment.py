"""The experiment: whole searches played in milliseconds, with the tuner, the cluster and the keepers as lines of a test."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from attempts import attempt_id
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nni_manager.domain.attempts import AttemptReport
from nni_manager.domain.events import (
    AddObservation,
    AskAssessor,
    AskTuner,
    AttemptDelivered,
    AttemptEnded,
    AttemptStarted,
    CancelTrial,
    CloseAttempt,
    DetachTrial,
    DispatchTrial,
    DrainJob,
    EarlyStopRequested,
    Effect,
    Event,
    ExperimentStopAsked,
    Finish,
    JobTerminated,
    KeeperConnected,
    LimitsChanged,
    ManagerReady,
    MetricsStored,
    ParametersSuggested,
    ProblemFound,
    SaveExperiment,
    SaveJob,
    SaveTrial,
    SaveUsage,
    SearchSpaceChanged,
    SubmitJob,
    TaskReported,
    TellAssessor,
    TellTuner,
    TimePassed,
    TrialProposed,
    TrialStopAsked,
    TunerExhausted,
    TunerFailed,
    TunerNotReady,
    UsageReported,
)
from nni_manager.domain.experiment import TRANSITIONS, Experiment, ExperimentEvent, ExperimentState
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import (
    NO_FINAL_RESULT,
    NO_NUMBER_IN_FINAL_RESULT,
    TERMINAL_STATE,
    Trial,
    TrialState,
)
from trial_keeper.wire.messages import AttemptKey, TrialEnded, Usage
from trial_keeper.wire.reasons import ExitReason


class Search:
    """An experiment and what it asked for. Trials are named t0, t1, … by their sequence ids."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.now_s = 0.0
        self.asked: list[int] = []
        """Questions that the tuner has not answered."""
        self.told: list[TellTuner] = []
        self.taught: list[AddObservation] = []
        self.assessed: list[AskAssessor | TellAssessor] = []
        self.submitted: list[str] = []
        self.stopped: list[tuple[str, ExitReason]] = []
        self.given: list[tuple[str, str]] = []
        self.dismissed: list[str] = []
        self.closed: list[AttemptKey] = []
        self.finishes = 0

    @property
    def state(self) -> ExperimentState:
        return self.experiment.state

    @property
    def live(self) -> list[Trial]:
        return [trial for trial in self.experiment.trials.values() if not trial.state.is_terminal]

    def job(self, job_id: str) -> Job:
        return self.experiment.jobs.live[job_id]

    def handle(self, event: Event) -> list[Effect]:
        effects = self.experiment.handle(event, self.now_s)
        for effect in effects:
            match effect:
                case AskTuner():
                    self.asked.append(effect.sequence_id)
                case TellTuner():
                    self.told.append(effect)
                case AddObservation():
                    self.taught.append(effect)
                case AskAssessor() | TellAssessor():
                    self.assessed.append(effect)
                case SubmitJob():
                    self.submitted.append(effect.job.job_id)
                case CancelTrial():
                    self.stopped.append((effect.trial.trial_id, effect.reason))
                case DispatchTrial():
                    self.given.append((effect.job.job_id, effect.trial.trial_id))
                case DrainJob():
                    self.dismissed.append(effect.job.job_id)
                case CloseAttempt():
                    self.closed.append(effect.key)
                case Finish():
                    self.finishes += 1
                case SaveTrial() | SaveExperiment() | SaveJob() | DetachTrial():
                    pass
        return effects

    # ---- what the others do

    def suggest(self) -> str:
        """The tuner answers its oldest question."""
        sequence_id = self.asked.pop(0)
        self.handle(ParametersSuggested(f"t{sequence_id}", sequence_id, {"lr": 0.1}, {}, 10.0))
        return f"t{sequence_id}"

    def put_off(self, index: int = 0) -> None:
        """The tuner has no answer now."""
        self.handle(TunerNotReady(self.asked.pop(index % len(self.asked))))

    def propose(self, trial_id: str) -> Trial:
        """Somebody wants a trial of his own."""
        self.handle(TrialProposed(trial_id, {"lr": 0.7}, 10.0))
        return self.trial(trial_id)

    def lose_job(self, trial_id: str, reason: ExitReason = ExitReason.JOB_LOST) -> list[Effect]:
        return self.handle(JobTerminated(self.trial(trial_id).job_id, reason, "gone", 60.0))

    def limit(self, **limits: Any) -> list[Effect]:
        return self.handle(LimitsChanged(replace(self.experiment.budget.limits, **limits)))

    def start(self, trial_id: str, attempt: int = 0) -> list[Effect]:
        return self.handle(AttemptStarted(AttemptKey(trial_id, attempt_id(attempt), "main"), 20.0))

    def report(
        self, trial_id: str, *values: str, final: bool = True, attempt: int = 0, offset: int = 0
    ) -> list[Effect]:
        records = tuple((final, value) for value in values)
        self.handle(TaskReported(AttemptKey(trial_id, attempt_id(attempt), "main")))
        key = AttemptKey(trial_id, attempt_id(attempt), "main")
        return self.handle(MetricsStored(key, records, offset if final else None))

    def end(
        self,
        trial_id: str,
        reason: ExitReason = ExitReason.SUCCEEDED,
        attempt: int = 0,
        message: str = "",
        **more: Any,
    ) -> list[Effect]:
        code = 0 if reason is ExitReason.SUCCEEDED else 1
        key = AttemptKey(trial_id, attempt_id(attempt), "main")
        return self.handle(AttemptEnded(TrialEnded(key, reason, code, 20.0, 30.0, {}, message, **more)))

    def deliver(self, trial_id: str, attempt: int = 0) -> list[Effect]:
        return self.handle(AttemptDelivered(AttemptKey(trial_id, attempt_id(attempt), "main")))

    def run(self, trial_id: str, value: str | None = "1", reason: ExitReason = ExitReason.SUCCEEDED) -> None:
        """From its start to its final state."""
        self.start(trial_id)
        if value is not None:
            self.report(trial_id, value)
        self.end(trial_id, reason)
        self.deliver(trial_id)

    def trial(self, trial_id: str) -> Trial:
        return self.experiment.trials[trial_id]


@pytest.fixture
def a_search() -> Callable[..., Search]:
    def make(
        *,
        concurrency: int = 2,
        max_trials: int | None = 5,
        max_duration_s: float | None = None,
        maximize: bool = True,
        is_begun: bool = True,
        **limits: Any,
    ) -> Search:
        limits = {"max_trials": max_trials, "max_duration_s": max_duration_s, **limits}
        search = Search(Experiment("exp", Limits(concurrency, **limits), maximize))
        if is_begun:
            search.handle(ManagerReady())
        return search

    return make


def restored(search: Search) -> Search:
    """The same experiment in the next manager: what was stored, and nothing else."""
    before = search.experiment
    after = Experiment(
        before.experiment_id,
        before.budget.limits,
        before.leaderboard.maximize,
        state=before.state,
        active_s=before.budget.duration_s(search.now_s),
        any_compatible_keeper=before.scheduler.any_compatible_keeper,
    )
    after.restore(before.trials.values())
    after.scheduler.restore([Job(job_id) for job_id in before.jobs.live], [])
    return Search(after)


# ---- the table


@pytest.mark.parametrize(("state", "event"), list(product(ExperimentState, ExperimentEvent)))
def test_what_the_table_does_not_hold_cannot_happen(
    a_search, state: ExperimentState, event: ExperimentEvent
) -> None:
    experiment = a_search(is_begun=False).experiment
    experiment.state = state
    if (state, event) in TRANSITIONS:
        experiment._move(event, 0.0)
        assert experiment.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            experiment._move(event, 0.0)
        assert experiment.state is state


@pytest.mark.parametrize("state", ExperimentState)
def test_every_experiment_can_be_stopped_and_resumed(state: ExperimentState) -> None:
    assert (state, ExperimentEvent.STOP_ASKED) in TRANSITIONS
    assert TRANSITIONS[state, ExperimentEvent.MANAGER_READY] is ExperimentState.RUNNING


# ---- the ordinary run


@pytest.mark.parametrize(("concurrency", "max_trials"), [(1, 1), (1, 4), (2, 5), (4, 5), (8, 3)])
def test_an_ordinary_run_makes_just_its_trials_and_is_done(a_search, concurrency, max_trials) -> None:
    search = a_search(concurrency=concurrency, max_trials=max_trials)
    while search.asked or search.live:
        assert len(search.asked) + len(search.live) <= concurrency
        while search.asked:
            search.suggest()
        search.run(search.live[0].trial_id, value=str(search.live[0].sequence_id))
    assert search.state is ExperimentState.DONE
    assert search.finishes == 1
    assert search.submitted == [f"t{number}" for number in range(max_trials)]
    assert search.told == [TellTuner(number, float(number)) for number in range(max_trials)]
    assert search.experiment.lifecycle.counts[TrialState.SUCCEEDED] == max_trials


def test_a_new_experiment_asks_for_as_many_trials_as_may_run(a_search) -> None:
    search = a_search(concurrency=3, is_begun=False)
    assert search.handle(ManagerReady()) == [SaveExperiment(), AskTuner(0), AskTuner(1), AskTuner(2)]


def test_a_trial_is_stored_before_it_is_submitted(a_search) -> None:
    search = a_search()
    effects = search.handle(ParametersSuggested("t0", 0, {"lr": 1}, {"note": 1}, 10.0))
    trial = search.trial("t0")
    assert effects[:3] == [
        SaveTrial(trial),
        SaveJob(Job("t0", JobState.BUSY, "t0", taken=1)),
        SubmitJob(search.job("t0")),
    ]
    assert (trial.parameters, trial.metadata, trial.created_at_s) == ({"lr": 1}, {"note": 1}, 10.0)


def test_a_place_is_free_when_every_byte_of_the_trial_is_stored_and_not_before(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0")
    assert search.asked == []
    assert search.trial("t0").state is TrialState.CLOSING
    search.deliver("t0")
    assert search.asked == [1]


def test_a_final_result_that_arrives_after_the_end_still_counts(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0")
    search.report("t0", "0.75")
    search.deliver("t0")
    assert search.told == [TellTuner(0, 0.75)]


def test_a_trial_that_is_final_keeps_only_what_is_stored_of_it(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.end("t0")
    trial = search.trial("t0")
    assert (len(trial.registered.registered), len(trial.attempts), len(trial.ends)) == (1, 1, 1)
    search.deliver("t0")
    assert (trial.state, trial.result) == (TrialState.SUCCEEDED, "0.5")
    assert (trial.registered.registered, trial.attempts, trial.ends, trial.ended) == ([], {}, [], None)


def test_a_trial_so_short_that_its_start_is_never_told_counts_like_any_other(a_search) -> None:
    search = a_search(concurrency=1)
    search.suggest()
    search.report("t0", "0.5")
    search.end("t0")
    search.deliver("t0")
    assert search.trial("t0").state is TrialState.SUCCEEDED
    assert search.told == [TellTuner(0, 0.5)]


def test_the_keeper_is_let_go_after_the_trial_is_stored(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0")
    effects = search.deliver("t0")
    trial, key = search.trial("t0"), AttemptKey("t0", attempt_id(0), "main")
    assert effects[:3] == [SaveTrial(trial), TellTuner(0, None), CloseAttempt(key)]


def test_failed_trials_count_towards_the_limit_and_have_no_result(a_search) -> None:
    search = a_search(concurrency=1, max_trials=3)
    for _ in range(3):
        search.run(search.suggest(), value="1", reason=ExitReason.NONZERO_EXIT)
    assert search.state is ExperimentState.DONE
    assert search.told == [TellTuner(number, None) for number in range(3)]
    assert search.experiment.lifecycle.counts == Counter({TrialState.FAILED: 3}) + Counter()
    assert search.experiment.leaderboard.best is None


def test_without_a_limit_it_goes_on(a_search) -> None:
    search = a_search(concurrency=1, max_trials=None)
    for _ in range(200):
        search.run(search.suggest())
    assert search.state is ExperimentState.RUNNING
    assert search.asked == [200]


def test_the_limit_of_trials_is_reached_when_the_last_was_made(a_search) -> None:
    search = a_search(concurrency=2, max_trials=2)
    search.suggest()
    assert search.state is ExperimentState.RUNNING
    search.suggest()
    assert search.state is ExperimentState.NO_MORE_TRIAL
    search.run("t0")
    assert search.state is ExperimentState.NO_MORE_TRIAL
    search.run("t1")
    assert search.state is ExperimentState.DONE


def test_places_taken_away_are_not_filled_again_and_new_ones_are(a_search) -> None:
    search = a_search(concurrency=3, max_trials=None)
    for _ in range(3):
        search.suggest()
    search.handle(LimitsChanged(Limits(1, None, None)))
    search.run("t0")
    search.run("t1")
    assert search.asked == []
    search.handle(LimitsChanged(Limits(4, None, None)))
    assert search.asked == [3, 4, 5]


# ---- time


def test_time_ends_the_asking_and_not_the_trials(a_search) -> None:
    search = a_search(concurrency=1, max_duration_s=60)
    search.start(search.suggest())
    assert search.experiment.time_runs_out_at_s == 60
    search.now_s = 59.9
    search.handle(TimePassed())
    assert search.state is ExperimentState.RUNNING
    search.now_s = 60
    search.handle(TimePassed())
    assert search.state is ExperimentState.NO_MORE_TRIAL
    search.now_s = 100
    search.run("t0")
    assert search.state is ExperimentState.DONE
    assert search.asked == []
    assert search.experiment.budget.duration_s(500) == 100


def test_nobody_needs_to_look_at_the_clock_once_time_has_run_out(a_search) -> None:
    search = a_search(concurrency=1, max_duration_s=60)
    search.suggest()
    search.now_s = 60
    search.handle(TimePassed())
    assert search.experiment.time_runs_out_at_s is None
    assert a_search().experiment.time_runs_out_at_s is None
    assert a_search(max_duration_s=9, is_begun=False).experiment.time_runs_out_at_s is None


def test_a_question_that_time_cut_off_still_becomes_a_trial(a_search) -> None:
    search = a_search(concurrency=1, max_duration_s=60)
    search.now_s = 61
    search.handle(TimePassed())
    assert (search.state, search.finishes) == (ExperimentState.NO_MORE_TRIAL, 0)
    search.run(search.suggest())
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_time_between_stop_and_resume_does_not_count(a_search) -> None:
    search = a_search(max_duration_s=100)
    search.now_s = 30
    search.handle(TunerFailed("boom", was_asked=True))
    search.handle(TunerExhausted())
    search.now_s = 1000
    assert search.experiment.budget.duration_s(1000) == 30
    search.handle(ManagerReady())
    assert search.experiment.time_runs_out_at_s == 1070
    search.now_s = 1010
    assert search.experiment.budget.duration_s(1010) == 40


# ---- the tuner


def test_an_exhausted_tuner_ends_the_asking_and_not_the_trials(a_search) -> None:
    search = a_search(concurrency=2, max_trials=None)
    search.start(search.suggest())
    search.asked.clear()
    search.handle(TunerExhausted())
    assert search.state is ExperimentState.TUNER_NO_MORE_TRIAL
    search.run("t0")
    assert search.asked == []
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_an_assessor_of_the_users_own_sees_whole_results(a_search) -> None:
    search = a_search()
    search.experiment.lifecycle.is_assessed = search.experiment.lifecycle.assessor_sees_all = True
    trial_id = search.suggest()
    search.start(trial_id)
    search.report(trial_id, '{"acc": 1}', "2", final=False)
    (asked,) = search.assessed
    assert isinstance(asked, AskAssessor)
    assert [each.text for each in asked.values] == ['{"acc": 1}', "2"]
    assert asked.values[1] == 2.0


def test_a_tuner_that_has_nothing_now_is_asked_again_when_a_trial_is_over(a_search) -> None:
    search = a_search(concurrency=3)
    search.suggest()
    search.suggest()
    search.put_off()
    assert (search.asked, search.state) == ([], ExperimentState.RUNNING)
    search.start("t0")
    search.handle(TimePassed())
    assert search.asked == []
    search.run("t1")
    assert search.asked == [2, 3]
    search.put_off(1)
    assert search.suggest() == "t2"
    assert search.asked == [3], "it had an answer, so it may have another"


def test_an_end_while_the_tuner_was_asked_may_have_changed_its_answer(a_search) -> None:
    search = a_search(concurrency=2, max_trials=None)
    search.suggest()
    search.run("t0")
    assert search.asked == [1, 2]
    search.put_off()
    search.put_off()
    assert search.state is ExperimentState.DONE, "nothing runs, and nothing has changed since"
    other = a_search(concurrency=2)
    other.suggest()
    other.put_off()
    assert other.asked == []
    other.run("t0")
    assert other.asked == [1, 2]


def test_an_answer_older_than_an_end_does_not_keep_the_tuner_from_being_asked(a_search) -> None:
    search = a_search(concurrency=2, max_trials=2)
    search.suggest()
    assert search.asked == [1]
    search.run("t0")  # the question was asked before this
    search.put_off()
    assert search.asked == [1]


def test_a_tuner_that_has_nothing_while_nothing_runs_has_nothing_at_all(a_search) -> None:
    search = a_search(concurrency=1)
    search.suggest()
    search.run("t0")
    search.put_off()
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_every_open_question_may_be_answered_by_exhaustion(a_search) -> None:
    search = a_search(concurrency=3, max_trials=None)
    for _ in range(3):
        search.handle(TunerExhausted())
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_a_tuner_with_nothing_to_offer_for_a_last_place_ends_the_experiment(a_search) -> None:
    search = a_search(concurrency=1, max_trials=1)
    search.handle(TunerExhausted())
    assert search.state is ExperimentState.DONE


def test_a_tuner_that_raises_stops_the_asking_and_running_trials_are_still_recorded(a_search) -> None:
    search = a_search(concurrency=2, max_trials=None)
    search.start(search.suggest())
    search.start(search.suggest())
    search.run("t0")
    search.handle(TunerFailed("Traceback: boom", was_asked=True))
    assert (search.state, search.experiment.error) == (ExperimentState.ERROR, "Traceback: boom")
    assert search.finishes == 0
    search.run("t1", "0.9")
    assert search.trial("t1").value == 0.9
    assert search.told[-1] == TellTuner(1, 0.9)
    assert search.finishes == 1
    assert search.stopped == []


def test_the_first_error_is_the_one_shown(a_search) -> None:
    search = a_search(concurrency=2)
    search.handle(TunerFailed("first", was_asked=True))
    search.handle(TunerFailed("second", was_asked=True))
    assert (search.experiment.error, search.finishes) == ("first", 1)


def test_a_tuner_that_raises_over_a_result_stops_the_asking_too(a_search) -> None:
    search = a_search(concurrency=2, max_trials=None)
    search.suggest()
    search.suggest()
    search.run("t0")
    search.handle(TunerFailed("cannot take it", was_asked=False))
    assert search.state is ExperimentState.ERROR
    search.suggest()  # the question of before is answered in the end
    search.run("t1")
    assert search.finishes == 1


@pytest.mark.parametrize("state", [ExperimentState.DONE, ExperimentState.STOPPED])
def test_a_tuner_that_raises_over_the_last_result_comes_too_late_to_matter(a_search, state) -> None:
    search = a_search(concurrency=1, max_trials=1)
    search.suggest()
    if state is ExperimentState.STOPPED:
        search.handle(ExperimentStopAsked(40.0))
    search.run("t0")
    assert search.state is state
    search.handle(TunerFailed("cannot take it", was_asked=False))
    assert (search.state, search.finishes) == (state, 1)
    assert search.experiment.error == "cannot take it"


@pytest.mark.parametrize("trouble", [ExperimentStopAsked(40.0), TunerFailed("boom", was_asked=False)])
@pytest.mark.parametrize(
    "answer",
    [TunerExhausted(), TunerFailed("late", was_asked=True), ParametersSuggested("t0", 0, {}, {}, 1.0)],
    ids=lambda answer: type(answer).__name__,
)
def test_any_answer_may_come_after_the_asking_has_stopped(a_search, trouble: Event, answer: Event) -> None:
    search = a_search(concurrency=1)
    search.handle(trouble)
    assert search.finishes == 0
    search.handle(answer)
    assert (search.finishes, search.submitted) == (1, [])


# ---- stopping


def test_stopping_cancels_all_trials_and_then_is_stopped(a_search) -> None:
    search = a_search(concurrency=3, max_trials=None)
    waiting, running, closing = search.suggest(), search.suggest(), search.suggest()
    search.start(running)
    search.start(closing)
    search.end(closing)
    search.handle(ExperimentStopAsked(40.0))
    assert search.state is ExperimentState.STOPPING
    assert search.stopped == [
        (waiting, ExitReason.STOPPED_BY_USER),
        (running, ExitReason.STOPPED_BY_USER),
    ]
    search.deliver(closing)
    search.end(running, ExitReason.SIGNAL)
    search.deliver(running)
    assert search.finishes == 0
    search.handle(JobTerminated(waiting, ExitReason.JOB_LOST, "never began", 40.0))
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)
    assert [search.trial(trial).state for trial in (waiting, running, closing)] == [
        TrialState.USER_CANCELED,
        TrialState.USER_CANCELED,
        TrialState.SUCCEEDED,
    ]
    assert search.asked == []


def test_stopping_twice_is_stopping_once(a_search) -> None:
    search = a_search(concurrency=1)
    search.suggest()
    search.handle(ExperimentStopAsked(40.0))
    assert search.handle(ExperimentStopAsked(40.0)) == []
    assert len(search.stopped) == 1


def test_an_experiment_without_trials_stops_at_once(a_search) -> None:
    search = a_search(is_begun=False)
    search.handle(ExperimentStopAsked(40.0))
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)


def test_an_answer_that_comes_after_the_stop_becomes_a_cancelled_trial_and_no_job(a_search) -> None:
    search = a_search(concurrency=1)
    search.handle(ExperimentStopAsked(40.0))
    assert search.state is ExperimentState.STOPPING
    search.suggest()
    assert search.trial("t0").state is TrialState.USER_CANCELED
    assert (search.submitted, search.told) == ([], [TellTuner(0, None)])
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)


def test_an_answer_that_comes_after_the_experiment_failed_becomes_a_failed_trial_with_its_error(
    a_search,
) -> None:
    search = a_search(concurrency=2)
    search.suggest()
    search.handle(TunerFailed("cannot use the tuner: no", was_asked=False))
    assert search.state is ExperimentState.ERROR
    search.suggest()
    trial = search.trial("t1")
    assert (trial.state, trial.message) == (TrialState.FAILED, "cannot use the tuner: no")
    assert search.submitted == ["t0"]


def test_an_answer_that_comes_after_the_stop_is_cancelled_also_if_the_tuner_failed_since(a_search) -> None:
    search = a_search(concurrency=2)
    search.start(search.suggest())
    search.handle(ExperimentStopAsked(40.0))
    search.handle(TunerFailed("cannot use the tuner: no", was_asked=False))
    assert search.state is ExperimentState.STOPPING
    search.suggest()
    trial = search.trial("t1")
    assert (trial.state, trial.message) == (TrialState.USER_CANCELED, "the experiment was stopped")


def test_one_trial_can_be_stopped_and_another_takes_its_place(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 40.0))
    search.handle(TrialStopAsked("t0", ExitReason.EARLY_STOPPED, 40.0))
    assert search.stopped == [("t0", ExitReason.STOPPED_BY_USER)]
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert search.trial("t0").state is TrialState.USER_CANCELED
    assert search.asked == [1]


def assessed(search: Search, *, learns: bool = False) -> Search:
    search.experiment.lifecycle.is_assessed = True
    search.experiment.lifecycle.learns_from_early_stopped = learns
    search.start(search.suggest())
    return search


def test_an_assessor_hears_the_numbers_of_intermediate_results_and_the_end(a_search) -> None:
    search = assessed(a_search(concurrency=1))
    search.report("t0", "0.5", "NaN", '"loss"', '{"default": 2, "other": 1}', final=False)
    search.report("t0", '"none"', final=False)
    search.report("t0", "7")
    search.end("t0")
    search.deliver("t0")
    assert search.assessed == [AskAssessor("t0", 0, (0.5, 2.0)), TellAssessor("t0", has_succeeded=True)]


def test_without_an_assessor_nobody_is_asked(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5", final=False)
    search.end("t0")
    search.deliver("t0")
    assert search.assessed == []


@pytest.mark.parametrize(("learns", "lesson"), [(False, None), (True, 0.25)])
def test_a_trial_that_the_assessor_refuses_is_stopped_early_and_its_last_result_told_if_wanted(
    a_search, learns: bool, lesson: float | None
) -> None:
    search = assessed(a_search(concurrency=1), learns=learns)
    search.report("t0", "0.5", "0.25", final=False)
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    assert search.stopped == [("t0", ExitReason.EARLY_STOPPED)]
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert search.trial("t0").state is TrialState.EARLY_STOPPED
    assert search.told == [TellTuner(0, lesson)]
    assert search.assessed[-1] == TellAssessor("t0", has_succeeded=False)
    assert search.experiment.leaderboard.best is None
    assert search.asked == [1]


@pytest.mark.parametrize(
    "reason", [ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER, ExitReason.TIME_LIMIT]
)
@pytest.mark.parametrize(("size", "succeeds"), [(None, False), (50, False), (51, True)])
def test_a_final_result_of_a_trial_that_was_stopped_counts_for_the_tuner_and_the_best(
    a_search, reason: ExitReason, size: int | None, succeeds: bool
) -> None:
    search = assessed(a_search(concurrency=2))
    search.run(search.suggest(), "0.1")
    search.report("t0", "0.25", final=False)
    search.handle(TrialStopAsked("t0", reason, 40.0))
    # Its bytes may come after the word that it has ended.
    search.end("t0", reason, metrics_size_at_stop=size)
    search.report("t0", "0.5", "0.9", offset=50)
    search.deliver("t0")
    state = TrialState.SUCCEEDED if succeeds else TERMINAL_STATE[reason]
    assert search.trial("t0").state is state
    assert search.told == [TellTuner(1, 0.1), TellTuner(0, 0.5)]
    assert search.assessed[-1] == TellAssessor("t0", has_succeeded=succeeds)
    assert search.experiment.leaderboard.best is search.trial("t0")
    assert search.experiment.lifecycle.metric_of(search.trial("t0")) == "0.5"
    assert restored(search).experiment.leaderboard.best is search.trial("t0")
    assert search.experiment.lifecycle.counts[state] == 1 + succeeds


@pytest.mark.parametrize(("learns", "lesson"), [(False, None), (True, 0.25)])
def test_a_final_result_without_a_number_of_a_trial_that_was_stopped_is_no_lesson(
    a_search, learns: bool, lesson: float | None
) -> None:
    search = assessed(a_search(concurrency=1), learns=learns)
    search.report("t0", "0.25", final=False)
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    search.report("t0", "NaN")
    search.end("t0", ExitReason.EARLY_STOPPED)
    search.deliver("t0")
    assert search.told == [TellTuner(0, lesson)]
    assert search.experiment.leaderboard.best is None


def test_a_proposed_trial_that_was_stopped_teaches_the_tuner_its_final_result(a_search) -> None:
    search = a_search(concurrency=1, max_trials=0)
    mine = search.propose("mine")
    search.start("mine")
    search.report("mine", "0.5")
    search.handle(TrialStopAsked("mine", ExitReason.STOPPED_BY_USER, 40.0))
    search.end("mine", ExitReason.STOPPED_BY_USER)
    search.deliver("mine")
    assert mine.state is TrialState.USER_CANCELED
    assert search.taught == [AddObservation("mine", 0.5)]


def test_a_warning_that_a_keeper_adds_after_the_end_is_stored(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", warnings=("its metrics file was truncated",))
    assert search.trial("t0").warning == "its metrics file was truncated"
    both = ("its metrics file was truncated", "its stdout file was rewritten")
    assert search.end("t0", warnings=both) == [SaveTrial(search.trial("t0"))]
    assert search.trial("t0").warning == "\n".join(both)
    assert search.end("t0", warnings=both) == []


def test_the_last_result_of_a_trial_that_was_stopped_early_is_told_however_long_it_is(a_search) -> None:
    search = assessed(a_search(concurrency=1))
    search.experiment.lifecycle.learns_from_early_stopped = True
    search.report("t0", json.dumps({"default": 0.5, "note": "x" * 5000}), final=False)
    assert search.trial("t0").intermediate == "0.5", "all of it is in its row"
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    search.end("t0", ExitReason.EARLY_STOPPED)
    search.deliver("t0")
    assert search.told == [TellTuner(0, 0.5)]


def test_a_refusal_of_an_attempt_of_before_or_of_a_trial_that_is_over_is_nothing(a_search) -> None:
    search = assessed(a_search(concurrency=1))
    search.report("t0", "0.5", final=False)
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    assert search.handle(EarlyStopRequested("t0", 0, 40.0)) == []
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.handle(EarlyStopRequested("t0", 1, 40.0)) == []
    assert search.stopped == []


def test_a_stop_of_a_trial_that_is_over_is_nothing(a_search) -> None:
    search = a_search()
    search.run(search.suggest())
    assert search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 40.0)) == []


def test_a_new_attempt_of_what_was_to_be_stopped_is_stopped_as_well(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.handle(TrialStopAsked("t0", ExitReason.EARLY_STOPPED, 40.0))
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    assert search.stopped == [("t0", ExitReason.EARLY_STOPPED)] * 2
    assert search.trial("t0").state is TrialState.STOPPING


def test_a_new_attempt_while_the_experiment_stops_is_stopped_as_well(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", ExitReason.SIGNAL)
    search.handle(ExperimentStopAsked(40.0))
    assert search.stopped == []
    search.start("t0", attempt=1)
    assert search.stopped == [("t0", ExitReason.STOPPED_BY_USER)]


# ---- results


def test_the_first_final_result_is_the_one_that_counts(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    assert len(search.report("t0", "0.5", "0.9")) == 1
    assert search.report("t0", "0.7") == []
    assert (search.trial("t0").final, search.trial("t0").value) == ("0.5", 0.5)


def test_intermediate_results_are_counted_and_the_newest_is_shown(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    assert search.report("t0", "0.1", "0.3", final=False) == []
    search.report("t0", "0.2", final=False)
    trial = search.trial("t0")
    assert (trial.intermediate, trial.intermediate_count, trial.final) == ("0.2", 3, None)


@pytest.mark.parametrize("value", ["NaN", '{"loss": 1}', '"good"'])
def test_a_final_result_without_a_number_is_kept_and_is_no_result_to_the_tuner(a_search, value) -> None:
    search = a_search(concurrency=1)
    search.run(search.suggest(), value)
    assert search.trial("t0").final == value
    assert search.told == [TellTuner(0, None)]
    assert search.experiment.leaderboard.best is None
    assert search.trial("t0").message == NO_NUMBER_IN_FINAL_RESULT
    assert search.experiment.leaderboard.latest_without_result is search.trial("t0")


def test_a_success_without_a_final_result_says_so_also_after_a_restart(a_search) -> None:
    search = a_search(concurrency=1, max_trials=2)
    search.run(search.suggest(), None)
    search.run(search.suggest(), "0.5")
    silent = search.trial("t0")
    assert (silent.state, silent.value, silent.message) == (TrialState.SUCCEEDED, None, NO_FINAL_RESULT)
    assert search.trial("t1").message == ""
    assert search.experiment.leaderboard.latest_without_result is silent
    assert restored(search).experiment.leaderboard.latest_without_result is silent


@pytest.mark.parametrize(("maximize", "best"), [(True, "t1"), (False, "t2")])
def test_the_best_trial_is_the_highest_or_the_lowest(a_search, maximize: bool, best: str) -> None:
    search = a_search(concurrency=1, maximize=maximize)
    for value in ("0.5", "0.9", "0.1", "0.9", "0.1"):
        search.run(search.suggest(), value)
    assert search.experiment.leaderboard.best is search.trial(best)


@pytest.mark.parametrize("maximize", [True, False])
def test_the_ten_best_are_kept_best_first_and_of_equals_the_first(a_search, maximize: bool) -> None:
    search = a_search(concurrency=1, max_trials=None, maximize=maximize)
    values = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    for value in values:
        search.run(search.suggest(), str(value))
    ranks = sorted(range(len(values)), key=lambda number: -values[number] if maximize else values[number])
    for experiment in (search.experiment, restored(search).experiment):
        assert [trial.sequence_id for trial in experiment.leaderboard.top] == ranks[:10]
        assert experiment.leaderboard.best is experiment.leaderboard.top[0]


def test_the_latest_failures_are_kept_newest_first(a_search) -> None:
    search = a_search(concurrency=1, max_trials=None)
    for reason in [ExitReason.SIGNAL] * 3 + [ExitReason.SUCCEEDED, ExitReason.NONZERO_EXIT]:
        search.run(search.suggest(), reason=reason)
    assert [trial.trial_id for trial in search.experiment.leaderboard.latest_failures] == ["t4", "t2", "t1"]


def test_a_result_of_a_trial_that_failed_is_not_the_best(a_search) -> None:
    search = a_search(concurrency=1)
    search.run(search.suggest(), "0.5")
    search.run(search.suggest(), "0.9", ExitReason.NONZERO_EXIT)
    assert search.experiment.leaderboard.best is search.trial("t0")


# ---- attempts


def test_a_new_attempt_begins_from_nothing(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    search.start("t0", attempt=1)
    assert search.trial("t0").value is None
    search.report("t0", "0.4", attempt=1)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.told == [TellTuner(0, 0.4)]


def test_metrics_of_an_old_attempt_do_not_count(a_search) -> None:
    search = a_search(concurrency=1)
    search.suggest()
    search.start("t0", attempt=1)
    assert search.report("t0", "0.9", attempt=0) == []
    assert search.report("t0", "0.1", final=False, attempt=0) == []
    trial = search.trial("t0")
    assert (trial.final, trial.intermediate_count) == (None, 0)


def test_the_end_of_an_old_attempt_is_not_the_trials_and_its_keeper_may_go(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.start("t0", attempt=1)
    assert search.end("t0", ExitReason.SIGNAL, attempt=0) == []
    assert search.deliver("t0", attempt=0) == [CloseAttempt(AttemptKey("t0", attempt_id(0), "main"))]
    assert search.trial("t0").state is TrialState.RUNNING


def test_the_bytes_of_an_old_attempt_do_not_close_the_new_one(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.start("t0", attempt=1)
    search.end("t0", attempt=1)
    assert search.deliver("t0", attempt=0) == [CloseAttempt(AttemptKey("t0", attempt_id(0), "main"))]
    assert search.trial("t0").state is TrialState.CLOSING


def test_a_retry_before_the_first_attempt_was_closed_goes_on_running(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    search.deliver("t0", attempt=0)
    assert search.trial("t0").state is TrialState.RUNNING
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.trial("t0").state is TrialState.SUCCEEDED


def test_a_retry_that_could_not_be_started_decides_as_well(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    search.end("t0", ExitReason.SIGNAL)
    search.end("t0", ExitReason.COULD_NOT_START, attempt=1, message="no bash")
    search.deliver("t0", attempt=1)
    trial = search.trial("t0")
    assert (trial.reason, trial.message, trial.final) == (ExitReason.COULD_NOT_START, "no bash", None)


def test_what_is_told_again_after_a_lost_link_changes_nothing(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    assert search.start("t0") == []
    search.end("t0")
    assert search.start("t0") == []
    assert search.end("t0") == []
    search.deliver("t0")
    key = AttemptKey("t0", attempt_id(0), "main")
    assert search.start("t0") == [CloseAttempt(key)]
    assert search.report("t0", "0.1") == []
    assert search.end("t0") == [CloseAttempt(key)]
    assert search.deliver("t0") == [CloseAttempt(key)]
    job = search.job("t0")
    assert search.handle(JobTerminated("t0", ExitReason.JOB_LOST, "", 50.0)) == [SaveJob(job, is_over=True)]
    assert search.handle(JobTerminated("t0", ExitReason.JOB_LOST, "", 50.0)) == []
    assert search.told == [TellTuner(0, 0.9)]


def test_a_trial_whose_job_is_lost_has_failed_and_its_place_is_free(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())  # at 20, by the keeper's clock
    search.now_s += 30
    search.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "the node is gone", 90_000.0))
    trial = search.trial("t0")
    assert (trial.state, trial.reason, trial.ended_at_s) == (
        TrialState.FAILED,
        ExitReason.KEEPER_LOST,
        50.0,
    )
    assert (search.told, search.asked) == ([TellTuner(0, None)], [1])


# ---- versions


def test_a_wrong_version_stops_the_experiment_when_no_keeper_ever_matched(a_search) -> None:
    search = a_search(concurrency=2)
    search.suggest()
    search.suggest()
    search.handle(JobTerminated("t0", ExitReason.VERSION, "cannot run: 0.6 and 0.7", 50.0))
    assert (search.state, search.experiment.error) == (ExperimentState.ERROR, "cannot run: 0.6 and 0.7")
    search.handle(JobTerminated("t1", ExitReason.VERSION, "cannot run: 0.6 and 0.8", 50.0))
    assert search.experiment.error == "cannot run: 0.6 and 0.7"
    assert (search.asked, search.finishes) == ([], 1)


def test_a_wrong_version_is_only_that_trials_failure_once_a_keeper_has_matched(a_search) -> None:
    search = a_search(concurrency=1)
    search.handle(KeeperConnected("J"))
    search.suggest()
    search.handle(JobTerminated("t0", ExitReason.VERSION, "cannot run", 50.0))
    assert search.state is ExperimentState.RUNNING
    assert search.trial("t0").state is TrialState.FAILED
    assert search.asked == [1]


# ---- the resource usage of a trial, and silent jobs


def used(search: Search, rss_bytes: int, attempt: int = 0) -> list[Effect]:
    return search.handle(
        UsageReported(Usage(AttemptKey("t0", attempt_id(attempt), "main"), 100.0, rss_bytes))
    )


def test_a_trial_is_stored_when_it_uses_more_than_before(a_search) -> None:
    search = a_search(concurrency=1)
    trial = search.trial(search.suggest())
    search.start("t0")
    higher = [used(search, rss_bytes) for rss_bytes in (10, 10, 5, 11)]
    assert [[type(effect) for effect in effects] for effects in higher] == [
        [SaveUsage, SaveTrial],
        [SaveUsage],
        [SaveUsage],
        [SaveUsage, SaveTrial],
    ]
    assert trial.peak_usage is not None
    assert trial.latest_usage is not None
    assert (trial.peak_usage.rss_bytes, trial.latest_usage.rss_bytes) == (11, 11)


def test_only_the_attempt_that_counts_uses_anything(a_search) -> None:
    search = a_search(concurrency=1)
    trial = search.trial(search.suggest())
    assert used(search, 10) == [], "nothing of it runs yet"
    search.start("t0")
    used(search, 10)
    search.start("t0", attempt=1)
    assert (trial.peak_usage, trial.latest_usage) == (None, None)
    assert used(search, 99, attempt=0) == []
    used(search, 7, attempt=1)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert used(search, 99, attempt=1) == []
    assert trial.peak_usage is not None
    assert trial.peak_usage.rss_bytes == 7


def test_a_job_is_silent_until_its_keeper_connects_or_its_trial_is_over(a_search) -> None:
    search = a_search(concurrency=3)
    transports = search.experiment.transports
    for trial_id in (search.suggest(), search.suggest(), search.suggest()):
        transports.track(trial_id, 0.0)
    assert "job t0" in transports.problem(60.0)
    transports.connected("t0", "main-0", 50.0)
    assert "job t1" in transports.problem(60.0)
    search.handle(JobTerminated("t1", ExitReason.JOB_LOST, "gone", 50.0))
    assert "job t2" in transports.problem(60.0)
    search.run("t2", "0.5")
    assert transports.problem(1e6) == ""


# ---- resume


def test_a_resumed_experiment_goes_on_with_what_it_has(a_search) -> None:
    search = a_search(concurrency=2, max_trials=4)
    search.run(search.suggest(), "0.5")
    search.start(search.suggest())
    search.handle(KeeperConnected("J"))
    after = restored(search)
    assert after.experiment.lifecycle.counts == Counter({TrialState.SUCCEEDED: 1, TrialState.RUNNING: 1})
    assert after.experiment.leaderboard.best is search.trial("t0")
    after.handle(ManagerReady())
    assert after.asked == [2], "one place is taken; the question of before died with its manager"
    after.run("t1", "0.7")
    while after.asked:
        after.run(after.suggest(), "0.6")
    assert (after.state, after.finishes) == (ExperimentState.DONE, 1)
    assert sorted(after.experiment.trials) == ["t0", "t1", "t2", "t3"]
    assert after.experiment.leaderboard.best is after.trial("t1")


def test_a_trial_that_was_closing_when_the_manager_died_is_told_of_again(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.end("t0")
    trial = search.trial("t0")
    trial.ended = None  # it is not stored
    next(iter(trial.attempts.values())).apply(AttemptReport.DISCARDED)
    after = restored(search)
    after.handle(ManagerReady())
    after.start("t0")
    after.end("t0")
    after.deliver("t0")
    assert after.told == [TellTuner(0, 0.5)]


@pytest.mark.parametrize(
    "state", [ExperimentState.DONE, ExperimentState.STOPPED, ExperimentState.ERROR, ExperimentState.RUNNING]
)
def test_an_experiment_that_has_all_its_trials_is_done_again_at_once(a_search, state) -> None:
    search = a_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    search.experiment.state = state
    after = restored(search)
    after.handle(ManagerReady())
    assert (after.state, after.finishes, after.asked) == (ExperimentState.DONE, 1, [])


def test_a_resume_forgets_the_error_of_before(a_search) -> None:
    search = a_search(concurrency=1)
    search.handle(TunerFailed("boom", was_asked=True))
    search.handle(ManagerReady())
    assert (search.state, search.experiment.error) == (ExperimentState.RUNNING, "")
    search.handle(TunerFailed("again", was_asked=True))
    assert (search.experiment.error, search.finishes) == ("again", 2)


# ---- limits that change


@pytest.mark.parametrize("raised", [{"max_trials": 4}, {"max_trials": None}])
def test_an_experiment_that_is_done_goes_on_when_it_may_make_more_trials(a_search, raised) -> None:
    search = a_search(concurrency=1, max_trials=2)
    for trial_id in ("t0", "t1"):
        search.suggest()
        search.run(trial_id)
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)
    assert SaveExperiment() in search.limit(**raised)
    assert (search.state, search.asked) == (ExperimentState.RUNNING, [2])
    search.run(search.suggest())
    search.limit(max_trials=3)
    assert search.asked == [3], "a question that is under way still becomes a trial"
    search.run(search.suggest())
    assert (search.state, search.finishes) == (ExperimentState.DONE, 2)


def test_time_that_is_added_after_the_end_counts_from_then_on(a_search) -> None:
    search = a_search(concurrency=1, max_trials=None, max_duration_s=60)
    search.start(search.suggest())
    search.now_s = 70
    search.run("t0")
    assert search.state is ExperimentState.DONE
    search.now_s = 1000
    search.limit(max_duration_s=80)
    assert (search.state, search.asked) == (ExperimentState.RUNNING, [1])
    assert search.experiment.budget.duration_s(1000) == 70
    assert search.experiment.time_runs_out_at_s == 1010


@pytest.mark.parametrize("change", [{"concurrency": 3}, {"max_trial_duration_s": 5.0}, {"max_trials": 1}])
def test_a_change_that_leaves_no_room_begins_nothing(a_search, change) -> None:
    search = a_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    search.limit(**change)
    assert (search.state, search.asked, search.finishes) == (ExperimentState.DONE, [], 1)


@pytest.mark.parametrize("state", [ExperimentState.ERROR, ExperimentState.STOPPED, ExperimentState.STOPPING])
def test_what_has_failed_or_was_stopped_goes_on_with_a_resume_only(a_search, state) -> None:
    search = a_search(concurrency=1, max_trials=1)
    search.suggest()
    search.experiment.state = state
    search.limit(max_trials=5)
    search.handle(SearchSpaceChanged())
    assert (search.state, search.asked) == (state, [])
    assert not search.experiment.accepts_trials
    search.handle(ManagerReady())
    assert search.experiment.budget.limits.max_trials == 5


def test_a_lower_limit_ends_the_asking_and_nothing_that_runs(a_search) -> None:
    search = a_search(concurrency=2, max_trials=10)
    search.start(search.suggest())
    search.start(search.suggest())
    search.limit(max_trials=1)
    assert search.state is ExperimentState.NO_MORE_TRIAL
    assert search.stopped == []


def test_another_search_space_may_have_more_trials(a_search) -> None:
    search = a_search(concurrency=1, max_trials=None)
    search.run(search.suggest())
    search.asked.clear()
    search.handle(TunerExhausted())
    assert search.state is ExperimentState.DONE
    search.handle(SearchSpaceChanged())
    assert (search.state, search.asked) == (ExperimentState.RUNNING, [2])


# ---- trials that run for too long


def test_a_trial_over_its_time_is_stopped_for_that_reason_and_another_one_takes_its_place(a_search) -> None:
    search = a_search(concurrency=2, max_trials=3, max_trial_duration_s=30.0)
    search.start(search.suggest())
    search.now_s = 10
    search.start(search.suggest())
    assert search.experiment.time_runs_out_at_s == 30
    search.now_s = 29.9
    search.handle(TimePassed())
    assert search.stopped == []
    search.now_s = 30
    search.handle(TimePassed())
    assert search.stopped == [("t0", ExitReason.TIME_LIMIT)]
    assert search.experiment.time_runs_out_at_s == 40
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert (search.trial("t0").state, search.trial("t0").reason) == (
        TrialState.SYS_CANCELED,
        ExitReason.TIME_LIMIT,
    )
    assert search.told == [TellTuner(0, None)]
    assert search.asked == [2]


def test_a_trial_that_succeeds_at_the_last_moment_has_succeeded(a_search) -> None:
    search = a_search(max_trial_duration_s=30.0)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.now_s = 31
    search.handle(TimePassed())
    search.end("t0")
    search.deliver("t0")
    assert search.told == [TellTuner(0, 0.5)]


def test_time_of_waiting_and_of_an_attempt_before_does_not_count(a_search) -> None:
    search = a_search(concurrency=1, max_trial_duration_s=30.0)
    search.suggest()
    search.now_s = 100
    search.start("t0")
    search.now_s = 125
    search.start("t0", attempt=1)
    search.now_s = 140
    search.handle(TimePassed())
    assert search.stopped == []
    search.now_s = 155
    search.handle(TimePassed())
    assert search.stopped == [("t0", ExitReason.TIME_LIMIT)]


def test_a_limit_that_is_set_later_holds_for_those_that_run_and_over_a_resume(a_search) -> None:
    search = a_search(concurrency=1)
    search.start(search.suggest())
    search.now_s = 50
    search.limit(max_trial_duration_s=60.0)
    after = restored(search)
    search.trial(
        "t0"
    ).start_received_at_s = -50.0  # as the next manager finds out: it has run for so long already
    after.handle(ManagerReady())
    assert after.experiment.time_runs_out_at_s == 10
    after.now_s = 10
    after.handle(TimePassed())
    assert after.stopped == [("t0", ExitReason.TIME_LIMIT)]


@pytest.mark.parametrize("learns", [True, False])
def test_the_last_result_of_a_trial_over_its_time_is_told_if_wanted(a_search, learns: bool) -> None:
    search = a_search(max_trial_duration_s=30.0)
    search.experiment.lifecycle.learns_from_early_stopped = learns
    search.start(search.suggest())
    search.report("t0", "0.5", "0.25", final=False)
    search.now_s = 30
    search.handle(TimePassed())
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert search.told == [TellTuner(0, 0.25 if learns else None)]


# ---- trials that people propose


def test_a_proposed_trial_is_the_next_one_and_the_tuner_learns_of_it(a_search) -> None:
    search = a_search(concurrency=1, max_trials=3)
    search.start(search.suggest())
    mine = search.propose("mine")
    assert (mine.sequence_id, mine.is_customized, search.submitted) == (1, True, ["t0"])
    search.run("t0")
    assert (search.submitted, search.asked) == (["t0", "mine"], [])
    search.run("mine", "0.5")
    assert search.taught == [AddObservation("mine", 0.5)]
    assert search.told == [TellTuner(0, 1.0)]
    assert search.asked == [2], "it counts among maxTrialNum"
    search.run(search.suggest())
    assert search.state is ExperimentState.DONE


def test_a_proposed_trial_runs_whatever_limit_is_reached(a_search) -> None:
    search = a_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    assert search.state is ExperimentState.DONE
    search.propose("mine")
    assert (search.state, search.submitted) == (ExperimentState.NO_MORE_TRIAL, ["t0", "mine"])
    search.run("mine", None)
    assert (search.state, search.finishes, search.taught) == (ExperimentState.DONE, 2, [])


def test_a_proposed_trial_without_a_place_can_be_stopped_and_outlives_its_manager(a_search) -> None:
    search = a_search(concurrency=1, max_trials=2)
    search.start(search.suggest())
    search.propose("mine")
    search.propose("other")
    search.handle(TrialStopAsked("mine", ExitReason.STOPPED_BY_USER, 40.0))
    assert search.trial("mine").state is TrialState.USER_CANCELED
    after = restored(search)
    after.handle(ManagerReady())
    after.run("t0")
    assert after.submitted == ["other"]


# ---- what the cluster loses


def test_a_trial_that_the_cluster_lost_begins_again_with_empty_hands(a_search) -> None:
    search = a_search(concurrency=1, max_retries=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    effects = search.lose_job("t0", ExitReason.KEEPER_LOST)
    trial = search.trial("t0")
    assert DetachTrial(trial, "t0") in effects
    assert (trial.state, trial.final, trial.retries) == (TrialState.WAITING, None, 1)
    assert "retry 1 of 1" in trial.warning
    assert search.submitted == ["t0", "t0-1"]
    search.start("t0", attempt=0)  # a ghost of the attempt that was lost
    search.report("t0", "0.8")
    assert (trial.state, trial.final) == (TrialState.WAITING, None)
    search.start("t0", attempt=1)
    search.report("t0", "0.5", attempt=1)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.told == [TellTuner(0, 0.5)]
    assert len(search.experiment.trials) == 1


def test_it_is_begun_again_so_often_and_no_more(a_search) -> None:
    search = a_search(concurrency=1, max_trials=1, max_retries=2)
    search.suggest()
    for attempt in range(3):
        assert search.trial("t0").state is TrialState.WAITING
        search.start("t0", attempt)
        search.lose_job("t0")
    assert search.trial("t0").state is TrialState.FAILED
    assert search.submitted == ["t0", "t0-1", "t0-2"]
    assert search.state is ExperimentState.DONE


@pytest.mark.parametrize(
    "reason", sorted(set(ExitReason) - {ExitReason.KEEPER_LOST, ExitReason.JOB_LOST, ExitReason.SUCCEEDED})
)
def test_what_is_no_fault_of_the_cluster_is_not_tried_again(a_search, reason: ExitReason) -> None:
    search = a_search(concurrency=1, max_retries=3)
    search.start(search.suggest())
    search.lose_job("t0", reason)
    assert search.trial("t0").state is TERMINAL_STATE[reason]


def test_a_trial_that_failed_by_itself_or_was_stopped_is_not_tried_again(a_search) -> None:
    search = a_search(concurrency=2, max_retries=3)
    search.start(search.suggest())
    search.start(search.suggest())
    search.end("t0", ExitReason.NONZERO_EXIT)
    search.lose_job("t0")
    search.handle(TrialStopAsked("t1", ExitReason.STOPPED_BY_USER, 40.0))
    search.lose_job("t1")
    assert [search.trial(each).state for each in ("t0", "t1")] == [
        TrialState.FAILED,
        TrialState.USER_CANCELED,
    ]


# ---- everything at once

TRIALS = st.integers(0, 30)


class ExperimentLife(RuleBasedStateMachine):
    """Every order of events that tuner, cluster, keepers and user can produce."""

    def __init__(self) -> None:
        super().__init__()
        self.search = Search(Experiment("exp", Limits(3, 8, 500.0), maximize=True))
        self.late: list[tuple[str, int]] = []
        """Attempts whose keepers have spoken, and may speak again."""
        self.most_at_once, self.most_trials = 3, 8
        """What limits have ever allowed."""
        self._do(lambda: self.search.handle(ManagerReady()))

    @property
    def experiment(self) -> Experiment:
        return self.search.experiment

    def _do(self, action: Callable[[], Any]) -> None:
        before = {trial.trial_id for trial in self.search.live} | (
            {f"t{number}" for number in self.search.asked}
        )
        over = {
            trial_id: (trial.state, trial.reason, trial.value)
            for trial_id, trial in self.experiment.trials.items()
            if trial.state.is_terminal
        }
        told, taught = len(self.search.told), len(self.search.taught)
        action()
        for trial_id, was in over.items():
            trial = self.search.trial(trial_id)
            assert (trial.state, trial.reason, trial.value) == was, "what is over stays as it is"
        settled = [
            trial_id
            for trial_id in before & self.experiment.trials.keys()
            if self.search.trial(trial_id).state.is_terminal
        ]
        mine = [trial_id for trial_id in settled if self.search.trial(trial_id).is_customized]
        settled = [trial_id for trial_id in settled if trial_id not in mine]
        lessons = [self.experiment.lifecycle.reward_of(self.search.trial(trial_id)) for trial_id in mine]
        assert [each.value for each in self.search.taught[taught:]] == [
            lesson for lesson in lessons if lesson is not None
        ]
        if not self.experiment.state.is_over:
            self.search.finishes = 0
        told_now = [f"t{tell.sequence_id}" for tell in self.search.told[told:]]
        assert sorted(told_now) == sorted(settled), (
            "the tuner learns of every trial that is over, once, and of no other"
        )

    def _pick(self, candidates: Sequence[str], index: int) -> str:
        return candidates[index % len(candidates)]

    def _ids(self, *states: TrialState) -> list[str]:
        return [trial.trial_id for trial in self.search.live if not states or trial.state in states]

    @property
    def with_jobs(self) -> list[str]:
        return [trial.trial_id for trial in self.search.live if trial.job_id]

    @precondition(lambda self: self.search.asked)
    @rule()
    def tuner_suggests(self) -> None:
        self._do(self.search.suggest)

    @precondition(lambda self: self.search.asked)
    @rule(index=TRIALS, fails=st.sampled_from([False, False, True]))
    def tuner_gives_up(self, index: int, fails: bool) -> None:
        self.search.asked.pop(index % len(self.search.asked))
        event = TunerFailed("boom", was_asked=True) if fails else TunerExhausted()
        self._do(lambda: self.search.handle(event))

    @precondition(lambda self: self.search.asked)
    @rule(index=TRIALS)
    def tuner_has_nothing_now(self, index: int) -> None:
        self._do(lambda: self.search.put_off(index))

    @precondition(lambda self: self.search.told)
    @rule(happens=st.sampled_from([True, False, False, False]))
    def tuner_refuses_a_result(self, happens: bool) -> None:
        if happens:
            self._do(lambda: self.search.handle(TunerFailed("no", was_asked=False)))

    @precondition(lambda self: self.with_jobs)
    @rule(index=TRIALS, attempt=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def attempt_starts(self, index: int, attempt: int) -> None:
        trial_id = self._pick(self.with_jobs, index)
        self.late.append((trial_id, attempt))
        self._do(lambda: self.search.start(trial_id, attempt))

    @precondition(lambda self: self.late)
    @rule(index=TRIALS, value=st.sampled_from(["0.5", "NaN", "2", '{"default": -1}']), final=st.booleans())
    def metrics_arrive(self, index: int, value: str, final: bool) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        trial = self.search.trial(trial_id)
        before = (trial.final, trial.intermediate_count)
        self._do(lambda: self.search.report(trial_id, value, final=final, attempt=attempt))
        if trial.attempt is not None and attempt < trial.attempt:
            assert (trial.final, trial.intermediate_count) == before, "an old attempt does not count"

    @precondition(lambda self: self.late)
    @rule(
        index=TRIALS,
        reason=st.sampled_from([ExitReason.SUCCEEDED, ExitReason.SUCCEEDED, *ExitReason]),
        size=st.sampled_from([None, 0, 1]),
    )
    def attempt_ends(self, index: int, reason: ExitReason, size: int | None) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        self._do(lambda: self.search.end(trial_id, reason, attempt, metrics_size_at_stop=size))

    @precondition(lambda self: self.late)
    @rule(index=TRIALS)
    def attempt_is_delivered(self, index: int) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        self._do(lambda: self.search.deliver(trial_id, attempt))

    @precondition(lambda self: self.with_jobs)
    @rule(index=TRIALS, reason=st.sampled_from([ExitReason.JOB_LOST, ExitReason.VERSION]))
    def job_is_lost(self, index: int, reason: ExitReason) -> None:
        trial_id = self._pick(self.with_jobs, index)
        trial = self.search.trial(trial_id)
        retries, was_stopped = trial.retries, trial.stop_reason is not None
        self._do(lambda: self.search.lose_job(trial_id, reason))
        if trial.retries > retries:
            assert reason is ExitReason.JOB_LOST
            assert not was_stopped
            assert trial.retries <= self.experiment.budget.limits.max_retries

    @rule(
        concurrency=st.integers(1, 4),
        max_trials=st.sampled_from([4, 8, 12]),
        max_duration_s=st.sampled_from([None, 50.0, 500.0]),
        max_trial_duration_s=st.sampled_from([None, 20.0, 60.0]),
        max_retries=st.integers(0, 2),
    )
    def user_changes_limits(self, **limits: Any) -> None:
        self.most_at_once = max(self.most_at_once, limits["concurrency"])
        self.most_trials = max(self.most_trials, limits["max_trials"])
        self._do(lambda: self.search.limit(**limits))

    @rule()
    def search_space_changes(self) -> None:
        self._do(lambda: self.search.handle(SearchSpaceChanged()))

    @precondition(lambda self: self.experiment.accepts_trials and len(self.experiment.trials) < 40)
    @rule()
    def user_proposes_a_trial(self) -> None:
        self._do(lambda: self.search.propose(f"mine{len(self.experiment.trials)}"))

    @precondition(lambda self: self.experiment.trials)
    @rule(index=TRIALS)
    def user_stops_a_trial(self, index: int) -> None:
        trial_id = self._pick(list(self.experiment.trials), index)
        self._do(lambda: self.search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0)))

    @rule(happens=st.sampled_from([True, False, False, False]))
    def user_stops_all(self, happens: bool) -> None:
        if happens:
            self._do(lambda: self.search.handle(ExperimentStopAsked(40.0)))
            assert not self._ids(TrialState.WAITING, TrialState.RUNNING), "whoever runs is told to stop"

    @precondition(lambda self: self.late)
    @rule(index=TRIALS, rss_bytes=st.integers(0, 100))
    def usage_is_reported(self, index: int, rss_bytes: int) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        usage = Usage(AttemptKey(trial_id, attempt_id(attempt), "main"), 1.0, rss_bytes)
        self._do(lambda: self.search.handle(UsageReported(usage)))

    @rule()
    def a_keeper_matches(self) -> None:
        self._do(lambda: self.search.handle(KeeperConnected("J")))

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.search.now_s += seconds
        self._do(lambda: self.search.handle(TimePassed()))

    @rule()
    def manager_is_resumed(self) -> None:
        before = self.search
        self.search = restored(before)
        self.search.now_s = before.now_s
        for trial in self.search.live:
            trial.ended = trial.latest_usage = None  # they are not stored
        self._do(lambda: self.search.handle(ManagerReady()))

    @invariant()
    def counts_are_what_counting_gives(self) -> None:
        recount = Counter(trial.state for trial in self.experiment.trials.values())
        assert +self.experiment.lifecycle.counts == recount

    @invariant()
    def limits_are_kept(self) -> None:
        assert len(self.with_jobs) + len(self.search.asked) <= self.most_at_once
        asked = [trial for trial in self.experiment.trials.values() if not trial.is_customized]
        assert len(asked) + len(self.search.asked) <= self.most_trials

    @invariant()
    def no_trial_runs_for_longer_than_it_may(self) -> None:
        limit_s = self.experiment.budget.limits.max_trial_duration_s
        for trial in self.search.live:
            if (
                trial.state is TrialState.RUNNING
                and trial.start_received_at_s is not None
                and limit_s is not None
            ):
                assert self.search.now_s - trial.start_received_at_s < limit_s

    @invariant()
    def what_waits_without_a_job_waits_for_a_place(self) -> None:
        waiting = {trial.trial_id for trial in self.search.live if not trial.job_id}
        assert waiting == set(self.experiment.jobs.queue)

    @invariant()
    def a_trial_that_is_over_has_the_one_reason_of_its_state(self) -> None:
        for trial in self.experiment.trials.values():
            if trial.state.is_terminal:
                assert trial.reason is not None
                assert trial.state is TERMINAL_STATE[trial.reason]

    @invariant()
    def it_is_finished_once_and_when_it_is_over_and_nothing_runs(self) -> None:
        is_over = self.experiment.state.is_over and not self.search.live and not self.search.asked
        assert self.search.finishes == is_over

    @invariant()
    def the_best_is_the_best(self) -> None:
        results = [
            trial.value
            for trial in self.experiment.trials.values()
            if trial.state.is_terminal and trial.state is not TrialState.FAILED and trial.value is not None
        ]
        top = [trial.value for trial in self.experiment.leaderboard.top]
        assert top == sorted(results, reverse=True)[:10]

    @invariant()
    def an_experiment_that_runs_has_something_to_wait_for(self) -> None:
        if not self.experiment.state.is_over and self.experiment.state is not ExperimentState.INITIALIZED:
            assert self.search.live or self.search.asked

    def teardown(self) -> None:
        """However it was: when all trials end, it ends."""
        for _ in range(60):
            while self.search.asked:
                self.tuner_suggests()
            for trial in [trial for trial in self.search.live if trial.job_id]:
                self._do(lambda trial=trial: self.search.start(trial.trial_id, 9))
                self._do(lambda trial=trial: self.search.end(trial.trial_id, attempt=9))
                self._do(lambda trial=trial: self.search.deliver(trial.trial_id, 9))
        assert self.experiment.state.is_over
        assert self.search.finishes == 1


TestExperimentLife = ExperimentLife.TestCase
TestExperimentLife.settings = hypothesis_settings(stateful_step_count=50)


# ---- results while a trial stops


@pytest.mark.parametrize(
    "reason", [ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER, ExitReason.TIME_LIMIT]
)
def test_a_final_result_that_arrives_while_the_trial_stops_counts(a_search, reason: ExitReason) -> None:
    search = assessed(a_search(concurrency=1))
    search.handle(TrialStopAsked("t0", reason, 40.0))
    assert search.trial("t0").state is TrialState.STOPPING
    search.report("t0", "0.5", offset=50)
    search.end("t0", reason, metrics_size_at_stop=50)
    search.deliver("t0")
    assert search.trial("t0").state is TERMINAL_STATE[reason]
    assert search.told == [TellTuner(0, 0.5)]
    assert search.experiment.leaderboard.best is search.trial("t0")


def test_the_tuner_learns_the_last_intermediate_result_that_arrives_while_a_trial_stops_early(
    a_search,
) -> None:
    search = assessed(a_search(concurrency=1), learns=True)
    search.report("t0", "0.5", final=False)
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    search.report("t0", "0.75", final=False)
    search.end("t0", ExitReason.EARLY_STOPPED)
    search.deliver("t0")
    assert search.trial("t0").intermediate_count == 2
    assert search.told == [TellTuner(0, 0.75)]


def test_the_assessor_may_stop_the_second_attempt_of_a_trial(a_search) -> None:
    search = assessed(a_search(concurrency=1))
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    search.report("t0", "0.25", final=False, attempt=1)
    (asked,) = search.assessed
    search.handle(EarlyStopRequested(asked.trial_id, asked.attempt, 40.0))
    assert search.stopped == [("t0", ExitReason.EARLY_STOPPED)]


def test_a_problem_of_a_trial_is_a_stored_warning_once(a_search) -> None:
    search = a_search(concurrency=1)
    trial = search.trial(search.suggest())
    problem = ProblemFound("t0", "ignored an attempt: it has no attempt.json")
    assert search.handle(problem) == [SaveTrial(trial)]
    assert trial.warning == problem.message
    assert search.handle(problem) == []
