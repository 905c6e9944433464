"""Limits and retries with real managers, keepers and trials."""

import os
import signal

import pytest
from real_experiment import wait_until

from nni_manager.store.reader import StoreReader
from trial_keeper.wire.messages import Stream

WAITING = """
import time
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result(1)
time.sleep(600)
"""
# The first attempt waits until the test kills its keeper; the next attempt succeeds.
SUCCEEDS_ON_RETRY = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
own = os.environ["NNI_SYS_DIR"].split("/attempts/")[1].split("/")[0]
attempt = sorted(os.listdir(os.environ["NNI_SYS_DIR"].split(own)[0])).index(own)
nni.report_intermediate_result(attempt)
if attempt == 0:
    time.sleep(600)
nni.report_final_result(5)
"""


def test_max_trial_duration_counts_from_the_start_of_a_trial_even_after_a_resume(a_real_experiment):
    experiment = a_real_experiment(WAITING, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the trial reports")
    change = {"params": {"maxTrialDuration": "4s"}}
    assert experiment.ask("PUT", "/experiment?update_type=MAX_TRIAL_DURATION", json=change).json() == {}
    experiment.kill_manager()
    experiment.start()
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["reason"]) == ("SYS_CANCELED", "time limit")
    assert trial["endTime"] - trial["startTime"] > 3500, "the trial must run until its limit"


def test_a_trial_is_retried_after_a_kill_of_its_keeper_and_the_result_of_the_last_attempt_counts(
    a_real_experiment,
):
    experiment = a_real_experiment(SUCCEEDS_ON_RETRY, trialConcurrency=1, maxTrialNum=1, maxTrialRetry=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the first attempt reports")
    (pid,) = experiment.keeper_pids()
    os.kill(pid, signal.SIGKILL)
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["value"], trial["attempt"], trial["retries"]) == ("SUCCEEDED", 5, 1, 1)
    assert trial["jobId"] == f"{trial['id']}-1"
    assert "the cluster lost it (keeper lost); retry 1 of 1" in trial["warning"]
    assert [row.value for row in experiment.rows(trial["id"])] == ["1", "5"]
    with StoreReader(experiment.folder.database) as reader:
        first, second = reader.attempts(trial["id"])
        lost = reader.offsets(first.key)
    assert (first.is_lost, second.is_lost) == (True, False)
    assert lost[Stream.METRICS] > 0, "results of the lost attempt must be kept"


@pytest.mark.smoke
def test_an_experiment_whose_first_trials_fail_ends_with_an_error_and_can_be_resumed(a_real_experiment):
    code = "import nni_sdk as nni\nrate = nni.get_next_parameter()['lr']\nnni.report_final_result(rate)\n"
    experiment = a_real_experiment(code, trialConcurrency=2, maxTrialNum=40, failFast=3)
    experiment.start()
    experiment.wait_for_status("ERROR")
    (error,) = experiment.get("/check-status")["errors"]
    assert error.startswith("cannot continue the search: the last 3 trials failed, and none has succeeded: ")
    assert "exit code 1: KeyError: 'lr' (train.py:2); fix the training code" in error
    wait_until(
        lambda: {trial["status"] for trial in experiment.get("/trials")} == {"FAILED"},
        "trials that ran at the third failure have ended",
    )
    failed = len(experiment.get("/trials"))
    assert 3 <= failed <= 5
    experiment.kill_manager()
    (experiment.code / "train.py").write_text(code.replace("lr", "x"))
    change = {"params": {"maxTrialNum": failed + 4}}
    experiment.start()
    assert experiment.ask("PUT", "/experiment?update_type=MAX_TRIAL_NUM", json=change).json() == {}
    experiment.wait_for_status("DONE")
    states = [trial["status"] for trial in experiment.get("/trials")]
    assert states == ["FAILED"] * failed + ["SUCCEEDED"] * 4
