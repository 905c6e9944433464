"""Runs a make target that runs pytest, and returns its failures."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from failure_reports import REPORTING

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1
"""pytest's exit status of a run in which tests failed. Others: interrupted, internal error, usage error, no tests."""


class RunResult(NamedTuple):
    """The outcome of a run. `failures`: the full report of each failed test, by id."""

    exit_status: int
    failures: dict[str, str]


def run_tests(*command: str, **environ: str) -> RunResult:
    """Run a command that runs pytest once. A command that fails without pytest has exit status -1."""
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder, "failures.json")
        plugin = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} {REPORTING}"
        own = {"FAILURE_REPORTS": str(reports), "PYTEST_ADDOPTS": options, "PYTHONPATH": plugin}
        code = subprocess.run(command, cwd=ROOT, env=os.environ | own | environ, check=False).returncode
        if not reports.exists():
            return RunResult(-1 if code else 0, {})
        return RunResult(**json.loads(reports.read_text()))
