"""Intermediate results for the assessor, early stops, and the results of trials that were stopped."""

import json

import pytest
from simulated_search import SimulatedSearch, new_search

from nni_manager.domain.events import (
    AskAssessor,
    EarlyStopRequested,
    TellAssessor,
    TellTuner,
    TrialStopAsked,
)
from nni_manager.domain.trial import (
    TERMINAL_STATE,
    Trial,
    TrialState,
)
from trial_keeper.wire.reasons import ExitReason


def test_a_custom_assessor_receives_the_complete_text_of_results() -> None:
    search = new_search()
    search.experiment.feedback.is_assessed = search.experiment.feedback.assessor_sees_all = True
    trial_id = search.suggest()
    search.start(trial_id)
    search.report(trial_id, '{"acc": 1}', "2", final=False)
    (asked,) = search.assessed
    assert isinstance(asked, AskAssessor)
    assert [each.text for each in asked.values] == ['{"acc": 1}', "2"]
    assert asked.values[1] == 2.0


def assessed(search: SimulatedSearch, *, uses_early_stopped: bool = False) -> SimulatedSearch:
    search.experiment.feedback.is_assessed = True
    search.experiment.feedback.learns_from_early_stopped = uses_early_stopped
    search.start(search.suggest())
    return search


def test_a_tuner_that_learns_from_early_stops_gets_the_complete_newest_result_of_a_stopped_trial() -> None:
    search = assessed(new_search(concurrency=1), uses_early_stopped=True)
    newest = '{"default": 0.5, "loss": 2}'
    search.report("t0", "0.25", newest, final=False)
    search.handle(TrialStopAsked("t0", ExitReason.EARLY_STOPPED, 40.0))
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    feedback, trial = search.experiment.feedback, search.trial("t0")
    assert feedback.metric_of(trial) == newest
    feedback.learns_from_early_stopped = False
    assert feedback.metric_of(trial) is None


@pytest.mark.parametrize("reason", [ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER])
@pytest.mark.parametrize("final", [None, "0.5"])
@pytest.mark.parametrize("reports_pruned", [True, False])
def test_a_trial_counts_as_pruned_if_it_was_stopped_early_without_a_final_result(
    reason: ExitReason, final: str | None, reports_pruned: bool
) -> None:
    search = assessed(new_search(concurrency=1))
    search.experiment.feedback.reports_pruned = reports_pruned
    if final is not None:
        search.report("t0", final)
    search.handle(TrialStopAsked("t0", reason, 40.0))
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    is_expected = reports_pruned and reason is ExitReason.EARLY_STOPPED and final is None
    assert search.experiment.feedback.is_pruned(search.trial("t0")) == is_expected


def test_an_assessor_receives_intermediate_numbers_and_the_trial_end() -> None:
    search = assessed(new_search(concurrency=1))
    search.report("t0", "0.5", "NaN", '"loss"', '{"default": 2, "other": 1}', final=False)
    search.report("t0", '"none"', final=False)
    search.report("t0", "7")
    search.end("t0")
    search.deliver("t0")
    assert search.assessed == [AskAssessor("t0", 0, 0, (0.5, 2.0)), TellAssessor("t0", has_succeeded=True)]


def test_results_are_not_assessed_if_there_is_no_assessor() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5", final=False)
    search.end("t0")
    search.deliver("t0")
    assert search.assessed == []


@pytest.mark.parametrize(("uses_early_stopped", "reported"), [(False, None), (True, 0.25)])
def test_the_last_result_of_an_early_stopped_trial_goes_only_to_a_tuner_that_learns_from_early_stops(
    uses_early_stopped: bool, reported: float | None
) -> None:
    search = assessed(new_search(concurrency=1), uses_early_stopped=uses_early_stopped)
    search.report("t0", "0.5", "0.25", final=False)
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    assert search.canceled == [("t0", ExitReason.EARLY_STOPPED)]
    search.end("t0", ExitReason.SIGNAL)
    search.deliver("t0")
    assert search.trial("t0").state is TrialState.EARLY_STOPPED
    assert search.tuner_results == [TellTuner(0, reported)]
    assert search.assessed[-1] == TellAssessor("t0", has_succeeded=False)
    assert search.experiment.leaderboard.best is None
    assert search.requests == [1]


@pytest.mark.parametrize(
    "reason", [ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER, ExitReason.TIME_LIMIT]
)
@pytest.mark.parametrize(("size", "succeeds"), [(None, False), (50, False), (51, True)])
def test_the_tuner_and_the_leaderboard_receive_the_final_result_of_a_stopped_trial(
    reason: ExitReason, size: int | None, succeeds: bool
) -> None:
    search = assessed(new_search(concurrency=2))
    search.run(search.suggest(), "0.1")
    search.report("t0", "0.25", final=False)
    search.handle(TrialStopAsked("t0", reason, 40.0))
    # The bytes of the final result arrive after the report of the trial's end.
    search.end("t0", reason, metrics_size_at_stop=size)
    search.report("t0", "0.5", "0.9", offset=50)
    search.deliver("t0")
    state = TrialState.SUCCEEDED if succeeds else TERMINAL_STATE[reason]
    assert search.trial("t0").state is state
    assert search.tuner_results == [TellTuner(1, 0.1), TellTuner(0, 0.5)]
    assert search.assessed[-1] == TellAssessor("t0", has_succeeded=succeeds)
    assert search.experiment.leaderboard.best is search.trial("t0")
    assert search.experiment.feedback.metric_of(search.trial("t0")) == "0.5"
    assert search.resumed().experiment.leaderboard.best is search.trial("t0")
    assert search.experiment.lifecycle.counts[state] == 1 + succeeds


@pytest.mark.parametrize(("uses_early_stopped", "reported"), [(False, None), (True, 0.25)])
def test_the_tuner_receives_no_final_result_of_a_stopped_trial_if_the_result_is_nan(
    uses_early_stopped: bool, reported: float | None
) -> None:
    search = assessed(new_search(concurrency=1), uses_early_stopped=uses_early_stopped)
    search.report("t0", "0.25", final=False)
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    search.report("t0", "NaN")
    search.end("t0", ExitReason.EARLY_STOPPED)
    search.deliver("t0")
    assert search.tuner_results == [TellTuner(0, reported)]
    assert search.experiment.leaderboard.best is None


def test_a_tuner_receives_the_last_result_of_an_early_stopped_trial_even_if_the_record_is_long() -> None:
    search = assessed(new_search(concurrency=1))
    search.experiment.feedback.learns_from_early_stopped = True
    search.report("t0", json.dumps({"default": 0.5, "note": "x" * 5000}), final=False)
    assert search.trial("t0").run.intermediate == "0.5", "the store has the whole record"
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    search.end("t0", ExitReason.EARLY_STOPPED)
    search.deliver("t0")
    assert search.tuner_results == [TellTuner(0, 0.5)]


@pytest.mark.parametrize(
    ("reason", "is_void"),
    [
        (ExitReason.NONZERO_EXIT, False),
        (ExitReason.TIME_LIMIT, False),
        (ExitReason.STOPPED_BY_USER, True),
        (ExitReason.JOB_LOST, True),
        (ExitReason.PREEMPTED, True),
    ],
)
def test_a_trial_is_void_if_a_user_or_the_cluster_ended_it_without_a_result(reason, is_void) -> None:
    trial = Trial("t0", 0, {}, {}, 0.0, "t0")
    trial.gone(reason, "", 1.0, 1.0)
    assert new_search().experiment.feedback.is_void(trial) is is_void


def test_an_early_stop_request_is_ignored_if_a_newer_attempt_runs_or_the_trial_is_terminal() -> None:
    search = assessed(new_search(concurrency=1))
    search.report("t0", "0.5", final=False)
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    assert search.handle(EarlyStopRequested("t0", 0, 40.0)) == []
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.handle(EarlyStopRequested("t0", 1, 40.0)) == []
    assert search.canceled == []


@pytest.mark.parametrize(
    "reason", [ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER, ExitReason.TIME_LIMIT]
)
def test_a_final_result_counts_if_it_arrives_while_the_trial_stops(reason: ExitReason) -> None:
    search = assessed(new_search(concurrency=1))
    search.handle(TrialStopAsked("t0", reason, 40.0))
    assert search.trial("t0").state is TrialState.STOPPING
    search.report("t0", "0.5", offset=50)
    search.end("t0", reason, metrics_size_at_stop=50)
    search.deliver("t0")
    assert search.trial("t0").state is TERMINAL_STATE[reason]
    assert search.tuner_results == [TellTuner(0, 0.5)]
    assert search.experiment.leaderboard.best is search.trial("t0")


def test_the_tuner_receives_the_last_intermediate_result_reported_during_an_early_stop() -> None:
    search = assessed(new_search(concurrency=1), uses_early_stopped=True)
    search.report("t0", "0.5", final=False)
    search.handle(EarlyStopRequested("t0", 0, 40.0))
    search.report("t0", "0.75", final=False)
    search.end("t0", ExitReason.EARLY_STOPPED)
    search.deliver("t0")
    assert search.trial("t0").run.intermediate_count == 2
    assert search.tuner_results == [TellTuner(0, 0.75)]


def test_the_assessor_may_stop_the_second_attempt_of_a_trial() -> None:
    search = assessed(new_search(concurrency=1))
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    search.report("t0", "0.25", final=False, attempt=1)
    (asked,) = search.assessed
    search.handle(EarlyStopRequested(asked.trial_id, asked.attempt, 40.0))
    assert search.canceled == [("t0", ExitReason.EARLY_STOPPED)]
