"""A trial whose Python is not the manager's and has no nni_sdk, as with `.venv/bin/nnictl` without an
activated venv.
"""

import os
import subprocess
import venv

import pytest

from trial_keeper.wire.messages import Stream

pytestmark = pytest.mark.smoke

TRAIN = """
import sys
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x)
nni_sdk.report_final_result(x)
print(nni_sdk.__file__)
"""


def test_a_trial_whose_python_lacks_nni_sdk_imports_the_copy_of_nni_sdk_in_the_workspace(
    a_real_experiment, tmp_path
):
    venv.create(tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = subprocess.run([python, "-c", "import nni_sdk"], env=clean, capture_output=True, cwd=tmp_path)
    assert b"No module named 'nni_sdk'" in alone.stderr
    # The command keeps only the last entry of PYTHONPATH, which is the workspace's copy of the SDK. It removes the folders of the
    # test suite, so the trial can import only this copy.
    command = f'PYTHONPATH="${{PYTHONPATH##*:}}" {python} train.py'
    experiment = a_real_experiment(TRAIN, maxTrialNum=2, trial={"command": command, "codeDir": "."})
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert [trial["status"] for trial in trials] == ["SUCCEEDED"] * 2, trials
    sdk = experiment.folder.workspace.sdk / "nni_sdk" / "__init__.py"
    for trial in trials:
        assert [row.is_final for row in experiment.rows(trial["id"])] == [False, True]
        assert experiment.stream(trial["id"], Stream.STDOUT).read_text() == f"{sdk}\n"
