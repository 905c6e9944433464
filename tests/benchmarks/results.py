"""Result files of `make bench`: rounds of measurements and the machine they ran on; and the comparison of two files."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from table import Row, aligned

_PROBES = 3
_BLOCK = bytes(4096)
# A row counts as changed only if all pairs of rounds changed in the same direction. Fewer than three pairs often agree by chance.
_MIN_PAIRS = 3


class ResultsInvalid(Exception):
    """The file is not a result file of `make bench`; the message has the path and the remedy."""


@dataclass(frozen=True)
class Results:
    """The result rows of each round, and a description of the machine."""

    machine: dict[str, Any]
    rounds: list[list[Row]]

    def write(self, path: Path) -> None:
        """Write the results as JSON."""
        document = {
            "machine": self.machine,
            "rounds": [[asdict(row) | {"figure": row.figure} for row in rows] for rows in self.rounds],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Read a result file.

        Raises:
            ResultsInvalid: the file cannot be read, or is not a result file.
        """
        try:
            document = json.loads(path.read_bytes())
            rounds = [
                [Row(**{name: value for name, value in row.items() if name != "figure"}) for row in rows]
                for rows in document["rounds"]
            ]
            return cls(document["machine"], rounds)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsInvalid(
                f"cannot read {path}: {error}; write it with `make bench JSON={path}`"
            ) from error

    def figures(self, what: str) -> list[float]:
        """The values of a row, one from each round that contains the row."""
        rows = [row for rows in self.rounds for row in rows if row.what == what]
        return [row.figure for row in rows if row.figure is not None]


def machine() -> dict[str, Any]:
    """The properties of this machine that a reader needs to judge the figures."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory_kb = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_kb / 1e6, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "commit": _commit(),
        "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def probe() -> str:
    """Median times of a bare Python start and of a durable write of 4 KB at this moment. They show the influence of a slow
    machine or disk on any row.
    """
    starts_s, writes_s = [], []
    with tempfile.TemporaryFile() as file:
        for _ in range(_PROBES):
            starts_s.append(_took_s(lambda: subprocess.run([sys.executable, "-S", "-c", ""], check=True)))
            writes_s.append(_took_s(lambda: (os.pwrite(file.fileno(), _BLOCK, 0), os.fsync(file.fileno()))))
    start_ms, write_ms = (statistics.median(each) * 1e3 for each in (starts_s, writes_s))
    return f"start {start_ms:.0f} ms, fsync {write_ms:.1f} ms"


def _took_s(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def compare(before: Results, after: Results) -> str:
    """A table of the rows that both results contain.

    The rounds are compared in pairs. A row counts as changed if there are at least three pairs and all of them changed in the
    same direction.
    """
    table = [("what", "before", "after", "after / before", "")]
    known = [row.what for row in before.rounds[0]] if before.rounds else []
    for what in known:
        old, new = before.figures(what), after.figures(what)
        ratios = [b / a for a, b in zip(old, new, strict=False) if a]
        if not ratios:
            continue
        table.append((what, _spread(old), _spread(new), _spread(ratios), _verdict(ratios)))
    notes = [f"{name}: {was} -> {after.machine.get(name)}" for name, was in _differences(before, after)]
    return "\n".join([aligned(table), *notes])


def _differences(before: Results, after: Results) -> list[tuple[str, Any]]:
    return [(name, was) for name, was in before.machine.items() if after.machine.get(name) != was]


def _spread(numbers: list[float]) -> str:
    middle = f"{statistics.median(numbers):.3g}"
    return middle if len(numbers) == 1 else f"{middle} ({min(numbers):.3g} to {max(numbers):.3g})"


def _verdict(ratios: list[float]) -> str:
    if len(ratios) < _MIN_PAIRS:
        return "too few rounds"
    if min(ratios) > 1:
        return "higher"
    return "lower" if max(ratios) < 1 else "within the noise"
