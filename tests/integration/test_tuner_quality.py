"""`make quality` and `make quality-functions` in their short forms."""

import importlib
from pathlib import Path

import pytest

from nni_manager.tuner.registry import TUNERS

# BatchTuner and GridSearch enumerate; PBTTuner continues from checkpoints instead of a function.
NOT_MEASURED = {"BatchTuner", "GridSearch", "PBTTuner"}


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("tuner_quality")


@pytest.fixture
def real(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("tuner_problems")


SHORT = ("SVM, digits", "SVM kernels, cancer")


@pytest.mark.timeout(900)
def test_auto_finds_better_models_than_random_search(real):
    found = real.searches(("Auto", "Random"), SHORT, seeds=3, concurrencies=(4,), processes=1)
    of = real.scores(found, SHORT, 4)
    assert all(ours > theirs + 0.1 for ours, theirs in zip(of["Auto"], of["Random"], strict=True)), of


@pytest.mark.timeout(900)
def test_random_search_in_place_of_auto_misses_the_goal(real, monkeypatch):
    class RandomSearch(real.OurTuner):
        def __init__(self, name, *others):
            super().__init__("Random", *others)

    monkeypatch.setattr(real, "OurTuner", RandomSearch)
    found = real.searches(("Auto", real.REFERENCE), SHORT, seeds=3, concurrencies=(1,), processes=1)
    assert not real.reaches_goal(found, SHORT, 1)


def test_every_problem_has_a_table_whose_columns_are_its_parameters(real):
    for name, problem in real.REAL_PROBLEMS.items():
        header, *rows = real.file_of(name).read_text().splitlines()
        drawn = real.flat(real.made_tuner("Random", problem.space, seed=1).ask(0).parameters)
        assert drawn.keys() <= {*header.split(",")}
        assert len(rows) == 450


def test_the_score_is_0_for_the_median_of_random_search_and_1_for_the_best_known_error(real):
    problem = real.problem_of(SHORT[0])
    runs = {
        (tuner, SHORT[0], 1): [real.Run(error, 1.0)]
        for tuner, error in (("one", problem.random_median), ("two", problem.least))
    }
    assert real.scores(runs, SHORT[:1], 1) == {"one": [0.0], "two": [1.0]}


def test_tpe_reaches_the_quality_of_optunas_sampler(measured):
    rows = measured.quality(["TPE"], ["Branin, 2", "sphere, 5"], seeds=5, trials=40, processes=1)
    assert len(rows) == 2
    assert all(row.holds for row in rows), measured.render(rows)


def test_the_quality_with_a_pruner_is_measured_beside_optunas_own_loop(measured):
    # One seed proves nothing about the quality; this runs what `make quality` runs.
    (row,) = measured.quality_with_pruning(1, measured.CHANCE)
    assert row.holds, measured.render([row])


def test_every_tuner_has_a_quality_baseline(measured):
    named = {*measured.SAMPLERS, *measured.WITHOUT_SAMPLER, *measured.WITH_BUDGET}
    assert TUNERS.keys() <= named | NOT_MEASURED


def test_the_quality_check_fails_for_a_random_sampler_in_place_of_tpe(measured, monkeypatch):
    # Replace TPE by random search.
    monkeypatch.setattr(measured, "of_tuner", lambda name, *job: measured.of_sampler("Random", *job))
    rows = measured.quality(["TPE"], ["sphere, 5"], seeds=5, trials=40, processes=1)
    assert not any(row.holds for row in rows), measured.render(rows)
