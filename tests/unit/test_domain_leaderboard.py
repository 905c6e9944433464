"""The leaderboard: best trials, latest failures, and trials without a result."""

import pytest

from nni_manager.domain.leaderboard import LATEST_FAILURES, TOP_TRIALS, Leaderboard
from nni_manager.domain.objectives import MAXIMIZE, MINIMIZE
from nni_manager.domain.trial import Trial, TrialState


def a_trial(number: int, state: TrialState = TrialState.SUCCEEDED, value: float | None = None) -> Trial:
    trial = Trial(f"t{number}", number, {}, {}, 0.0, "job", state)
    trial.run.value, trial.run.final = value, None if value is None else repr(value)
    return trial


@pytest.mark.parametrize(("maximize", "best"), [(True, [9, 8]), (False, [0, 1])])
def test_the_leaderboard_lists_a_bounded_number_of_results_best_first(
    maximize: bool, best: list[int]
) -> None:
    leaderboard = Leaderboard(MAXIMIZE if maximize else MINIMIZE)
    for number in range(2 * TOP_TRIALS):
        leaderboard.add(a_trial(number, value=float(number % 10)))
    assert len(leaderboard.top) == TOP_TRIALS
    assert [trial.run.value for trial in leaderboard.top[:4]] == [best[0], best[0], best[1], best[1]]
    assert leaderboard.best is leaderboard.top[0]
    assert leaderboard.top[0].sequence_id < leaderboard.top[1].sequence_id, (
        "the earlier trial of two equal results comes first"
    )


def test_the_leaderboard_lists_the_newest_failures() -> None:
    leaderboard = Leaderboard(MAXIMIZE)
    for number in range(LATEST_FAILURES + 2):
        leaderboard.add(a_trial(number, TrialState.FAILED))
    assert [trial.sequence_id for trial in leaderboard.latest_failures] == [4, 3, 2]
    assert leaderboard.best is None


def test_the_leaderboard_lists_successes_without_a_number_separately() -> None:
    leaderboard = Leaderboard(MAXIMIZE)
    trial = a_trial(0)
    leaderboard.add(trial)
    assert (leaderboard.latest_without_result, leaderboard.top) == (trial, [])


def test_the_leaderboard_ignores_a_trial_that_is_not_terminal() -> None:
    leaderboard = Leaderboard(MAXIMIZE)
    leaderboard.add(a_trial(0, TrialState.RUNNING, 1.0))
    assert (leaderboard.top, leaderboard.latest_without_result, len(leaderboard.latest_failures)) == (
        [],
        None,
        0,
    )
