"""Trials with parameters of a person: from the experiment file, nnictl and Python."""

import json

import pytest
from real_experiment import wait_until

from nni_manager.cli import main
from nni_manager.experiment import Experiment
from nni_manager.store.folders import Registry

TRAIN = """
import nni_sdk as nni
nni.report_final_result(nni.get_next_parameter()["x"])
"""
INITIAL = [{"x": 0.25}, {"x": 7}]


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_initial_trials_come_first_count_in_the_limit_and_are_started_once(a_real_experiment):
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=4, initialTrials=INITIAL)
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert [trial["parameters"] for trial in trials[:2]] == INITIAL
    assert [trial["value"] for trial in trials[:2]] == [0.25, 7]
    assert [trial["isCustomized"] for trial in trials] == [True, True, False, False]
    starts = [trial["startTime"] for trial in trials]
    assert starts == sorted(starts)
    experiment.kill_manager()
    experiment.start()
    experiment.wait_for_status("DONE")
    assert len(experiment.get("/trials")) == 4


def test_a_person_adds_trials_with_nnictl_and_python(a_real_experiment, tmp_path, capsys):
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=1)
    Registry.of_user().add(experiment.folder)
    experiment.start()
    experiment.wait_for_status("DONE")
    path = tmp_path / "params.json"
    path.write_text(json.dumps(INITIAL))
    assert main.run(["trial", "add", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert out.startswith("INFO: Trial ")
    assert "(no. 1): x=0.25\n" in out
    assert err.endswith("; the trial is started anyway\n")
    assert err.count("WARNING") == 1
    trial_id = Experiment.connect(experiment.port).enqueue_trial({"x": 0.5})
    wait_until(
        lambda: [trial["value"] for trial in experiment.get("/trials")][1:] == [0.25, 7, 0.5],
        "the added trials have results",
    )
    assert experiment.get("/trials")[3]["id"] == trial_id
    assert Experiment.connect(experiment.port).import_data([{"parameter": {"x": 0.1}, "value": 3}]) in (0, 1)


@pytest.mark.parametrize("text", ["[1]", '"x"', "3", '[{"x": 1}, null]'])
def test_a_file_without_parameters_starts_nothing(a_real_experiment, tmp_path, capsys, text):
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=1)
    Registry.of_user().add(experiment.folder)
    experiment.start()
    experiment.wait_for_status("DONE")
    (tmp_path / "params.json").write_text(text)
    assert main.run(["trial", "add", str(tmp_path / "params.json")]) == 1
    assert "cannot start a trial: " in capsys.readouterr().err
    assert len(experiment.get("/trials")) == 1
