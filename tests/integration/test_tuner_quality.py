"""`make quality` in its short form: TPE on two functions, and a baseline for every tuner."""

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
