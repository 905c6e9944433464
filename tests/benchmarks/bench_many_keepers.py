"""The manager's cost of many keepers: storing their records, holding their connections, and running the 10,000th trial."""

import itertools
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deadlines import DEADLINE_S

# Make the helper modules of tests/fakes importable.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import psutil
from keeper_doubles import Doubles, Job
from real_experiment import RealExperiment, wait_until
from table import Row, render

from nni_manager.engine.tokens import token_of
from nni_manager.store.reader import StoreReader
from trial_keeper.host.usage import INTERVAL_S

HERE = Path(__file__).parent
DELIVERING = 64
RECORDS_EACH = 20_000
CONNECTED = 1000
REST_S = 30.0
SETTLES_S = 10.0
JOBS = 16
MARKS = (10, 1_000, 10_000)
SHARE = 500
# The SHARE trials of a measurement are divided into this many parts, and the result is the median of the parts. One-time imports
# make only the first trials slow. These trials are all in one part, so they do not affect the median.
SAMPLES = 5


def ingest(keepers: int = DELIVERING, records_each: int = RECORDS_EACH) -> list[Row]:
    """Records per second that become durable when all keepers (doubles) send as fast as they can; compared with a
    bare server.
    """
    with tempfile.TemporaryDirectory() as folder, _a_manager(Path(folder), keepers) as manager:
        ours = manager.delivered(manager.jobs_of_trials(keepers), records_each)
        stored = manager.experiment.folder.database
        assert _count(stored) == keepers * records_each, "records were lost or doubled"
    with tempfile.TemporaryDirectory() as folder, a_bare_server(Path(folder)) as bare:
        floor = bare.delivered([Job(str(number), "", str(number)) for number in range(keepers)], records_each)
        assert _count(Path(folder, "bare.sqlite")) == keepers * records_each
    return [
        Row(
            f"ingest, durable, {keepers} keepers (doubles)",
            f"{ours.per_s:,.0f} records/s",
            f"gRPC + SQLite {floor.per_s:,.0f}/s",
            f"{floor.per_s / ours.per_s:.2f} x",
            ">= 100,000 records/s",
            ours.per_s >= 100_000,
        ),
        Row(
            "of this, the manager's processor time for a record",
            f"{ours.cpu_us:.1f} µs",
            f"gRPC + SQLite {floor.cpu_us:.1f} µs",
            # The kernel counts processor time in ticks of 10 ms, so the time of a short measurement may be 0.
            f"{ours.cpu_us / floor.cpu_us:.2f} x" if floor.cpu_us else "-",
            "<= 1.3 x",
            ours.cpu_us <= 1.3 * floor.cpu_us,
        ),
    ]


def many_idle(keepers: int = CONNECTED, rest_s: float = REST_S) -> list[Row]:
    """The manager's memory and processor use with 1,000 connected keepers (doubles). The keepers are first idle, then each has a
    trial without output.
    """
    with tempfile.TemporaryDirectory() as folder, _a_manager(Path(folder), keepers) as manager:
        jobs = manager.jobs_of_trials(keepers)
        idle, resting = manager.while_they("idle", jobs, rest_s), manager.while_they("rest", jobs, rest_s)
    with tempfile.TemporaryDirectory() as folder, a_bare_server(Path(folder)) as bare:
        jobs = [Job(str(number), "", str(number)) for number in range(keepers)]
        bare_idle, bare_resting = bare.while_they("idle", jobs, rest_s), bare.while_they("rest", jobs, rest_s)
    who = f"manager with {keepers:,} idle keepers (doubles)"
    ratio = resting.cpu_percent / bare_resting.cpu_percent
    return [
        Row(
            f"{who}, memory",
            f"{idle.rss_mb:.0f} MB",
            f"bare gRPC server {bare_idle.rss_mb:.0f} MB",
            f"{idle.rss_mb / bare_idle.rss_mb:.2f} x",
            "<= 300 MB",
            idle.rss_mb <= 300,
        ),
        Row(
            f"{who}, CPU",
            f"{idle.cpu_percent:.1f} %",
            f"bare gRPC server {bare_idle.cpu_percent:.1f} %",
            f"{idle.cpu_percent / bare_idle.cpu_percent:.1f} x",
            "<= 10 % of a core",
            idle.cpu_percent <= 10,
        ),
        Row(
            f"the same, a trial's usage from each every {INTERVAL_S:g} s",
            f"{resting.cpu_percent:.1f} %",
            f"bare gRPC server {bare_resting.cpu_percent:.1f} %",
            f"{ratio:.1f} x",
            "<= 2 x",
            ratio <= 2,
        ),
    ]


def cost_of_trials(marks: Sequence[int] = MARKS, share: int = SHARE) -> list[Row]:
    """The manager's processor time per trial, measured over the trials after the 10th, the 1,000th and the 10,000th. The tuner is
    Random.
    """
    with tempfile.TemporaryDirectory() as folder:
        manager_of_trials = _a_manager(
            Path(folder), JOBS, maxTrialNum=marks[-1] + share, localConfig={"reuse": True}
        )
        with (
            manager_of_trials as manager,
            manager.doubles("run trials", manager.reused_jobs(JOBS)) as doubles,
        ):
            doubles.begin()
            first_ms, *later_ms = [manager.cpu_ms_of_trials(mark, mark + share) for mark in marks]
    return [
        Row(
            f"a trial costs the manager (Random tuner), {share:,} from trial {mark:,} on",
            f"{cost_ms:.2f} ms CPU",
            f"from trial {marks[0]} on {first_ms:.2f} ms",
            f"{cost_ms / first_ms:.2f} x",
            "<= 1.2 x",
            cost_ms <= 1.2 * first_ms,
        )
        for mark, cost_ms in zip(marks[1:], later_ms, strict=True)
    ]


class _Delivery:
    def __init__(self, records: int, took_s: float, cpu_s: float) -> None:
        self.per_s = records / took_s
        self.cpu_us = cpu_s / records * 1e6


class _Rest:
    def __init__(self, rss_mb: float, cpu_percent: float) -> None:
        self.rss_mb, self.cpu_percent = rss_mb, cpu_percent


class _Server:
    """A process to which keepers connect."""

    def __init__(self, pid: int, address: str, experiment_id: str) -> None:
        self._process = psutil.Process(pid)
        self._address = address
        self._experiment_id = experiment_id

    def doubles(self, role: str, jobs: list[Job], records: int = 0) -> Doubles:
        return Doubles(role, self._address, self._experiment_id, jobs, records)

    def delivered(self, jobs: list[Job], records_each: int) -> _Delivery:
        with self.doubles("deliver", jobs, records_each) as doubles:
            begin_s = self.cpu_s()
            doubles.begin()
            took_s = float(doubles.answer())
            return _Delivery(len(jobs) * records_each, took_s, self.cpu_s() - begin_s)

    def while_they(self, role: str, jobs: list[Job], rest_s: float) -> _Rest:
        with self.doubles(role, jobs) as doubles:
            doubles.begin()
            time.sleep(min(SETTLES_S, rest_s))  # wait until startup work has ended
            begin_s, began_at_s = self.cpu_s(), time.monotonic()
            time.sleep(rest_s)
            # The kernel counts processor time in ticks, so a short measurement may give 0. The result is a divisor elsewhere, so
            # it is at least one tick.
            used_s = max(self.cpu_s() - begin_s, 1 / os.sysconf("SC_CLK_TCK"))
            cpu_percent = used_s / (time.monotonic() - began_at_s) * 100
            return _Rest(self._process.memory_info().rss / 1e6, cpu_percent)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


class _Manager(_Server):
    """A manager process with a cluster that accepts every job and runs none."""

    def __init__(self, experiment: RealExperiment) -> None:
        self.experiment = experiment
        assert experiment.manager is not None
        super().__init__(
            experiment.manager.pid, f"127.0.0.1:{experiment.port + 1}", experiment.folder.experiment_id
        )
        self._reader = StoreReader(experiment.folder.database)
        self._secret = self._reader.experiment().secret

    def jobs_of_trials(self, count: int) -> list[Job]:
        """The jobs of the first trials, one per trial."""
        trials = wait_until(
            lambda: len(found := self._reader.trials()) >= count and found,
            f"there are {count} trials",
            DEADLINE_S,
        )
        return [self._job(trial.job_id, trial.trial_id) for trial in trials]

    def reused_jobs(self, count: int) -> list[Job]:
        """Reused jobs."""
        jobs = wait_until(
            lambda: len(found := self._reader.jobs()[0]) >= count and found,
            f"there are {count} jobs",
            DEADLINE_S,
        )
        return [self._job(job.job_id, "") for job in jobs]

    def cpu_ms_of_trials(self, first: int, last: int) -> float:
        """Processor time per trial from the first to the last trial: the median of several parts, so that one slow part does not
        affect it.
        """
        ends = [first + (last - first) * part // SAMPLES for part in range(SAMPLES + 1)]
        looks = [(self._ended(count), self.cpu_s()) for count in ends]
        return statistics.median(
            (end_s - begin_s) / (end - begin) * 1e3
            for (begin, begin_s), (end, end_s) in itertools.pairwise(looks)
            if end > begin
        )

    def _ended(self, count: int) -> int:
        connection = sqlite3.connect(f"file:{self.experiment.folder.database}?mode=ro", uri=True)

        def ended() -> int:
            (found,) = connection.execute(
                "SELECT count(*) FROM trial WHERE ended_at_s IS NOT NULL"
            ).fetchone()
            return int(found) if found >= count else 0

        try:
            return int(wait_until(ended, f"{count} trials have ended", DEADLINE_S))
        finally:
            connection.close()

    def _job(self, job_id: str, trial_id: str) -> Job:
        return Job(job_id, token_of(self._secret, job_id), trial_id)

    def close(self) -> None:
        self._reader.close()


@contextmanager
def _a_manager(folder: Path, concurrency: int, **config: Any) -> Iterator[_Manager]:
    experiment = RealExperiment(
        folder, "pass\n", **{"trialConcurrency": concurrency, "maxTrialNum": concurrency, **config}
    )
    experiment.program = [str(HERE / "manager_alone.py")]
    experiment.create()
    try:
        experiment.start()
        manager = _Manager(experiment)
        yield manager
        manager.close()
    finally:
        experiment.kill_manager()


@contextmanager
def a_bare_server(folder: Path) -> Iterator[_Server]:
    with subprocess.Popen(
        [sys.executable, HERE / "bare_server.py", folder / "bare.sqlite"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield _Server(process.pid, f"127.0.0.1:{process.stdout.readline().strip()}", "")
        process.kill()


def _count(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        (count,) = connection.execute("SELECT count(*) FROM metric").fetchone()
    connection.close()
    return int(count)


if __name__ == "__main__":
    print(render([*ingest(), *many_idle(), *cost_of_trials()]))
