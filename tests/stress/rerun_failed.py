"""Runs a make target that runs pytest.

Then runs each failed test once more, alone: `rerun_failed.py FLAKY_FILE make test`. A test that fails twice fails the run. A test
that fails once is flaky: its first failure is printed, and FLAKY_FILE gets a line `FLAKY: <test>`. The environment variable TEST
names the single test that the make target runs.
"""

import sys
from pathlib import Path

from runs import TESTS_FAILED, run_tests

# More failures than this probably have a common cause, so they are not repeated.
MAX_FAILURES = 20


def main(flaky_file: Path, *command: str) -> int:
    """Run the target; return the exit code."""
    first = run_tests(*command)
    if first.exit_status == 0:
        return 0
    if first.exit_status != TESTS_FAILED or not first.failures:
        print(f"{' '.join(command)}: pytest did not run to its end; nothing is run again", flush=True)
        return 1
    if len(first.failures) > MAX_FAILURES:
        print(f"{len(first.failures)} tests failed, more than {MAX_FAILURES}: none is run again", flush=True)
        return 1
    print(f"running {len(first.failures)} failed tests once more, each alone", flush=True)
    again = [test for test in first.failures if run_tests(*command, TEST=test).exit_status != 0]
    for test, report in first.failures.items():
        print(f"\n==== first failure of {test}\n{report}")
    print(f"{len(again)} of {len(first.failures)} failed tests failed again", *again, sep="\n  ", flush=True)
    if again:
        return 1
    with flaky_file.open("a") as lines:
        lines.writelines(f"FLAKY: {test}\n" for test in first.failures)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
