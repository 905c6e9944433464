"""What a warm start costs, from one trial's last line to the next one's first, beside plain processes and plain forks."""

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from table import Row, render

from trial_keeper.core.warm_command import WarmCommand
from trial_keeper.host.process import adopt_orphans
from trial_keeper.host.warm import WarmInterpreter, WarmStart

TURNS = 60
IMPORTING_TURNS = 9
IMPORTS = ("numpy", "sklearn.linear_model", "sklearn.model_selection", "sklearn.datasets")

# Its first and its last line note the time; the imports are before the first.
SCRIPT = "{}import time\nprint(time.time(), flush=True)\nprint(time.time(), flush=True)\n"
READY_S = 120.0


def warm_turnaround() -> list[Row]:
    """Median time from a trial's last line to the next trial's first: warm, by `subprocess.run`, and by a bare fork."""
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        bare_ms, fork_ms, warm_ms = _gaps_ms(Path(folder), (), TURNS)
        bare_importing_ms, fork_importing_ms, warm_importing_ms = _gaps_ms(
            Path(folder), IMPORTS, IMPORTING_TURNS
        )
    gain = bare_importing_ms / warm_importing_ms
    return [
        Row(
            "trial end -> next trial's first line, warm",
            f"{warm_ms:.1f} ms",
            f"fork {fork_ms:.1f} ms, subprocess.run {bare_ms:.1f} ms",
            f"{warm_ms / fork_ms:.1f} x the fork",
            "<= 6 ms",
            warm_ms <= 6,
        ),
        Row(
            "the same, importing numpy and scikit-learn",
            f"{warm_importing_ms:.1f} ms",
            f"fork {fork_importing_ms:.1f} ms, subprocess.run {bare_importing_ms:.0f} ms",
            f"1/{gain:.0f} of subprocess.run",
            ">= 20 x faster",
            gain >= 20,
        ),
    ]


def _gaps_ms(folder: Path, imports: tuple[str, ...], turns: int) -> tuple[float, float, float]:
    """The median gap of each of the three, which take turns so that all meet the same machine."""
    script, shown = folder / "trial.py", folder / "shown"
    script.write_text(SCRIPT.format("".join(f"import {name}\n" for name in imports)))
    environ = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    interpreter = WarmInterpreter(sys.executable, imports, environ)
    forking = subprocess.Popen(
        [sys.executable, "-c", FORKING, script, shown, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def bare() -> None:
        with shown.open("ab") as out:
            subprocess.run([sys.executable, script], stdout=out, env=environ, check=True)

    def fork() -> None:
        assert forking.stdin is not None
        assert forking.stdout is not None
        forking.stdin.write("\n")
        forking.stdin.flush()
        forking.stdout.readline()

    def warm() -> None:
        start = WarmStart(WarmCommand("python", script.name), str(folder), environ, shown, Path(os.devnull))
        _, status = os.waitpid(interpreter.start(start), 0)
        if status:
            raise AssertionError(f"the warm trial ended with {status}, so its times mean nothing")

    with contextlib.closing(interpreter), forking:
        interpreter.is_ready(READY_S)
        kinds: tuple[Callable[[], None], ...] = (bare, fork, warm)
        gaps_ms: dict[Callable[[], None], list[float]] = {kind: [] for kind in kinds}
        # Three of a kind in a row: two gaps.
        for _, kind in itertools.product(range(max(1, turns // 3)), kinds):
            shown.unlink(missing_ok=True)
            for _ in range(3):
                kind()
            lines = [float(line) for line in shown.read_text().split()]
            gaps_ms[kind] += [
                (after - before) * 1e3 for before, after in zip(lines[1::2], lines[2::2], strict=False)
            ]
        assert forking.stdin is not None
        forking.stdin.close()
    bare_ms, fork_ms, warm_ms = (statistics.median(gaps_ms[kind]) for kind in kinds)
    return bare_ms, fork_ms, warm_ms


# The least a fork can do: run the same script's code, leave without a farewell.
FORKING = """
import os, sys, time
script, shown, *imports = sys.argv[1:]
for name in imports:
    __import__(name)
code = compile(open(script).read(), script, "exec")
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(shown, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), 1)
        exec(code, {"__name__": "__main__"})
        os._exit(0)
    os.waitpid(pid, 0)
    print(flush=True)
"""


if __name__ == "__main__":
    print(render(warm_turnaround()))
