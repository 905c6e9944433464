"""Each test causes one kind of failure. No written byte is lost or counted twice, and every state is correct."""

import json
import os
import signal

import psutil
import pytest
from real_experiment import assert_rows_are_what_was_written, values, wait_until

from nni_manager.store.reader import StoreReader
from trial_keeper.wire.messages import Stream

REPORTS = 2000
TRIALS = 4
# The trial pauses after every ten reports, so that it still reports when the test kills a process.
PACED = f"""
import time
import nni_sdk as nni
nni.get_next_parameter()
for i in range({REPORTS}):
    nni.report_intermediate_result(i)
    if i % 10 == 0:
        time.sleep(0.02)
nni.report_final_result({REPORTS})
"""


def is_zombie(pid):
    # A zombie has ended, although it still has a pid: the process that adopts orphans may reap it late.
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.smoke
def test_no_result_is_lost_or_duplicated_if_a_manager_is_killed_repeatedly(a_real_experiment):
    """Each manager uses a new port, except one that restarts on the port of its predecessor."""
    experiment = a_real_experiment(PACED, trialConcurrency=TRIALS, maxTrialNum=TRIALS)
    port = None
    for share in (0.05, 0.3, 0.6):
        experiment.start(port)
        wait_until(
            lambda share=share: experiment.row_count() > TRIALS * REPORTS * share, "some results are stored"
        )
        experiment.kill_manager()
        if share == 0.05:
            assert experiment.row_count() < TRIALS * REPORTS
        port = experiment.port if port is None else None
    experiment.start()
    summary = experiment.wait_for_status("DONE")

    assert summary["counts"]["SUCCEEDED"] == TRIALS
    # A trial's message may quote the end of its keeper's log. So this log may contain lines of the keeper, but none of a library.
    for log in experiment.folder.jobs.glob("*.log"):
        assert [line for line in log.read_text().splitlines() if " trial-keeper " not in line] == []
    for trial in experiment.get("/trials"):
        rows = assert_rows_are_what_was_written(experiment, trial["id"])
        assert values(rows) == [*range(REPORTS), REPORTS]
        assert [row.is_final for row in rows] == [False] * REPORTS + [True]
        assert trial["attempt"] == 0
        assert trial["value"] == REPORTS


# Trial 0 waits until the test creates the file `gate`. The other trials do not wait for the file.
ONE_GATED = f"""
import os, time
import nni_sdk as nni
nni.get_next_parameter()
for i in range({REPORTS}):
    nni.report_intermediate_result(i)
    if i % 10 == 0:
        time.sleep(0.02)
while nni.get_sequence_id() == 0 and not os.path.exists("gate"):
    time.sleep(0.05)
nni.report_final_result({REPORTS})
"""


@pytest.mark.smoke
def test_a_new_manager_adopts_running_trials_and_reads_results_of_ended_trials_and_fails_lost_trials(
    a_real_experiment,
):
    """The first trial runs, but its keeper has no state file. The keeper of the second trial is killed after the trial has ended.
    The keeper of the third trial is killed while the trial runs.
    """
    experiment = a_real_experiment(ONE_GATED, trialConcurrency=3, maxTrialNum=3)
    experiment.start()
    with StoreReader(experiment.folder.database) as reader:
        wait_until(
            lambda: len({row.trial_id for row in reader.metrics()}) == 3, "results of each trial are stored"
        )
    running, ended, lost = (
        trial["id"] for trial in sorted(experiment.get("/trials"), key=lambda each: each["sequenceId"])
    )
    experiment.kill_manager()
    jobs = experiment.folder.jobs
    pids = {path.stem: json.loads(path.read_bytes())["pid"] for path in jobs.glob("*.json")}
    os.kill(pids[lost], signal.SIGKILL)
    with (jobs / f"{lost}.log").open("a") as file:
        file.write("trial-keeper: cannot write to the workspace /there: full; free some space there\n")
    # The manager may die after it has started a job and before it has written this file.
    (jobs / f"{running}.json").unlink()
    exit_json = experiment.stream(ended, Stream.METRICS).parent.parent / "exit.json"
    wait_until(exit_json.is_file, "a trial has ended")
    # Only the files of this trial remain, no process.
    os.kill(pids[ended], signal.SIGKILL)

    experiment.start()
    wait_until(lambda: experiment.summary()["keepers"] == 1, "the keeper of the running trial has connected")
    (experiment.code / "gate").touch()
    experiment.wait_for_status("DONE")
    trials = {trial["id"]: trial for trial in experiment.get("/trials")}
    for trial_id in (running, ended):
        assert (trials[trial_id]["status"], trials[trial_id]["attempt"]) == ("SUCCEEDED", 0)
        assert values(assert_rows_are_what_was_written(experiment, trial_id)) == [*range(REPORTS), REPORTS]
    assert (trials[lost]["status"], trials[lost]["reason"]) == ("FAILED", "keeper lost")
    assert "its keeper is gone" in trials[lost]["message"]
    assert "free some space there" in trials[lost]["message"]


def test_a_trial_killed_by_a_signal_fails_with_the_reason_signal_and_keeps_its_results(a_real_experiment):
    train = """
import os, signal, sys
import nni_sdk as nni
nni.get_next_parameter()
for i in range(500):
    nni.report_intermediate_result(i)
print("about to die", file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
"""
    experiment = a_real_experiment(train, maxTrialNum=1)
    experiment.start()
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["reason"], trial["exitCode"]) == ("FAILED", "signal", 128 + signal.SIGKILL)
    assert "about to die" in trial["message"]
    assert values(assert_rows_are_what_was_written(experiment, trial["id"])) == [*range(500)]


def test_the_guard_of_a_killed_keeper_ends_the_trial_and_the_stored_results_are_kept(a_real_experiment):
    experiment = a_real_experiment(PACED, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() > 10, "some results are stored")
    (pid,) = experiment.keeper_pids()
    started = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    assert started
    os.kill(pid, signal.SIGKILL)
    experiment.wait_for_status("DONE")
    assert not [child for child in started if not is_zombie(child)]
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["reason"]) == ("FAILED", "keeper lost")
    assert "keeper" in trial["message"]
    rows = experiment.rows(trial["id"])
    assert values(rows) == [*range(len(rows))]


def test_a_resume_after_a_tuner_error_completes_the_experiment_if_the_tuner_works_again(
    a_real_experiment, tmp_path
):
    train = "import nni_sdk as nni\nnni.get_next_parameter()\nnni.report_final_result(1)\n"
    # This module makes the tuner raise an error at its third request for parameters.
    broken = tmp_path / "sitecustomize"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "if '-m' in sys.orig_argv and 'nni_manager' in sys.orig_argv:\n"
        "    from nni_manager.tuner import optuna_backed\n"
        "    ask = optuna_backed.OptunaTuner.ask\n"
        "    def failing(self, key):\n"
        "        if key == 2:\n"
        "            raise RuntimeError('no idea left')\n"
        "        return ask(self, key)\n"
        "    optuna_backed.OptunaTuner.ask = failing\n"
    )
    experiment = a_real_experiment(
        train, trialConcurrency=1, maxTrialNum=3, environ={"PYTHONPATH": str(broken)}
    )
    experiment.start()
    summary = experiment.wait_for_status("ERROR")
    assert summary["counts"]["SUCCEEDED"] == 2
    assert "no idea left" in summary["errors"][0]
    assert "nnictl resume" in summary["errors"][0]

    experiment.kill_manager()
    experiment.environ.pop("PYTHONPATH")
    experiment.start()
    assert experiment.wait_for_status("DONE")["counts"]["SUCCEEDED"] == 3


def test_a_stopped_experiment_cancels_its_trials_and_leaves_no_process(a_real_experiment):
    train = "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\nnni.report_intermediate_result(1)\ntime.sleep(600)\n"
    experiment = a_real_experiment(train, trialConcurrency=2, maxTrialNum=4)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 2, "both trials report")
    pids = experiment.keeper_pids()
    experiment.close()
    assert experiment.manager.returncode == 0
    assert not [pid for pid in pids if not is_zombie(pid)]
    with StoreReader(experiment.folder.database) as reader:
        assert reader.experiment().state.value == "STOPPED"
        assert {trial.state.value for trial in reader.trials()} == {"USER_CANCELED"}


def test_keepers_of_another_version_stop_the_experiment_before_any_trial_runs(a_real_experiment, tmp_path):
    # This module changes the version of the keeper process, as if the keeper came from an old image.
    other = tmp_path / "other-version"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        "import sys\n"
        "if '-m' in sys.orig_argv and 'trial_keeper' in sys.orig_argv:\n"
        "    import trial_keeper\n"
        "    trial_keeper.__version__ = '0.5.1'\n"
    )
    experiment = a_real_experiment(
        "raise SystemExit('ran')\n", maxTrialNum=10, environ={"PYTHONPATH": str(other)}
    )
    experiment.start()
    summary = experiment.wait_for_status("ERROR")
    assert "0.5.1" in summary["errors"][0]
    assert "pip install" in summary["errors"][0]
    assert summary["trialCount"] <= 4
    wait_until(
        lambda: all("endTime" in trial for trial in experiment.get("/trials")), "all trials have ended"
    )
    assert {trial["reason"] for trial in experiment.get("/trials")} == {"version"}
