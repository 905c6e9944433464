"""Annotated code with the real nnictl: create, resume, and print the code with a trial's values."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from deadlines import scaled_s

BIN = Path(sys.executable).parent
CONFIG = """\
authorName: ada
experimentName: annotated
trialConcurrency: 1
maxTrialNum: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
logDir: ../experiments
useAnnotation: true
tuner: {builtinTunerName: Random, classArgs: {seed: 3}}
trial: {command: python3 -m package.train, codeDir: .}
"""
TRAIN = '''\
"""Trains nothing."""
from __future__ import annotations
from package.net import width

def small(n): return n
def large(n): return n + 100

class Optimiser:
    """@nni.variable(nni.loguniform(1e-4, 0.1), name=lr)"""
    lr: float = 0.5

def main():
    """@nni.get_next_parameter()"""
    """@nni.function_choice(small(width), large(width), name=small)"""
    size = small(width)
    for step in range(2):
        """@nni.report_intermediate_result(step)"""
    print("ran with", size, Optimiser.lr)
    """@nni.report_final_result({"default": size, "lr": Optimiser.lr})"""

main()
'''
NET = "'''@nni.variable(nni.choice(16, 32, 64), name=width)'''\nwidth = 8\n"


@pytest.fixture
def place(tmp_path):
    """A user's annotated code. Processes that a test starts here are killed after the test."""
    folder = tmp_path / "work"
    (folder / "package").mkdir(parents=True)
    (folder / "config.yml").write_text(CONFIG)
    (folder / "package" / "train.py").write_text(TRAIN)
    (folder / "package" / "net.py").write_text(NET)
    (folder / "package" / "data.bin").write_bytes(b"\0\r\n")
    yield folder
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(tmp_path):
                process.kill()


@pytest.fixture
def run(place):
    """Runs a command in the folder of the annotated code and waits for its end."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("NNI_", "TRIAL_KEEPER_"))
    }

    def run_command(*command, program=BIN / "nnictl"):
        return subprocess.run(
            [program, *command],
            cwd=place,
            env=outside
            | {
                "HOME": str(place.parent),
                "XDG_STATE_HOME": str(place.parent / "state"),
                "PATH": f"{BIN}:{outside['PATH']}",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled_s(120),
        )

    return run_command


@pytest.mark.smoke
def test_trials_run_a_copy_of_annotated_code_and_the_original_is_unchanged(place, run):
    alone = run("-m", "package.train", program=sys.executable)
    assert (alone.stdout, alone.stderr) == ("ran with 8 0.5\n", "")

    done = run("create", "--config", "config.yml", "--port", "auto", "--foreground")
    assert done.stderr == (
        "WARNING: useAnnotation: true takes precedence over searchSpacePath: "
        "the search space is that of the annotations in trial.codeDir\n"
    )
    assert done.returncode == 0
    name = done.stdout.split("The experiment id is ")[1].split()[0]
    params = json.loads(run("experiment", "show", name).stdout)["params"]
    assert params["searchSpace"] == {
        "package.net/width/choice": {"_type": "choice", "_value": [16, 32, 64]},
        "package.train/lr/loguniform": {"_type": "loguniform", "_value": [1e-4, 0.1]},
        "package.train/small/function_choice": {
            "_type": "choice",
            "_value": ["small(width)", "large(width)"],
        },
    }
    copy = Path(params["trial"]["codeDir"])
    assert copy.is_relative_to(place.parent / "experiments" / name)
    assert (copy / "package" / "data.bin").read_bytes() == b"\0\r\n"
    assert (place / "package" / "train.py").read_text() == TRAIN
    assert (place / "package" / "net.py").read_text() == NET

    first, second = json.loads(run("trial", "ls", name, "--json").stdout)
    for trial in (first, second):
        width, lr, function = (trial["parameters"][key] for key in params["searchSpace"])
        size = width + 100 if function == "large(width)" else width
        assert trial["value"] == size
        assert trial["latestIntermediate"] == "1"
        assert json.loads(trial["finalMetricData"][0]["data"])["lr"] == lr
        assert run("log", "trial", name, "-T", trial["id"]).stdout == f"ran with {size} {lr}\n"

    # nnictl prints the code with the trial's values in place of the annotations, so the printed code runs without nnictl.
    printed = run("trial", "codegen", name, "--trial-id", first["id"])
    assert (printed.returncode, printed.stderr) == (0, "")
    width, lr, function = (first["parameters"][key] for key in params["searchSpace"])
    net, train = printed.stdout.removeprefix("# ---- package/net.py\n").split("# ---- package/train.py\n")
    assert net == NET.replace("= 8", f"= {width}")
    assert train == TRAIN.replace("0.5", str(lr)).replace("= small(width)", f"= {function}")


WAITS = """\
import pathlib, signal
if not pathlib.Path.home().joinpath("may-go-on").exists():
    signal.pause()
"""


def test_a_resumed_experiment_ignores_later_changes_of_the_annotated_code(place, run):
    (place / "package" / "train.py").write_text(TRAIN.replace("def large", WAITS + "def large"))
    created = run("create", "--config", "config.yml", "--port", "auto")
    name = created.stdout.split("The experiment id is ")[1].split()[0]
    assert run("stop", name).returncode == 0
    (place / "package" / "train.py").write_text("raise SystemExit('somebody goes on writing')")
    (place / "package" / "net.py").unlink()
    (place.parent / "may-go-on").touch()
    resumed = run("resume", name, "--port", "auto", "--foreground")
    assert resumed.returncode == 0, resumed.stderr
    *_, last = json.loads(run("trial", "ls", name, "--json").stdout)
    assert last["state"] == "SUCCEEDED"
    assert run("trial", "codegen", name, "-T", last["id"]).stdout.startswith("# ---- package/net.py\n'''@nni")


@pytest.mark.smoke
def test_nnictl_create_reports_an_invalid_annotation_with_file_and_line(place, run):
    (place / "package" / "net.py").write_text(NET.replace("name=width", "name=widht"))
    (place / "package" / "train.py").write_text(TRAIN.replace("@nni.get_next", "@nni.get_nxt"))
    done = run("create", "--config", "config.yml", "--port", "auto")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith(
        "ERROR: package/net.py:1: cannot use @nni.variable with name=widht: line 2 assigns width; write name="
    )
    assert second.startswith(
        "ERROR: package/train.py:13: cannot use @nni.get_nxt_parameter: there is no such annotation; did you"
    )
    assert not (place.parent / "experiments").exists()


def test_nnictl_refuses_to_generate_code_if_there_are_no_annotations(place, run):
    (place / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (place / "config.yml").write_text(CONFIG.replace("useAnnotation: true", "useAnnotation: false"))
    (place / "package" / "net.py").write_text("import nni_sdk\nnni_sdk.report_final_result(1)\nwidth = 1\n")
    done = run("create", "--config", "config.yml", "--port", "auto", "--foreground")
    assert done.returncode == 0, done.stderr
    name = done.stdout.split("The experiment id is ")[1].split()[0]
    printed = run("trial", "codegen", name, "-T", "x")
    assert printed.returncode == 1
    assert printed.stderr.startswith(
        f"ERROR: cannot generate code of experiment {name}: it has no annotated code; its parameters"
    )
