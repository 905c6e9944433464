"""Metrics of a trial: its final result, its intermediate results, and the leaderboard."""

import pytest
from attempts import attempt_id
from simulated_search import new_search

from nni_manager.domain.events import (
    ProblemFound,
    SaveTrial,
    TaskReported,
    TellTuner,
)
from nni_manager.domain.objectives import MAXIMIZE, MINIMIZE
from nni_manager.domain.trial import TrialState
from nni_manager.domain.trial_run import NO_FINAL_RESULT, NO_NUMBER_IN_FINAL_RESULT
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.reasons import ExitReason


def test_a_final_result_counts_even_if_it_arrives_after_the_trial_end() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0")
    search.report("t0", "0.75")
    search.deliver("t0")
    assert search.tuner_results == [TellTuner(0, 0.75)]


def test_the_attempts_of_a_terminal_trial_are_removed_from_memory() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.5")
    search.end("t0")
    trial = search.trial("t0")
    assert (len(trial.registered.registered), len(trial.attempts), len(trial.ends)) == (1, 1, 1)
    search.deliver("t0")
    assert (trial.state, trial.result) == (TrialState.SUCCEEDED, "0.5")
    assert (trial.registered.registered, trial.attempts, trial.ends, trial.run.ended) == ([], {}, [], None)


def test_a_warning_is_stored_even_if_it_arrives_after_the_trial_end() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", warnings=("its metrics file was truncated",))
    assert search.trial("t0").warning == "its metrics file was truncated"
    both = ("its metrics file was truncated", "its stdout file was rewritten")
    assert search.end("t0", warnings=both) == [SaveTrial(search.trial("t0"))]
    assert search.trial("t0").warning == "\n".join(both)
    assert search.end("t0", warnings=both) == []


def test_a_trial_is_stored_when_a_task_first_reports_metrics() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    first, second = (TaskReported(AttemptKey("t0", attempt_id(0), task)) for task in ("main", "other"))
    trial = search.trial("t0")
    assert search.handle(first) == [SaveTrial(trial)]
    assert search.handle(first) == []
    assert SaveTrial(trial) in search.handle(second), "the warning about the second task"
    search.end("t0")
    search.deliver("t0")
    assert trial.state is TrialState.SUCCEEDED
    assert search.handle(second) == []


def test_only_the_first_final_result_of_a_trial_counts() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    assert search.report("t0", "0.5") == [SaveTrial(search.trial("t0"))]
    assert search.report("t0", "0.9") == [SaveTrial(search.trial("t0"))], "a new warning"
    assert search.report("t0", "0.7") == []
    assert (search.trial("t0").run.final, search.trial("t0").run.value) == ("0.5", 0.5)


def test_intermediate_results_are_counted_and_only_the_latest_result_is_kept() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    assert search.report("t0", "0.1", "0.3", final=False) == []
    search.report("t0", "0.2", final=False)
    trial = search.trial("t0")
    assert (trial.run.intermediate, trial.run.intermediate_count, trial.run.final) == ("0.2", 3, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "it is NaN, not a finite number; "),
        ('{"loss": 1}', 'it is a dict without "default" (it has "loss"); '),
        ('"good"', 'it is "good", a str; '),
        ("null", 'under "default"; if the objective is a function, it returned None: add `return`'),
    ],
)
def test_a_final_result_that_contains_no_number_is_stored_but_not_reported_to_the_tuner(
    value, reason
) -> None:
    search = new_search(concurrency=1)
    search.run(search.suggest(), value)
    assert search.trial("t0").run.final == value
    assert search.tuner_results == [TellTuner(0, None)]
    assert search.experiment.leaderboard.best is None
    assert reason in search.trial("t0").run.message
    assert search.trial("t0").run.message.startswith(NO_NUMBER_IN_FINAL_RESULT.partition("{")[0])
    assert search.experiment.leaderboard.latest_without_result is search.trial("t0")


def test_the_message_for_a_result_dict_without_the_key_default_suggests_an_objective() -> None:
    search = new_search(concurrency=1, max_trials=2)
    search.run(search.suggest(), '{"note": "x", "loss": 1}')
    search.run(search.suggest(), '{"note": "x"}')
    hint = ', or name the metric in the experiment file, such as objectives: [{metric: "loss", mode: minimize}] (or maximize)'
    assert search.trial("t0").run.message.endswith('"default"' + hint)
    assert search.trial("t1").run.message.endswith('"default"')


def test_a_succeeded_trial_without_a_final_result_keeps_its_message_after_a_restart() -> None:
    search = new_search(concurrency=1, max_trials=2)
    search.run(search.suggest(), None)
    search.run(search.suggest(), "0.5")
    silent = search.trial("t0")
    assert (silent.state, silent.run.value, silent.run.message) == (
        TrialState.SUCCEEDED,
        None,
        NO_FINAL_RESULT,
    )
    assert search.trial("t1").run.message == ""
    assert search.experiment.leaderboard.latest_without_result is silent
    assert search.resumed().experiment.leaderboard.latest_without_result is silent


@pytest.mark.parametrize(("maximize", "best"), [(True, "t1"), (False, "t2")])
def test_the_best_trial_has_the_highest_or_the_lowest_result_depending_on_the_optimize_mode(
    maximize: bool, best: str
) -> None:
    search = new_search(concurrency=1, objectives=MAXIMIZE if maximize else MINIMIZE)
    for value in ("0.5", "0.9", "0.1", "0.9", "0.1"):
        search.run(search.suggest(), value)
    assert search.experiment.leaderboard.best is search.trial(best)


@pytest.mark.parametrize("maximize", [True, False])
def test_the_leaderboard_keeps_the_ten_best_trials_and_lists_the_older_of_equal_trials_first(
    maximize: bool,
) -> None:
    search = new_search(concurrency=1, max_trials=None, objectives=MAXIMIZE if maximize else MINIMIZE)
    values = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    for value in values:
        search.run(search.suggest(), str(value))
    ranks = sorted(range(len(values)), key=lambda number: -values[number] if maximize else values[number])
    for experiment in (search.experiment, search.resumed().experiment):
        assert [trial.sequence_id for trial in experiment.leaderboard.top] == ranks[:10]
        assert experiment.leaderboard.best is experiment.leaderboard.top[0]


def test_the_leaderboard_lists_the_latest_failures_newest_first() -> None:
    search = new_search(concurrency=1, max_trials=None)
    for reason in [ExitReason.SIGNAL] * 3 + [ExitReason.SUCCEEDED, ExitReason.NONZERO_EXIT]:
        search.run(search.suggest(), reason=reason)
    assert [trial.trial_id for trial in search.experiment.leaderboard.latest_failures] == ["t4", "t2", "t1"]


def test_the_result_of_a_failed_trial_is_not_the_best() -> None:
    search = new_search(concurrency=1)
    search.run(search.suggest(), "0.5")
    search.run(search.suggest(), "0.9", ExitReason.NONZERO_EXIT)
    assert search.experiment.leaderboard.best is search.trial("t0")


def test_a_repeated_problem_of_a_trial_is_stored_as_one_warning() -> None:
    search = new_search(concurrency=1)
    trial = search.trial(search.suggest())
    problem = ProblemFound("t0", "ignored an attempt: it has no attempt.json")
    assert search.handle(problem) == [SaveTrial(trial)]
    assert trial.warning == problem.message
    assert search.handle(problem) == []


def test_a_problem_of_a_replaced_attempt_or_of_an_ended_trial_causes_no_warning() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.start("t0", attempt=1)
    old, new = (AttemptKey("t0", attempt_id(number), "main") for number in range(2))
    assert search.handle(ProblemFound("t0", "it has no space", old)) == []
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.handle(ProblemFound("t0", "it has no space", new)) == []
    assert search.trial("t0").warning == ""
