"""A wall clock that a test changes while processes run; builds stepped_clock.c."""

import shutil
import subprocess
from pathlib import Path

import pytest
from deadlines import scaled_s


class SteppedClock:
    """The clock shows the real time until `set_by` is called. `environ` contains the variables for the processes that use this
    clock.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc")
        if compiler is None:
            pytest.skip("needs gcc, to build the library that sets the clock of a process")
        library, self._file = folder / "stepped_clock.so", folder / "clock"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=scaled_s(120)
        )
        self.set_by(0)
        self.environ = {"LD_PRELOAD": str(library), "TEST_CLOCK_FILE": str(self._file)}

    def set_by(self, seconds: int) -> None:
        """Shift the clock by so many seconds from the real time."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(str(seconds))
        temporary.rename(self._file)
