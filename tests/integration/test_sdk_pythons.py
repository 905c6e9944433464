"""The SDK runs in the Python versions of users and in the Python of the tests, with the same code, records and messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from pythons import each_of, python_of

import nni_manager
import nni_sdk
from nni_manager.config.annotations import read_annotations

ROOT = Path(nni_sdk.__file__).parents[1]
NEW_ENOUGH = {f"3.{minor}": python_of(f"3.{minor}") for minor in range(7, 15)}
TOO_OLD = {version: python_of(version) for version in ("2.7", "3.5", "3.6")}

# The script uses every name of the SDK. For each error, it prints the type and the text, which must be the same in every Python.
TRIAL = r"""
import argparse, multiprocessing, os
import nni_sdk as nni
from nni_sdk import utils
from nni_sdk.assessor import Assessor, AssessResult
from nni_sdk.tuner import NoMoreTrialError, Tuner
from nni_sdk.utils import ClassArgsValidator, MetricType, OptimizeMode, extract_scalar_history

class Scalar:
    def __init__(self, value): self.value = value
    def tolist(self): return self.value

class Proposing(Tuner):
    def generate_parameters(self, parameter_id, **kwargs):
        if parameter_id > 1:
            raise NoMoreTrialError("over")
        return {"x": parameter_id}

def shown(call, *arguments):
    try:
        print(call(*arguments))
    except Exception as error:
        print(type(error).__name__, error)

def report(number):
    nni.report_intermediate_result({"default": number})

if __name__ == "__main__":
    print(nni.get_experiment_id(), nni.get_trial_id(), nni.get_sequence_id(), nni.get_current_parameter("lr"))
    parameters = nni.get_next_parameter()
    print(parameters, nni.get_next_parameter(), nni.get_current_parameter("lr"))
    for value in (1, 0.5, True, None, float("nan"), -float("inf"), 1e-300, 2**80, "text", "é\n\"\\", [1, [2.5]], (1,),
                  {"default": 1, "none": None, 3: {}}, Scalar(0.25), {"default": Scalar([1, 2])}):
        shown(nni.report_intermediate_result, value)
    circle = []
    circle.append(circle)
    for value in (object, 1j, {"curve": [0, 1, b"x"]}, {(1, 2): 3}, circle, "x" * 1000000):
        shown(nni.report_intermediate_result, value)
    for method in "fork", "spawn":
        child = multiprocessing.get_context(method).Process(target=report, args=(7,))
        child.start()
        child.join()
        print(child.exitcode)
    shown(utils.merge_parameter, {"lr": 1.0, "n": None}, parameters)
    shown(utils.merge_parameter, argparse.Namespace(lr=1.0, n=2), parameters)
    shown(utils.merge_parameter, {"lr": 1}, parameters)
    shown(utils.merge_parameter, {"n": 1}, parameters)
    shown(extract_scalar_history, [1, {"default": 2}, {"loss": 3}])
    shown(Proposing().generate_multiple_parameters, [0, 1, 2, 3])
    shown(Assessor().assess_trial, "id", [])
    shown(getattr, nni, "nothing")
    print(AssessResult.Good, OptimizeMode("minimize"), MetricType.FINAL, nni.NoMoreTrialError, nni.ClassArgsValidator)
    shown(nni.report_final_result, {"default": 0.75})
    nni.report_final_result(0.5)
"""
CALLBACKS = r"""
import os
import nni_sdk
from nni_sdk import integrations
from nni_sdk.integrations.reporter import MetricReporter

folder = os.path.dirname(integrations.__file__)
for name in sorted(os.listdir(folder)):
    if name.endswith(".py"):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            compile(file.read(), name, "exec")
        print(name)
nni_sdk.get_next_parameter()
reporter = MetricReporter("auc", "max")
reporter.report_final_result_at_exit()
for auc in 0.25, 0.75, 0.5:
    reporter.report({"valid-auc": auc, "valid-loss": 1})
try:
    reporter.report({"valid-loss": 1})
except LookupError as error:
    print(error)
"""
ANNOTATED = '''
"""@nni.get_next_parameter()"""
def add(a, b): return a + b
def power(a, b): return a ** b
words = {"a": "x"}
"""@nni.variable(nni.choice(16, f"{words['a']}-{1:>3}", None), name=size)"""
size = 8
"""@nni.function_choice(add(2, 3), power(2, 3), name=add)"""
total = 1 + add(2, 3)
"""@nni.variable(nni.uniform(0, 1), name=lr)"""
lr = 0.5
"""@nni.report_intermediate_result({"default": total, "text": f"{words['a']}, {lr:.2f}"})"""
"""@nni.report_final_result(total if size == "x-  1" else -1)"""
'''


CHECKPOINTS = r"""
import os
import nni_sdk as nni

def save(folder):
    with open(os.path.join(folder, "state"), "w") as file:
        file.write("1")

nni.report_intermediate_result(1)
nni.save_checkpoint(save)
path = nni.load_checkpoint()
with open(os.path.join(path, "state")) as file:
    print(*os.listdir(path), file.read())
nni.report_intermediate_result(2)
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script as a trial in the given Python. It returns the exit code, stdout, the messages on
    stderr, and the metrics.
    """

    def run_script(python, script, parameters, name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(script, encoding="utf-8")
        (folder / "parameter.cfg").write_text(json.dumps({"parameter_id": 3, "parameters": parameters}))
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith(("NNI_", "PYTHON"))
        }
        trial = {
            "NNI_PLATFORM": "local",
            "NNI_EXP_ID": "eXpId",
            "NNI_TRIAL_JOB_ID": "tRiAl",
            "NNI_TRIAL_SEQ_ID": "2",
            "NNI_SYS_DIR": str(folder),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [python, "train.py"], cwd=folder, env=outside | trial, capture_output=True, timeout=DEADLINE_S
        )
        messages = [line.partition("] ")[2] or line for line in done.stderr.decode().splitlines()]
        path = folder / ".nni/metrics"
        return done.returncode, done.stdout.decode(), messages, path.read_bytes() if path.exists() else b""

    return run_script


@pytest.mark.parametrize("python", each_of(NEW_ENOUGH))
def test_a_trial_has_the_same_metrics_and_output_in_every_python(run, python):
    parameters = {"lr": 0.25, "n": 4}
    expected = run(sys.executable, TRIAL, parameters, "here")
    assert (expected[0], len(expected[2]), expected[3].count(b"\n")) == (0, 1, 19), expected
    assert run(python, TRIAL, parameters, "there") == expected


@pytest.mark.parametrize("python", each_of(NEW_ENOUGH))
def test_compiled_callbacks_report_the_same_metrics_in_every_python(run, python):
    expected = run(sys.executable, CALLBACKS, {"lr": 0.25}, "here")
    assert (expected[0], expected[2], expected[3].count(b"\n")) == (0, [], 4), expected
    assert run(python, CALLBACKS, {"lr": 0.25}, "there") == expected


@pytest.mark.parametrize("python", each_of(NEW_ENOUGH))
def test_checkpoints_are_saved_and_loaded_in_every_python(run, python):
    expected = run(sys.executable, CHECKPOINTS, {}, "here")
    assert (expected[:3], expected[3].count(b"\n")) == ((0, "state 1\n", []), 4), expected
    code, out, err, metrics = run(python, CHECKPOINTS, {}, "there")
    assert (code, out, err) == expected[:3]
    # The slice omits the load number at the start of each line and the folder names at its end, because they differ in each run.
    assert [line[8:90] for line in metrics.splitlines()] == [line[8:90] for line in expected[3].splitlines()]


@pytest.mark.parametrize("python", each_of(NEW_ENOUGH))
def test_annotated_code_runs_in_every_python(run, python):
    generated = read_annotations(ANNOTATED.encode(), "train", "train.py").generated.decode()
    parameters = {
        "train/size/choice": "f\"{words['a']}-{1:>3}\"",
        "train/add/function_choice": "power(2, 3)",
        "train/lr/uniform": 0.125,
    }
    expected = run(sys.executable, generated, parameters, "here")
    assert (expected[:3], expected[3].count(b"\n")) == ((0, "", []), 2), expected
    assert b'"value": "9"' in expected[3]
    assert run(python, generated, parameters, "there") == expected


# From Python 3.12 on, ast.unparse writes f-strings that earlier Pythons cannot parse. The manager must not depend on this.
@pytest.mark.parametrize(
    "python", each_of({version: NEW_ENOUGH[version] for version in NEW_ENOUGH if len(version) > 3})
)
def test_the_manager_generates_the_same_annotated_code_in_every_python(python):
    here = read_annotations(ANNOTATED.encode(), "train", "train.py").generated
    code = (
        "import sys; from nni_manager.config.annotations import read_annotations; "
        "sys.stdout.buffer.write(read_annotations(sys.stdin.buffer.read(), 'train', 'train.py').generated)"
    )
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    places = os.pathsep.join([str(ROOT), str(Path(nni_manager.__file__).parents[1]), packages])
    there = subprocess.run(
        [python, "-c", code],
        input=ANNOTATED.encode(),
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        check=True,
        timeout=DEADLINE_S,
    ).stdout
    assert there == here


@pytest.mark.parametrize("python", each_of(TOO_OLD))
def test_a_python_older_than_3_7_fails_with_a_one_line_message(python):
    done = subprocess.run(
        [python, "-c", "import nni_sdk as nni"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "needs Python 3.7 or later; run this script with a newer Python" in done.stderr.splitlines()[-1]
