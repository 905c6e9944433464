"""The limits of an experiment: its duration, its number of trials, and changes to both."""

import pytest
from simulated_search import new_search

from nni_manager.domain.events import (
    ManagerReady,
    SaveExperiment,
    SearchSpaceChanged,
    TimePassed,
    TunerExhausted,
    TunerFailed,
)
from nni_manager.domain.experiment import ExperimentState


def test_running_trials_finish_and_no_further_trials_are_requested_after_the_time_limit() -> None:
    search = new_search(concurrency=1, max_duration_s=60)
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
    assert search.requests == []
    assert search.experiment.budget.duration_s(500) == 100


def test_no_end_time_is_scheduled_if_the_time_limit_is_unset_or_expired_or_if_the_manager_is_not_ready() -> (
    None
):
    search = new_search(concurrency=1, max_duration_s=60)
    search.suggest()
    search.now_s = 60
    search.handle(TimePassed())
    assert search.experiment.time_runs_out_at_s is None
    assert new_search().experiment.time_runs_out_at_s is None
    assert new_search(max_duration_s=9, is_ready=False).experiment.time_runs_out_at_s is None


def test_parameters_that_were_requested_before_the_time_limit_still_become_a_trial() -> None:
    search = new_search(concurrency=1, max_duration_s=60)
    search.now_s = 61
    search.handle(TimePassed())
    assert (search.state, search.finishes) == (ExperimentState.NO_MORE_TRIAL, 0)
    search.run(search.suggest())
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)


def test_the_time_limit_excludes_the_time_between_a_tuner_failure_and_the_resume() -> None:
    search = new_search(max_duration_s=100)
    search.now_s = 30
    search.handle(TunerFailed("boom", was_asked=True))
    search.handle(TunerExhausted(1))
    search.now_s = 1000
    assert search.experiment.budget.duration_s(1000) == 30
    search.handle(ManagerReady())
    assert search.experiment.time_runs_out_at_s == 1070
    search.now_s = 1010
    assert search.experiment.budget.duration_s(1010) == 40


@pytest.mark.parametrize("raised", [{"max_trials": 4}, {"max_trials": None}])
def test_a_higher_trial_limit_restarts_an_experiment_that_is_done(raised) -> None:
    search = new_search(concurrency=1, max_trials=2)
    for trial_id in ("t0", "t1"):
        search.suggest()
        search.run(trial_id)
    assert (search.state, search.finishes) == (ExperimentState.DONE, 1)
    assert SaveExperiment() in search.limit(**raised)
    assert (search.state, search.requests) == (ExperimentState.RUNNING, [2])
    search.run(search.suggest())
    search.limit(max_trials=3)
    assert search.requests == [3], "an open request still becomes a trial"
    search.run(search.suggest())
    assert (search.state, search.finishes) == (ExperimentState.DONE, 2)


def test_the_time_limit_excludes_the_time_between_the_end_of_an_experiment_and_an_increase_of_the_limit() -> (
    None
):
    search = new_search(concurrency=1, max_trials=None, max_duration_s=60)
    search.start(search.suggest())
    search.now_s = 70
    search.run("t0")
    assert search.state is ExperimentState.DONE
    search.now_s = 1000
    search.limit(max_duration_s=80)
    assert (search.state, search.requests) == (ExperimentState.RUNNING, [1])
    assert search.experiment.budget.duration_s(1000) == 70
    assert search.experiment.time_runs_out_at_s == 1010


@pytest.mark.parametrize(
    "change",
    [{"concurrency": 3}, {"max_trial_duration_s": 5.0}, {"max_trials": 0}, {"max_duration_s": 1e6}],
)
def test_no_trial_starts_after_a_limit_change_that_permits_no_further_trial(change) -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    assert search.limit(**change) == []
    assert (search.state, search.requests, search.finishes) == (ExperimentState.DONE, [], 1)


@pytest.mark.parametrize("state", [ExperimentState.ERROR, ExperimentState.STOPPED, ExperimentState.STOPPING])
def test_a_limit_change_does_not_restart_a_failed_or_stopped_experiment(state) -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.suggest()
    search.experiment.state = state
    search.limit(max_trials=5)
    search.handle(SearchSpaceChanged())
    assert (search.state, search.requests) == (state, [])
    assert not search.experiment.accepts_trials
    search.handle(ManagerReady())
    assert search.experiment.budget.limits.max_trials == 5


def test_running_trials_finish_and_no_further_trials_are_requested_after_the_trial_limit_is_lowered() -> None:
    search = new_search(concurrency=2, max_trials=10)
    search.start(search.suggest())
    search.start(search.suggest())
    search.limit(max_trials=1)
    assert search.state is ExperimentState.NO_MORE_TRIAL
    assert search.canceled == []


def test_a_new_search_space_restarts_an_experiment_with_an_exhausted_tuner() -> None:
    search = new_search(concurrency=1, max_trials=None)
    search.run(search.suggest())
    search.requests.clear()
    search.handle(TunerExhausted(1))
    assert search.state is ExperimentState.DONE
    search.handle(SearchSpaceChanged())
    assert (search.state, search.requests) == (ExperimentState.RUNNING, [1])


def test_parameters_that_arrive_after_the_concurrency_was_lowered_wait_for_a_free_slot() -> None:
    search = new_search(concurrency=4, max_trials=4)
    search.suggest()
    search.limit(concurrency=1)
    for _ in range(3):
        search.suggest()
    assert search.submitted == ["t0"]
    for number in range(4):
        search.run(f"t{number}")
        assert search.submitted == [f"t{each}" for each in range(min(number + 2, 4))]
    assert search.state is ExperimentState.DONE
