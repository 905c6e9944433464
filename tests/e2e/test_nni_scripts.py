"""Training code written for NNI, run with nni_sdk imported as `nni`, and with the real `nni` package."""

import json
import subprocess
import sys

import pytest
from real_experiment import RealExperiment
from real_nni import python_with_nni

from nni_manager.cli.log_commands import PRINTED_BY_NNI

pytestmark = pytest.mark.smoke

# The script resembles NNI's examples: the tuner overrides argparse defaults, and the metrics are a dict, numpy scalars and a NaN.
STOCK_SCRIPT = """
import argparse
import logging
{imports}
import numpy as np

logger = logging.getLogger("mnist_AutoML")

def main(args):
    for epoch in range(args["epochs"]):
        accuracy = np.float64(args["lr"]) * (epoch + 1)
        nni.report_intermediate_result(accuracy)
        logger.debug("test accuracy %g", accuracy)
    nni.report_intermediate_result({{"default": float(accuracy), "note": "it's fine", "loss": 0.5}})
    nni.report_intermediate_result(float("nan"))
    nni.report_final_result({{"default": float(accuracy), "sequence": nni.get_sequence_id()}})

def get_params():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=3)
    args, _ = parser.parse_known_args()
    return args

if __name__ == "__main__":
    tuner_params = nni.get_next_parameter()
    logger.debug(tuner_params)
    assert nni.get_experiment_id() == "TESTEXPT"
    assert len(nni.get_trial_id()) == 5
    params = vars(merge_parameter(get_params(), tuner_params))
    main(params)
"""
SPACE = {
    "lr": {"_type": "loguniform", "_value": [0.001, 0.1]},
    "epochs": {"_type": "choice", "_value": [2, 3, 4]},
}
OURS = "import nni_sdk as nni\nfrom nni_sdk.utils import merge_parameter"
THEIRS = "import nni\nfrom nni.utils import merge_parameter"


def run(folder, imports, python):
    """Run two trials; return the parameters and the stored metric rows of each trial."""
    experiment = RealExperiment(
        folder,
        STOCK_SCRIPT.format(imports=imports),
        space=SPACE,
        trialConcurrency=1,
        maxTrialNum=2,
        trial={"command": f"{python} train.py", "codeDir": "."},
    )
    experiment.create()
    try:
        experiment.start()
        experiment.wait_for_status("DONE")
        trials = experiment.get("/trials")
        assert [trial["status"] for trial in trials] == ["SUCCEEDED"] * 2, trials
        return [
            (
                trial["parameters"],
                [
                    (row.is_final, row.sequence, row.parameter_id, row.value)
                    for row in experiment.rows(trial["id"])
                ],
            )
            for trial in trials
        ]
    finally:
        experiment.close()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The trials with nni_sdk."""
    return run(tmp_path_factory.mktemp("ours"), OURS, sys.executable)


def test_a_script_for_nni_runs_unchanged_with_nni_sdk_imported_as_nni(ours):
    for number, (parameters, rows) in enumerate(ours):
        best = parameters["lr"] * parameters["epochs"]
        values = [json.loads(value) for _, _, _, value in rows]
        assert values[: parameters["epochs"]] == [
            parameters["lr"] * (epoch + 1) for epoch in range(parameters["epochs"])
        ]
        assert values[-3] == {"default": best, "note": "it's fine", "loss": 0.5}
        assert values[-2] != values[-2]
        assert values[-1] == {"default": best, "sequence": number}
        assert [is_final for is_final, *_ in rows] == [False] * (len(rows) - 1) + [True]


@pytest.fixture(scope="module")
def python_of_nni():
    """A Python with the real `nni`."""
    return python_with_nni("3.0")


@pytest.mark.peer
@pytest.mark.timeout(600)
def test_the_real_nni_package_writes_stdout_to_trial_log_in_the_expected_format(python_of_nni, tmp_path):
    names = ("NNI_OUTPUT_DIR", "NNI_SYS_DIR")
    environ = {"NNI_PLATFORM": "local", "NNI_TRIAL_JOB_ID": "t", "NNI_EXP_ID": "e", "NNI_TRIAL_SEQ_ID": "0"}
    done = subprocess.run(
        [python_of_nni, "-c", "import nni; print('hello')"],
        env=environ | dict.fromkeys(names, str(tmp_path)),
        capture_output=True,
        check=True,
    )
    assert done.stdout == b""
    assert PRINTED_BY_NNI.search((tmp_path / "trial.log").read_bytes())


@pytest.mark.peer
@pytest.mark.timeout(600)
def test_the_real_nni_package_and_nni_sdk_write_the_same_rows(ours, python_of_nni, tmp_path):
    assert run(tmp_path / "theirs", THEIRS, python_of_nni) == ours
