"""Builds the library of clock_shim.c: processes that load it see a wall clock that tests can set."""

import shutil
import subprocess
from pathlib import Path

from deadlines import DEADLINE_S


def can_step_clocks() -> bool:
    """Whether the library can be built here."""
    return shutil.which("gcc") is not None


def build_clock(folder: Path) -> Path:
    """Build the library for LD_PRELOAD."""
    library = folder / "stepping-clock.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=DEADLINE_S)
    return library


class Clock:
    """The wall clock of processes that have `environ` in their environment."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.environ = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(file)}

    def set_ahead(self, ahead_s: int) -> None:
        """Set the clock so many seconds ahead of the real time, or behind it."""
        new = self._file.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.replace(self._file)
