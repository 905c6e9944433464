"""A pytest plugin: writes the exit status and the failures of a run to the file that FAILURE_REPORTS names."""

import json
import os
from pathlib import Path

import pytest

REPORTING = "-p failure_reports"
"""The options of pytest that load this plugin."""


class FailureReports:
    """Collects the failures by test id, in the process to which all workers report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the failure of a test, of its set-up or of its tear-down."""
        self._add(report, f"{report.nodeid} ({report.when}, {report.duration:.1f} s)")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record the failed collection of a test file."""
        self._add(report, f"{report.nodeid} (collection)")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the exit status and the failures to the file."""
        self._path.write_text(json.dumps({"exit_status": int(exitstatus), "failures": self._failures}))

    def _add(self, report: pytest.TestReport | pytest.CollectReport, title: str) -> None:
        if report.failed:
            output = [f"---- {name}\n{text}" for name, text in report.sections]
            parts = [self._failures.get(report.nodeid, ""), title, report.longreprtext, *output]
            self._failures[report.nodeid] = "\n".join(filter(None, parts))


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, except in the workers of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailureReports(Path(os.environ.pop("FAILURE_REPORTS"))))
        # Tests that run pytest themselves must not load the plugin.
        os.environ["PYTEST_ADDOPTS"] = os.environ["PYTEST_ADDOPTS"].removesuffix(REPORTING).strip()
