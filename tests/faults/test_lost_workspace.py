"""The trials folder, or the link to the workspace, is lost. The manager creates it again, and the experiment ends."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from openpai_here import an_openpai_here
from real_experiment import wait_until

from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.remains import end_without_manager
from nni_manager.support.leftovers import processes_of

pytestmark = pytest.mark.timeout(180)

# Trials 0 and 1 wait until the test creates the gate file. Later trials end at once.
TRAIN = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
number = nni.get_sequence_id()
nni.report_intermediate_result(number)
while number < 2 and not os.path.exists({gate!r}):
    time.sleep(0.02)
nni.report_final_result(number)
"""


@pytest.fixture(params=["local", "openpai", "openpai-reuse"])
def experiment(request, a_real_experiment, tmp_path, monkeypatch):
    """An experiment whose manager was killed while two trials ran."""
    train = TRAIN.format(gate=str(tmp_path / "gate"))
    limits = {"trialConcurrency": 2, "maxTrialNum": 4}
    if request.param == "local":
        yield with_two_trials(a_real_experiment(train, **limits))
        return
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "openpai").mkdir()
    with an_openpai_here(tmp_path / "openpai") as here:
        keys = here.experiment_keys(reuse=request.param.endswith("reuse"))
        made = a_real_experiment(train, **limits, **keys)
        yield with_two_trials(made)
        made.close()


def with_two_trials(experiment):
    experiment.start()
    wait_until(lambda: experiment.row_count() == 2, "both trials report")
    experiment.kill_manager()
    return experiment


def test_a_resumed_experiment_without_a_trials_folder_runs_to_its_end(experiment, tmp_path):
    workspace, trials = experiment.folder.workspace, experiment.folder.workspace.trials
    shutil.rmtree(trials)
    if workspace.root != experiment.folder.path:
        # With shared storage, the experiment's folder contains a link to the workspace. The link is lost too.
        (experiment.folder.path / "workspace").unlink()
    experiment.start()
    assert experiment.folder.workspace == workspace
    assert f"{trials} was missing and has been created" in experiment.folder.manager_log.read_text()
    (tmp_path / "gate").touch()
    assert_it_ends(experiment)


# The cases below omit reused jobs, because the manager refuses the resume before it submits any job. They omit a missing
# workspace on the local platform, because the workspace is the folder of the experiment there.
@pytest.mark.parametrize(
    ("experiment", "lost"),
    [("local", "a file as trials"), ("openpai", "a file as trials"), ("openpai", "a missing workspace")],
    indirect=["experiment"],
)
def test_a_resume_without_a_workspace_is_refused_and_the_printed_remedy_works(experiment, tmp_path, lost):
    workspace = experiment.folder.workspace
    if lost == "a file as trials":
        shutil.rmtree(workspace.trials)
        workspace.trials.touch()
        told = f"cannot use {workspace.trials}: it is not a folder; move it away"
        remedy = workspace.trials.unlink
    else:
        shutil.rmtree(workspace.root)
        told = f"cannot find workspace {workspace.root}; mount its storage, or, if the workspace is lost, create an empty folder"
        remedy = workspace.root.mkdir
    with pytest.raises(AssertionError):
        experiment.start()
    assert experiment.folder.manager_stderr.read_text().splitlines()[-1].startswith(told)
    remedy()
    (tmp_path / "gate").touch()
    experiment.start()
    assert_it_ends(experiment)


@contextlib.contextmanager
def mounted_read_only(folder):
    """During the block, the folder is read-only. Open files stay writable."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a folder")
    try:
        for words in (("--bind", folder, folder), ("-o", "remount,bind,ro", folder)):
            done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no folder can be mounted here: {done.stderr}")
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("experiment", ["openpai"], indirect=True)
def test_a_resume_with_read_only_storage_is_refused_and_the_printed_remedy_works(experiment, tmp_path):
    root = experiment.folder.workspace.root
    with mounted_read_only(root), pytest.raises(AssertionError):
        experiment.start()
    told = f"cannot write to workspace {root}: Read-only file system; mount its storage read-write"
    assert experiment.folder.manager_stderr.read_text().splitlines()[-1] == told
    (tmp_path / "gate").touch()
    experiment.start()
    assert_it_ends(experiment)


def test_nnictl_stop_without_a_manager_and_without_a_workspace_ends_all_jobs(experiment):
    workspace = experiment.folder.workspace
    is_local = workspace.root == experiment.folder.path
    shutil.rmtree(workspace.trials if is_local else workspace.root)
    known = KnownExperiment(experiment.folder, None)
    assert end_without_manager(known).startswith("Ended 2 jobs (")
    assert processes_of(workspace) == []
    assert end_without_manager(known).startswith("Nothing of it runs")


def test_a_running_manager_recreates_a_removed_trials_folder(a_real_experiment, tmp_path):
    experiment = a_real_experiment(
        TRAIN.format(gate=str(tmp_path / "gate")), trialConcurrency=2, maxTrialNum=4
    )
    experiment.start()
    wait_until(lambda: experiment.row_count() == 2, "both trials report")
    shutil.rmtree(experiment.folder.workspace.trials)
    (tmp_path / "gate").touch()
    assert_it_ends(experiment)


def assert_it_ends(experiment):
    """Check that the experiment ends. The first two trials may fail, because they had files in the lost folder."""
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    assert [trial["status"] for trial in trials[2:]] == ["SUCCEEDED"] * 2, trials
    for trial in trials[:2]:
        assert trial["status"] == "SUCCEEDED" or "the trial's files are gone" in trial["message"], trial
