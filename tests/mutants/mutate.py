"""Mutation test: makes one small bug at a time in a copy of the tree, and runs the tests of the changed module.

`make mutants` calls it. A mutant is killed if a test fails or hangs. The failed test then runs once on the unchanged code: if it
fails there too, it does not kill the mutant. A survivor shows behaviour that no test checks. Write a test, simplify the code, or
explain in explained.txt why the mutant behaves like the original.

The first stage runs unit tests in forks of one process (mutant_forks.py), which takes about a second per mutant. The second stage
starts pytest for each mutant that is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import mutant_forks
import psutil
from mutant_finder import Mutant, sampled
from mutant_forks import SURVIVED, Request

ROOT = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("explained.txt")
# For each folder: the quick tests, and then the slow tests, that apply to all its modules. For each mutant, the unit tests that
# import the changed module run first. The contract and integration tests that import it run before all other slow tests.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "manager/nni_manager/domain": (
        [
            "unit/test_domain_experiment.py",
            "unit/test_domain_*.py",
            "unit/test_reuse_exchange.py",
            "unit/test_stop_escalation.py",
        ],
        ["integration/test_engine.py", "integration/test_changes.py"],
    ),
    "manager/nni_manager/store": (
        ["unit/test_store.py", "integration/test_group_commit.py"],
        ["integration/test_lease.py", "integration/test_stored_experiment.py"],
    ),
    "manager/nni_manager/engine": (
        ["integration/test_engine.py", "integration/test_group_commit.py", "unit/test_page_views.py"],
        [
            "integration/test_job_recovery.py",
            "integration/test_adopted_jobs.py",
            "integration/test_keeper_commands.py",
            "integration/test_experiment_end.py",
            "integration/test_admission.py",
            "integration/test_changes.py",
            "integration/test_mount.py",
            "integration/test_assessed_experiment.py",
            "integration/test_stored_experiment.py",
            "integration/test_http_api.py",
            "integration/test_monitoring.py",
            "integration/test_remarks.py",
            "integration/test_tracing.py",
            "integration/test_transient_failures.py",
            "faults/test_forged_attempts.py",
            "faults/test_no_network.py",
        ],
    ),
    "trial_keeper/core": (
        ["unit/test_core_*.py", "unit/test_reuse_exchange.py"],
        ["contract/test_exactly_once.py", "integration/test_reuse_keeper.py"],
    ),
    "trial_keeper/wire": (
        ["unit/test_wire_*.py", "unit/test_attempt_files.py", "unit/test_unsafe_paths.py"],
        ["integration/test_admission.py", "integration/test_mount.py"],
    ),
}
# A test that takes longer than TEST_TIMEOUT_S counts as a hang, and so does a run of pytest after RUN_TIMEOUT_S.
TEST_TIMEOUT_S = 60
RUN_TIMEOUT_S = 600
# A fork that runs longer counts as a hang. Forks run quick tests only, so this limit is lower than RUN_TIMEOUT_S.
FORK_TIMEOUT_S = 20
# The remaining time is printed each time that this number of mutants has been judged.
ESTIMATE_INTERVAL = 25


def explanations(text: str) -> dict[tuple[str, str, str], str]:
    """The reasons of explained survivors, by path, line before and line after. Each block of the text has a path, a line `-
    before`, a line `+ after` and a reason.
    """
    known = {}
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.strip().splitlines() if not line.startswith("#")]
        if lines:
            path, before, after, *reason = lines
            if not (before.startswith("- ") and after.startswith("+ ") and reason):
                raise ValueError(
                    f"cannot read the explanation {block!r}: write path, - before, + after, reason"
                )
            known[path, before[2:], after[2:]] = " ".join(reason)
    return known


@cache
def _text_of(file: Path) -> str:
    return file.read_text()


@lru_cache
def tests_of(root: Path, path: str) -> list[list[str]]:
    """The groups of test files for a module, in the order in which they run. Each slow file has a run of pytest of its own."""
    folder = next(each for each in TARGETS if path.startswith(f"{each}/"))
    quick, slow = (
        [str(file) for pattern in group for file in sorted((root / "tests").glob(pattern))]
        for group in TARGETS[folder]
    )
    module = path.removeprefix("manager/").removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    uses = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    texts = {file: _text_of(file) for file in (root / "tests").glob("*/test_*.py")}
    users = [file for file, text in texts.items() if name in text and uses.search(text)]
    # Run small files first: they usually test only this module. Run test_cli_* last: these files start nnictl many times.
    users.sort(key=lambda file: (file.name.startswith("test_cli_"), file.stat().st_size))
    units = [file for file in users if file.parent.name == "unit"]
    own = [str(file) for file in units if name in file.name]
    first = list(dict.fromkeys([*own, *map(str, units[:4]), *quick]))
    whole = [file for file in users if file.parent.name in ("contract", "integration")]
    then = [file for file in dict.fromkeys(map(str, [*units[4:], *whole, *slow])) if file not in first]
    groups = [first, *([file] for file in then)]
    return [[os.path.relpath(file, root) for file in group] for group in groups if group]


def unit_tests_of(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """The files of unit tests that belong to the modules of these mutants."""
    paths = sorted({mutant.path for mutant in mutants})
    files = {file for path in paths for group in tests_of(root, path) for file in group}
    return sorted(file for file in files if file.startswith("tests/unit/"))


class Copy:
    """A copy of the tree with its own virtual environment, which can import the packages of the running Python."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._environ = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "PATH": f"{folder}/venv/bin:{os.environ['PATH']}",
        }
        self._environ.pop("PYTHONPATH", None)
        self._output = folder / "output"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        self._lock = threading.Lock()
        self._changes = count(1)
        (folder / "tmp").mkdir(parents=True)
        # Make the parent folder accessible to other users, because some tests run as another user.
        folder.parent.chmod(0o755)
        listed = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
        for name in subprocess.check_output(listed, text=True).split("\0"):
            if name and (root / name).is_file():
                (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / "tree" / name)
        self.tree = folder / "tree"
        self._make_environment()

    def _make_environment(self) -> None:
        venv = self.folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (packages,) = venv.glob("lib/python*/site-packages")
        (installed,) = {path for path in sys.path if path.endswith("site-packages")}
        lines = [str(self.tree), str(self.tree / "manager"), f"import site; site.addsitedir({installed!r})"]
        (packages / "copy.pth").write_text("\n".join(lines))
        for script in (Path(sys.executable).parent / name for name in ("nnictl", "trial-keeper", "pytest")):
            if script.exists():
                text = script.read_text().replace(sys.executable, str(venv / "bin/python"), 1)
                text = re.sub(r"^#!.*", f"#!{venv}/bin/python", text)
                (venv / "bin" / script.name).write_text(text)
                (venv / "bin" / script.name).chmod(0o755)

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """Replace the content of a file in the copy during the block."""
        file = self.tree / path
        before = file.read_text()
        try:
            self._write(file, text)
            yield
        finally:
            self._write(file, before)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Python reuses a compiled file if the time and size of the source are the same, so each version gets a different time.
        os.utime(file, (next(self._changes) * 2,) * 2)

    def failure(self, tests: Sequence[str], without: Collection[str] = ()) -> str:
        """The first test that fails or hangs, without its parameters; empty if none does. `without`: tests that do not run."""
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
        command: list[str | Path] = [
            self.folder / "venv/bin/python",
            "-m",
            "pytest",
            *options,
            "--tb=no",
            *tests,
        ]
        command += [f"--deselect={test}" for test in without]
        if (self.tree / "tests/conftest.py").exists():
            command.append("--hypothesis-profile=quick")
        # Use a file instead of a pipe: processes that tests have left would keep a pipe open.
        with self._output.open("w") as file:
            process = self._start(command, stdout=file, stderr=file)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RUN_TIMEOUT_S)
        self._kill()
        if self._is_ended:
            raise KeyboardInterrupt
        if process.returncode in (0, 5):
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self._output.read_text(), re.MULTILINE)
        return failed[1].partition("[")[0] if failed else "a hang"

    def verdicts(
        self, mutants: Sequence[Mutant], tests: Sequence[str], workers: int
    ) -> Iterator[tuple[Mutant, str, str]]:
        """Judge the mutants with these unit tests in forks: each mutant, its verdict, and the test that kills it.

        Mutants whose process dies have no verdict. `workers`: the number of mutants that are judged at the same time.
        """
        request = self.folder / "request"
        request.write_text(
            Request(str(self.tree), list(tests), list(mutants), workers, FORK_TIMEOUT_S).to_json()
        )
        command: list[str | Path] = [self.folder / "venv/bin/python", mutant_forks.__file__, request]
        with self._output.open("w") as file:
            process = self._start(command, stdout=subprocess.PIPE, stderr=file)
        assert process.stdout is not None
        with process.stdout:
            # Forks of a test may keep the pipe open, so this loop does not wait for the end of the pipe.
            for line in islice(process.stdout, len(mutants)):
                number, verdict, test = json.loads(line)
                yield mutants[number], verdict, test
        self._kill()

    def _start(self, command: Sequence[str | Path], **output: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_ended:
                raise KeyboardInterrupt
            self._process = subprocess.Popen(
                command, cwd=self.tree, env=self._environ, start_new_session=True, **output
            )
        return self._process

    def _kill(self) -> None:
        """Kill the tests and the processes that they have left. These processes have the copy's path in their command lines."""
        if self._process is None:
            return
        # Kill pytest first, so that it starts no processes while the loop lists the remaining processes.
        self._process.kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in word for word in process.cmdline()):
                    process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the running tests, and prevent the start of further tests."""
        with self._lock:
            self._is_ended = True
            self._kill()


class Judge:
    """Runs the tests of mutants."""

    def __init__(self, root: Path, groups_of: Any = None) -> None:
        self._root = root
        self._groups_of = groups_of or (lambda path: tests_of(root, path))
        self._verified: set[str] = set()
        self._always_fail: set[str] = set()

    def killer(self, copy: Copy, mutant: Mutant) -> str:
        """The test that fails because of the mutant; empty if it survives."""
        source = (self._root / mutant.path).read_text()
        for tests in self._groups_of(mutant.path):
            while True:
                with copy.changed(mutant.path, mutant.apply(source)):
                    failed = copy.failure(tests, self._always_fail)
                if not failed:
                    break
                if self._passes_without_mutant(copy, failed):
                    return failed
        return ""

    def _passes_without_mutant(self, copy: Copy, failed: str) -> bool:
        # For an import error or a hang, the output of pytest names no test that could run without the mutant.
        if failed in self._verified | self._always_fail or "::" not in failed:
            return True
        if copy.failure([failed]):
            print(f"warning: {failed} fails without a mutant as well, and is left out", flush=True)
            self._always_fail.add(failed)
            return False
        self._verified.add(failed)
        return True


class Report:
    """Prints the verdict of each mutant, at intervals the remaining time, and finally the survivors and the score."""

    def __init__(self, root: Path, size: int) -> None:
        self._root = root
        self._size = size
        self._killed = self._explained = 0
        self._survivors: list[Mutant] = []
        self._to_judge = self._judged = 0
        self._since_s = 0.0

    def add(self, mutant: Mutant, killer: str = "", reason: str = "") -> None:
        """Print the verdict of a mutant: the test that kills it, or the reason why no test can kill it, or neither."""
        self._killed += bool(killer)
        self._explained += bool(reason)
        if not killer and not reason:
            self._survivors.append(mutant)
        done = self._killed + self._explained + len(self._survivors)
        word = f"killed by {killer}" if killer else f"explained: {reason}" if reason else "SURVIVED"
        print(f"{done}/{self._size} {mutant.path}:{mutant.line} {word}", flush=True)
        if not killer and not reason:
            before, after = mutant.diff((self._root / mutant.path).read_text())
            print(f"  - {before}\n  + {after}", flush=True)

    def start_stage(self, name: str, to_judge: int) -> None:
        """Print the number of mutants of a stage."""
        self._to_judge, self._judged = to_judge, 0
        print(f"{name}: {to_judge} mutants", flush=True)

    def count(self) -> None:
        """Count a mutant that the stage has judged. At intervals, print the remaining time."""
        # The collection of the tests delays the first mutant, so the time is measured from its verdict.
        if self._judged == 0:
            self._since_s = time.monotonic()
        elif self._judged % ESTIMATE_INTERVAL == 0:
            left = self._to_judge - self._judged
            left_s = (time.monotonic() - self._since_s) / self._judged * left
            print(f"{left} mutants of this stage left: about {left_s / 60:.1f} minutes", flush=True)
        self._judged += 1

    def end(self, seed: int) -> float:
        """Print the survivors and the score, and return the score in percent."""
        for mutant in self._survivors:
            before, after = mutant.diff((self._root / mutant.path).read_text())
            print(f"\n{mutant.path}:{mutant.line}\n- {before}\n+ {after}")
        counted = self._size - self._explained
        score = 100.0 * self._killed / counted if counted else 100.0
        print(
            f"\n{self._size} mutants (seed {seed}): {self._killed} killed, {len(self._survivors)} survived, "
            f"{self._explained} explained; score {score:.1f} %"
        )
        return score


def _judge_in_forks(
    report: Report, copy: Copy, mutants: list[Mutant], *, workers: int, quick: bool
) -> list[Mutant]:
    """Judge mutants with unit tests, and return those that are left for the second stage."""
    report.start_stage("unit tests in forks", len(mutants))
    judged = set()
    for mutant, verdict, test in copy.verdicts(mutants, unit_tests_of(ROOT, mutants), workers):
        report.count()
        if test or (quick and verdict == SURVIVED):
            report.add(mutant, test)
            judged.add(mutant)
    return [mutant for mutant in mutants if mutant not in judged]


def _judge_with_pytest(
    report: Report, copies: Sequence[Copy], pool: ThreadPoolExecutor, judge: Judge, mutants: list[Mutant]
) -> None:
    """Judge mutants with a run of pytest for each."""
    report.start_stage("pytest for each mutant", len(mutants))
    free = list(copies)

    def killer(mutant: Mutant) -> tuple[Mutant, str]:
        copy = free.pop()
        try:
            return mutant, judge.killer(copy, mutant)
        finally:
            free.append(copy)

    for future in as_completed([pool.submit(killer, mutant) for mutant in mutants]):
        report.count()
        report.add(*future.result())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each survivor and the score; the exit code is 1 if the score is below the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", default="100", help="size of the sample, or `all`")
    parser.add_argument("--seed", type=int, default=1, help="which sample")
    parser.add_argument(
        "--target", type=float, default=95.0, help="the lowest score in percent that is a success"
    )
    parser.add_argument("--workers", type=int, default=2, help="how many mutants at once")
    parser.add_argument("--only", default="", help="only mutants of paths that contain this text")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only unit tests in forks; for mutants that these cannot judge, the first group of tests of the module",
    )
    options = parser.parse_args(arguments)
    size = None if options.mutants == "all" else int(options.mutants)
    sample = sampled(ROOT, list(TARGETS), size, options.seed, options.only)
    known = explanations(EXPLAINED.read_text())
    judge = Judge(ROOT, (lambda path: tests_of(ROOT, path)[:1]) if options.quick else None)
    report = Report(ROOT, len(sample))
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    copies: list[Copy] = []
    pool = ThreadPoolExecutor(options.workers)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Without this handler, SIGINT is ignored if a script starts this program in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        copies += [Copy(ROOT, folder / str(number)) for number in range(options.workers)]
        left = []
        for mutant in sample:
            if reason := known.get((mutant.path, *mutant.diff((ROOT / mutant.path).read_text()))):
                report.add(mutant, reason=reason)
            else:
                left.append(mutant)
        left = _judge_in_forks(report, copies[0], left, workers=options.workers, quick=options.quick)
        _judge_with_pytest(report, copies, pool, judge, left)
    finally:
        for copy in copies:
            copy.end()
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)
    return int(report.end(options.seed) < options.target)


if __name__ == "__main__":
    sys.exit(main())
