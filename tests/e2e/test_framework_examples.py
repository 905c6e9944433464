"""The examples of frameworks. Each example is a real training with three additional lines that use nni_sdk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import scaled_s
from pythons import python_with

from nni_sdk.records import decode

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
AT_EXIT = """
import nni_sdk
from nni_sdk.integrations.reporter import MetricReporter
nni_sdk.get_next_parameter()
reporter = MetricReporter("auc")
reporter.report_final_result_at_exit()
reporter.report({"auc": 0.5})
"""
# This limit is for a busy machine: the import of a framework and a training take 72 s with seven other test workers, and 180 s at
# a load average of 24.
TRAINING_S = 500
EXAMPLES = sorted(ROOT.glob("examples/frameworks/train_*.py"))


@pytest.fixture
def run(tmp_path):
    """Run a script as a trial; return its exit code, its stderr, and the types and values of its records."""

    def run_script(python, script):
        content = {"parameter_id": 0, "parameters": {"learning_rate": 0.01}}
        (tmp_path / "parameter.cfg").write_text(json.dumps(content))
        outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
        trial = {"NNI_PLATFORM": "local", "NNI_SYS_DIR": str(tmp_path), "NNI_TRIAL_JOB_ID": "tRiAl"}
        frameworks = {"KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [python, script],
            env=outside | trial | frameworks | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=scaled_s(TRAINING_S),
        )
        records = decode((tmp_path / ".nni/metrics").read_bytes(), 0).records
        return done.returncode, done.stderr, [(each.type, float(each.value)) for each in records]

    return run_script


@pytest.mark.timeout(TRAINING_S + 100)
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_each_framework_example_reports_its_results_with_three_lines_that_use_nni_sdk(run, script):
    assert sum("nni_sdk" in line for line in script.read_text().splitlines()) == 3
    code, stderr, records = run(python_with(script.stem.removeprefix("train_")), script)
    assert code == 0, stderr
    *reports, final = records
    assert {kind for kind, _ in reports} == {"PERIODICAL"}
    assert final[0] == "FINAL"
    assert final[1] in [value for _, value in reports]


def test_each_framework_has_an_example_and_the_example_experiment_runs_one_of_the_examples():
    modules = {path.stem for path in ROOT.glob("nni_sdk/integrations/*.py")}
    shared = {
        "__init__",
        "reporter",
        "lightning_hooks",
        "pytorch_lightning",
        "torch_optimizers",
        "torch_ranks",
        "continued_training",
    }
    assert {path.stem.removeprefix("train_") for path in EXAMPLES} == modules - shared
    experiment = (ROOT / "examples/frameworks/config.yml").read_text()
    assert any(f"command: python3 {path.name}\n" in experiment for path in EXAMPLES)


@pytest.mark.parametrize(
    ("ending", "code", "finals"),
    [("", 0, [("FINAL", 0.5)]), ("exit(0)", 0, [("FINAL", 0.5)]), ("raise KeyError", 1, [])],
)
def test_a_training_reports_no_final_result_at_exit_if_it_raises_an_exception(
    run, tmp_path, ending, code, finals
):
    (tmp_path / "train.py").write_text(AT_EXIT + ending)
    found = run(sys.executable, tmp_path / "train.py")
    assert (found[0], found[2]) == (code, [("PERIODICAL", 0.5), *finals])
