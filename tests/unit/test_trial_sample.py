"""The sample of trials for charts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_experiment import made_trial

from nni_manager.domain.trial import Trial
from nni_manager.engine.trial_sample import TOP, even, improvements, sampled

RESULTS = st.one_of(st.none(), st.integers(-50, 50).map(float))


def a_trial(number: int, value: float | None, end_s: float | None) -> Trial:
    trial = made_trial(number, 0.0)
    trial.run.value, trial.run.ended_at_s = value, end_s
    return trial


@st.composite
def trials(draw: st.DrawFn) -> list[Trial]:
    ends = st.one_of(st.none(), st.integers(0, 100).map(float))
    drawn = draw(st.lists(st.tuples(RESULTS, ends), max_size=400))
    return [a_trial(number, *each) for number, each in enumerate(drawn)]


@given(trials(), st.integers(1, 60), st.booleans())
def test_a_sample_has_the_best_trials_and_all_improvements_in_order(
    all_trials: list[Trial], most: int, maximize: bool
) -> None:
    chosen = sampled(all_trials, most, maximize=maximize)
    ids = {trial.trial_id for trial in chosen}
    assert [trial.sequence_id for trial in chosen] == sorted(trial.sequence_id for trial in chosen)
    if len(all_trials) <= most:
        assert chosen == all_trials
        return
    assert len(chosen) <= 3 * most + TOP
    results = [trial for trial in all_trials if trial.run.value is not None]
    ended = [trial for trial in results if trial.run.ended_at_s is not None]
    by_end = sorted(ended, key=lambda trial: (trial.run.ended_at_s, trial.sequence_id))
    for order in (results, by_end):
        steps = improvements(order, maximize=maximize)
        if len(steps) <= most:
            assert ids >= {trial.trial_id for trial in steps}
        if steps:
            assert steps[-1].trial_id in ids, "the best one is always there"
    values = sorted((trial.run.value or 0.0 for trial in results), reverse=maximize)[:TOP]
    drawn = sorted((trial.run.value for trial in chosen if trial.run.value is not None), reverse=maximize)
    assert drawn[: len(values)] == values, "the best ones are there"


@pytest.mark.parametrize(("maximize", "expected"), [(True, [0, 4]), (False, [0, 1, 6])])
def test_an_improvement_is_better_than_all_feasible_results_before_it(
    maximize: bool, expected: list[int]
) -> None:
    all_trials = [a_trial(number, value, None) for number, value in enumerate([3, 1, 3, None, 4, 4, 0, 9])]
    all_trials[7].run.is_feasible = False
    assert [trial.sequence_id for trial in improvements(all_trials, maximize=maximize)] == expected


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_evenly_spaced_indices_include_the_first_and_the_last_index(count: int, most: int) -> None:
    places = even(count, most)
    assert len(places) == min(count, most)
    assert places == sorted(set(places))
    if count:
        assert places[-1] == count - 1
    if count >= most > 1:
        assert places[0] == 0
        gaps = {after - before for before, after in pairwise(places)}
        assert max(gaps) - min(gaps) <= 1


def test_a_sample_includes_the_pareto_front_and_counts_only_feasible_trials_as_improvements():
    trials = [Trial(f"t{number}", number, {}, {}, 0.0, "job") for number in range(1000)]
    for trial in trials:
        trial.run.value, trial.run.is_feasible = float(trial.sequence_id), trial.sequence_id % 2 == 0
    assert all(each.run.is_feasible for each in improvements(trials, maximize=True))
    front = [trials[123], trials[457]]
    chosen = sampled(trials, 3, maximize=True, front=front)
    assert [each in chosen for each in front] == [True, True]
    assert sum(not each.run.is_feasible for each in chosen) <= 3 + len(front)
