"""The measurements of `make bench` that need many keepers run, with few of them. What they find is not judged here."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "measurement", "short"),
    [
        ("bench_many_keepers", "ingest", {"keepers": 2, "records_each": 3000}),
        ("bench_many_keepers", "many_idle", {"keepers": 3, "rest_s": 0.5}),
        ("bench_many_keepers", "cost_of_trials", {"marks": (10, 130), "share": 100}),
        ("bench_kubernetes", "calls_of_jobs", {"jobs": 6, "few": 2, "rest_s": 0.5}),
        ("bench_many_trials", "listing", {"trials": 20, "rounds": 1}),
        ("bench_many_trials", "suggestion", {"trials": 20, "rounds": 3}),
        ("bench_outage", "catching_up", {"records": 3000, "log_bytes": 1_000_000}),
        ("bench_outage", "reconnection", {"keepers": 2, "away_s": 0.5}),
        (
            "bench_neighbours",
            "neighbours",
            {"alone_s": 1.0, "beside_s": 1.0, "kinds": ["10 million reports"]},
        ),
        ("bench_experiment", "delays", {"keepers": 2, "reports": 20, "report_every_s": 0.1}),
    ],
)
def test_a_measurement_runs_with_few_keepers_and_counts_every_record(
    benchmark_module, module, measurement, short
):
    rows = getattr(benchmark_module(module), measurement)(**short)
    assert rows
    assert all(row.measured and row.floor for row in rows)
