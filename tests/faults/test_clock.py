"""The wall clock changes during an experiment. No trial ends or restarts, and order and durations stay correct."""

import os
import signal
import time

import psutil
import pytest
from amounts import amount
from real_experiment import assert_rows_are_what_was_written, values, wait_until
from stepped_clock import SteppedClock

pytestmark = pytest.mark.timeout(240)

DAY_S = 86_400
STEPS = pytest.mark.parametrize("step_s", [DAY_S, -DAY_S], ids=["a day ahead", "a day back"])
TRAIN = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
for i in range(5):
    nni.report_intermediate_result(i)
while not os.path.exists("gate"):
    time.sleep(0.05)
for i in range(5, 10):
    nni.report_intermediate_result(i)
nni.report_final_result(10)
"""


@pytest.fixture
def clock(tmp_path):
    return SteppedClock(tmp_path)


def assert_durations_are_true(experiment, began_s):
    longest_s = time.monotonic() - began_s
    for trial in experiment.get("/trials"):
        assert 0 <= trial["endTime"] - trial["startTime"] <= 1000 * longest_s, trial
    assert 0 <= experiment.summary()["elapsedS"] <= longest_s
    profile = experiment.get("/experiment")
    assert profile["endTime"] >= profile["startTime"]


@pytest.mark.any_machine
@pytest.mark.parametrize(
    ("step_s", "reuse"),
    [
        pytest.param(DAY_S, False, id="a day ahead, a job per trial"),
        pytest.param(-DAY_S, True, id="a day back, reused jobs"),
        pytest.param(DAY_S, True, id="a day ahead, reused jobs"),
        pytest.param(-DAY_S, False, id="a day back, a job per trial"),
    ][: amount(2, 4)],
)
def test_an_experiment_completes_even_if_the_clock_changes_and_the_manager_is_killed(
    a_real_experiment, clock, step_s, reuse
):
    began_s = time.monotonic()
    experiment = a_real_experiment(
        TRAIN,
        trialConcurrency=2,
        maxTrialNum=3,
        maxExecDuration="1h",
        localConfig={"reuse": reuse},
        environ=clock.environ,
    )
    experiment.start()
    wait_until(lambda: experiment.row_count() == 10, "both trials report")
    keepers = experiment.keeper_pids()
    clock.set_by(step_s)
    experiment.kill_manager()
    experiment.start()
    wait_until(lambda: experiment.summary()["keepers"] == 2, "both keepers have reconnected")
    assert [trial["status"] for trial in experiment.get("/trials")] == ["RUNNING", "RUNNING"]
    assert experiment.summary()["status"] == "RUNNING"
    # Step the clock in the opposite direction of the first step, while the manager runs.
    clock.set_by(-step_s // 2)
    (experiment.code / "gate").touch()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert [(trial["sequenceId"], trial["status"], trial["attempt"]) for trial in trials] == [
        (number, "SUCCEEDED", 0) for number in range(3)
    ]
    for trial in trials:
        assert values(assert_rows_are_what_was_written(experiment, trial["id"])) == list(range(11))
    assert set(keepers) <= set(experiment.keeper_pids())
    assert_durations_are_true(experiment, began_s)


@STEPS
def test_the_duration_of_a_trial_is_correct_after_a_clock_change_and_the_loss_of_the_keeper(
    a_real_experiment, clock, step_s
):
    began_s = time.monotonic()
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=1, environ=clock.environ)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 5, "the trial reports")
    clock.set_by(step_s)
    (keeper,) = experiment.keeper_pids()
    os.kill(keeper, signal.SIGKILL)
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["reason"]) == ("FAILED", "keeper lost")
    assert_durations_are_true(experiment, began_s)
    assert not psutil.pid_exists(keeper)
