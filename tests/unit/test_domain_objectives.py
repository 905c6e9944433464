"""Objectives, constraints and best results. A brute-force computation checks the Pareto front."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_search import new_search

from nni_manager.domain.leaderboard import Leaderboard
from nni_manager.domain.objectives import (
    MAXIMIZE,
    Constraint,
    Objective,
    Objectives,
    Outcome,
    violated,
)
from nni_manager.domain.pareto import ParetoFront, dominates
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.engine.trial_rows import row_view

TWO = Objectives(
    (Objective("accuracy", "maximize"), Objective("latency_ms", "minimize")),
    (Constraint("size_mb", at_most=50.0),),
)
# A loss has one of only seven values, so that many losses are equal.
LOSSES = st.integers(0, 6).map(float)


def results_of(*rows: tuple[float, float, float]) -> list[tuple[int, str]]:
    names = "accuracy", "latency_ms", "size_mb"
    return [(number, json.dumps(dict(zip(names, row, strict=True)))) for number, row in enumerate(rows)]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@given(data=st.data())
def test_the_pareto_front_matches_a_brute_force_computation_after_every_result(
    width: int, data: st.DataObject
) -> None:
    points = data.draw(st.lists(st.tuples(*[LOSSES] * width), max_size=40))
    front: ParetoFront[int] = ParetoFront()
    for number, point in enumerate(points):
        so_far = points[: number + 1]
        is_on_front = not any(dominates(other, point) for other in so_far)
        assert front.add(point, number) is is_on_front
        expected = [
            index
            for index, each in enumerate(so_far)
            if not any(all(a <= b for a, b in zip(o, each, strict=True)) and o != each for o in so_far)
        ]
        assert front.items == sorted(expected, key=lambda index: (points[index], index))
        assert len(front) == len(expected)


@pytest.mark.slow
def test_a_pareto_front_of_thirty_thousand_results_is_computed_quickly() -> None:
    count = 30_000
    front: ParetoFront[int] = ParetoFront()
    began_s = time.process_time()
    for number in range(count):
        place = number * 7919 % count
        front.add((float(place), float(-place)), number)
    # The loop takes 0.5 s on an idle machine. If each result were compared with all others, it would take minutes.
    assert time.process_time() - began_s < 10
    assert len(front) == count


def test_a_pareto_front_of_three_objectives_may_have_hundreds_of_results() -> None:
    front: ParetoFront[int] = ParetoFront()
    for number in range(300):
        assert front.add((float(number), float(-number), 0.0), number)
    assert [*front] == list(range(300))
    assert not front.add((150.0, -149.0, 0.0), 300)
    assert front.add((149.0, -150.0, 0.0), 301)
    assert front.items == [*range(149), 301, *range(151, 300)]


def test_the_best_results_are_feasible_and_not_dominated() -> None:
    rows = results_of((0.9, 20, 40), (0.8, 10, 40), (0.8, 30, 40), (0.99, 1, 51), (0.9, 20, 50))
    assert TWO.ranked(rows) == [0, 4, 1], "equal ones in their order; 2 is dominated, 3 is too large"
    assert TWO.ranked([*rows, (5, "0.9"), (6, '{"accuracy": 1}'), (7, "no JSON")]) == [0, 4, 1]
    one = Objectives((Objective("latency_ms", "minimize"),), TWO.constraints)
    assert one.ranked(rows) == [1, 0, 4, 2]
    assert MAXIMIZE.ranked([(0, "0.5"), (1, "0.9"), (2, '{"default": 0.9}')]) == [1, 2, 0]


def test_a_result_without_a_number_for_every_metric_is_rejected_with_a_reason() -> None:
    assert TWO.outcome('{"accuracy": 1, "latency_ms": 2.5, "size_mb": 53}') == Outcome((1.0, 2.5), (3.0,))
    assert TWO.outcome('{"accuracy": true, "latency_ms": false, "size_mb": 1}') == Outcome(
        (1.0, 0.0), (-49.0,)
    )
    assert TWO.metrics == ("accuracy", "latency_ms", "size_mb")
    for text, reason in {
        "0.9": '0.9, not a dict with "accuracy", "latency_ms", "size_mb"',
        '{"accuracy": 1, "loss": 2}': 'a dict without "latency_ms", "size_mb" (it has "accuracy", "loss")',
        '{"accuracy": 1, "latency_ms": NaN, "size_mb": 1}': 'a dict whose "latency_ms" is NaN, not a finite number',
        '{"accuracy": "1", "latency_ms": 1, "size_mb": 1}': 'a dict whose "accuracy" is "1", a str',
        "{": "{, which is not JSON",
    }.items():
        assert TWO.outcome(text) is None
        assert TWO.reason_against(text) == reason
    assert MAXIMIZE.reason_against("{") == "{, which is not JSON"


def test_the_violation_of_a_constraint_is_the_distance_of_the_value_to_the_exceeded_bound() -> None:
    both = Constraint("size_mb", at_most=50.0, at_least=10.0)
    assert [both.violation(value) for value in (60.0, 50.0, 10.0, 7.0)] == [10.0, 0.0, 0.0, 3.0]
    assert Constraint("size_mb").violation(60.0) == 0.0


def test_a_single_number_is_a_valid_result_for_the_default_objective() -> None:
    assert MAXIMIZE.outcome("0.5") == Outcome((0.5,))
    sized = Objectives(MAXIMIZE.all, TWO.constraints)
    assert sized.outcome("0.5") is None
    assert sized.outcome('{"default": 0.5, "size_mb": 50}') == Outcome((0.5,), (0.0,))
    assert Objectives((Objective("accuracy", "maximize"),)).outcome("0.5") is None
    assert Objectives(MAXIMIZE.all, (Constraint("default", at_least=0.0),)).outcome("-2") == Outcome(
        (-2.0,), (2.0,)
    )


@given(value=st.floats(-9, 9), low=st.floats(-9, 9), high=st.floats(-9, 9))
def test_a_metric_outside_the_bounds_violates_its_constraint(value: float, low: float, high: float) -> None:
    assert (Constraint("m", at_most=high).violation(value) <= 0) is (value <= high)
    assert (Constraint("m", at_least=low).violation(value) <= 0) is (value >= low)
    assert (Constraint("m", high, low).violation(value) <= 0) is (low <= value <= high)


def test_the_message_for_a_violated_constraint_names_the_constraint() -> None:
    assert violated(TWO, '{"accuracy": 1, "latency_ms": 2, "size_mb": 51}') == ["size_mb ≤ 50"]
    assert violated(TWO, '{"accuracy": 1, "latency_ms": 2, "size_mb": 50}') == []
    assert violated(TWO, "1") == []
    assert str(Constraint("m", 2.5, 1.0)) == "m ≤ 2.5 and m ≥ 1"
    assert str(Constraint("m", 123456788, 1e-7)) == "m ≤ 123456788 and m ≥ 1e-07"


def ended(number: int, text: str, objectives: Objectives) -> Trial:
    trial = Trial(f"t{number}", number, {}, {}, 0.0, "job", TrialState.SUCCEEDED)
    trial.run.set_final(text, 0, objectives)
    return trial


def test_the_leaderboard_of_several_objectives_has_a_pareto_front_and_no_best_trial() -> None:
    leaderboard = Leaderboard(TWO)
    for number, text in results_of((0.9, 20, 40), (0.95, 30, 40), (0.9, 21, 40), (0.99, 1, 51)):
        leaderboard.add(ended(number, text, TWO))
    assert [trial.sequence_id for trial in leaderboard.front] == [1, 0]
    assert leaderboard.best is None
    assert leaderboard.latest_without_result is None


def test_a_trial_that_violates_a_constraint_is_never_the_best() -> None:
    sized = Objectives(MAXIMIZE.all, TWO.constraints)
    leaderboard = Leaderboard(sized)
    trials = [
        ended(number, json.dumps({"default": value, "size_mb": size}), sized)
        for number, (value, size) in enumerate([(0.9, 60), (0.5, 50), (0.4, 1)])
    ]
    for trial in trials:
        leaderboard.add(trial)
    assert leaderboard.front == [leaderboard.best] == [trials[1]]
    assert (trials[0].run.value, trials[0].run.is_feasible) == (0.9, False)


def test_the_message_of_a_trial_names_the_metrics_missing_in_the_final_result() -> None:
    trial = ended(0, '{"accuracy": 0.9}', TWO)
    assert trial.is_without_result
    assert trial.run.why_without_result("") == trial.run.unusable
    assert trial.run.unusable == (
        'the final result has not all numbers of objectives and constraints: it is a dict without "latency_ms", "size_mb" '
        '(it has "accuracy"); report a dict with a number under "accuracy", "latency_ms", "size_mb"'
    )


def test_assessors_and_lists_use_the_objective_metric_of_intermediate_results() -> None:
    search = new_search(objectives=Objectives((Objective("accuracy", "maximize"),)))
    feedback = search.experiment.feedback
    feedback.is_assessed = True
    assert feedback.seen_by_assessor('{"accuracy": 0.5, "default": 1}') == 0.5
    assert feedback.seen_by_assessor("0.5") is None
    trial = Trial("t0", 0, {}, {}, 0.0, "job")
    search.experiment.restore([trial])
    for text, latest in {'{"accuracy": 0.5, "default": 1}': 0.5, "0.25": 0.25, '{"loss": 1}': None}.items():
        trial.run.intermediate = text
        assert row_view(trial)["latest"] == latest


def test_a_restored_trial_is_marked_infeasible_if_it_violates_a_constraint() -> None:
    experiment = new_search(objectives=TWO).experiment
    trials = [
        Trial(
            f"t{number}",
            number,
            {},
            {},
            0.0,
            "job",
            TrialState.SUCCEEDED,
            run=TrialRun(value=row[0], final=text),
        )
        for (number, text), row in zip(
            results_of((0.9, 20, 40), (0.99, 1, 51)), [(0.9,), (0.99,)], strict=True
        )
    ]
    experiment.restore(trials)
    assert [trial.run.is_feasible for trial in trials] == [True, False]
    assert [row_view(trial).get("infeasible") for trial in trials] == [None, True]
    assert experiment.leaderboard.front == trials[:1]
