"""Trials continue from their checkpoints, with real managers, keepers and trials."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_experiment import wait_until

from nni_manager.config.reader import read_experiment_file

# The model is a number that each step changes, so a missing or repeated step changes all later results. $PLAN has one entry for
# each start of the first trial: the step and the point where the trial waits to be killed.
TRAIN = """
import json, os, pathlib, time
import nni_sdk as nni

STEPS = 12
ledger = pathlib.Path(os.environ["LEDGER"])
plan = json.loads(os.environ["PLAN"])
nni.get_next_parameter()
number = sum(line.startswith("start") for line in ledger.read_text().splitlines())
kill_step, kill_place = plan[number] if number < len(plan) else (None, None)

def note(text):
    with ledger.open("a") as file:
        file.write(text + "\\n")

def may_be_killed(step, place):
    if (step, place) == (kill_step, kill_place):
        note("waits")
        time.sleep(600)

path = nni.load_checkpoint()
state = json.loads(pathlib.Path(path, "state").read_text()) if path else {"step": 0, "model": 0.5}
note(f"start {state['step']}")
if kill_step is not None:
    kill_step = max(kill_step, state["step"])
while state["step"] < STEPS:
    step = state["step"]
    model = 3.7 * state["model"] * (1 - state["model"])
    may_be_killed(step, "before report")
    nni.report_intermediate_result(model)
    may_be_killed(step, "after report")
    state = {"step": step + 1, "model": model}

    def save(folder):
        pathlib.Path(folder, "state").write_text(json.dumps(state))
        may_be_killed(step, "in save")

    if step % 2 == 0:
        nni.save_checkpoint(save)
    else:
        may_be_killed(step, "in save")
    may_be_killed(step, "after save")
nni.report_final_result(state["model"])
"""
PLACES = ("before report", "after report", "in save", "after save")
KILLS = 10


def rows_of(experiment, trial):
    """The learning curve, without the fields that differ between any two trials."""
    return [(row.is_final, row.sequence, row.value) for row in experiment.rows(trial["id"])]


@pytest.mark.parametrize(
    ("seed", "more"), [(1, {}), (2, {"localConfig": {"reuse": True}})], ids=["plain", "reuse"]
)
def test_a_trial_that_is_killed_ten_times_has_the_same_result_as_an_undisturbed_trial(
    a_real_experiment, tmp_path, seed, more
):
    draw = random.Random(seed)
    plan = [(draw.randrange(12), draw.choice(PLACES)) for _ in range(KILLS)]
    ledger = tmp_path / "ledger"
    ledger.touch()
    experiment = a_real_experiment(
        TRAIN,
        trialConcurrency=1,
        maxTrialNum=2,
        maxTrialRetry=KILLS,
        environ={"PLAN": json.dumps(plan), "LEDGER": str(ledger)},
        **more,
    )
    experiment.start()
    for kills in range(1, KILLS + 1):
        wait_until(lambda kills=kills: ledger.read_text().count("waits\n") == kills, f"attempt {kills} waits")
        (trial,) = experiment.get("/trials")
        job = json.loads((experiment.folder.jobs / f"{trial['jobId']}.json").read_bytes())
        if kills == KILLS // 2:
            experiment.kill_manager()
        os.kill(job["pid"], signal.SIGKILL)
        if kills == KILLS // 2:
            experiment.start()
    experiment.wait_for_status("DONE")
    killed, whole = experiment.get("/trials")
    assert (killed["status"], killed["retries"], whole["retries"]) == ("SUCCEEDED", KILLS, 0)
    expected = rows_of(experiment, whole)
    assert [sequence for is_final, sequence, _ in expected if not is_final] == list(range(12))
    assert rows_of(experiment, killed) == expected
    assert (killed["value"], killed["intermediateCount"]) == (whole["value"], 12)
    # The trial did not restart from step 0 each time: it continued from checkpoints, and its rows come from several attempts.
    starts = [int(line.split()[1]) for line in ledger.read_text().splitlines() if line.startswith("start")]
    assert max(starts[:-1]) > 0
    assert len({row.attempt for row in experiment.rows(killed["id"])}) > 1
    assert [each["data"] for each in experiment.get(f"/metric-data/{killed['id']}")] == [
        each["data"] for each in experiment.get(f"/metric-data/{whole['id']}")
    ]


FAILS_ONCE = """
import os, pathlib
import nni_sdk as nni

nni.get_next_parameter()
path = nni.load_checkpoint()
first = int(pathlib.Path(path).read_text()) if path else 0
for step in range(first, 4):
    nni.report_intermediate_result(step)
    pathlib.Path("state.txt").write_text(str(step + 1))
    nni.save_checkpoint("state.txt")
    if step == 1 and path is None:
        raise RuntimeError("out of luck")
nni.report_final_result(first)
"""


@pytest.mark.smoke
def test_a_retry_from_the_checkpoint_continues_a_failed_trial_in_a_new_trial(a_real_experiment):
    experiment = a_real_experiment(FAILS_ONCE, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    experiment.wait_for_status("DONE")
    (failed,) = experiment.get("/trials")
    assert (failed["status"], failed["continues"]) == ("FAILED", None)
    made = experiment.ask("POST", f"/trials/{failed['id']}/retry", params={"from": "checkpoint"}).json()
    experiment.wait_for_status("DONE")
    _, trial = experiment.get("/trials")
    assert (trial["id"], trial["continues"]) == (made["trialJobId"], failed["id"])
    assert (trial["status"], trial["value"], trial["parameters"]) == ("SUCCEEDED", 2, failed["parameters"])
    assert [row.value for row in experiment.rows(trial["id"])] == ["2", "3", "2"]
    assert [row.value for row in experiment.rows(failed["id"])] == ["0", "1"]
    # The next manager restores from the store which trial is continued.
    experiment.kill_manager()
    experiment.start()
    assert experiment.get("/trials")[1]["continues"] == failed["id"]


def test_a_retry_from_the_checkpoint_is_refused_for_a_trial_without_a_checkpoint(a_real_experiment):
    experiment = a_real_experiment("raise SystemExit(1)", trialConcurrency=1, maxTrialNum=1, failFast=False)
    experiment.start()
    experiment.wait_for_status("DONE")
    (failed,) = experiment.get("/trials")
    refusal = experiment.ask("POST", f"/trials/{failed['id']}/retry", params={"from": "checkpoint"})
    assert refusal.status_code == 409
    assert "it has no signed checkpoint; let the training code call nni_sdk.save_checkpoint()" in refusal.text
    refusal = experiment.ask("POST", f"/trials/{failed['id']}/retry", params={"from": "there"})
    assert (refusal.status_code, refusal.json()["error"]) == (
        400,
        "cannot retry from 'there'; write start or checkpoint",
    )


TRAINS_IN_ROUNDS = """
import pathlib
import nni_sdk as nni

parameters = nni.get_next_parameter()
path = nni.load_checkpoint()
done = int(pathlib.Path(path).read_text()) if path else 0
for step in range(done, parameters["TRIAL_BUDGET"]):
    nni.report_intermediate_result(parameters["x"])
    pathlib.Path(f"state{nni.get_trial_id()}").write_text(str(step + 1))
    nni.save_checkpoint(f"state{nni.get_trial_id()}")
nni.report_final_result({"default": parameters["x"], "done": done})
"""


@pytest.mark.parametrize("reuse", [False, True], ids=["a job each", "reuse"])
def test_a_promoted_hyperband_trial_continues_its_parent_trial_of_the_previous_round(
    a_real_experiment, reuse
):
    more = {"localConfig": {"reuse": True}} if reuse else {}
    experiment = a_real_experiment(
        TRAINS_IN_ROUNDS,
        trialConcurrency=1,  # with one trial at a time, the fourth trial is the promoted trial
        maxTrialNum=4,
        tuner={"builtinTunerName": "Hyperband", "classArgs": {"R": 3, "eta": 3, "seed": 1}},
        **more,
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    *first, promoted = experiment.get("/trials")
    assert [trial["continues"] for trial in first] == [None, None, None]
    (parent,) = [trial for trial in first if trial["id"] == promoted["continues"]]
    assert parent["parameters"] == {"x": promoted["parameters"]["x"], "TRIAL_BUDGET": 1}
    assert json.loads(promoted["finalMetricData"][0]["data"])["done"] == 1
    assert promoted["intermediateCount"] == 2


@pytest.mark.smoke
def test_the_checkpoints_example_runs_standalone_and_its_experiment_file_is_valid(tmp_path):
    folder = Path(__file__).parents[2] / "examples/checkpoints"
    assert read_experiment_file(folder / "config.yml").tuner.name == "Hyperband"
    run = subprocess.run(
        [sys.executable, folder / "train.py"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "Final result" in run.stderr
