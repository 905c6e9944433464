"""After an outage of the manager: the time until keepers reconnect, and their catch-up rate. All processes
are real.
"""

import os
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from deadlines import DEADLINE_S

# Benchmarks import helpers of the tests from tests/fakes, so this folder is added to the module search path.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from attempts import AttemptNumbers, attempt_id
from bench_many_keepers import a_bare_server
from keeper_doubles import Job, metrics
from real_experiment import RealExperiment, wait_until
from table import Row, render

from trial_keeper.core.replication import LOG_WINDOW_BYTES
from trial_keeper.wire.messages import AttemptKey, Stream

KEEPERS = 100
AWAY_S = 10.0
RECORDS = 400_000
LOG_BYTES = 200_000_000
# The trial waits until the manager has been killed, and then writes all its output.
GATED = """
import os
import nni_sdk as nni
nni.get_next_parameter()
open("gate").read()  # until its end, which comes after the kill
"""
REPORTS = """
for i in range({records}):
    nni.report_intermediate_result(i * 0.123456789)
"""
PRINTS = """
line = b"epoch 17 step 000123 loss 0.123456 accuracy 0.987654 learning rate 0.00100000\\n"
for _ in range({log_bytes} // len(line) // 1000):
    os.write(1, line * 1000)
"""


def reconnection(keepers: int = KEEPERS, away_s: float = AWAY_S) -> list[Row]:
    """Time from the restart of a killed manager until the last of 100 keepers has connected; compared with the startup time of
    the manager.
    """
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(
            Path(folder),
            "",
            trialConcurrency=keepers,
            maxTrialNum=keepers,
            trial={"command": "sleep 3600", "codeDir": "."},
        )
        experiment.create()
        try:
            experiment.start()
            _wait_for_keepers(experiment, keepers)
            experiment.kill_manager()
            experiment.folder.manager_log.unlink()
            # Keepers pause longer between connection attempts, the longer an outage lasts. So the time until all keepers have
            # reconnected depends on the duration of the outage.
            time.sleep(away_s)
            began_s = time.monotonic()
            experiment.start()
            ready_s = time.monotonic() - began_s
            _wait_for_keepers(experiment, keepers)
            back_s = time.monotonic() - began_s
        finally:
            experiment.close()
    return [
        Row(
            f"manager killed and started -> {keepers} keepers connected",
            f"{back_s:.1f} s",
            f"the manager's start {ready_s:.1f} s",
            f"{back_s - ready_s:+.1f} s",
            "<= +5 s",
            back_s - ready_s <= 5,
        )
    ]


def _wait_for_keepers(experiment: RealExperiment, keepers: int) -> None:
    def are_there() -> bool:
        log = experiment.folder.manager_log
        return log.exists() and log.read_text().count(" connected\n") >= keepers

    wait_until(are_there, f"{keepers} keepers are connected", DEADLINE_S)


def catching_up(records: int = RECORDS, log_bytes: int = LOG_BYTES) -> list[Row]:
    """How fast a keeper delivers what its trial wrote during an outage of the manager.

    Metrics are compared with a bare gRPC server, logs with a durable copy of a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics_mb_s = _caught_up_mb_s(Path(folder), Stream.METRICS, REPORTS.format(records=records))
    with tempfile.TemporaryDirectory() as folder, a_bare_server(Path(folder)) as bare:
        delivery = bare.delivered([Job("0", "", "0")], records)
        bare_mb_s = delivery.per_s * len(metrics(records)) / records / 1e6
    with tempfile.TemporaryDirectory() as folder:
        logs_mb_s = _caught_up_mb_s(Path(folder), Stream.STDOUT, PRINTS.format(log_bytes=log_bytes))
        copy_mb_s = _copied_mb_s(Path(folder, "copy"), log_bytes)
    return [
        Row(
            "catching up after an outage, metrics",
            f"{metrics_mb_s:.1f} MB/s",
            f"gRPC + SQLite {bare_mb_s:.1f} MB/s",
            f"{bare_mb_s / metrics_mb_s:.1f} x",
            "<= 3 x",
            bare_mb_s / metrics_mb_s <= 3,
        ),
        Row(
            "catching up after an outage, logs",
            f"{logs_mb_s:.0f} MB/s",
            f"a copy, as durable {copy_mb_s:.0f} MB/s",
            f"{copy_mb_s / logs_mb_s:.1f} x",
            "<= 4 x",
            copy_mb_s / logs_mb_s <= 4,
        ),
    ]


def _caught_up_mb_s(folder: Path, stream: Stream, train: str) -> float:
    experiment = RealExperiment(
        folder, GATED + train, trialConcurrency=1, maxTrialNum=1, logCollection="http"
    )
    experiment.create()
    gate = experiment.code / "gate"
    os.mkfifo(gate)
    try:
        experiment.start()
        _wait_for_keepers(experiment, 1)
        (trial,) = experiment.get("/trials")
        attempt = AttemptNumbers(experiment.folder.workspace).folder(
            AttemptKey(trial["id"], attempt_id(0), "main-0")
        )
        with gate.open("w"):
            experiment.kill_manager()
        wait_until(attempt.exit_json.exists, "the trial has ended", DEADLINE_S)
        return _rate_mb_s(experiment, stream, attempt.stream(stream).stat().st_size)
    finally:
        experiment.close()


def _rate_mb_s(experiment: RealExperiment, stream: Stream, size: int) -> float:
    """Start a manager. Return the bytes per second, from the keeper's connection until the last byte is durable."""
    with closing(sqlite3.connect(f"file:{experiment.folder.database}?mode=ro", uri=True)) as connection:

        def durable() -> int:
            query = "SELECT durable_offset FROM stream WHERE stream = ?"
            found = connection.execute(query, (stream.value,)).fetchone()
            return int(found[0]) if found else 0

        before = durable()
        experiment.start()
        wait_until(lambda: durable() >= size, "all bytes are durable", DEADLINE_S)
        took_s = time.time() - _last_connected_at_s(experiment)
        return (size - before) / took_s / 1e6


def _last_connected_at_s(experiment: RealExperiment) -> float:
    lines = experiment.folder.manager_log.read_text().splitlines()
    at, ms = next(line for line in reversed(lines) if line.endswith(" connected")).split(",")[:2]
    return time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms[:3]) / 1000


def _copied_mb_s(path: Path, size: int) -> float:
    """The disk's rate for a writer that syncs after each log window."""
    piece = bytes(LOG_WINDOW_BYTES)
    began_s = time.monotonic()
    with path.open("wb", buffering=0) as copy:
        for _ in range(size // len(piece)):
            copy.write(piece)
            os.fdatasync(copy.fileno())
    return size / (time.monotonic() - began_s) / 1e6


if __name__ == "__main__":
    print(render([*reconnection(), *catching_up()]))
