"""Full disks and hostile users beside an experiment on the local OpenPAI; all processes are real."""

import contextlib
import ctypes
import os
import subprocess

import psutil
import pytest
from amounts import amount
from deadlines import scaled_s
from free_ports import free_port_pair
from openpai_home import ENDLESS, created, job_states, jobs, processes_of, trials, trials_here
from real_experiment import wait_until
from second_user import a_flood, a_forger

from nni_manager.client.experiments import resolve
from nni_manager.local_openpai import daemon
from nni_manager.local_openpai.daemon import StateFolder

pytestmark = pytest.mark.timeout(300)

TRIALS = amount(4, 50)
PTRACE_ATTACH, PTRACE_DETACH, WALL = 16, 17, 0x40000000


def mounted(folder):
    """Mount a small disk at the folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder.mkdir(exist_ok=True)
    words = ("mount", "-t", "tmpfs", "-o", "size=64m", "none", folder)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr}")
    return folder


def filled(folder):
    """Fill the disk completely."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (2**16, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


@pytest.fixture
def small_disk(tmp_path):
    """A small disk that contains the whole home of this test."""
    yield mounted(tmp_path)
    subprocess.run(["umount", "-l", tmp_path], check=True)


def two_that_run(home, nnictl):
    """Create an experiment with two trials that run until they are stopped; return its id."""
    (home / "work" / "train.py").write_text(ENDLESS)
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto"), replace={"maxTrialNum: 3": "maxTrialNum: 2"}
    )
    experiment_id = created(done)
    wait_until(
        lambda: [each["intermediateCount"] for each in trials_here(experiment_id)] == [1, 1],
        "both trials report",
    )
    return experiment_id


def of_jobs(home):
    """The processes of jobs: keepers, guards, trials, and their parents."""
    return [each for each in processes_of(home) if "PAI_JOB_NAME" in each.environ()]


def test_nnictl_stop_ends_all_jobs_while_the_managers_disk_is_full(home, nnictl):
    mounted(home / "experiments")
    try:
        experiment_id = two_that_run(home, nnictl)
        for each in of_jobs(home):
            with contextlib.suppress(psutil.NoSuchProcess):  # a process may have exited since it was listed
                if each.cmdline()[-1:] == ["trial_keeper"]:  # a keeper or its guard
                    each.suspend()
        filled(home / "experiments")
        done = nnictl("stop", experiment_id)
        assert done.returncode == 1
        assert f"cannot record that experiment {experiment_id} was stopped" in done.stderr
        assert "disk is full" in done.stderr
        assert not of_jobs(home)
        assert "RUNNING" not in jobs(nnictl, experiment_id).values()
        (home / "experiments" / "filler").unlink()
        assert nnictl("resume", experiment_id, "--port", "auto").returncode == 0
        wait_until(
            lambda: not {"RUNNING", "WAITING"} & {each["state"] for each in trials_here(experiment_id)},
            "no trial runs",
        )
        assert [each["intermediateCount"] for each in trials(nnictl, experiment_id)] == [1, 1]
        # nnictl fails if the experiment has ended already.
        assert nnictl("stop", experiment_id).returncode in (0, 1)
    finally:
        subprocess.run(["umount", "-l", home / "experiments"], check=True)


def test_nnictl_stop_ends_all_jobs_while_every_disk_is_full(small_disk, own_home, nnictl):
    experiment_id = two_that_run(own_home, nnictl)
    filled(small_disk)
    done = nnictl("stop", experiment_id)
    assert done.returncode == 1
    assert not of_jobs(own_home)
    # The cluster cannot record the end of its jobs, so nnictl cannot confirm that they have ended.
    assert "nnictl openpai stop nni_exp_" in done.stderr
    (small_disk / "filler").unlink()
    wait_until(
        lambda: "RUNNING" not in job_states(experiment_id).values(),
        "the cluster has recorded the end of its jobs",
    )


def test_nnictl_stop_wakes_a_suspended_cluster_process_and_then_ends_all_jobs(home, nnictl):
    experiment_id = two_that_run(home, nnictl)
    psutil.Process(StateFolder.of_user().process().pid).suspend()
    done = nnictl("stop", experiment_id)
    assert (done.returncode, done.stderr) == (0, "")
    assert not of_jobs(home)
    assert [each["status"] for each in trials(nnictl, experiment_id)] == ["USER_CANCELED"] * 2
    # The state is not always STOPPED: the manager also stops the trials through their keepers, so jobs may end before the
    # cluster reads the stop request.
    assert set(job_states(experiment_id).values()) <= {"STOPPED", "SUCCEEDED", "FAILED"}


@contextlib.contextmanager
def held_by_a_debugger(pid):
    """Stop a process with ptrace, so that SIGCONT does not resume it. At the end of the block, release the process, or reap it if
    it was killed.
    """
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    if ptrace(PTRACE_ATTACH, pid, None, None) != 0:
        pytest.skip(f"this machine refuses ptrace: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, WALL)
    try:
        yield
    finally:
        ptrace(PTRACE_DETACH, pid, None, None)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, WALL | os.WNOHANG)


def test_a_new_local_openpai_adopts_the_jobs_of_a_suspended_service(home, nnictl, monkeypatch):
    monkeypatch.setattr(daemon, "_ANSWERS_TIMEOUT_S", 1.0)
    experiment_id = two_that_run(home, nnictl)
    state = StateFolder.of_user()
    before = state.process()
    with held_by_a_debugger(before.pid):
        daemon.replace_unresponsive(state)
    assert state.process().pid != before.pid
    assert state.process().options == before.options
    assert set(job_states(experiment_id).values()) == {"RUNNING"}
    daemon.replace_unresponsive(state)  # this call changes nothing, because the new service responds
    assert nnictl("stop", experiment_id).returncode == 0
    assert not of_jobs(home)


# The trial waits until the test creates the file `go on`, after the attacks of the other user have started. Its final result is
# its sequence id.
LATE = """\
import os, time
import nni_sdk
nni_sdk.get_next_parameter()
while not os.path.exists("../../../../../../go on"):
    time.sleep(0.05)
for i in range(20):
    nni_sdk.report_intermediate_result(i)
nni_sdk.report_final_result(int(os.environ["NNI_TRIAL_SEQ_ID"]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to forge as another user")
@pytest.mark.smoke
def test_results_stay_correct_while_another_user_forges_attempts_and_floods_the_port(home, nnictl):
    (home / "work" / "train.py").write_text(LATE)
    port = free_port_pair()
    done = nnictl(
        *("create", "--config", "config.yml", "--port", str(port)),
        replace={"maxTrialNum: 3": f"maxTrialNum: {TRIALS}", "trialConcurrency: 2": "trialConcurrency: 4"},
    )
    experiment_id = created(done)
    workspace = home / "storage" / experiment_id
    with a_forger(workspace, "--uninvited") as printed, a_flood(port + 1) as opened:
        wait_until(printed, "the forger has tried")
        wait_until(opened, "the port is flooded")
        (workspace / "go on").touch()
        wait_until(
            lambda: resolve(experiment_id).client().get("/summary")["status"] == "DONE",
            "the experiment is done",
            scaled_s(280),
        )
        assert printed() == ["Permission denied"]
        opened_then = opened()
        wait_until(lambda: opened() > opened_then, "the flood has lasted to the end")
    found = sorted(trials(nnictl, experiment_id), key=lambda each: each["sequenceId"])
    assert [(each["status"], each["value"], each["intermediateCount"]) for each in found] == [
        ("SUCCEEDED", float(number), 20) for number in range(TRIALS)
    ]
    assert nnictl("stop", experiment_id).returncode == 0
