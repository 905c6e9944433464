"""The short forms of `make quality`, `make quality-functions` and `make quality-peers`."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

from nni_manager.config.algorithms import TUNERS
from nni_manager.config.search_space import contains


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("tuner_quality")


@pytest.fixture
def real(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("tuner_problems")


@pytest.fixture
def beside(real, monkeypatch, tmp_path):
    """`peer_quality` with one problem and one peer, whose virtual environment contains no optimiser."""
    module = importlib.import_module("peer_quality")
    python = tmp_path / "peers/nevergrad/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"raise SystemExit('no optimiser is here')\"\n")
    python.chmod(0o755)
    (tmp_path / "peers/nevergrad/.installed").touch()
    monkeypatch.setattr(importlib.import_module("peer_process"), "INSTALLED", tmp_path / "peers")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "peers/results.jsonl")
    monkeypatch.setattr(module, "HELD_OUT", (real.HELD_OUT[0],))
    return module


SHORT = ("SVM, digits", "SVM kernels, cancer")


@pytest.mark.timeout(900)
def test_the_auto_tuner_finds_better_models_than_random_search(real):
    found = real.searches(("Auto", "Random"), SHORT, seeds=3, concurrencies=(4,), processes=1)
    of = real.scores(found, SHORT, 4)
    assert all(ours > theirs + 0.1 for ours, theirs in zip(of["Auto"], of["Random"], strict=True)), of


@pytest.mark.timeout(900)
def test_random_search_does_not_reach_the_quality_goal_of_the_auto_tuner(real, monkeypatch):
    class RandomSearch(real.OurTuner):
        def __init__(self, name, *others):
            super().__init__("Random", *others)

    monkeypatch.setattr(real, "OurTuner", RandomSearch)
    found = real.searches(("Auto", real.REFERENCE), SHORT, seeds=3, concurrencies=(1,), processes=1)
    assert not real.reaches_goal(found, SHORT, 1)


def test_every_benchmark_problem_has_a_table_with_a_column_for_each_parameter(real):
    for name, problem in real.REAL_PROBLEMS.items():
        header, *rows = real.file_of(name).read_text().splitlines()
        drawn = real.flat(real.made_tuner("Random", problem.space, seed=1).ask(0).parameters)
        assert drawn.keys() <= {*header.split(",")}
        assert len(rows) == 450


def test_the_median_error_of_random_search_has_score_0_and_the_lowest_known_error_has_score_1(real):
    problem = real.problem_of(SHORT[0])
    runs = {
        (tuner, SHORT[0], 1): [real.Run(error, 1.0)]
        for tuner, error in (("one", problem.random_median), ("two", problem.least))
    }
    assert real.scores(runs, SHORT[:1], 1) == {"one": [0.0], "two": [1.0]}


def test_tpe_reaches_the_quality_of_the_optuna_sampler(measured):
    rows = measured.quality(["TPE"], ["Branin, 2", "sphere, 5"], seeds=5, trials=40, processes=1)
    assert len(rows) == 2
    assert all(row.holds for row in rows), measured.render(rows)


def test_the_measurement_that_compares_a_pruner_with_optuna_works(measured):
    # One seed cannot prove the quality. This test only checks that the code of `make quality` works.
    (row,) = measured.quality_with_pruning(1, measured.CHANCE)
    assert row.holds, measured.render([row])


def test_the_quality_measurement_includes_every_tuner_that_learns_except_pbttuner(measured):
    assert TUNERS.keys() >= measured.SAMPLERS.keys()
    others = TUNERS.keys() - {*measured.MEASURED}
    assert {name for name in others if TUNERS[name].learns} == {"PBTTuner"}, "it continues from checkpoints"


def test_the_quality_check_fails_if_a_random_sampler_replaces_tpe(measured, monkeypatch):
    monkeypatch.setattr(measured, "of_tuner", lambda name, *job: measured.of_sampler("Random", *job))
    rows = measured.quality(["TPE"], ["sphere, 5"], seeds=5, trials=40, processes=1)
    assert not any(row.holds for row in rows), measured.render(rows)


def test_values_that_peers_draw_from_the_described_dimensions_lie_inside_the_search_space(real):
    described = importlib.import_module("peer_process")
    drawn = random.Random(1)
    for problem in real.REAL_PROBLEMS.values():
        space = real.parse_search_space(problem.space)
        dimensions = described.dimensions_of(space)
        assert len({each["name"] for each in dimensions}) == len(dimensions)
        for _ in range(50):
            draws = {each["name"]: drawn.uniform(each["low"], each["high"] + 0.4) for each in dimensions}
            draws |= {each["name"]: drawn.randrange(each["count"]) for each in dimensions if "count" in each}
            assert contains(space, real.suggested(described.Suggested(draws), space)) == []


@pytest.mark.parametrize(("version", "used"), [(None, True), ("0.1", False)])
def test_a_peer_comparison_uses_stored_results_of_the_installed_version_and_reports_failing_peers(
    beside, capsys, monkeypatch, version, used
):
    problem = beside.HELD_OUT[0]
    key = {"tuner": "Nevergrad", "version": version, "problem": problem, "seed": 0}
    stored = key | {"error": 0.5, "cpu_ms": 7}
    beside.RESULTS.write_text(json.dumps(stored) + "\n")
    monkeypatch.setattr(sys, "argv", ["peer_quality", "nevergrad", "ax", "--seeds", "2"])
    assert beside.main() == 1
    assert [json.loads(line) for line in beside.RESULTS.read_text().splitlines()] == [stored]
    out = capsys.readouterr().out
    assert "not installed, so only stored results are used: Ax" in out
    assert f"{problem}, seed 1: Nevergrad: no optimiser is here" in out
    assert (f"{problem}, seed 0: Nevergrad: no optimiser is here" in out) is not used
    assert ("Nevergrad: 1 seeds of each problem" in out) is used
    assert "Auto: 2 seeds of each problem" in out


LOWEST_VALUES = """\
import json, sys
draws = {each["name"]: each["low"] for each in json.loads(input())["dimensions"]}
while True:
    print(json.dumps({"draws": draws, "cpu_s": 0.1}), flush=True)
    if not sys.stdin.readline():
        sys.exit()
"""


def test_a_finished_search_of_a_peer_is_stored_with_the_version_of_the_peer(beside, tmp_path):
    package = tmp_path / "peers/nevergrad/lib/python3.11/site-packages/nevergrad-1.2.3.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: nevergrad\nVersion: 1.2.3\n")
    (tmp_path / "peers/nevergrad/bin/python").write_text(f"#!{sys.executable}\n{LOWEST_VALUES}")
    found, failures = beside.complete(["Auto", "Nevergrad"], 1, 1)
    problem = beside.HELD_OUT[0]
    assert failures == []
    assert found.keys() == {("Auto", problem, 0), ("Nevergrad", problem, 0)}
    (line,) = map(json.loads, beside.RESULTS.read_text().splitlines())
    assert (line["tuner"], line["version"]) == ("Nevergrad", "1.2.3")
    assert beside.known() == {("Nevergrad", problem, 0): found["Nevergrad", problem, 0]}


def test_every_peer_library_has_an_adapter_and_a_virtual_environment(beside):
    adapters = importlib.import_module("peer_tuners").PEERS
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert {*beside.PEERS.values()} == adapters.keys()
    assert all(f"\nOF_{name} " in makefile for name in adapters)
