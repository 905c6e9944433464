"""CI runs each failed test a second time, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import scaled_s

RERUN_FAILED = Path(__file__).parents[1] / "stress" / "rerun_failed.py"
PASSES = "def test_passes():\n    pass\n"
FAILS_AT_FIRST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", ["a b", "$HOME [x]"])
def test_fails_at_first(name):
    mark = Path(__file__).with_name(name)
    is_first = not mark.exists()
    mark.touch()
    assert not is_first, "the first failure"
"""
RUNS_PYTEST = """
import subprocess, sys

def test_runs_pytest(tmp_path):
    (tmp_path / "test_inner.py").write_text("def test_passes(): pass")
    assert subprocess.run([sys.executable, "-m", "pytest", tmp_path], env={ENVIRON}).returncode == 0
"""
ALWAYS_FAILS = "def test_always_fails():\n    assert False, 'again'\n"


@pytest.fixture
def rerun_failed(tmp_path):
    """Return a function that writes these test files and runs them like CI. It returns the exit code, the output, and the lines
    about flaky tests.
    """
    flaky = tmp_path / "flaky.txt"
    flaky.touch()

    def run(**files):
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        script = f'cd {tmp_path} && exec {sys.executable} -m pytest -p no:cacheprovider "${{TEST:-.}}"'
        done = subprocess.run(
            [sys.executable, RERUN_FAILED, flaky, "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            # Without plugins, pytest starts a second faster.
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=scaled_s(120),
        )
        return done.returncode, done.stdout, flaky.read_text().splitlines()

    return run


def test_a_run_without_failures_passes_and_repeats_no_test(rerun_failed):
    code, out, flaky = rerun_failed(one=PASSES)
    assert (code, flaky, out.count("test session starts")) == (0, [], 1)


@pytest.mark.parametrize("environ", ["None", "{**__import__('os').environ, 'PYTHONPATH': ''}"])
def test_the_rerun_ignores_the_results_of_pytest_processes_that_a_test_starts(rerun_failed, environ):
    code, _, flaky = rerun_failed(one=RUNS_PYTEST.replace("{ENVIRON}", environ), two=ALWAYS_FAILS)
    assert (code, flaky) == (1, [])
    assert rerun_failed(two=PASSES)[0] == 0


def test_the_report_marks_tests_that_fail_once_as_flaky_with_their_first_failure(rerun_failed):
    code, out, flaky = rerun_failed(one=PASSES, two=FAILS_AT_FIRST)
    tests = [f"test_two.py::test_fails_at_first[{name}]" for name in ("a b", "$HOME [x]")]
    assert (code, flaky) == (0, [f"FLAKY: {test}" for test in tests])
    last_part = out[out.index("==== first failure of") :]
    assert last_part.count("AssertionError: the first failure") == 2


def test_the_run_fails_if_a_test_fails_twice(rerun_failed):
    code, out, flaky = rerun_failed(one=ALWAYS_FAILS, two=FAILS_AT_FIRST)
    assert (code, flaky) == (1, [])
    assert out.endswith("1 of 3 failed tests failed again\n  test_one.py::test_always_fails\n")


@pytest.mark.parametrize("text", ["import nowhere", "import os\nos._exit(3)", "raise KeyboardInterrupt"])
def test_a_run_is_not_repeated_if_it_crashes_or_cannot_be_collected(rerun_failed, text):
    code, out, flaky = rerun_failed(one=text)
    assert (code, flaky, out.count("first failure of")) == (1, [], 0)


def test_more_than_twenty_failed_tests_are_not_repeated(rerun_failed):
    code, out, flaky = rerun_failed(one="".join(f"def test_{n}():\n    assert 0\n" for n in range(21)))
    assert (code, flaky) == (1, [])
    assert out.endswith("21 tests failed, more than 20: none is run again\n")
