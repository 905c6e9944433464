"""The program of `make bench`, without a measurement."""

import subprocess
import sys
from pathlib import Path

from deadlines import DEADLINE_S

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def test_the_help_page_of_make_bench_describes_each_measurement():
    done = subprocess.run([sys.executable, RUN, "--help"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.partition("measurements:\n")[2].splitlines()
    assert len(listed) > 20
    assert all(len(line.split()) > 3 for line in listed if line)
