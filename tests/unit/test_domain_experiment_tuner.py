"""The answers of the tuner: parameters, not ready, exhausted, an exception."""

import pytest
from simulated_search import new_search

from nni_manager.domain.events import (
    Event,
    ExperimentStopAsked,
    ParametersSuggested,
    TellTuner,
    TimePassed,
    TunerExhausted,
    TunerFailed,
)
from nni_manager.domain.experiment import ExperimentState


def test_an_exhausted_tuner_receives_no_further_requests_and_running_trials_finish() -> None:
    search = new_search(concurrency=2, max_trials=None)
    search.start(search.suggest())
    search.requests.clear()
    search.handle(TunerExhausted(1))
    assert search.state is ExperimentState.TUNER_NO_MORE_TRIAL
    search.run("t0")
    assert search.requests == []
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_the_experiment_sends_a_new_request_to_an_unready_tuner_when_a_trial_ends() -> None:
    search = new_search(concurrency=3)
    search.suggest()
    search.suggest()
    search.decline()
    assert (search.requests, search.state) == ([], ExperimentState.RUNNING)
    search.start("t0")
    search.handle(TimePassed())
    assert search.requests == []
    search.run("t1")
    assert search.requests == [2, 3]
    search.decline(1)
    assert search.suggest() == "t2"
    assert search.requests == [3], "the tuner answered, so another request may be answered too"


def test_a_trial_that_ends_during_a_request_to_the_tuner_causes_a_second_request() -> None:
    search = new_search(concurrency=2, max_trials=None)
    search.suggest()
    search.run("t0")
    assert search.requests == [1, 2]
    search.decline()
    search.decline()
    assert search.state is ExperimentState.DONE, (
        "no trial runs, and nothing has changed since the last answer"
    )
    other = new_search(concurrency=2)
    other.suggest()
    other.decline()
    assert other.requests == []
    other.run("t0")
    assert other.requests == [1, 2]


def test_the_experiment_repeats_a_request_if_a_trial_ended_before_the_tuner_answered_not_ready() -> None:
    search = new_search(concurrency=2, max_trials=2)
    search.suggest()
    assert search.requests == [1]
    search.run("t0")  # the request to the tuner was sent before this trial ended
    search.decline()
    assert search.requests == [1]


def test_the_experiment_ends_if_the_tuner_is_not_ready_while_no_trial_runs() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    search.run("t0")
    search.decline()
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_an_unready_tuner_receives_a_new_request_if_a_user_proposes_a_trial_after_the_experiment_is_done() -> (
    None
):
    search = new_search(concurrency=2)
    search.suggest()
    search.run("t0")
    while search.requests:
        search.decline()
    assert search.state is ExperimentState.DONE
    search.propose("mine")
    assert len(search.requests) == 1


def test_the_experiment_ends_only_once_if_the_tuner_answers_all_requests_with_exhausted() -> None:
    search = new_search(concurrency=3, max_trials=None)
    for sequence_id in range(3):
        search.handle(TunerExhausted(sequence_id))
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_the_experiment_ends_if_the_tuner_is_exhausted_at_the_last_request() -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.handle(TunerExhausted(0))
    assert search.state is ExperimentState.DONE


def test_a_trial_that_runs_when_the_tuner_fails_keeps_its_result_and_no_new_trial_starts() -> None:
    search = new_search(concurrency=2, max_trials=None)
    search.start(search.suggest())
    search.start(search.suggest())
    search.run("t0")
    search.handle(TunerFailed("Traceback: boom", was_asked=True))
    assert (search.state, search.experiment.error) == (ExperimentState.ERROR, "Traceback: boom")
    assert search.finishes == 0
    search.run("t1", "0.9")
    assert search.trial("t1").run.value == 0.9
    assert search.tuner_results[-1] == TellTuner(1, 0.9)
    assert search.finishes == 1
    assert search.canceled == []


def test_the_experiment_shows_only_the_first_tuner_error() -> None:
    search = new_search(concurrency=2)
    search.handle(TunerFailed("first", was_asked=True))
    search.handle(TunerFailed("second", was_asked=True))
    assert (search.experiment.error, search.finishes) == ("first", 1)


def test_no_trials_are_requested_after_the_tuner_raises_an_exception_for_a_result() -> None:
    search = new_search(concurrency=2, max_trials=None)
    search.suggest()
    search.suggest()
    search.run("t0")
    search.handle(TunerFailed("cannot take it", was_asked=False))
    assert search.state is ExperimentState.ERROR
    search.suggest()  # These parameters answer a request that was sent before the failure.
    search.run("t1")
    assert search.finishes == 1


@pytest.mark.parametrize("state", [ExperimentState.DONE, ExperimentState.STOPPED])
def test_a_tuner_exception_after_the_last_trial_leaves_the_final_state_unchanged(state) -> None:
    search = new_search(concurrency=1, max_trials=1)
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
    [TunerExhausted(0), TunerFailed("late", was_asked=True), ParametersSuggested("t0", 0, {}, {}, 1.0)],
    ids=lambda answer: type(answer).__name__,
)
def test_a_stopped_or_failed_experiment_ends_after_the_next_answer_of_the_tuner(
    trouble: Event, answer: Event
) -> None:
    search = new_search(concurrency=1)
    search.handle(trouble)
    assert search.finishes == 0
    search.handle(answer)
    assert (search.finishes, search.submitted) == (1, [])
