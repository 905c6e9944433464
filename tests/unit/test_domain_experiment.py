"""The experiment as a whole: its states, an ordinary run, and a resume. The tests use neither a cluster nor a clock."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from attempts import attempt_id
from simulated_search import new_search

from nni_manager.domain.attempts import AttemptReport
from nni_manager.domain.events import (
    AskTuner,
    CloseAttempt,
    JobTerminated,
    KeeperConnected,
    KeeperSeenOnStorage,
    LimitsChanged,
    ManagerReady,
    ParametersSuggested,
    SaveExperiment,
    SaveJob,
    SaveTrial,
    SubmitJob,
    TellTuner,
    TimePassed,
    TunerFailed,
)
from nni_manager.domain.experiment import TRANSITIONS, ExperimentEvent, ExperimentState
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.objectives import MAXIMIZE, Constraint, Objectives
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import (
    TrialState,
)
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.reasons import ExitReason


@pytest.mark.parametrize(("state", "event"), list(product(ExperimentState, ExperimentEvent)))
def test_an_event_without_a_transition_raises_an_error_and_keeps_the_state(
    state: ExperimentState, event: ExperimentEvent
) -> None:
    experiment = new_search(is_ready=False).experiment
    experiment.state = state
    if (state, event) in TRANSITIONS:
        experiment._move(event, 0.0)
        assert experiment.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            experiment._move(event, 0.0)
        assert experiment.state is state


@pytest.mark.parametrize("state", ExperimentState)
def test_an_experiment_in_any_state_can_be_stopped_and_resumed(state: ExperimentState) -> None:
    assert (state, ExperimentEvent.STOP_ASKED) in TRANSITIONS
    assert TRANSITIONS[state, ExperimentEvent.MANAGER_READY] is ExperimentState.RUNNING


@pytest.mark.parametrize(("concurrency", "max_trials"), [(1, 1), (1, 4), (2, 5), (4, 5), (8, 3)])
def test_an_experiment_creates_exactly_as_many_trials_as_max_trials_and_ends_as_done(
    concurrency, max_trials
) -> None:
    search = new_search(concurrency=concurrency, max_trials=max_trials)
    while search.requests or search.live:
        assert len(search.requests) + len(search.live) <= concurrency
        while search.requests:
            search.suggest()
        search.run(search.live[0].trial_id, value=str(search.live[0].sequence_id))
    assert search.state is ExperimentState.DONE
    assert search.finishes == 1
    assert search.submitted == [f"t{number}" for number in range(max_trials)]
    assert search.tuner_results == [TellTuner(number, float(number)) for number in range(max_trials)]
    assert search.experiment.lifecycle.counts[TrialState.SUCCEEDED] == max_trials


def test_a_new_experiment_requests_as_many_trials_as_may_run_at_the_same_time() -> None:
    search = new_search(concurrency=3, is_ready=False)
    assert search.handle(ManagerReady()) == [SaveExperiment(), AskTuner(0), AskTuner(1), AskTuner(2)]


def test_a_trial_is_stored_before_its_job_is_submitted() -> None:
    search = new_search()
    effects = search.handle(ParametersSuggested("t0", 0, {"lr": 1}, {"note": 1}, 10.0))
    trial = search.trial("t0")
    assert effects[:3] == [
        SaveTrial(trial),
        SaveJob(Job("t0", JobState.BUSY, "t0", taken=1)),
        SubmitJob(search.job("t0")),
    ]
    assert (trial.parameters, trial.metadata, trial.created_at_s) == ({"lr": 1}, {"note": 1}, 10.0)


def test_a_trial_frees_its_slot_when_all_its_bytes_are_stored() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0")
    assert search.requests == []
    assert search.trial("t0").state is TrialState.CLOSING
    search.deliver("t0")
    assert search.requests == [1]


def test_a_trial_without_a_start_report_succeeds() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    search.report("t0", "0.5")
    search.end("t0")
    search.deliver("t0")
    assert search.trial("t0").state is TrialState.SUCCEEDED
    assert search.tuner_results == [TellTuner(0, 0.5)]


def test_an_attempt_is_closed_only_after_its_trial_is_stored() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0")
    effects = search.deliver("t0")
    trial, key = search.trial("t0"), AttemptKey("t0", attempt_id(0), "main")
    assert effects[:3] == [SaveTrial(trial), TellTuner(0, None), CloseAttempt(key)]


def test_failed_trials_count_towards_max_trials_and_the_tuner_receives_no_result_for_failed_trials() -> None:
    search = new_search(concurrency=1, max_trials=3)
    for _ in range(3):
        search.run(search.suggest(), value="1", reason=ExitReason.NONZERO_EXIT)
    assert search.state is ExperimentState.DONE
    assert search.tuner_results == [TellTuner(number, None) for number in range(3)]
    assert search.experiment.lifecycle.counts == Counter({TrialState.FAILED: 3}) + Counter()
    assert search.experiment.leaderboard.best is None


def test_an_experiment_without_a_trial_limit_keeps_requesting_trials() -> None:
    search = new_search(concurrency=1, max_trials=None)
    for _ in range(200):
        search.run(search.suggest())
    assert search.state is ExperimentState.RUNNING
    assert search.requests == [200]


def test_the_trial_limit_is_reached_when_the_last_trial_is_created() -> None:
    search = new_search(concurrency=2, max_trials=2)
    search.suggest()
    assert search.state is ExperimentState.RUNNING
    search.suggest()
    assert search.state is ExperimentState.NO_MORE_TRIAL
    search.run("t0")
    assert search.state is ExperimentState.NO_MORE_TRIAL
    search.run("t1")
    assert search.state is ExperimentState.DONE


def test_a_lower_concurrency_leaves_slots_empty_and_a_higher_concurrency_fills_slots() -> None:
    search = new_search(concurrency=3, max_trials=None)
    for _ in range(3):
        search.suggest()
    search.handle(LimitsChanged(Limits(1, None, None)))
    search.run("t0")
    search.run("t1")
    assert search.requests == []
    search.handle(LimitsChanged(Limits(4, None, None)))
    assert search.requests == [3, 4, 5]


def test_a_version_mismatch_fails_the_experiment_if_no_compatible_keeper_has_connected() -> None:
    search = new_search(concurrency=2)
    search.suggest()
    search.suggest()
    search.handle(JobTerminated("t0", ExitReason.VERSION, "cannot run: 0.6 and 0.7", 50.0))
    assert (search.state, search.experiment.error) == (ExperimentState.ERROR, "cannot run: 0.6 and 0.7")
    search.handle(JobTerminated("t1", ExitReason.VERSION, "cannot run: 0.6 and 0.8", 50.0))
    assert search.experiment.error == "cannot run: 0.6 and 0.7"
    assert (search.requests, search.finishes) == ([], 1)
    assert search.handle(TimePassed()) == [], "the error is stored only once"


@pytest.mark.parametrize("contact", [KeeperConnected, KeeperSeenOnStorage])
def test_a_version_mismatch_fails_only_the_trial_if_a_compatible_keeper_was_detected_before(
    contact: type[Any],
) -> None:
    search = new_search(concurrency=1)
    search.suggest()
    search.handle(contact("t0"))
    search.handle(JobTerminated("t0", ExitReason.VERSION, "cannot run", 50.0))
    assert search.state is ExperimentState.RUNNING
    assert search.trial("t0").state is TrialState.FAILED
    assert search.requests == [1]


def test_a_job_is_stored_when_its_keeper_is_first_found_on_the_shared_storage() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    found = KeeperSeenOnStorage("t0")
    assert not search.job("t0").was_found
    assert search.handle(found) == [SaveJob(search.job("t0"))]
    assert search.job("t0").was_found
    assert search.handle(found) == []
    assert search.handle(KeeperSeenOnStorage("ended")) == []


def test_the_last_job_counts_as_running_until_it_ends_even_if_the_experiment_is_done() -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    assert search.state is ExperimentState.DONE
    assert search.experiment.scheduler.runs_jobs
    search.lose_job("t0")
    assert not search.experiment.scheduler.runs_jobs


def test_a_job_drains_after_its_only_trial_has_ended_and_still_drains_after_a_manager_restart() -> None:
    search = new_search(concurrency=1)
    search.run(search.suggest())
    assert search.job("t0").state is JobState.DRAINING
    assert search.resumed().job("t0").state is JobState.DRAINING


def test_a_job_counts_as_silent_until_its_keeper_connects_or_its_trial_ends() -> None:
    search = new_search(concurrency=3)
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


def test_a_resumed_experiment_keeps_its_trials_and_requests_the_missing_trials() -> None:
    search = new_search(concurrency=2, max_trials=4)
    search.run(search.suggest(), "0.5")
    search.start(search.suggest())
    search.handle(KeeperConnected("J"))
    after = search.resumed()
    assert after.experiment.lifecycle.counts == Counter({TrialState.SUCCEEDED: 1, TrialState.RUNNING: 1})
    assert after.experiment.leaderboard.best is search.trial("t0")
    after.handle(ManagerReady())
    assert after.requests == [2], "one slot is taken, and the request of the previous manager is gone"
    after.run("t1", "0.7")
    while after.requests:
        after.run(after.suggest(), "0.6")
    assert (after.state, after.finishes) == (ExperimentState.DONE, 1)
    assert sorted(after.experiment.trials) == ["t0", "t1", "t2", "t3"]
    assert after.experiment.leaderboard.best is after.trial("t1")


def test_a_resumed_experiment_reports_all_its_trials_as_changed() -> None:
    search = new_search(concurrency=1)
    search.run(search.suggest())
    search.start(search.suggest())
    assert set(search.resumed().experiment.change_log.since(0)) == {"t0", "t1"}


def test_a_resumed_experiment_checks_the_constraints_of_final_results() -> None:
    search = new_search(concurrency=2, objectives=Objectives(MAXIMIZE.all, (Constraint("mb", at_most=50.0),)))
    search.run(search.suggest(), '{"default": 0.9, "mb": 60}')
    search.start(search.suggest())
    # The store does not contain `is_feasible`, so the resumed manager must compute it and not use this value.
    search.trial("t0").run.is_feasible = True
    after = search.resumed()
    assert not after.trial("t0").run.is_feasible
    assert after.experiment.leaderboard.best is None


def test_the_tuner_receives_a_result_after_a_resume_if_the_manager_crashed_before_reporting_the_result() -> (
    None
):
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.end("t0")
    trial = search.trial("t0")
    trial.run.ended = None  # the store does not contain `ended`, so a resumed manager lacks the field
    next(iter(trial.attempts.values())).apply(AttemptReport.DISCARDED)
    after = search.resumed()
    after.handle(ManagerReady())
    after.start("t0")
    after.end("t0")
    after.deliver("t0")
    assert after.tuner_results == [TellTuner(0, 0.5)]


@pytest.mark.parametrize(
    "state", [ExperimentState.DONE, ExperimentState.STOPPED, ExperimentState.ERROR, ExperimentState.RUNNING]
)
def test_a_resumed_experiment_that_has_reached_its_trial_limit_is_done_immediately(state) -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    search.experiment.state = state
    after = search.resumed()
    after.handle(ManagerReady())
    assert (after.state, after.finishes, after.requests) == (ExperimentState.DONE, 1, [])


def test_a_resume_clears_the_previous_error() -> None:
    search = new_search(concurrency=1)
    search.handle(TunerFailed("boom", was_asked=True))
    search.handle(ManagerReady())
    assert (search.state, search.experiment.error) == (ExperimentState.RUNNING, "")
    search.handle(TunerFailed("again", was_asked=True))
    assert (search.experiment.error, search.finishes) == ("again", 2)
