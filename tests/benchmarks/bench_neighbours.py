"""The effect of a misbehaving trial on another trial: the time from a report to its committed row, with and without the
misbehaving trial.

A misbehaving trial that occupies all cores delays every process of the machine. The same run therefore also measures bare reports
for comparison. A bare report sends a few bytes to another process on this machine, which syncs them to the same disk and
responds.
"""

import json
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

# Make the helper modules of tests/fakes importable.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from real_experiment import RealExperiment, wait_until
from table import Row, render

REPORT_INTERVAL_S = 0.02
ALONE_S = 6.0
BESIDE_S = 8.0
MAX_RATIO = 2.0

# Trial 0 is measured. Trial 1 waits for the file `go`, and then misbehaves until it is stopped.
TRAIN = """
import os, sys, time
import nni_sdk as nni
nni.get_next_parameter()
if nni.get_sequence_id() == 0:
    while True:
        nni.report_intermediate_result(time.time())
        time.sleep({every_s})
while not os.path.exists("go"):
    time.sleep(0.01)
{misbehave}
"""
BARE_RECEIVER = """
import os, socket, sys
file = open(sys.argv[1], "ab", buffering=0)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while data := connection.recv(4096):
        file.write(data)
        os.fdatasync(file.fileno())
        connection.sendall(b".")
"""
KINDS = {
    "1 GB of stdout": "block = b'x' * 79 + b'\\n'\nwhile True: os.write(1, block * 12_500)",
    "10 million reports": "while True: nni.report_intermediate_result(0.5)",
    "100,000 tiny writes": "while True: os.write(1, b'x')",
}


def neighbours(
    alone_s: float = ALONE_S, beside_s: float = BESIDE_S, kinds: Iterable[str] = tuple(KINDS)
) -> list[Row]:
    """Ratio of two report-to-row times of the same run: with a misbehaving trial on the machine, and without one."""
    return [row for kind in kinds for row in _beside(kind, KINDS[kind], alone_s, beside_s)]


def _beside(kind: str, misbehave: str, alone_s: float, beside_s: float) -> list[Row]:
    train = TRAIN.format(every_s=REPORT_INTERVAL_S, misbehave=misbehave)
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(
            Path(folder), train, trialConcurrency=2, maxTrialNum=2, logCollection="http"
        )
        experiment.create()
        try:
            experiment.start()
            wait_until(lambda: experiment.summary()["counts"]["RUNNING"] == 2, "both trials run")
            wait_until(lambda: experiment.row_count() > 0, "the neighbour reports")
            with _BareReports(Path(folder, "bare")) as bare:
                alone_ms, bare_alone_ms = _delays_ms(experiment, alone_s), bare.delays_ms()
                (experiment.code / "go").touch()
                time.sleep(1.0)  # wait until the flooding trial has started
                bare.delays_ms()
                beside_ms, bare_beside_ms = _delays_ms(experiment, beside_s), bare.delays_ms()
        finally:
            experiment.close()
    rows = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        alone, beside, bare_alone, bare_beside = (
            delays[int(len(delays) * share)]
            for delays in (alone_ms, beside_ms, bare_alone_ms, bare_beside_ms)
        )
        rows.append(
            Row(
                f"report -> row beside {kind}, {name}",
                f"{beside:.1f} ms",
                f"without it {alone:.1f} ms (a bare one {bare_alone:.1f} -> {bare_beside:.1f} ms)",
                f"{beside / alone:.1f} x",
                f"<= {MAX_RATIO:g} x",
                beside <= MAX_RATIO * alone,
            )
        )
    return rows


class _BareReports:
    """Sends bare reports at the measured trial's report interval while the `with` block runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._delays_ms: list[float] = []
        self._is_over = threading.Event()
        self._sending = threading.Thread(target=self._send)

    def __enter__(self) -> "_BareReports":
        self._receiver = subprocess.Popen(
            [sys.executable, "-c", BARE_RECEIVER, self._path], stdout=subprocess.PIPE, text=True
        )
        self._sending.start()
        wait_until(lambda: self._delays_ms, "a bare report")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._sending.join()
        self._receiver.communicate()

    def delays_ms(self) -> list[float]:
        """The delays of the bare reports since the last call, in ascending order."""
        delays_ms, self._delays_ms = self._delays_ms, []
        return sorted(delays_ms)

    def _send(self) -> None:
        assert self._receiver.stdout is not None
        port = int(self._receiver.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while not self._is_over.wait(REPORT_INTERVAL_S):
                began_s = time.monotonic()
                connection.sendall(b"x" * 120)
                connection.recv(1)
                self._delays_ms.append((time.monotonic() - began_s) * 1e3)


def _delays_ms(experiment: RealExperiment, for_s: float) -> list[float]:
    """The delay of each new row of trial 0: the time from the report of its value until the row is visible.

    In ascending order.
    """
    connection = sqlite3.connect(f"file:{experiment.folder.database}?mode=ro", uri=True)
    (trial_id,) = connection.execute("SELECT trial_id FROM trial WHERE sequence_id = 0").fetchone()
    newest, seen_version = None, -1
    delays_ms: list[float] = []
    ends_at_s = time.monotonic() + for_s
    while time.monotonic() < ends_at_s:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version == seen_version:
            time.sleep(0.0005)
            continue
        seen_version, now_s = version, time.time()
        found = connection.execute(
            "SELECT record_offset, value FROM metric WHERE trial_id = ? AND attempt = 0 AND task = 'main-0'"
            " AND record_offset > ? ORDER BY record_offset",
            (trial_id, -1 if newest is None else newest),
        ).fetchall()
        if found and newest is not None:
            delays_ms += [(now_s - json.loads(value)) * 1e3 for _, value in found]
        if found:
            newest = found[-1][0]
    connection.close()
    return sorted(delays_ms)


if __name__ == "__main__":
    print(render(neighbours()))
