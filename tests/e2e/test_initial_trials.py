"""Trials that no tuner proposes: from the experiment file, nnictl, Python, and earlier experiments."""

import json
import shutil
import sys

import pytest
from real_experiment import wait_until

from nni_manager.cli import main
from nni_manager.client.experiments import known_experiments
from nni_manager.engine.profiles import configuration_view
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.experiment import Experiment, ExperimentConfig
from nni_manager.store.registry import Registry

TRAIN = """
import nni_sdk as nni
nni.report_final_result(nni.get_next_parameter()["x"])
"""
INITIAL = [{"x": 0.25}, {"x": 7}]


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.smoke
def test_initial_trials_start_first_and_count_towards_the_trial_limit(a_real_experiment):
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


@pytest.mark.smoke
def test_nnictl_and_the_python_api_add_trials_to_an_experiment(a_real_experiment, tmp_path, capsys):
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
    assert err.endswith("; it is started anyway\n")
    assert err.count("WARNING") == 1
    trial_id = Experiment.connect(experiment.port).enqueue_trial({"x": 0.5})
    wait_until(
        lambda: [trial["value"] for trial in experiment.get("/trials")][1:] == [0.25, 7, 0.5],
        "the added trials have results",
    )
    assert experiment.get("/trials")[3]["id"] == trial_id
    assert Experiment.connect(experiment.port).import_data([{"parameter": {"x": 0.1}, "value": 3}]) in (0, 1)
    capsys.readouterr()
    trial_id = Experiment.connect(experiment.port).enqueue_trial({"z": 1})
    assert capsys.readouterr().err.splitlines() == [
        f"WARNING: trial {trial_id} lies outside the search space: {each}; it is started anyway"
        for each in ("z is not in the space", "x is missing")
    ]


@pytest.mark.parametrize("text", ["[]", "[1]", '"x"', "3", '[{"x": 1}, null]'])
def test_a_parameter_file_without_entries_adds_no_trials(a_real_experiment, tmp_path, capsys, text):
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=1)
    Registry.of_user().add(experiment.folder)
    experiment.start()
    experiment.wait_for_status("DONE")
    (tmp_path / "params.json").write_text(text)
    assert main.run(["trial", "add", str(tmp_path / "params.json")]) == 1
    assert "cannot start a trial: " in capsys.readouterr().err
    assert len(experiment.get("/trials")) == 1


@pytest.fixture
def an_experiment_file(tmp_path):
    def write(name, **class_args):
        (tmp_path / "train.py").write_text(TRAIN)
        document = {
            "experimentName": name,
            "searchSpace": {"x": {"_type": "uniform", "_value": [0, 1]}},
            "trialCommand": f"{sys.executable} train.py",
            "trialCodeDirectory": ".",
            "trialConcurrency": 1,
            "maxTrialNumber": 3,
            "experimentWorkingDirectory": str(tmp_path / "experiments"),
            "tuner": {"name": "Auto", "classArgs": {"optimize_mode": "maximize", "seed": 1} | class_args},
            "trainingService": {"platform": "local"},
        }
        path = tmp_path / f"{name}.yml"
        path.write_text(json.dumps(document))
        return path

    return write


def test_a_warm_start_proposes_the_best_parameters_of_earlier_experiments_first(an_experiment_file, capsys):
    assert main.run(["create", "--config", str(an_experiment_file("earlier")), "--foreground"]) == 0
    (earlier,) = known_experiments()
    best = max(earlier.trial_list(), key=lambda each: each["value"])
    capsys.readouterr()
    path = an_experiment_file("later", warmStart="auto", seed=2)
    assert main.run(["create", "--config", str(path), "--foreground"]) == 0
    source = f"experiment {earlier.experiment_id}"
    assert f"start with the best of {source}, {best['value']:g}: x=" in capsys.readouterr().out
    (later,) = (each for each in known_experiments() if each.experiment_id != earlier.experiment_id)
    trials = later.trial_list()
    assert [each["parameters"] == best["parameters"] for each in trials] == [True, False, False]
    shown = configuration_view(ExperimentSnapshot.stored(later.folder))
    assert shown["warmStart"] == [{"source": source, "value": best["value"]}]

    # A resumed experiment reads its initial parameters from its own store, so it does not need the earlier experiment.
    shutil.rmtree(earlier.folder.path)
    assert main.run(["resume", later.experiment_id, "--foreground"]) == 0
    assert [each["id"] for each in later.trial_list()] == [each["id"] for each in trials]
    assert later.stored.config().warm_start[0].parameters == best["parameters"]


def test_the_python_api_supports_warm_starts(an_experiment_file, tmp_path, capsys):
    (tmp_path / "results.json").write_text(json.dumps([{"parameter": {"x": 0.5}, "value": 2}]))
    config = ExperimentConfig.load(an_experiment_file("python"))
    config.tuner.class_args["warmStart"] = [str(tmp_path / "results.json"), "nowhere"]
    config.max_trial_number = 1
    with Experiment(config) as experiment:
        experiment.run("auto")
        assert [each.parameters for each in experiment.list_trial_jobs()] == [{"x": 0.5}]
    err = capsys.readouterr().err
    assert f"start with the best of {tmp_path / 'results.json'}, 2: x=0.5" in err
    assert "cannot find experiment 'nowhere'; " in err
