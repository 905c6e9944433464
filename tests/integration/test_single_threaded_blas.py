"""The number of threads that the manager's linear algebra uses."""

import os
import subprocess
import sys

import pytest

CODE = """
import os
import nni_manager.__main__
import nni_manager.tuner.gaussian_process
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize("setting", [None, "2"])
def test_a_tuner_computes_in_one_thread_unless_the_user_sets_the_thread_number(setting):
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environ = inherited if setting is None else inherited | {"OPENBLAS_NUM_THREADS": setting}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True
    )
    threads, left = done.stdout.split()
    assert left == str(setting)
    assert (int(threads) == 1) == (setting is None)
