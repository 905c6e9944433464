"""Another user forges attempts, or the folder of an attempt is removed. No result changes, and rows of two runs are never
mixed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from functools import partial

import psutil
import pytest
from amounts import amount
from fault_files import FORGED_VALUE
from jobs_here import JobsHere
from real_experiment import a_manager_here, until, values, wait_until
from second_user import a_flood, a_forger

from nni_manager.domain import transports as transports_module

pytestmark = pytest.mark.timeout(300)

TRIALS = amount(4, 50)
UNREACHABLE = "127.0.0.1:9"
TRAIN = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
while not os.path.exists({gate!r}):
    time.sleep(0.01)
number = int(os.environ["NNI_TRIAL_SEQ_ID"])
for i in range(20):
    nni.report_intermediate_result(i)
    time.sleep(0.02)
nni.report_final_result(number)
"""
TWICE = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
with open("runs", "a") as runs:
    runs.write("x")
run = os.path.getsize("runs")
for i in range(42):
    nni.report_intermediate_result(run * 1000 + i)
if run == 1:
    time.sleep(600)
nni.report_final_result(run * 1000 + 42)
"""


class OnSharedStorage(JobsHere):
    """Jobs on storage where other users may write. The manager checks for forged attempts at the end of such a job."""

    uses_snapshot = True


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    monkeypatch.setattr(transports_module, "RECONNECT_GRACE_S", 0.5)
    monkeypatch.setattr(transports_module, "POLL_INTERVAL_S", 0.2)


@pytest.fixture(autouse=True)
def ended_keepers():
    yield
    JobsHere.end_keepers()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to forge as another user")
@pytest.mark.parametrize("reached", [False, True], ids=["storage", "stream"])
@pytest.mark.smoke
def test_attempts_forged_by_another_user_are_reported_and_change_no_result(
    a_real_experiment, tmp_path, reached
):
    """Other users may write to the storage, as on a cluster. The keepers have a connection to the manager only in the case
    `stream`. Another user floods the manager's port.
    """
    gate = tmp_path / "the port is flooded"
    experiment = a_real_experiment(TRAIN.format(gate=str(gate)), maxTrialNum=TRIALS, trialConcurrency=4)
    workspace = experiment.folder.workspace
    jobs = partial(OnSharedStorage, experiment.config, workspace, experiment.folder.jobs)

    async def play():
        with a_forger(workspace.root) as forged:
            told = {} if reached else {"told": UNREACHABLE}
            async with a_manager_here(experiment, jobs, **told) as engine:
                with a_flood(experiment.port) as opened:
                    await until(opened, "the port is flooded")
                    gate.touch()
                    await until(engine.finished.is_set, "the experiment is over")
                    opened_then = opened()
                    await until(lambda: opened() > opened_then, "the flood has lasted to the end")
                # The manager reports rejected attempts of the last trial when the job has ended. This is after the end of the
                # experiment, so the test waits until the manager has stopped.
                await engine.until_stopped()
                return list(engine.experiment.trials.values()), forged()

    trials, forged = asyncio.run(play())
    assert set(forged) == {trial.trial_id for trial in trials}, "each trial must have forged attempts"
    assert [(trial.state.value, trial.run.value) for trial in trials] == [
        ("SUCCEEDED", float(trial.sequence_id)) for trial in trials
    ]
    for trial in trials:
        rows = values(experiment.rows(trial.trial_id))
        assert rows == [*range(20), trial.sequence_id]
        assert FORGED_VALUE not in rows
    warnings = [trial.warning for trial in trials]
    assert all("check who may write to the shared storage" in warning for warning in warnings), warnings


def test_the_manager_ignores_an_unregistered_attempt_without_attempt_json_and_warns_about_it(
    a_real_experiment, monkeypatch
):
    """The manager has never read the attempt, so the attempt is not registered."""
    monkeypatch.setattr(transports_module, "RECONNECT_GRACE_S", 600.0)
    experiment = a_real_experiment(TWICE, maxTrialNum=1, trialConcurrency=1)
    workspace = experiment.folder.workspace
    jobs = partial(JobsHere, experiment.config, workspace, experiment.folder.jobs)

    async def play():
        async with a_manager_here(experiment, jobs, told=UNREACHABLE) as engine:
            metrics = []
            await until(
                lambda: metrics.extend(workspace.trials.rglob("metrics")) or metrics, "it has metrics"
            )
            await until(lambda: metrics[0].read_bytes().count(b"PERIODICAL") == 42, "it has reported")
            attempt = workspace.attempt_folder_of(metrics[0])
            (attempt / "attempt.json").unlink()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("TRIAL_KEEPER_WORKSPACE") == str(workspace.root):
                        process.send_signal(signal.SIGKILL)
            await until(engine.finished.is_set, "the experiment is over")
            await engine.until_stopped()
            (trial,) = engine.experiment.trials.values()
            return attempt, trial

    attempt, trial = asyncio.run(play())
    assert (trial.state.value, experiment.rows(trial.trial_id)) == ("FAILED", [])
    assert (
        f"ignored {attempt}: it has no attempt.json, so what it has reported does not count" in trial.warning
    )


@pytest.mark.parametrize("retries", [0, 1])
def test_the_metrics_of_two_attempts_are_not_mixed_if_the_folder_of_the_first_attempt_was_removed(
    a_real_experiment, retries
):
    experiment = a_real_experiment(TWICE, maxTrialNum=1, trialConcurrency=1, maxTrialRetry=retries)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 42, "the first run has reported")
    (trial,) = experiment.get("/trials")
    attempts = experiment.folder.workspace.trial(trial["id"]).attempts
    (first,) = attempts.iterdir()
    shutil.rmtree(first)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # The keeper and its guard have this variable in their environment, so both are killed.
            if process.environ().get("TRIAL_KEEPER_WORKSPACE") == str(experiment.folder.workspace.root):
                process.send_signal(signal.SIGKILL)
    experiment.wait_for_status("DONE", is_stored=True)
    (trial,) = experiment.get("/trials")
    rows = values(experiment.rows(trial["id"]))
    if retries:
        assert (trial["state"], trial["value"], trial["attempt"]) == ("SUCCEEDED", 2042.0, 1)
        assert rows == [2000 + number for number in range(43)]
        (second,) = attempts.iterdir()
        assert second.name != first.name
    else:
        assert trial["state"] == "FAILED"
        assert rows == [1000 + number for number in range(len(rows))], "stored rows must be kept"
