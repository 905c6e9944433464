"""The list and the curves of all experiments, read from the stores of the experiments."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_experiment import made_trial, write
from stored_experiments import finished

from nni_manager.domain.objectives import Constraint, Objective, Objectives
from nni_manager.hub.experiments import MAX_COMPARED, SPARKLINE_POINTS, Curve, Experiments, curve_of
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import trial_row

MAXIMIZE = Objective("default", "maximize")
MINIMIZE = Objective("default", "minimize")


@given(st.lists(st.floats(-1e6, 1e6)), st.sampled_from([MAXIMIZE, MINIMIZE]))
def test_the_result_curve_of_an_experiment_has_a_point_for_each_improvement(values, objective):
    curve = curve_of([(100.0 + at, value) for at, value in enumerate(values)], 100.0, objective)
    sign = 1 if objective.mode == "maximize" else -1
    improved = [
        at for at, value in enumerate(values) if all(sign * value > sign * each for each in values[:at])
    ]
    assert [(count - 1, seconds, value) for count, seconds, value in curve.points] == [
        (at, float(at), values[at]) for at in improved
    ]
    assert (curve.results, curve.seconds) == (len(values), max(len(values) - 1.0, 0.0))
    if values:
        assert curve.points[-1][2] == sign * max(sign * each for each in values)


def test_a_result_that_violates_a_constraint_adds_no_point_to_the_result_curve(an_experiment):
    objectives = Objectives((MAXIMIZE,), (Constraint("size", at_most=5),))
    folder = an_experiment("abc11111")
    trials = [made_trial(number, 100.0 + number) for number in range(3)]
    for trial, (value, size) in zip(trials, ((1, 5), (3, 6), (2, 4)), strict=True):
        trial.run.set_final(json.dumps({"default": value, "size": size}), 0, objectives)
    write(folder, *map(trial_row, trials))
    with StoreReader(folder.database) as reader:
        rows = reader.values_over_time(objectives)
    curve = curve_of(rows, 100.0, MAXIMIZE)
    assert [(count, value) for count, _, value in curve.points] == [(1, 1), (3, 2)]
    assert curve.results == 3


@given(st.integers(0, 200), st.integers(2, 50))
def test_a_thinned_result_curve_keeps_the_first_and_the_last_point(count, most):
    points = tuple((place + 1, float(place), float(place)) for place in range(count))
    thinned = Curve(MAXIMIZE, points, count, float(count)).thinned(most)
    assert len(thinned) == min(count, most)
    assert thinned == sorted(set(thinned))
    if points:
        assert (thinned[0], thinned[-1]) == (points[0], points[-1])


def test_the_experiment_list_shows_the_best_result_of_each_experiment(an_experiment):
    folder = an_experiment("abc11111")
    with StoreReader(folder.database) as reader:
        began_s = reader.experiment().created_at_s
    trials = [made_trial(number, began_s + number) for number in range(100)]
    for trial, value in zip(trials, (0.2, 0.1, *range(98)), strict=True):
        trial.run.value = value
    write(folder, *map(trial_row, trials))
    an_experiment("abc22222")
    lines = {line["id"]: line for line in Experiments().lines()}
    assert lines.keys() == {"abc11111", "abc22222"}
    assert (lines["abc11111"]["bestValue"], lines["abc22222"]["best"]) == (97, [])
    best = lines["abc11111"]["best"]
    assert (len(best), best[0], best[-1]) == (SPARKLINE_POINTS, (1, 1.0, 0.2), (100, 100.0, 97))
    (curve,) = Experiments().curves(["abc11111"])
    assert (curve["metric"], curve["mode"], curve["results"]) == ("default", "maximize", 100)
    assert curve["points"][:2] == ((1, 1.0, 0.2), (4, 4.0, 1))


@pytest.mark.slow
def test_a_comparison_of_result_curves_has_at_most_twenty_experiments(an_experiment):
    ids = [f"abc{number:05d}" for number in range(MAX_COMPARED + 1)]
    for each in ids:
        an_experiment(each)
    assert [curve["id"] for curve in Experiments().curves(ids)] == ids[:-1]


def test_the_experiment_list_reads_only_the_databases_of_changed_experiments(an_experiment, monkeypatch):
    first, second = an_experiment("abc11111"), an_experiment("abc22222")
    experiments = Experiments()
    before = experiments.lines()
    read, opened = [], StoreReader.__init__
    monkeypatch.setattr(StoreReader, "__init__", lambda self, path: read.append(path) or opened(self, path))
    assert experiments.lines() == before
    assert read == []
    finished(second, 0.5)
    lines = {line["id"]: line for line in experiments.lines()}
    assert lines["abc22222"]["bestValue"] == 0.5
    assert {*read} == {second.database}
    assert first.database not in read


def test_the_experiment_list_shows_readable_experiments_even_if_another_experiment_is_unreadable(
    an_experiment,
):
    an_experiment("abc11111")
    an_experiment("abc22222").database.write_bytes(b"no database")
    lines = {line["id"]: line for line in Experiments().lines()}
    assert lines["abc22222"]["status"] == "UNREADABLE"
    assert "problem" not in lines["abc11111"]
    assert [each["id"] for each in Experiments().curves(["abc11111", "abc22222", "absent"])] == ["abc11111"]


def test_a_removed_experiment_disappears_from_the_experiment_list(an_experiment):
    folder = an_experiment("abc11111")
    experiments = Experiments()
    assert len(experiments.lines()) == 1
    folder.remove()
    assert experiments.lines() == []
