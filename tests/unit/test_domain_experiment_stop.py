"""Stops: of the experiment, of one trial by a user, and of a trial at its time limit."""

import pytest
from simulated_search import new_search

from nni_manager.domain.events import (
    ExperimentStopAsked,
    JobTerminated,
    ManagerReady,
    TellTuner,
    TimePassed,
    TrialStopAsked,
    TunerFailed,
)
from nni_manager.domain.experiment import ANSWER_TIMEOUT_S, ExperimentState
from nni_manager.domain.trial import (
    TrialState,
)
from trial_keeper.wire.reasons import ExitReason


def test_a_stopped_experiment_cancels_all_trials_and_ends_after_the_last_trial() -> None:
    search = new_search(concurrency=3, max_trials=None)
    waiting, running, closing = search.suggest(), search.suggest(), search.suggest()
    search.start(running)
    search.start(closing)
    search.end(closing)
    search.handle(ExperimentStopAsked(40.0))
    assert search.state is ExperimentState.STOPPING
    assert search.canceled == [
        (waiting, ExitReason.EXPERIMENT_STOPPED),
        (running, ExitReason.EXPERIMENT_STOPPED),
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
    assert search.requests == []


def test_a_second_stop_request_for_an_experiment_has_no_effect() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    search.handle(ExperimentStopAsked(40.0))
    assert search.handle(ExperimentStopAsked(40.0)) == []
    assert len(search.canceled) == 1


def test_an_experiment_without_trials_stops_immediately() -> None:
    search = new_search(is_ready=False)
    search.handle(ExperimentStopAsked(40.0))
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)


def test_parameters_that_arrive_after_a_stop_request_become_a_canceled_trial_without_a_job() -> None:
    search = new_search(concurrency=1)
    search.handle(ExperimentStopAsked(40.0))
    assert search.state is ExperimentState.STOPPING
    search.suggest()
    assert search.trial("t0").state is TrialState.USER_CANCELED
    assert (search.submitted, search.tuner_results) == ([], [TellTuner(0, None)])
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)


def test_parameters_that_arrive_after_an_error_become_a_failed_trial_with_a_message() -> None:
    search = new_search(concurrency=2)
    search.suggest()
    search.handle(TunerFailed("cannot use the tuner: no", was_asked=False))
    assert search.state is ExperimentState.ERROR
    search.suggest()
    trial = search.trial("t1")
    assert (trial.state, trial.run.message) == (TrialState.FAILED, "cannot use the tuner: no")
    assert search.submitted == ["t0"]


def test_parameters_that_arrive_after_a_stop_request_and_a_tuner_failure_become_a_canceled_trial() -> None:
    search = new_search(concurrency=2)
    search.start(search.suggest())
    search.handle(ExperimentStopAsked(40.0))
    search.handle(TunerFailed("cannot use the tuner: no", was_asked=False))
    assert search.state is ExperimentState.STOPPING
    search.suggest()
    trial = search.trial("t1")
    assert (trial.state, trial.run.message) == (TrialState.USER_CANCELED, "the experiment was stopped")


def test_a_stopped_trial_frees_its_slot_for_another_trial() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 40.0))
    search.handle(TrialStopAsked("t0", ExitReason.EARLY_STOPPED, 40.0))
    assert search.canceled == [("t0", ExitReason.STOPPED_BY_USER)]
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert search.trial("t0").state is TrialState.USER_CANCELED
    assert search.requests == [1]


def test_a_stop_request_for_a_terminal_trial_has_no_effect() -> None:
    search = new_search()
    search.run(search.suggest())
    assert search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 40.0)) == []


def test_a_new_attempt_of_a_stopping_trial_is_stopped() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.handle(TrialStopAsked("t0", ExitReason.EARLY_STOPPED, 40.0))
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    assert search.canceled == [("t0", ExitReason.EARLY_STOPPED)] * 2
    assert search.trial("t0").state is TrialState.STOPPING


def test_an_attempt_is_stopped_if_it_starts_while_the_experiment_is_stopping() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", ExitReason.SIGNAL)
    search.handle(ExperimentStopAsked(40.0))
    assert search.canceled == []
    search.start("t0", attempt=1)
    assert search.canceled == [("t0", ExitReason.EXPERIMENT_STOPPED)]


def test_a_trial_over_its_time_limit_is_stopped_and_replaced_by_another_trial() -> None:
    search = new_search(concurrency=2, max_trials=3, max_trial_duration_s=30.0)
    assert search.experiment.time_runs_out_at_s is None
    search.start(search.suggest())
    search.now_s = 10
    search.start(search.suggest())
    assert search.experiment.time_runs_out_at_s == 30
    search.now_s = 29.9
    search.handle(TimePassed())
    assert search.canceled == []
    search.now_s = 30
    search.handle(TimePassed())
    assert search.canceled == [("t0", ExitReason.TIME_LIMIT)]
    started_at_s = search.trial("t0").run.started_at_s
    assert started_at_s
    assert search.trial("t0").stop_asked_at_s == started_at_s + 30
    assert search.experiment.time_runs_out_at_s == 40
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert (search.trial("t0").state, search.trial("t0").run.reason) == (
        TrialState.SYS_CANCELED,
        ExitReason.TIME_LIMIT,
    )
    assert search.tuner_results == [TellTuner(0, None)]
    assert search.requests == [2]


def test_a_trial_that_succeeds_after_its_time_limit_counts_as_succeeded() -> None:
    search = new_search(max_trial_duration_s=30.0)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.now_s = 31
    search.handle(TimePassed())
    search.end("t0")
    search.deliver("t0")
    assert search.tuner_results == [TellTuner(0, 0.5)]


def test_the_time_limit_counts_from_the_start_of_the_current_attempt() -> None:
    search = new_search(concurrency=1, max_trial_duration_s=30.0)
    search.suggest()
    search.now_s = 100
    search.start("t0")
    search.now_s = 125
    search.start("t0", attempt=1)
    search.now_s = 140
    search.handle(TimePassed())
    assert search.canceled == []
    search.now_s = 155
    search.handle(TimePassed())
    assert search.canceled == [("t0", ExitReason.TIME_LIMIT)]


def test_a_restart_of_a_trial_also_restarts_its_time_limit() -> None:
    search = new_search(concurrency=2, max_trial_duration_s=30.0)
    search.start(search.suggest())
    search.now_s = 10
    search.start(search.suggest())
    search.now_s = 20
    search.start("t0", attempt=1)
    assert search.experiment.time_runs_out_at_s == 10 + 30
    search.now_s = 40
    search.handle(TimePassed())
    assert search.canceled == [("t1", ExitReason.TIME_LIMIT)]


def test_a_changed_time_limit_of_trials_applies_to_running_trials_even_after_a_resume() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.now_s = 50
    search.limit(max_trial_duration_s=60.0)
    after = search.resumed()
    # From this value, the resumed manager computes that the trial has already run for 50 s.
    search.trial("t0").run.start_received_at_s = -50.0
    after.handle(ManagerReady())
    assert after.experiment.time_runs_out_at_s == 10
    after.now_s = 10
    after.handle(TimePassed())
    assert after.canceled == [("t0", ExitReason.TIME_LIMIT)]


@pytest.mark.parametrize("learns", [True, False])
def test_a_tuner_that_learns_from_early_stops_gets_results_of_timed_out_trials(
    learns: bool,
) -> None:
    search = new_search(max_trial_duration_s=30.0)
    search.experiment.feedback.learns_from_early_stopped = learns
    search.start(search.suggest())
    search.report("t0", "0.5", "0.25", final=False)
    search.now_s = 30
    search.handle(TimePassed())
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert search.tuner_results == [TellTuner(0, 0.25 if learns else None)]


def test_a_trial_has_the_state_stopping_from_the_first_stop_request_until_the_trial_ends() -> None:
    search = new_search(concurrency=1)
    trial_id = search.suggest()
    search.start(trial_id)
    trial = search.trial(trial_id)
    assert trial.stopping_since_s is None
    search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0))
    search.handle(ExperimentStopAsked(50.0))
    assert (trial.state, trial.stopping_since_s) == (TrialState.STOPPING, 40.0)
    search.end(trial_id, ExitReason.STOPPED_BY_USER)
    assert trial.stopping_since_s is None


@pytest.mark.parametrize("reason", [ExitReason.STOPPED_BY_USER, ExitReason.EARLY_STOPPED])
def test_a_stop_request_after_the_command_of_a_trial_has_ended_applies_to_the_next_attempt(reason) -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", ExitReason.KEEPER_LOST)
    search.handle(TrialStopAsked("t0", reason, 40.0))
    assert search.canceled == []
    assert search.trial("t0").state is TrialState.CLOSING
    search.start("t0", attempt=1)  # the cluster has restarted the container
    assert search.canceled == [("t0", reason)]
    assert search.trial("t0").state is TrialState.STOPPING


def test_a_stop_request_after_the_command_of_a_trial_has_ended_does_not_change_the_final_state() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.end("t0")
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 40.0))
    search.deliver("t0")
    trial = search.trial("t0")
    assert (trial.state, trial.run.value) == (TrialState.SUCCEEDED, 0.5)


def test_a_stopping_experiment_waits_a_limited_time_for_the_tuner() -> None:
    search = new_search(concurrency=1)
    search.handle(ExperimentStopAsked(40.0))
    assert (search.state, search.finishes) == (ExperimentState.STOPPING, 0)
    assert search.experiment.time_runs_out_at_s == ANSWER_TIMEOUT_S
    search.now_s = ANSWER_TIMEOUT_S
    search.handle(TimePassed())
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)
    search.suggest()  # the tuner's late answer adds no trial
    assert (search.experiment.trials, search.finishes) == ({}, 1)


def test_a_stopping_experiment_ends_even_if_the_tuner_fails_after_its_answer_timeout() -> None:
    search = new_search(concurrency=2)
    search.start(search.suggest())
    search.handle(ExperimentStopAsked(40.0))
    search.now_s = ANSWER_TIMEOUT_S
    search.handle(TimePassed())
    search.handle(TunerFailed("killed", True))
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert (search.state, search.finishes) == (ExperimentState.STOPPED, 1)


def test_a_tuner_error_after_the_last_trial_is_cleared_when_the_experiment_continues() -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    search.handle(TunerFailed("cannot learn", False))
    assert (search.state, search.experiment.error) == (ExperimentState.DONE, "cannot learn")
    search.limit(max_trials=9)
    assert (search.state, search.experiment.error) == (ExperimentState.RUNNING, "")
    search.handle(TunerFailed("the cause", True))
    assert (search.state, search.experiment.error) == (ExperimentState.ERROR, "the cause")


def test_a_stop_request_after_a_failed_command_does_not_change_the_failure_reason_after_a_resume() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5", final=False)
    search.end("t0", ExitReason.NONZERO_EXIT)
    search.handle(TrialStopAsked("t0", ExitReason.EARLY_STOPPED, 40.0))
    search = search.resumed()
    search.end("t0", ExitReason.NONZERO_EXIT)  # the keeper repeats its report to the resumed manager
    search.deliver("t0")
    trial = search.trial("t0")
    assert (trial.state, trial.run.reason) == (TrialState.FAILED, ExitReason.NONZERO_EXIT)


def test_a_stopped_trial_with_a_failed_command_and_a_lost_job_does_not_count_as_interrupted() -> None:
    search = new_search(concurrency=1, max_retries=1)
    search.start(search.suggest())
    search.end("t0", ExitReason.NONZERO_EXIT)
    search.handle(ExperimentStopAsked(40.0))
    search.handle(JobTerminated("t0", ExitReason.JOB_LOST, "gone", 50.0))
    trial = search.trial("t0")
    assert (trial.state, trial.run.reason) == (TrialState.FAILED, ExitReason.JOB_LOST)
    assert not search.experiment.feedback.is_interrupted(trial)
