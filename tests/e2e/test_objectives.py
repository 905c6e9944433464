"""An experiment with several objectives and a constraint: the experiment file, the results, the lists of trials, and a restart of
the manager.
"""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_experiment import made_experiment, made_trial

from nni_manager.cli import main
from nni_manager.config.reader import read_experiment_file
from nni_manager.experiment import Experiment
from nni_manager.experiment.queries import StartedExperiment
from nni_manager.store.registry import Registry
from nni_sdk.records import decode

# A larger x gives a higher accuracy and a longer latency. Trial 0 violates the constraint, and the result of trial 1 has no
# latency.
TRAIN = """
import os
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
number = int(os.environ["NNI_TRIAL_SEQ_ID"])
result = {"accuracy": x, "latency_ms": x * 100 + (number == 2) * 1000, "size_mb": 90 if number == 0 else 10}
if number == 1:
    del result["latency_ms"]
nni.report_final_result(result)
"""
OBJECTIVES = [{"metric": "accuracy", "mode": "maximize"}, {"metric": "latency_ms", "mode": "minimize"}]
INITIAL = [{"x": 1}, {"x": 0.9}, {"x": 0.1}, {"x": 0.5}]


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def output_of(capsys, *arguments):
    capsys.readouterr()
    assert main.run([*arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.smoke
def test_nnictl_and_the_python_api_and_the_page_show_the_same_pareto_front(
    a_real_experiment, capsys, tmp_path
):
    experiment = a_real_experiment(
        TRAIN,
        trialConcurrency=1,
        maxTrialNum=6,
        initialTrials=INITIAL,
        tuner={"builtinTunerName": "NSGAII", "classArgs": {"seed": 3}},
        objectives=OBJECTIVES,
        constraints=[{"metric": "size_mb", "at_most": 50}],
    )
    Registry.of_user().add(experiment.folder)
    experiment.start()
    experiment.wait_for_status("DONE")

    trials = experiment.get("/trials")
    assert trials[0]["violates"] == ["size_mb ≤ 50"]
    assert "no number under" not in trials[0]["message"]
    assert (trials[1]["state"], trials[1]["value"]) == ("SUCCEEDED", None)
    assert 'a dict without "latency_ms"' in trials[1]["message"]
    assert trials[3]["values"] == [0.5, 50]
    # Three trials are not expected in the Pareto front: trial 0 violates the constraint, trial 1 has no valid result, and trial 2
    # has a much longer latency than the other trials.
    expected = {each["id"] for each in trials[2:] if each["sequenceId"] != 2 or each["parameters"]["x"] > 1}
    params = experiment.get("/experiment")["params"]
    assert (params["objectives"], params["constraints"]) == (
        OBJECTIVES,
        [{"metric": "size_mb", "atMost": 50}],
    )
    summary = experiment.get("/summary")
    assert {*summary["front"]["ids"]} == expected
    assert summary["front"]["count"] == len(expected) == 3
    assert summary["best"] is None
    assert [each["values"][0] for each in summary["top"]] == sorted(
        (each["values"][0] for each in summary["top"]), reverse=True
    )

    known = experiment.folder.experiment_id
    exported = json.loads(output_of(capsys, "experiment", "export", known, "--type", "json"))
    assert {each["trialJobId"] for each in exported if each["onFront"]} == expected
    rows = list(
        csv.DictReader(io.StringIO(output_of(capsys, "experiment", "export", known, "--type", "csv")))
    )
    assert {row["trialJobId"] for row in rows if row["onFront"] == "true"} == expected
    rows = list(
        csv.DictReader(
            io.StringIO(output_of(capsys, "experiment", "export", known, "--type", "csv", "--all"))
        )
    )
    assert {row["trialJobId"] for row in rows if row["onFront"] == "true"} == expected
    assert len(rows) == 6
    listed = output_of(capsys, "trial", "ls", known, "--best", "9")
    assert all(each in listed for each in ("accuracy", "latency_ms", *expected))
    assert trials[0]["id"] not in listed
    assert "front of 3" in output_of(capsys, "experiment", "list", "--all")
    assert [each.trialJobId for each in Experiment.connect(experiment.port).best_trials] == summary["front"][
        "ids"
    ]
    assert Experiment.connect(experiment.port).best_trial is None

    experiment.kill_manager()
    stored = [each.trialJobId for each in StartedExperiment(known).best_trials]
    assert stored == summary["front"]["ids"]
    experiment.start()
    experiment.wait_for_status("DONE")
    again = experiment.get("/summary")
    assert (again["front"], again["objectives"], again["constraints"]) == (
        summary["front"],
        OBJECTIVES,
        ["size_mb ≤ 50"],
    )
    imported = [{"parameter": {"x": 0.3}, "value": {"accuracy": 0.3, "latency_ms": 1, "size_mb": 1}}]
    connected = Experiment.connect(experiment.port)
    assert connected.import_data(imported) in (0, 1)
    with pytest.raises(Exception, match='a dict without "latency_ms", "size_mb"'):
        connected.import_data([{"parameter": {"x": 0.3}, "value": {"accuracy": 0.3}}])


def test_the_objectives_example_reports_every_metric_that_its_experiment_file_names(tmp_path):
    pytest.importorskip("sklearn")
    folder = Path(__file__).parents[2] / "examples" / "objectives"
    spec = read_experiment_file(folder / "config.yml")
    (tmp_path / "parameter.cfg").write_text(
        json.dumps({"parameter_id": 0, "parameters": {"trees": 2, "depth": 3}})
    )
    outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
    trial = {
        "NNI_PLATFORM": "local",
        "NNI_SYS_DIR": str(tmp_path),
        "NNI_TRIAL_JOB_ID": "tRiAl",
        "NNI_RESULT_METRICS": json.dumps(spec.all_objectives.metrics),
        "PYTHONPATH": str(folder.parents[1]),
    }
    done = subprocess.run(
        [sys.executable, folder / "train.py"], env=outside | trial, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    records = decode((tmp_path / ".nni" / "metrics").read_bytes(), 0).records
    assert spec.all_objectives.outcome(records[-1].value) is not None


def test_a_saved_experiment_keeps_its_objectives(tmp_path, monkeypatch, capsys):
    def a_trial(number, now_s):
        trial = made_trial(number, now_s)
        trial.run.value, trial.run.final = (
            0.5 + number,
            json.dumps({"accuracy": 0.5 + number, "latency_ms": number}),
        )
        return trial

    experiment = made_experiment(
        tmp_path, 3, a_trial, tuner={"builtinTunerName": "QMC"}, objectives=OBJECTIVES
    )
    Registry.of_user().add(experiment.folder)
    saved = tmp_path / "saved.zip"
    output_of(capsys, "experiment", "save", experiment.folder.experiment_id, "--path", str(saved))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    output_of(
        capsys,
        "experiment",
        "load",
        "--path",
        str(saved),
        "--codeDir",
        str(tmp_path),
        "--logDir",
        str(tmp_path / "logs"),
    )
    assert "front of 3" in output_of(capsys, "experiment", "list", "--all")
