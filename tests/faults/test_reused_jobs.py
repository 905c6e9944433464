"""Failures while reused jobs run. No metric is lost or duplicated, and every state is correct."""

import contextlib
import os
import signal
import sqlite3

import psutil
import pytest
from amounts import amount
from real_experiment import assert_rows_are_what_was_written, values, wait_until

from nni_manager.store.reader import StoreReader
from trial_keeper.wire.messages import Stream

TRIALS = amount(12, 50)
REUSE = {"localConfig": {"reuse": True}}
SHORT = """
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
for i in range(20):
    nni.report_intermediate_result(i)
nni.report_final_result(x)
"""
# Trial 1 waits until the test opens the pipe `gate`.
GATED = """
import os
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result(1)
if os.environ["NNI_TRIAL_SEQ_ID"] == "1":
    open("gate").read()
nni.report_final_result(2)
"""


# Trials 0 to 5 are short. Of the trials after them, the first creates the file `long` and waits at the pipe `gate`; the others
# end.
LONG_AT_ONCE = """
import os
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result(1)
if int(os.environ["NNI_TRIAL_SEQ_ID"]) >= 6:
    try:
        os.close(os.open("long", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        open("gate").read()
nni.report_final_result(2)
"""


def states(experiment):
    return sorted(trial["status"] for trial in experiment.get("/trials"))


def trial_of(experiment, sequence_id, status=None):
    return next(
        (
            trial
            for trial in experiment.get("/trials")
            if trial["sequenceId"] == sequence_id and status in (None, trial["status"])
        ),
        None,
    )


def test_two_reused_jobs_run_many_trials_and_exit(a_real_experiment):
    experiment = a_real_experiment(SHORT, maxTrialNum=TRIALS, trialConcurrency=2, **REUSE)
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert {trial["status"] for trial in trials} == {"SUCCEEDED"}
    assert {trial["jobId"] for trial in trials} == {"env-0", "env-1"}
    for trial in trials:
        assert trial["startTime"] <= trial["endTime"]
        assert len(assert_rows_are_what_was_written(experiment, trial["id"])) == 21
    # The duration of a trial must be that of its own command, without the other trials of its job.
    assert max(trial["endTime"] - trial["startTime"] for trial in trials) < 20_000
    wait_until(
        lambda: not any(psutil.pid_exists(pid) for pid in experiment.keeper_pids()),
        "both keepers have exited",
    )


@pytest.mark.smoke
def test_the_running_trial_of_a_killed_keeper_fails_and_the_next_job_runs_the_remaining_trials(
    a_real_experiment,
):
    experiment = a_real_experiment(GATED, maxTrialNum=4, trialConcurrency=1, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    trial = wait_until(lambda: trial_of(experiment, 1, "RUNNING"), "the gated trial runs")
    wait_until(lambda: len(experiment.rows(trial["id"])) == 1, "its first result is stored")
    (keeper,) = experiment.keeper_pids()
    os.kill(keeper, signal.SIGKILL)
    experiment.wait_for_status("DONE")
    assert states(experiment) == ["FAILED", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]
    failed = trial_of(experiment, 1)
    assert (failed["reason"], failed["jobId"]) == ("keeper lost", "env-0")
    assert trial_of(experiment, 2)["jobId"] == "env-1"
    assert values(experiment.rows(failed["id"])) == [1]


def test_a_keeper_starts_its_prefetched_trial_without_a_manager(a_real_experiment):
    experiment = a_real_experiment(GATED, maxTrialNum=4, trialConcurrency=1, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    following = wait_until(
        lambda: trial_of(experiment, 1, "RUNNING") and trial_of(experiment, 2, "WAITING"),
        "the gated trial runs and another one waits for its end",
    )
    wait_until(lambda: trial_of(experiment, 2)["jobId"] == "env-0", "it is prefetched to the same job")
    folder = experiment.folder.workspace.trial(following["id"])
    wait_until(folder.trial_json.exists, "its trial.json is written")
    experiment.kill_manager()
    with (experiment.code / "gate").open("w"):
        pass
    wait_until(lambda: list(folder.attempts.glob("*/*/exit.json")), "it has ended")
    experiment.start()
    experiment.wait_for_status("DONE")
    assert states(experiment) == ["SUCCEEDED"] * 4
    for trial in experiment.get("/trials"):
        assert values(assert_rows_are_what_was_written(experiment, trial["id"])) == [1, 2]
    assert {trial["jobId"] for trial in experiment.get("/trials")} == {"env-0"}


def test_trials_prefetched_behind_a_long_trial_are_revoked_and_run_in_another_job(a_real_experiment):
    experiment = a_real_experiment(LONG_AT_ONCE, maxTrialNum=24, trialConcurrency=2, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    wait_until(
        lambda: states(experiment) == ["RUNNING"] + ["SUCCEEDED"] * 23, "all but the long trial have run"
    )
    (long,) = (trial for trial in experiment.get("/trials") if trial["status"] == "RUNNING")
    with (experiment.code / "gate").open("w"):
        pass
    experiment.wait_for_status("DONE")
    assert "revoking it from job" in experiment.folder.manager_log.read_text()
    trials = experiment.get("/trials")
    assert {trial["status"] for trial in trials} == {"SUCCEEDED"}
    assert {trial["jobId"] for trial in trials} == {"env-0", "env-1"}
    later = [trial for trial in trials if trial["startTime"] > long["startTime"]]
    assert {trial["jobId"] for trial in later} == {"env-0", "env-1"} - {long["jobId"]}
    for trial in trials:
        attempts = experiment.folder.workspace.trial(trial["id"]).attempts
        assert len(list(attempts.iterdir())) == 1
        assert values(assert_rows_are_what_was_written(experiment, trial["id"])) == [1, 2]


def test_a_prefetched_trial_never_starts_if_the_user_stops_it(a_real_experiment):
    experiment = a_real_experiment(GATED, maxTrialNum=4, trialConcurrency=1, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    wait_until(lambda: trial_of(experiment, 1, "RUNNING"), "the gated trial runs")
    following = wait_until(lambda: trial_of(experiment, 2, "WAITING"), "another one waits for its end")
    experiment.delete(f"/trial-jobs/{following['id']}")
    wait_until(lambda: trial_of(experiment, 2, "USER_CANCELED"), "its keeper has returned it")
    with (experiment.code / "gate").open("w"):
        pass
    experiment.wait_for_status("DONE")
    assert states(experiment) == ["SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "USER_CANCELED"]
    assert not list(experiment.folder.workspace.trial(following["id"]).attempts.iterdir())


@pytest.mark.smoke
def test_a_stored_final_row_becomes_the_result_if_the_manager_is_killed_before_it_updates_the_trial(
    a_real_experiment,
):
    experiment = a_real_experiment(
        "import nni_sdk as nni\nnni.get_next_parameter()\nnni.report_final_result(0.5)\nopen('gate').read()\n",
        maxTrialNum=1,
        trialConcurrency=1,
        **REUSE,
    )
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the result is stored")
    experiment.kill_manager()
    with contextlib.closing(sqlite3.connect(experiment.folder.database)) as database, database:
        # Undo the update of the trial, as if the manager had been killed after it stored the metric row and before it stored the
        # update.
        database.execute("UPDATE trial SET final = NULL, value = NULL")
    experiment.start()
    with (experiment.code / "gate").open("w"):
        pass
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["message"], trial["finalMetricData"][0]["data"]) == (
        "SUCCEEDED",
        "",
        "0.5",
    )


def test_only_the_running_trial_of_a_job_fails_if_the_job_is_lost_while_no_manager_runs(a_real_experiment):
    experiment = a_real_experiment(GATED, maxTrialNum=4, trialConcurrency=1, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    wait_until(lambda: trial_of(experiment, 1, "RUNNING"), "the gated trial runs")
    lost = trial_of(experiment, 1)["id"]
    experiment.kill_manager()
    (keeper,) = experiment.keeper_pids()
    # A cluster that drains a node sends SIGTERM, and later SIGKILL. After the SIGTERM, the keeper ends its trial and waits for a
    # manager.
    os.kill(keeper, signal.SIGTERM)
    ended = experiment.stream(lost, Stream.METRICS).parent.parent / "exit.json"
    wait_until(ended.exists, "the trial has ended")
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(keeper), "the keeper has ended")
    experiment.start()
    experiment.wait_for_status("DONE")
    assert states(experiment) == ["FAILED", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]
    assert trial_of(experiment, 1)["reason"] == "job lost"


def test_at_most_one_prefetched_trial_fails_if_a_job_is_killed_after_the_end_of_its_running_trial(
    a_real_experiment,
):
    experiment = a_real_experiment(GATED, maxTrialNum=6, trialConcurrency=1, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    gated = wait_until(lambda: trial_of(experiment, 1, "RUNNING"), "the gated trial runs")
    experiment.kill_manager()
    with (experiment.code / "gate").open("w"):
        pass
    ended = experiment.stream(gated["id"], Stream.METRICS).parent.parent / "exit.json"
    wait_until(ended.exists, "the trial ends without a manager")
    (keeper,) = experiment.keeper_pids()
    os.kill(keeper, signal.SIGKILL)
    experiment.start()
    experiment.wait_for_status("DONE")
    ended_how = {
        trial["sequenceId"]: (trial["status"], trial["reason"]) for trial in experiment.get("/trials")
    }
    # The keeper may be killed before, during or after each of its prefetched trials 2, 3 and 4. It runs one trial at a time, so
    # at most one of them fails.
    ahead = [ended_how.pop(number) for number in (2, 3, 4)]
    assert set(ahead) <= {("SUCCEEDED", "succeeded"), ("FAILED", "keeper lost")}
    assert ahead.count(("FAILED", "keeper lost")) <= 1
    # The manager may have assigned trial 5 to the dead job. It must then assign the trial to another job.
    assert ended_how == dict.fromkeys((0, 1, 5), ("SUCCEEDED", "succeeded"))


def test_a_reused_job_runs_further_trials_after_a_stopped_trial_and_ends_with_the_experiment(
    a_real_experiment,
):
    experiment = a_real_experiment(GATED, maxTrialNum=100, trialConcurrency=1, **REUSE)
    os.mkfifo(experiment.code / "gate")
    experiment.start()
    gated = wait_until(lambda: trial_of(experiment, 1, "RUNNING"), "the gated trial runs")
    experiment.delete(f"/trial-jobs/{gated['id']}")
    wait_until(lambda: trial_of(experiment, 3, "SUCCEEDED"), "later trials run")
    assert trial_of(experiment, 1)["status"] == "USER_CANCELED"
    assert trial_of(experiment, 2)["jobId"] == gated["jobId"] == "env-0"
    keepers = experiment.keeper_pids()
    experiment.close()
    assert not any(psutil.pid_exists(pid) for pid in keepers)
    with StoreReader(experiment.folder.database) as reader:
        assert reader.jobs() == ([], ["env-0"])


def test_an_experiment_ends_with_failed_trials_if_its_jobs_can_never_start(a_real_experiment):
    experiment = a_real_experiment(SHORT, maxTrialNum=3, trialConcurrency=1, **REUSE)
    experiment.environ["PAI_CURRENT_TASK_ROLE_NAME"] = "half of an identity"
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert [trial["status"] for trial in trials] == ["FAILED"] * 3
    assert {trial["reason"] for trial in trials} == {"could not start"}
    assert "PAI_" in trials[0]["message"]


def test_a_job_exits_after_the_maximum_number_of_trials_per_job(a_real_experiment):
    experiment = a_real_experiment(SHORT, maxTrialNum=7, trialConcurrency=1, maxTrialsPerJob=3, **REUSE)
    experiment.start()
    experiment.wait_for_status("DONE")
    jobs = [
        trial["jobId"] for trial in sorted(experiment.get("/trials"), key=lambda each: each["sequenceId"])
    ]
    assert jobs == ["env-0"] * 3 + ["env-1"] * 3 + ["env-2"]


def test_warm_trials_of_a_reused_job_report_all_results(a_real_experiment):
    experiment = a_real_experiment(
        SHORT, maxTrialNum=TRIALS, trialConcurrency=1, warmImports=["json"], **REUSE
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    for trial in experiment.get("/trials"):
        assert trial["status"] == "SUCCEEDED"
        rows = assert_rows_are_what_was_written(experiment, trial["id"])
        assert values(rows)[-1] == trial["parameters"]["x"]
    assert b"as a fork of a warm interpreter" in (experiment.folder.jobs / "env-0.log").read_bytes()
