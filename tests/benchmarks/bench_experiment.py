"""The cost of an experiment: the time from a report to its committed row, and the resource use of an idle keeper."""

import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Benchmarks import helpers of the tests from tests/fakes, so this folder is added to the module search path.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import psutil
from real_experiment import RealExperiment, wait_until
from table import Row, render

from nni_manager.domain.trial import Trial
from nni_manager.store.rows import trial_row
from nni_manager.store.writer import Store

KEEPERS = 8
REPORTS = 150
REPORT_INTERVAL_S = 0.05
MANY_KEEPERS = 64
MANY_REPORTS = 40
MANY_REPORT_INTERVAL_S = 0.5
REST_S = 30
MAX_START_S = 300.0


def report_to_row() -> list[Row]:
    """Time from a report until another database connection sees its row, with several keepers at the same time; compared with the
    time of one bare commit.
    """
    return delays(KEEPERS, REPORTS, REPORT_INTERVAL_S)


def report_to_row_of_many() -> list[Row]:
    """Time from a report to its row with 64 real keeper processes, whose trials report twice a second."""
    return delays(MANY_KEEPERS, MANY_REPORTS, MANY_REPORT_INTERVAL_S)


def delays(keepers: int, reports: int, report_every_s: float) -> list[Row]:
    """Time from a report to its row, with this number of keepers and this report interval."""
    train = (
        "import os, random, time\nimport nni_sdk as nni\nnni.get_next_parameter()\n"
        "while not os.path.exists('all-run'):\n    time.sleep(0.5)\n"
        f"for _ in range({reports}):\n"
        f"    time.sleep(random.uniform(0.5, 1.5) * {report_every_s})\n"
        "    nni.report_intermediate_result(time.time())\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(Path(folder), train, trialConcurrency=keepers, maxTrialNum=keepers)
        experiment.create()
        try:
            experiment.start()
            wait_until(
                lambda: experiment.summary()["counts"]["RUNNING"] == keepers,
                "all trials run",
                MAX_START_S,
            )
            (experiment.code / "all-run").touch()
            delays_ms = _watch_rows(experiment, reports * report_every_s)
        finally:
            experiment.close()
        commit_ms = _one_commit_ms(Path(folder))
    delays_ms.sort()
    p50, p99 = delays_ms[len(delays_ms) // 2], delays_ms[len(delays_ms) * 99 // 100]
    floor = f"one commit {commit_ms:.1f} ms"
    return [
        Row(
            f"report -> committed row, {keepers} keepers, p50",
            f"{p50:.0f} ms",
            floor,
            f"{p50 / commit_ms:.0f} x",
            "<= 60 ms",
            p50 <= 60,
        ),
        Row(
            f"report -> committed row, {keepers} keepers, p99",
            f"{p99:.0f} ms",
            floor,
            f"{p99 / commit_ms:.0f} x",
            "<= 250 ms",
            p99 <= 250,
        ),
    ]


def report_to_row_in_a_flood() -> list[Row]:
    """Time from a report to its row for a trial that also floods its stdout, while its keeper collects the logs."""
    flood = f"import os\nwhile True: os.write(1, {bytes(80) + b'x'!r})"
    train = (
        "import subprocess, sys, time\nimport nni_sdk as nni\nnni.get_next_parameter()\n"
        f"flood = subprocess.Popen([sys.executable, '-c', {flood!r}])\n"
        f"for _ in range({REPORTS}):\n"
        "    nni.report_intermediate_result(time.time())\n"
        f"    time.sleep({REPORT_INTERVAL_S})\n"
        "flood.kill()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(
            Path(folder), train, trialConcurrency=1, maxTrialNum=1, logCollection="http"
        )
        experiment.create()
        try:
            experiment.start()
            wait_until(lambda: experiment.row_count() > 0, "the trial reports")
            delays_ms = _watch_rows(experiment, REPORTS * REPORT_INTERVAL_S)
        finally:
            experiment.close()
        commit_ms = _one_commit_ms(Path(folder))
    p50 = statistics.median(delays_ms)
    return [
        Row(
            "report -> committed row while stdout floods, p50",
            f"{p50:.0f} ms",
            f"one commit {commit_ms:.1f} ms",
            f"{p50 / commit_ms:.0f} x",
            "<= 60 ms",
            p50 <= 60,
        )
    ]


def _watch_rows(experiment: RealExperiment, reporting_s: float) -> list[float]:
    """The delay in ms of each new row in this period: the time from the report of its value until the row is visible."""
    connection = sqlite3.connect(f"file:{experiment.folder.database}?mode=ro", uri=True)
    trials = [row[0] for row in connection.execute("SELECT trial_id FROM trial")]
    newest = dict.fromkeys(trials, -1)
    delays_ms: list[float] = []
    is_first_look, seen_version = True, -1
    ends_at_s = time.monotonic() + reporting_s * 0.8
    while time.monotonic() < ends_at_s:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version == seen_version:
            time.sleep(0.0005)
            continue
        seen_version, now_s = version, time.time()
        for trial_id in trials:
            for offset, value in connection.execute(
                "SELECT record_offset, value FROM metric WHERE trial_id = ? AND attempt = 0 AND task = 'main-0'"
                " AND record_offset > ? ORDER BY record_offset",
                (trial_id, newest[trial_id]),
            ):
                newest[trial_id] = offset
                if not is_first_look:
                    delays_ms.append((now_s - json.loads(value)) * 1e3)
        is_first_look = False
    connection.close()
    return delays_ms


def at_rest() -> list[Row]:
    """The resource use of a keeper whose trial produces no output, compared with an idle interpreter that has imported gRPC."""
    train = "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\nnni.report_intermediate_result(1)\ntime.sleep(600)\n"
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(Path(folder), train, trialConcurrency=1, maxTrialNum=1)
        experiment.create()
        idle = subprocess.Popen(
            [sys.executable, "-c", "import asyncio, grpc.aio, sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        try:
            experiment.start()
            wait_until(lambda: experiment.row_count() == 1, "the trial reports")
            keeper = psutil.Process(experiment.keeper_pids()[0])
            # The keeper's startup work ends within two seconds. Only its CPU time after the startup is measured.
            time.sleep(2)
            begin_s = cpu_s(keeper.pid)
            time.sleep(REST_S)
            cpu_percent = (cpu_s(keeper.pid) - begin_s) / REST_S * 100
            rss_mb, idle_mb = (
                process.memory_info().rss / 1e6 for process in (keeper, psutil.Process(idle.pid))
            )
        finally:
            idle.communicate()
            experiment.close()
    return [
        Row(
            "keeper at rest, memory",
            f"{rss_mb:.0f} MB",
            f"python3 + grpc {idle_mb:.0f} MB",
            f"{rss_mb / idle_mb:.2f} x",
            "<= 60 MB",
            rss_mb <= 60,
        ),
        Row(
            "keeper at rest, CPU",
            f"{cpu_percent:.2f} %",
            "nothing",
            "-",
            "<= 0.5 % of a core",
            cpu_percent <= 0.5,
        ),
    ]


def cpu_s(pid: int) -> float:
    """Processor time of a process whose set of threads does not change. It is read from schedstat, because the kernel's clock
    ticks are too coarse.

    Source: proc_pid_schedstat, linux/Documentation/scheduler/sched-stats.rst.
    """
    schedstats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(schedstat.read_text().split()[0]) for schedstat in schedstats) / 1e9


def _one_commit_ms(folder: Path) -> float:
    """The time of a durable commit of one row, in the same kind of database on the same disk."""
    store = Store.create(folder / "floor.sqlite", folder, "FLOOR", "{}", b"", 0.0)
    times_ms = []
    for i in range(50):
        row = trial_row(Trial(str(i), i, {}, {}, 0.0, str(i)))
        begin = time.perf_counter()
        store.commit([row], 0.0)
        times_ms.append((time.perf_counter() - begin) * 1e3)
    store.close()
    return statistics.median(times_ms)


if __name__ == "__main__":
    print(render([*report_to_row(), *at_rest()]))
