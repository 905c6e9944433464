"""The list of trials, the summary and the export show the same final results of stopped trials. A trial whose file has changed
shows a warning.
"""

import os
import signal
import time

import pytest
from real_experiment import RealExperiment, wait_until

from nni_manager.client.stored import StoredDocuments
from nni_manager.domain.trial_run import NO_FINAL_RESULT_IN_CHANGED_FILE
from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.messages import Stream

# Trial 0 reports its final result before the stop command, trial 1 after it, and trial 2 never. Trial 3 truncates its metrics
# file after the manager has collected all its bytes.
TRAIN = """
import os, signal, sys
import nni_sdk as nni
nni.get_next_parameter()
number = nni.get_sequence_id()

def report(*_):
    nni.report_final_result(number + 0.5)
    sys.exit(3)

if number == 3:
    for i in range(6):
        nni.report_intermediate_result(i)
    open("collected").read()
    os.truncate(os.environ["NNI_SYS_DIR"] + "/.nni/metrics", 0)
    nni.report_final_result(0.25)
    sys.exit(0)
if number == 0:
    nni.report_final_result(0.5)
if number == 1:
    signal.signal(signal.SIGTERM, report)
nni.report_intermediate_result(number)
while True:
    signal.pause()
"""
TRUNCATED = file_warning(Stream.METRICS, FileChange.TRUNCATED)


def of_all(experiment: RealExperiment):
    return sorted(experiment.get("/trials"), key=lambda trial: trial["sequenceId"])


@pytest.mark.parametrize(
    "config",
    [{}, {"localConfig": {"reuse": True}}, {"localConfig": {"reuse": True}, "warmImports": ["json"]}],
    ids=["plain", "reuse", "warm"],
)
def test_trials_stopped_by_the_user_keep_the_final_results_that_they_have_reported(a_real_experiment, config):
    experiment = a_real_experiment(TRAIN, trialConcurrency=4, maxTrialNum=4, **config)
    os.mkfifo(experiment.code / "collected")
    experiment.start()
    wait_until(
        lambda: (
            len(rows := experiment.get("/trials")) == 4
            and sorted(row["intermediateCount"] for row in rows) == [1, 1, 1, 6]
        ),
        "three trials wait for the stop, and one to truncate its file",
    )
    (experiment.code / "collected").write_text("go on")
    # The manager restarts before the stop commands, so it must read the position of the final record of trial 0 from the store.
    experiment.kill_manager()
    experiment.start()
    for trial in of_all(experiment)[:3]:
        experiment.delete(f"/trial-jobs/{trial['id']}")
    experiment.wait_for_status("DONE")
    trials = of_all(experiment)
    assert [(trial["state"], trial["value"], trial["exitCode"]) for trial in trials] == [
        ("SUCCEEDED", 0.5, 128 + signal.SIGTERM),
        ("USER_CANCELED", 1.5, 3),
        ("USER_CANCELED", None, 128 + signal.SIGTERM),
        ("SUCCEEDED", None, 0),
    ]
    assert trials[0]["why"] == "stopped by user, after the final result was reported"
    assert (trials[3]["warning"], trials[3]["message"]) == (TRUNCATED, NO_FINAL_RESULT_IN_CHANGED_FILE)
    ids = [trial["id"] for trial in trials]
    exported = {each["trialJobId"]: each["value"] for each in experiment.get("/export-data")}
    assert exported == {ids[0]: "0.5", ids[1]: "1.5"}

    experiment.kill_manager()
    experiment.start()
    summary = experiment.wait_for_status("DONE")
    assert [trial["id"] for trial in summary["top"]] == [ids[1], ids[0]]
    assert summary["best"]["id"] == ids[1]
    experiment.close()
    stored = StoredDocuments(experiment.folder).get("/export-data")
    assert {each["trialJobId"]: each["value"] for each in stored} == exported


# The trial polls should_stop(), so its keeper sends it no SIGTERM at once. It reports its result after the test has seen the
# state STOPPING.
ASKS = """
import time
import nni_sdk as nni
nni.get_next_parameter()
nni.should_stop()
nni.report_intermediate_result(0)
while not nni.should_stop():
    time.sleep(0.01)
open("seen").read()
nni.report_final_result({"default": 2, "reason": nni.stop_reason()})
"""


def test_a_trial_stopped_by_the_user_keeps_a_final_result_that_it_reports_while_it_stops(a_real_experiment):
    experiment = a_real_experiment(ASKS, trialConcurrency=1, maxTrialNum=1)
    os.mkfifo(experiment.code / "seen")
    experiment.start()
    wait_until(
        lambda: [row["intermediateCount"] for row in experiment.get("/trials")] == [1], "the trial has asked"
    )
    (trial,) = experiment.get("/trials")
    assert trial["stoppingSince"] is None
    asked_at_ms = time.time() * 1000
    experiment.delete(f"/trial-jobs/{trial['id']}")
    (trial,) = wait_until(
        lambda: [row for row in experiment.get("/trials") if row["state"] == "STOPPING"],
        "the trial is stopping",
    )
    assert asked_at_ms - 1 <= trial["stoppingSince"] <= time.time() * 1000
    stored = StoredDocuments(experiment.folder)
    (listed,) = wait_until(
        lambda: [row for row in stored.trial_list() if row["state"] == "STOPPING"], "the stop is stored"
    )
    assert abs(listed["stoppingSince"] - trial["stoppingSince"]) < 1
    (experiment.code / "seen").write_text("go on")
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["state"], trial["value"], trial["exitCode"]) == ("USER_CANCELED", 2, 0)
    assert '"stopped by user"' in trial["finalMetricData"][0]["data"]
    assert trial["stoppingSince"] is None
