"""A whole experiment with an assessor that stops trials early, and with a tuner whose grid is finite."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import optuna
import pytest
import real_experiment
from deadlines import DEADLINE_S
from optuna.trial import TrialState
from real_experiment import a_manager_here, until, wait_until
from void_service import Void

from nni_manager.engine.engine import Engine
from nni_manager.store.reader import StoreReader
from nni_manager.training_services.local.client import LocalTrainingService
from nni_manager.tuner import lazy
from nni_manager.tuner.registry import make_assessment, make_tuner

# A trial with an x below 0.5 blocks after its first result, so it ends only if the assessor stops it.
TRAIN = """
import signal, nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x)
if x < 0.5:
    signal.pause()
nni_sdk.report_final_result(x)
"""


def test_medianstop_stops_bad_trials_early_and_restores_its_state_after_a_resume(a_real_experiment):
    experiment = a_real_experiment(
        TRAIN,
        space={"x": {"_type": "choice", "_value": [1.0, 0.0, 0.1]}},
        trialConcurrency=1,
        maxTrialNum=50,
        tuner={"builtinTunerName": "GridSearch"},
        assessor={"builtinAssessorName": "Medianstop"},
    )
    experiment.start()
    experiment.wait_for_status("DONE", is_stored=True)
    experiment.close()
    with StoreReader(experiment.folder.database) as reader:
        trials = reader.trials()
    assert [(trial.parameters["x"], trial.state.value) for trial in trials] == [
        (1.0, "SUCCEEDED"),
        (0.0, "EARLY_STOPPED"),
        (0.1, "EARLY_STOPPED"),
    ]

    config = experiment.config
    unrestored, restored = make_assessment(config), make_assessment(config)

    async def restore():
        engine = Engine(config, experiment.folder, Void, make_tuner, restored)
        await engine.restore()
        await engine.close()

    asyncio.run(asyncio.wait_for(restore(), DEADLINE_S))
    assert unrestored.report(99, 0, (0.5,))
    assert not restored.report(99, 0, (0.5,))
    assert restored.report(98, 0, (1.0,))


# A trial with an x above 0.5 blocks after its second result, so it ends only if the pruner stops it.
PRUNED = """
import signal, nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(0.25)
nni_sdk.report_intermediate_result(x)
if x > 0.5:
    signal.pause()
nni_sdk.report_final_result(x)
"""


@pytest.mark.parametrize("has_intermediates", [False, True], ids=["as in Optuna", "as in NNI"])
def test_the_tuner_study_records_a_trial_as_pruned_if_a_pruner_stops_it(
    a_real_experiment, monkeypatch, has_intermediates
):
    """The test checks two studies: that of the manager which ran the trials, and that which the next manager restores."""
    experiment = a_real_experiment(
        PRUNED,
        space={"x": {"_type": "choice", "_value": [0.0, 1.0]}},
        trialConcurrency=1,
        maxTrialNum=6,
        tuner={
            "builtinTunerName": "TPE",
            "classArgs": {"optimize_mode": "minimize", "seed": 3},
            "includeIntermediateResults": has_intermediates,
        },
        assessor={"builtinAssessorName": "ThresholdPruner", "classArgs": {"upper": 0.5}},
    )
    studies, create_study = [], optuna.create_study

    def recorded(**settings):
        study = create_study(**settings)
        # Tuner and pruner each create a study. Only the study of the pruner has a name, so the test records the studies without a
        # name.
        if settings.get("study_name") is None:
            studies.append(study)
        return study

    monkeypatch.setattr(lazy.optuna, "create_study", recorded)
    jobs = partial(
        LocalTrainingService, experiment.config, experiment.folder.workspace, experiment.folder.jobs
    )

    def has_all_results(count):
        return len(studies) == count and all(each.state.is_finished() for each in studies[-1].trials)

    async def run():
        async with a_manager_here(experiment, jobs) as engine:
            await until(engine.finished.is_set, "the experiment is over")
            # The experiment may end before the thread of the tuner has received the last result.
            await until(lambda: has_all_results(1), "the tuner has all results")

    async def restore():
        engine = Engine(experiment.config, experiment.folder, Void, real_experiment.make_tuner, None)
        await engine.restore()
        await until(lambda: has_all_results(2), "the next tuner has all results")
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    asyncio.run(asyncio.wait_for(restore(), DEADLINE_S))
    assert len(studies) == 2
    for study in studies:
        outcomes = [(each.state, each.value, each.intermediate_values) for each in study.trials]
        stopped = (
            (TrialState.COMPLETE, 1.0, {})
            if has_intermediates
            else (TrialState.PRUNED, 1.0, {1: 0.25, 2: 1.0})
        )
        expected = [
            stopped if each.params["/x"] == 1 else (TrialState.COMPLETE, 0.0, {}) for each in study.trials
        ]
        assert stopped in outcomes, "choose another seed"
        assert outcomes == expected


# The first attempt saves a checkpoint after its second step, waits until the keeper has signed it, and is killed. The second
# attempt waits before its final result until the test has seen its intermediate results, because an ended trial is not assessed.
CONTINUED = """
import os, pathlib, signal, time, nni_sdk
nni_sdk.get_next_parameter()
path = nni_sdk.load_checkpoint()
first = 2 if path else 0
for step in range(first, 4):
    nni_sdk.report_intermediate_result(step)
    if step == 1:
        nni_sdk.save_checkpoint(lambda folder: pathlib.Path(folder, "step").touch())
        while not pathlib.Path(os.environ["NNI_SYS_DIR"], "checkpoints.json").exists():
            time.sleep(0.01)
        pathlib.Path("saved").touch()
        signal.pause()
while not pathlib.Path("assessed").exists():
    time.sleep(0.01)
nni_sdk.report_final_result(first)
"""
RECORDING = """
import pathlib
from nni.assessor import Assessor, AssessResult
class Recording(Assessor):
    def __init__(self, path):
        self.path = pathlib.Path(path)
    def assess_trial(self, trial_id, history):
        with self.path.open("a") as file:
            print(list(history), file=file)
        return AssessResult.Good
"""


def test_the_assessor_receives_the_results_of_a_killed_attempt_before_those_of_its_successor(
    a_real_experiment, tmp_path
):
    path = tmp_path / "histories"
    path.touch()
    own = {
        "codeDir": ".",
        "classFileName": "own.py",
        "className": "Recording",
        "classArgs": {"path": str(path)},
    }
    experiment = a_real_experiment(
        CONTINUED,
        trialConcurrency=1,
        maxTrialNum=1,
        maxTrialRetry=1,
        assessor=own,
        files={"own.py": RECORDING},
    )
    experiment.start()
    wait_until(Path(experiment.code, "saved").exists, "the first attempt has a checkpoint")
    (keeper,) = experiment.keeper_pids()
    os.kill(keeper, signal.SIGKILL)
    wait_until(
        lambda: path.read_text().endswith("\n[0, 1, 2, 3]\n"), "the assessor has all intermediate results"
    )
    Path(experiment.code, "assessed").touch()
    experiment.wait_for_status("DONE")
    assert [each["value"] for each in experiment.get("/trials")] == [2]
