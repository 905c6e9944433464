"""The cost of the SDK for a training process: one report compared with a bare write of the same bytes, and the import of the
SDK.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from table import Row, render

import nni_sdk
from nni_sdk.records import decode, encode
from trial_keeper.core.replication import METRICS_CHUNK_BYTES

ROUNDS = 300
optuna.logging.set_verbosity(optuna.logging.WARNING)
# The manager sets these thresholds of the garbage collector. They are repeated here, because importing the manager's module
# disables the collector.
_COLLECTION = (10_000, 10, 10)
# A round has many reports, so that the time for reading the clock hardly changes the time per report.
CALLS = 100


def report_cost() -> list[Row]:
    """Median time of `report_intermediate_result(float)`, compared with `os.write` of the same bytes to another file of the same
    folder, and with a stored report of Optuna. The calls of the first two alternate.
    """
    values = [i * 0.123456789 for i in range(CALLS)]
    report, write = nni_sdk.report_intermediate_result, os.write
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "parameter.cfg").write_text(json.dumps({"parameter_id": 3, "parameters": {}}))
        os.environ |= {"NNI_PLATFORM": "local", "NNI_TRIAL_JOB_ID": "aBcDe", "NNI_SYS_DIR": folder}
        bare_path, metrics_path = Path(folder, "bare"), Path(folder, ".nni", "metrics")
        bare = os.open(bare_path, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        reports_ns, writes_ns = [], []
        for round_ in range(ROUNDS):
            records = [
                encode(3, "aBcDe", "PERIODICAL", round_ * CALLS + i, value) for i, value in enumerate(values)
            ]
            begin = time.perf_counter_ns()
            for value in values:
                report(value)
            middle = time.perf_counter_ns()
            for record in records:
                write(bare, record)
            end = time.perf_counter_ns()
            reports_ns.append((middle - begin) / CALLS)
            writes_ns.append((end - middle) / CALLS)
        os.close(bare)
        if metrics_path.read_bytes() != bare_path.read_bytes():
            raise AssertionError(
                "the SDK wrote other bytes than the floor did, so the comparison means nothing"
            )
        sqlite_us, journal_us = (_optuna_report_us(storage) for storage in _storages_of_optuna(Path(folder)))
    report_us, write_us = median(reports_ns) / 1e3, median(writes_ns) / 1e3
    ratio = report_us / write_us
    return [
        Row(
            "report_intermediate_result(float), p50",
            f"{report_us:.2f} µs",
            f"os.write {write_us:.2f} µs; Optuna {sqlite_us:,.0f} µs in SQLite, {journal_us:,.0f} in a journal",
            f"{ratio:.2f} x",
            "<= 4 x",
            ratio <= 4,
        )
    ]


def _storages_of_optuna(folder: Path) -> Iterator[BaseStorage]:
    """Optuna's two storages of files. With each, a report is stored when the call returns."""
    yield optuna.storages.RDBStorage(f"sqlite:///{folder / 'optuna.sqlite'}")
    yield JournalStorage(JournalFileBackend(f"{folder / 'optuna.journal'}"))


def _optuna_report_us(storage: BaseStorage) -> float:
    trial = optuna.create_study(storage=storage).ask()
    times_s = []
    for step in range(CALLS):
        begin_s = time.perf_counter()
        trial.report(step * 0.123456789, step)
        times_s.append(time.perf_counter() - begin_s)
    return median(times_s) * 1e6


def should_stop_cost() -> list[Row]:
    """Median time of `should_stop` while no stop is requested, compared with `os.stat` of an existing file in the same folder.
    The calls alternate.
    """
    ask, stat = nni_sdk.should_stop, os.stat
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(Path(folder, ".nni"))
        os.environ |= {"NNI_PLATFORM": "local", "NNI_TRIAL_JOB_ID": "aBcDe", "NNI_SYS_DIR": folder}
        nni_sdk.trial._trial = nni_sdk.trial.TrialContext(os.environ)
        beside = str(Path(folder, "there"))
        Path(beside).touch()
        asks_ns, stats_ns = [], []
        for _ in range(ROUNDS):
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                ask()
            middle = time.perf_counter_ns()
            for _ in range(CALLS):
                stat(beside)
            asks_ns.append((middle - begin) / CALLS)
            stats_ns.append((time.perf_counter_ns() - middle) / CALLS)
    ask_us, stat_us = median(asks_ns) / 1e3, median(stats_ns) / 1e3
    ratio = ask_us / stat_us
    return [
        Row(
            "should_stop(), p50",
            f"{ask_us:.2f} µs",
            f"os.stat {stat_us:.2f} µs",
            f"{ratio:.2f} x",
            "<= 2 x",
            ratio <= 2,
        )
    ]


def import_cost() -> list[Row]:
    """Median wall time and peak memory of an interpreter that imports the SDK, compared with an idle one.

    The interpreter finds the SDK by PYTHONPATH, like a trial, and runs without site-packages, because .pth files could import
    modules at startup. Both programs import `os`, because an interpreter with site-packages always imports it.
    """
    own = Path(nni_sdk.__file__).parent
    path = os.pathsep.join(map(str, (own.parent, own / "fallback")))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    programs = {"bare": "import os", "sdk": "import os, nni_sdk", "nni": "import os, nni"}
    walls_ms: dict[str, list[float]] = {name: [] for name in programs}
    peaks_kb: dict[str, list[int]] = {name: [] for name in programs}
    # VmHWM is the peak memory of this process alone, so the program reads it. getrusage would include the memory of the parent
    # process.
    peak = "\nfor line in open('/proc/self/status'):\n  if line.startswith('VmHWM'): print(line.split()[1])"
    for _ in range(31):
        for name, program in programs.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-S", "-c", program], env=environ, check=True)
            walls_ms[name].append((time.perf_counter() - begin) * 1e3)
            shown = subprocess.run(
                [sys.executable, "-S", "-c", program + peak], env=environ, check=True, capture_output=True
            )
            peaks_kb[name].append(int(shown.stdout))
    wall_ms = {name: median(times) for name, times in walls_ms.items()}
    peak_mb = {name: median(sizes) / 1024 for name, sizes in peaks_kb.items()}
    fallback_ms = wall_ms["nni"] - wall_ms["sdk"]
    more_ms, more_mb = wall_ms["sdk"] - wall_ms["bare"], peak_mb["sdk"] - peak_mb["bare"]
    return [
        Row(
            "import nni_sdk, wall",
            f"+{more_ms:.2f} ms",
            f"python3 {wall_ms['bare']:.2f} ms",
            f"{wall_ms['sdk'] / wall_ms['bare']:.2f} x",
            "<= +5 ms",
            more_ms <= 5,
        ),
        Row(
            "import nni without the package, wall",
            f"+{fallback_ms:.2f} ms",
            f"import nni_sdk {wall_ms['sdk']:.2f} ms",
            f"{wall_ms['nni'] / wall_ms['sdk']:.2f} x",
            "<= +1 ms",
            fallback_ms <= 1,
        ),
        Row(
            "import nni_sdk, peak memory",
            f"+{more_mb:.2f} MB",
            f"python3 {peak_mb['bare']:.2f} MB",
            f"{peak_mb['sdk'] / peak_mb['bare']:.2f} x",
            "<= +2 MB",
            more_mb <= 2,
        ),
    ]


def decode_cost() -> list[Row]:
    """Records per second that the manager decodes on one core, compared with parsing only the JSON of the records.

    Both are measured with the manager's garbage collector thresholds. With Python's default thresholds, garbage collection takes
    half of the time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_COLLECTION)
    try:
        return _decode_cost()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _decode_cost() -> list[Row]:
    frames = [encode(3, "aBcDe", "PERIODICAL", i, i * 0.123456789) for i in range(20_000)]
    bodies = [frame[8:].decode() for frame in frames]
    pieces = list(_pieces(b"".join(frames)))
    decodes_s, parses_s = [], []
    for _ in range(15):
        begin = time.perf_counter()
        # The manager stores the records of one chunk before it decodes the next chunk. So this loop, too, drops the records of
        # each chunk.
        found = sum(len(decode(data, offset).records) for offset, data in pieces)
        middle = time.perf_counter()
        for body in bodies:
            json.loads(body)
        parses_s.append(time.perf_counter() - middle)
        decodes_s.append(middle - begin)
        if found != len(frames):
            raise AssertionError(f"{found} of {len(frames)} records were read, so the speed means nothing")
    per_s, floor_per_s = len(frames) / median(decodes_s), len(frames) / median(parses_s)
    return [
        Row(
            "decode, one core",
            f"{per_s:,.0f} records/s",
            f"json.loads {floor_per_s:,.0f}/s",
            f"{floor_per_s / per_s:.2f} x",
            "<= 1.5 x",
            floor_per_s / per_s <= 1.5,
        )
    ]


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The chunks of a keeper with their offsets, each cut at the end of its last whole record."""
    offset = 0
    while offset < len(data):
        end = data.rindex(b"\n", offset, offset + METRICS_CHUNK_BYTES) + 1
        yield offset, data[offset:end]
        offset = end


if __name__ == "__main__":
    print(render(report_cost() + import_cost() + decode_cost()))
