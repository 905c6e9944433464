"""Runs tests repeatedly while other processes keep the processors busy, and lists each failure: `make stress`.

Each round is a run of pytest. The full report of each failure goes to build/stress, and the temporary files of failed tests
stay. Exit code 1: a test has failed.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from pauses import Pauses
from runs import ROOT, run_tests

FOLDERS = ("tests/contract", "tests/integration", "tests/faults", "tests/e2e")
# A busy loop exits when its stdin is closed. The kernel closes it even if this process is killed, so no busy loop remains.
BUSY = "import select, sys\nwhile not select.select([sys.stdin], [], [], 0)[0]:\n    sum(range(100_000))"


def main() -> int:
    """Run the rounds; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="example: stress.py --rounds 20 tests/faults"
    )
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="files, folders or ids of tests")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--workers", type=int, default=6, help="processes that run tests; default: 6")
    parser.add_argument(
        "--busy", type=int, default=3, help="processes that keep the processors busy; default: 3"
    )
    parser.add_argument(
        "--pauses",
        type=float,
        default=0,
        metavar="SECONDS",
        help="suspend workers, each time for so long at most",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # If a script starts this program in the background, this program and pytest would ignore SIGINT. With this handler, both
    # react to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reports = ROOT / "build" / "stress"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    busy = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE) for _ in range(options.busy)
    ]
    pauses = Pauses(options.pauses) if options.pauses else contextlib.nullcontext()
    try:
        with pauses:
            failures = stress(options.tests, options.rounds, options.workers, reports)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{len(failures)} failures in {options.rounds} rounds", *failures, sep="\n  ")
    return 1 if failures else 0


def stress(tests: list[str], rounds: int, workers: int, reports: Path) -> list[str]:
    """Run the rounds. Returns a line for each failure: its round, its test and its report."""
    failures = []
    kept = ("-o", "tmp_path_retention_policy=failed", "-o", f"tmp_path_retention_count={rounds + 1}")
    command = ("pytest", "-q", "-n", str(workers), "--dist", "loadscope", *kept, *tests)
    for number in range(1, rounds + 1):
        started_s = time.monotonic()
        result = run_tests(*command)
        for test, report in result.failures.items():
            path = reports / f"{len(failures) + 1}.txt"
            path.write_text(report)
            failures.append(f"round {number}: {test}: {path.relative_to(ROOT)}")
        if result.exit_status not in (0, 1):
            failures.append(f"round {number}: pytest ended with exit status {result.exit_status}")
        took_s, load = time.monotonic() - started_s, os.getloadavg()[1]
        print(
            f"round {number} of {rounds}: {took_s:.0f} s, load average {load:.1f}, {len(failures)} failures so far",
            flush=True,
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
