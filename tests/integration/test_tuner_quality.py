"""`make quality` in its short form: TPE on two functions, and every tuner has somebody it is compared with."""

import importlib
from pathlib import Path

import pytest

from nni_manager.tuner.registry import TUNERS

# A list of parameters has no quality, and what goes on from checkpoints is not about functions.
NOT_MEASURED = {"BatchTuner", "GridSearch", "PBTTuner"}


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("tuner_quality")


def test_tpe_finds_what_optunas_own_sampler_finds(measured):
    rows = measured.quality(["TPE"], ["Branin, 2", "sphere, 5"], seeds=5, trials=40, processes=1)
    assert len(rows) == 2
    assert all(row.holds for row in rows), measured.render(rows)


def test_every_tuner_is_compared_with_a_sampler_or_with_chance(measured):
    named = {*measured.SAMPLERS, *measured.WITHOUT_SAMPLER, *measured.WITH_BUDGET}
    assert TUNERS.keys() <= named | NOT_MEASURED


def test_a_tuner_that_finds_less_is_found_out(measured, monkeypatch):
    # Random in the place of TPE.
    monkeypatch.setattr(measured, "of_tuner", lambda name, *job: measured.of_sampler("Random", *job))
    rows = measured.quality(["TPE"], ["sphere, 5"], seeds=5, trials=40, processes=1)
    assert not any(row.holds for row in rows), measured.render(rows)
