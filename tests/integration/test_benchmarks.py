"""Small forms of the measurements of `make bench`.

Measurements with many keepers use few keepers here. The tests do not check the measured values.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from amounts import amount
from deadlines import DEADLINE_S

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"
NO_RAY = "Ray Tune is not installed: make peers"

pytestmark = pytest.mark.timeout(300)


QUICK = [
    ("bench_many_keepers", "ingest", {"keepers": 2, "records_each": 300}),
    ("bench_kubernetes", "calls_of_jobs", {"jobs": 6, "few": 2, "rest_s": 0.5}),
    ("bench_many_trials", "listing", {"trials": 20, "rounds": 1}),
    ("bench_many_trials", "suggestion", {"trials": 20, "rounds": 3}),
    ("bench_search", "search", {"trials": 3, "rounds": 1}),
    (
        "bench_checkpoints",
        "checkpoint_cost",
        {"large_bytes": 1 << 20, "small_rounds": 2, "large_rounds": 1},
    ),
    ("bench_experiment", "delays", {"keepers": 2, "reports": 20, "report_every_s": 0.1}),
]
SLOW = [
    ("bench_many_keepers", "many_idle", {"keepers": 3, "rest_s": 0.5}),
    # The measurement polls the number of ended trials. There are so many trials that some are unfinished at a poll, even with a
    # fast manager.
    ("bench_many_keepers", "cost_of_trials", {"marks": (10, 300), "share": 290}),
    ("bench_outage", "catching_up", {"records": 300, "log_bytes": 100_000}),
    ("bench_outage", "reconnection", {"keepers": 2, "away_s": 0.5}),
    ("bench_neighbours", "neighbours", {"alone_s": 0.5, "beside_s": 0.5, "kinds": ["10 million reports"]}),
    ("bench_callbacks", "callback_cost", {"rounds": 5, "turns": 1}),
]


@pytest.mark.parametrize(("module", "measurement", "short"), amount(QUICK, [*QUICK, *SLOW]))
def test_every_measurement_runs_with_few_keepers_and_returns_rows_with_measured_values(
    benchmark_module, module, measurement, short
):
    rows = getattr(benchmark_module(module), measurement)(**short)
    assert rows
    assert all(row.measured and row.floor for row in rows)


@pytest.mark.parametrize(
    ("ours_ms", "holds_alone", "holds_beside_ray"),
    [(5.9, True, True), (9.4, False, True), (9.6, False, False)],
)
def test_a_warm_trial_must_take_at_most_6_ms_or_95_percent_of_the_time_of_ray_tune(
    benchmark_module, ours_ms, holds_alone, holds_beside_ray
):
    bench = benchmark_module("bench_turnaround")
    beside = bench.warm_row("trials", ours_ms, 2.0, bench.RayTune(recording_ms=10.0, unrecorded_ms=5.0))
    assert beside.holds == holds_beside_ray
    assert beside.floor == "fork 2.0 ms, Ray Tune 10.0 ms (5.0 without its records)"
    assert beside.ratio == f"{ours_ms / 2:.1f} x the fork, {ours_ms / 10:.2f} x Ray Tune ({ours_ms / 5:.2f})"
    assert beside.goal == "<= 6 ms, or <= 0.95 x Ray Tune"
    alone = bench.warm_row("trials", ours_ms, 2.0, NO_RAY)
    assert alone.holds == holds_alone
    assert (alone.floor, alone.goal) == (f"fork 2.0 ms; {NO_RAY}", "<= 6 ms")


def test_the_help_page_of_make_bench_describes_each_measurement():
    done = subprocess.run([sys.executable, RUN, "--help"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.partition("measurements:\n")[2].splitlines()
    assert len(listed) > 20
    assert all(len(line.split()) > 3 for line in listed if line)
