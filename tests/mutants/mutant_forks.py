"""Judges mutants with unit tests in forks of one process. mutate.py starts this program as its first stage.

The tests are collected once. A first run of them records which tests execute which lines, and how long each test takes. For each
mutant, a fork replaces the code of the changed functions in memory, and runs the tests that execute the changed lines. The parent
process only collects: no test runs there, so no thread of a test or of gRPC exists when it forks.

Usage: mutant_forks.py REQUEST. It prints a JSON array for each mutant: its number, its verdict, and the test that kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import psutil
import pytest
from mutant_code import Replacement, functions_of, replaced_code
from mutant_finder import Mutant, lines_around

KILLED, SURVIVED, UNJUDGED = "killed", "survived", "unjudged"
# A test that needs more processor time than this is not used here. mutate.py runs it in its second stage.
MAX_TEST_S = 2.0
# In the recording, a test that takes longer than this is interrupted. The first tests also compute values that later tests reuse,
# such as the character table of Hypothesis, so the limit is high.
RECORDING_TIMEOUT_S = 10.0
# A fork may use this much more memory than its parent. Without a limit, a mutant that extends a list endlessly would fill the
# memory.
MAX_MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Request:
    """The mutants of a tree, and the test files that may kill them."""

    root: str
    tests: list[str]
    mutants: list[Mutant]
    workers: int
    hang_s: float
    """A test that takes longer hangs. It is much longer than MAX_TEST_S, because the processor may be busy."""

    def to_json(self) -> str:
        """The text of the request."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request that to_json() has written."""
        fields = json.loads(text)
        return cls(**{**fields, "mutants": [Mutant(**each) for each in fields["mutants"]]})


class Recorder:
    """Records which tests execute which lines of the files with mutants, and the processor time of each test.

    Tests that fail or take too long have no time: they judge no mutant.
    """

    def __init__(self, root: str, paths: set[str]) -> None:
        self._files = {f"{root}/{path}": path for path in paths}
        self._lines: set[tuple[str, int]] = set()
        self.lines: list[tuple[str, list[tuple[str, int]]]] = []
        self.durations: dict[str, float] = {}

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run one test."""
        self._lines = set()
        item.add_marker(pytest.mark.timeout(RECORDING_TIMEOUT_S, method="signal"), append=False)
        before = time.process_time()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            passed = _passes(item, following)
        finally:
            sys.settrace(None)
            threading.settrace(None)
        duration_s = time.process_time() - before
        if passed and duration_s <= MAX_TEST_S:
            self.durations[item.nodeid] = duration_s
        self.lines.append((item.nodeid, [(self._files[file], line) for file, line in sorted(self._lines)]))

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename in self._files:
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
            return self._trace
        return None


class Forks:
    """The pytest plugin that judges the mutants instead of running the collected tests."""

    def __init__(self, request: Request, results: int, folder: Path) -> None:
        self._request = request
        self._results = results
        self._folder = folder
        self._session: Any = None
        self._items: dict[str, pytest.Item] = {}
        self._functions: dict[str, list[FunctionType]] = {}
        self._durations: dict[str, float] = {}
        self._tests: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._passing: set[str] = set()
        self._left_out: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record the tests, then judge each mutant."""
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._functions = functions_of(self._request.root, {each.path for each in self._request.mutants})
        self._in_forks(self._record)
        for file in self._folder.glob("recorded-*"):
            lines, durations = json.loads(file.read_text())
            self._durations.update(durations)
            for test, executed in lines:
                for path, line in executed:
                    self._tests[path, line].append(test)
        self._in_forks(self._judge)
        return True

    def _in_forks(self, work: Callable[[int], None]) -> None:
        """Call `work` in several processes at the same time, with the number of each process."""
        pids = []
        for number in range(self._request.workers):
            if (pid := os.fork()) == 0:
                try:
                    self._use_own_folder()
                    work(number)
                except BaseException:  # noqa: BLE001 -- the fork must not return into pytest
                    traceback.print_exc()
                finally:
                    os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)

    def _record(self, number: int) -> None:
        """Record the tests of this worker's share of the files."""
        recorder = Recorder(self._request.root, {each.path for each in self._request.mutants})
        files = list(dict.fromkeys(item.path for item in self._items.values()))
        share = set(files[number :: self._request.workers])
        items = [item for item in self._items.values() if item.path in share]
        for item, following in zip(items, [*items[1:], None], strict=True):
            recorder.run(item, following)
        (self._folder / f"recorded-{number}").write_text(json.dumps([recorder.lines, recorder.durations]))

    def _judge(self, number: int) -> None:
        """Write the verdicts of this worker's share of the mutants."""
        for index in range(number, len(self._request.mutants), self._request.workers):
            verdict = self._verdict(self._request.mutants[index])
            os.write(self._results, (json.dumps([index, *verdict]) + "\n").encode())

    def _verdict(self, mutant: Mutant) -> tuple[str, str]:
        source = Path(self._request.root, mutant.path).read_text()
        replaced = replaced_code(mutant, source, self._request.root, self._functions[mutant.path])
        executing = {test for line in lines_around(mutant, source) for test in self._tests[mutant.path, line]}
        tests = self._usable(executing, Path(mutant.path).stem)
        # _usable() may leave out tests that execute the mutant. Then a surviving mutant is not judged, because a test that is
        # left out may kill it.
        is_complete = len(tests) == len(executing)
        if not replaced or not tests:
            return UNJUDGED, ""
        while tests:
            failed = self._failure(tests, replaced)
            if not failed:
                return (SURVIVED if is_complete else UNJUDGED), ""
            if self._passes_without_mutant(failed):
                return KILLED, failed
            tests = tests[tests.index(failed) + 1 :]
        return UNJUDGED, ""

    def _passes_without_mutant(self, test: str) -> bool:
        if test not in self._passing | self._left_out:
            (self._left_out if self._failure([test], []) else self._passing).add(test)
        return test in self._passing

    def _usable(self, tests: set[str], module: str) -> list[str]:
        """The tests that are quick and pass: first those with the module's name in their names, then the quickest ones."""
        usable = tests & self._durations.keys() - self._left_out
        return sorted(usable, key=lambda test: (module not in test, self._durations[test]))

    def _failure(self, tests: Sequence[str], replaced: Sequence[Replacement]) -> str:
        """The first test that fails, hangs or ends its process while this code is replaced; empty if none does."""
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reader)
            self._run(tests, replaced, writer)
        os.close(writer)
        running = tests[0]
        try:
            # When a test starts, the fork writes the number of the test. After the last test, it writes "done".
            while select.select([reader], [], [], self._request.hang_s)[0]:
                words = os.read(reader, 65536).decode().split()
                if words[-1:] == ["done"]:
                    return ""
                running = next((tests[int(word)] for word in reversed(words) if word != "failed"), running)
                if not words or words[-1] == "failed":
                    break
            return running
        finally:
            os.close(reader)
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            shutil.rmtree(self._folder / str(pid), ignore_errors=True)

    def _use_own_folder(self) -> None:
        """Make the temporary folders of tests in a folder of this process, because several processes may run the same test at the
        same time.
        """
        factory: Any = self._session.config._tmp_path_factory
        factory._basetemp = self._folder / str(os.getpid())
        factory._basetemp.mkdir()

    def _run(self, tests: Sequence[str], replaced: Sequence[Replacement], writer: int) -> None:
        """Run these tests until one fails, and end this process."""
        try:
            os.setsid()
            os.close(self._results)
            items = [self._items[test] for test in tests]
            self._use_own_folder()
            limit = psutil.Process().memory_info().vms + MAX_MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            for function, code in replaced:
                function.__code__ = code
            for number, following in enumerate([*items[1:], None]):
                os.write(writer, f"{number}\n".encode())
                if not _passes(items[number], following):
                    os.write(writer, b"failed\n")
                    return
            os.write(writer, b"done\n")
        finally:
            os._exit(0)


class _Failures:
    """A pytest plugin that records whether a test fails."""

    def __init__(self) -> None:
        self.found = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found |= report.failed


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Run a test. `following`: the next one, for which pytest keeps shared fixtures."""
    failures = _Failures()
    item.config.pluginmanager.register(failures)
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        item.config.pluginmanager.unregister(failures)
    return not failures.found


def main(file: str) -> None:
    """Judge the mutants of a request."""
    request = Request.from_json(Path(file).read_text())
    results = os.dup(1)
    os.dup2(2, 1)
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    # The default capture writes the output of tests into a temporary file, which all forks would share. --capture=sys keeps the
    # output in memory.
    options = ["-q", "--tb=no", "--capture=sys", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if Path(request.root, "tests/conftest.py").exists():
        options.append("--hypothesis-profile=quick")
    try:
        pytest.main([*options, *request.tests], plugins=[Forks(request, results, folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
