"""Runs a make target that runs pytest, and returns its failures."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from failure_reports import REPORTING

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1
"""pytest's exit status of a run in which tests failed. Others: interrupted, internal error, usage error, no tests."""


# After an interrupt, the tests have this many seconds to end the processes that they have started.
INTERRUPTED_TIMEOUT_S = 60


class RunResult(NamedTuple):
    """The outcome of a run. `failures`: the full report of each failed test, by id."""

    exit_status: int
    failures: dict[str, str]


def run_tests(*command: str, **environ: str) -> RunResult:
    """Run this command, which runs pytest, once. The exit status is -1 if the command fails without a report of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder, "failures.json")
        plugin = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} {REPORTING}"
        own = {"FAILURE_REPORTS": str(reports), "PYTEST_ADDOPTS": options, "PYTHONPATH": plugin}
        code = _run(command, os.environ | own | environ)
        if not reports.exists():
            return RunResult(-1 if code else 0, {})
        return RunResult(**json.loads(reports.read_text()))


def _run(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run the command; return its exit code. After Ctrl-C, pytest and its workers get one SIGINT, and time to end the processes
    that they started.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
