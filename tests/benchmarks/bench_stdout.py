"""The cost of a trial's output: the same command under a keeper that streams logs, and with a plain file."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# Make the helper modules of tests/fakes importable.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from bench_experiment import cpu_s
from real_experiment import RealExperiment, wait_until
from table import Row, render

TURNS = 9
MAX_DELIVERY_S = 120.0
# Writes of two sizes are measured: large writes that fill a pipe, and single lines, as `print` writes to an unbuffered stdout.
BLOCKS_BYTES = 1 << 29
BLOCKS = ["head", "-c", str(BLOCKS_BYTES), "/dev/zero"]
LINE = b"epoch 17 step 000123 loss 0.123456 accuracy 0.987654 learning rate 0.00100000\n"
LINES_BYTES = 1_000_000 * len(LINE)
LINES = [
    sys.executable,
    "-c",
    f"import os\nfor _ in range({LINES_BYTES // len(LINE)}):\n    os.write(1, {LINE!r})\n",
]
# The trial waits for the gate file, writes its output, and reports the duration of the writes.
TRAIN = """
import subprocess, time
open("gate").close()
begin_s = time.monotonic()
subprocess.run({command!r}, check=True)
took_s = time.monotonic() - begin_s
with open("done", "w") as done:
    done.write(str(took_s))
"""


def stdout_rate() -> list[Row]:
    """The write rate of a command, measured by the command itself, while the manager collects its logs.

    The command runs alternately with a keeper and with a plain file as its stdout. The fastest run of each kind is compared,
    because other load on the machine can only slow down a run.
    """
    return [
        _compare("stdout in large blocks", BLOCKS, BLOCKS_BYTES),
        _compare("stdout line by line", LINES, LINES_BYTES),
    ]


class _Turn(NamedTuple):
    took_s: float
    keeper_cpu_s: float


def _compare(what: str, command: list[str], size_bytes: int) -> Row:
    train = TRAIN.format(command=command)
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(
            Path(folder), train, trialConcurrency=1, maxTrialNum=TURNS, logCollection="http"
        )
        experiment.create()
        bare_code = Path(folder, "bare")
        bare_code.mkdir()
        (bare_code / "train.py").write_text(train)
        for code, name in (
            (code, name) for code in (bare_code, experiment.code) for name in ("gate", "done")
        ):
            os.mkfifo(code / name)
        bare_s: list[float] = []
        ours: list[_Turn] = []
        try:
            experiment.start()
            for turn in range(TURNS):
                # While the bare run writes, the keeper of the next trial already waits at its own gate. A waiting keeper hardly
                # slows down the bare run.
                bare_s.append(_run_bare(bare_code))
                ours.append(_run_trial(experiment))
                wait_until(
                    lambda done=turn + 1: experiment.summary()["counts"]["SUCCEEDED"] == done,
                    "everything is stored",
                    MAX_DELIVERY_S,
                )
                _forget_output(experiment)
        finally:
            experiment.close()
    took_s = min(turn.took_s for turn in ours)
    keeper = statistics.median(turn.keeper_cpu_s / turn.took_s for turn in ours)
    ratio = min(bare_s) / took_s
    return Row(
        what,
        f"{size_bytes / took_s / 1e6:,.0f} MB/s, keeper {keeper:.1%} CPU",
        f"command > file {size_bytes / min(bare_s) / 1e6:,.0f} MB/s",
        f"{ratio:.0%}",
        ">= 95 %",
        ratio >= 0.95,
    )


def _run_bare(code: Path) -> float:
    shown = code / "stdout"
    with shown.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "train.py"], cwd=code, stdout=out, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
    _open(code / "gate")
    took_s = float((code / "done").read_text())
    process.wait()
    shown.unlink()
    return took_s


def _run_trial(experiment: RealExperiment) -> _Turn:
    _open(experiment.code / "gate")
    newest = max(experiment.folder.jobs.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    keeper_pid = json.loads(newest.read_bytes())["pid"]
    begin_s = cpu_s(keeper_pid)
    took_s = float((experiment.code / "done").read_text())
    return _Turn(took_s, cpu_s(keeper_pid) - begin_s)


def _open(gate: Path) -> None:
    """Open the gate for the process that already waits at it or will wait at it later."""
    # Flush the writes of earlier runs to the disk, so that they do not slow down the run that starts now.
    os.sync()
    with gate.open("w"):
        pass


def _forget_output(experiment: RealExperiment) -> None:
    """Empty the output files of ended trials, so that the disk holds only the output of one turn."""
    for shown in experiment.folder.workspace.trials.glob("*/attempts/*/*/output/stdout"):
        _cut(shown)
    for stored in experiment.folder.collected_logs.glob("*/0/*/stdout"):
        _cut(stored)


def _cut(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size:
            os.truncate(path, 0)


if __name__ == "__main__":
    print(render(stdout_rate()))
