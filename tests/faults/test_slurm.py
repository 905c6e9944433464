"""Slurm's daemons, nodes and jobs fail while trials run: no result is lost or stored twice, and no job is left."""

import contextlib
import os
import shutil
import signal
import sys
from collections import Counter

import pytest
from deadlines import scaled_s
from gated_trials import GatedExperiment, gated
from real_experiment import wait_until
from slurm_here import NODES, a_slurm_here
from slurm_login_node import a_login_node

from trial_keeper import processes

pytestmark = pytest.mark.timeout(400)

GATED = gated("SLURMD_NODENAME")


class Place(GatedExperiment):
    """An experiment on a cluster."""

    def __init__(self, folder, slurm, experiment, node):
        super().__init__(folder, experiment)
        self.slurm, self.node = slurm, node

    def has_started(self, count):
        wait_until(lambda: len(self.ran()) >= count, f"trials have started {count} times")
        running = len({number for number, _ in self.ran()})
        self.are_stored(running)

    def second_waits(self):
        """True if the manager's summary shows that the second trial's job waits in Slurm's queue."""
        trials = self.trials()
        return len(trials) == 2 and trials[1]["id"] in self.experiment.summary()["clusterMessages"]

    def log(self):
        """The manager's log."""
        return self.experiment.folder.manager_log.read_text()

    def is_done(self, *statuses, is_listed=False):
        """Wait until the trials have these states and no job and no process is left. `is_listed`: slurmctld may still list ended
        jobs.
        """
        self.has_ended(*statuses)
        wait_until(lambda: is_listed or not self.slurm.live(), "no job is left")
        workspace = str(self.experiment.folder.workspace.root)
        wait_until(
            lambda: not processes.pids_where(lambda environ: workspace in environ.values()),
            "no process of a job is left",
        )


@pytest.fixture
def place(tmp_path, a_real_experiment):
    """Return a function that starts an experiment on a new Slurm cluster. `section`: keys of slurmConfig. `is_over_ssh`: the
    manager runs Slurm's commands on a login node.
    """
    with contextlib.ExitStack() as stack:

        def make(train=GATED, section=None, *, is_over_ssh=False, **config):
            slurm, node = stack.enter_context(a_slurm_here()), None
            section, environ = section or {}, slurm.variables
            if is_over_ssh:
                inside = slurm.variables | {"PATH": os.environ["PATH"]}
                node = stack.enter_context(a_login_node(tmp_path / "site", inside))
                section, environ = section | {"login": node.address}, node.variables
            (tmp_path / "ran").touch()
            experiment = a_real_experiment(
                train.format(folder=tmp_path),
                environ=environ,
                **slurm.experiment_keys(**section),
                **config,
            )
            stack.callback(experiment.close)
            experiment.start()
            return Place(tmp_path, slurm, experiment, node)

        yield make


@pytest.mark.smoke
def test_running_trials_continue_without_slurmctld_and_later_trials_start_after_its_restart(place):
    place = place(trialConcurrency=2, maxTrialNum=4)
    place.has_started(2)
    place.slurm.save_state()
    place.slurm.stop_controller(signal.SIGKILL)
    wait_until(lambda: "Unable to contact slurm controller" in place.problem(), "the problem is shown")
    place.open(0)
    wait_until(lambda: place.statuses()[0] == "SUCCEEDED", "a trial ends meanwhile")
    assert place.statuses()[1] == "RUNNING"
    place.slurm.start_controller()
    wait_until(lambda: not place.problem(), "the problem is over")
    place.open(1, 2, 3)
    place.is_done(*["SUCCEEDED"] * 4)
    assert Counter(number for number, _ in place.ran()) == dict.fromkeys("0123", 1)


def test_trials_continue_while_the_login_node_is_unreachable_and_later_trials_start_when_it_is_reachable(
    place,
):
    place = place(trialConcurrency=2, maxTrialNum=4, is_over_ssh=True)
    place.has_started(2)
    place.node.machine.stop()
    wait_until(lambda: "cannot reach 127.0.0.1" in place.problem(), "the problem is shown")
    place.open(0)
    wait_until(lambda: place.statuses()[0] == "SUCCEEDED", "a trial ends meanwhile")
    assert place.statuses()[1] == "RUNNING"
    place.node.machine.start()
    wait_until(lambda: not place.problem(), "the problem is over")
    place.open(1, 2, 3)
    place.is_done(*["SUCCEEDED"] * 4)
    assert Counter(number for number, _ in place.ran()) == dict.fromkeys("0123", 1)


def test_a_waiting_job_is_submitted_again_if_a_killed_slurmctld_has_lost_the_job(place):
    place = place(trialConcurrency=1, maxTrialNum=2)
    place.has_started(1)
    place.slurm.run("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=test")
    state = place.slurm.folder / "state"
    place.slurm.save_state()
    place.slurm.copy_state(place.folder / "state")
    place.open(0)
    # When the second job waits, the manager has received its id. So the manager does not retry the submission, but must detect
    # that the job is lost.
    wait_until(place.second_waits, "the second job waits for a node")
    place.slurm.stop_controller(signal.SIGKILL)
    # slurmctld saves its state only every few seconds. So after a kill, the disk may contain an older state, which this copy
    # simulates.
    shutil.rmtree(state)
    shutil.copytree(place.folder / "state", state)
    place.open(1)
    place.slurm.start_controller()
    for node in NODES:
        # If the restored state is older than the drain, the nodes are not drained. Then this command fails, and ask() ignores the
        # failure.
        place.slurm.ask("scontrol", "update", f"nodename={node}", "state=resume")
    # With its old state, slurmctld regards the first job as running for minutes, although the job has ended on its node.
    place.is_done("SUCCEEDED", "SUCCEEDED", is_listed=True)
    assert "has lost job" in place.log()
    assert Counter(number for number, _ in place.ran()) == {"0": 1, "1": 1}


def test_a_trial_is_retried_and_the_log_names_the_cause_if_its_job_is_cancelled_with_scancel(place):
    place = place(trialConcurrency=1, maxTrialNum=1, maxTrialRetry=1)
    place.has_started(1)
    place.slurm.run("scancel", *[f"--name={name}" for name in place.slurm.live()])
    place.has_started(2)
    assert "CANCELLED, but not by this manager" in place.log()
    place.open(0)
    place.is_done("SUCCEEDED")


def test_a_job_of_a_failed_node_runs_again_on_another_node_and_a_drained_node_gets_no_jobs(place):
    place = place(trialConcurrency=1, maxTrialNum=2, maxTrialRetry=1)
    place.has_started(1)
    ((_, first),) = place.ran()
    place.slurm.run("scontrol", "update", f"nodename={first}", "state=down", "reason=test")
    place.has_started(2)
    (_, (_, second)) = place.ran()
    assert second != first
    assert "NODE_FAIL on n1: a node of it failed" in place.log()
    place.slurm.run("scontrol", "update", f"nodename={first}", "state=resume")
    place.slurm.run("scontrol", "update", f"nodename={second}", "state=drain", "reason=test")
    place.open(0, 1)
    place.is_done("SUCCEEDED", "SUCCEEDED")
    assert [node for _, node in place.ran()] == [first, second, first]


NOTICED = """
import pathlib, time
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
pathlib.Path("{folder}/ran").touch()
nni.report_intermediate_result(x / 2)
while not nni.should_stop():
    time.sleep(0.05)
pathlib.Path("{folder}/noticed").touch()
"""


def test_a_trial_is_stopped_before_its_slurm_time_limit_and_its_message_names_the_limit(place):
    place = place(NOTICED, section={"timeLimit": "1"}, trialConcurrency=1, maxTrialNum=1)
    place.experiment.wait_for_status("DONE", timeout_s=scaled_s(150))
    assert (place.folder / "noticed").exists()
    (trial,) = place.trials()
    assert (trial["status"], trial["reason"]) == ("FAILED", "job lost")
    assert "before its time limit; raise timeLimit" in trial["message"]
    wait_until(lambda: not place.slurm.live(), "no job is left")


def test_a_job_that_ends_while_no_manager_runs_is_reported_after_a_resume(place):
    place = place(trialConcurrency=2, maxTrialNum=4)
    place.has_started(2)
    place.experiment.kill_manager()
    place.open(0)
    wait_until(lambda: "COMPLETED" in place.slurm.states().values(), "a job ends without a manager")
    place.experiment.start()
    place.open(1, 2, 3)
    place.is_done(*["SUCCEEDED"] * 4)
    assert Counter(number for number, _ in place.ran()) == dict.fromkeys("0123", 1)
    assert len(place.slurm.states()) == 4


ON_BOTH_NODES = """
import os, pathlib, time
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
pathlib.Path("{folder}", os.environ["SLURMD_NODENAME"]).touch()
if os.environ["SLURM_PROCID"] == "0":
    nni.report_intermediate_result(x / 2)
time.sleep(1000)
"""


def test_a_stopped_trial_leaves_no_task_on_any_of_its_nodes(place):
    command = {"command": f"srun {sys.executable} train.py", "codeDir": "."}
    place = place(
        ON_BOTH_NODES, section={"nodes": 2, "ntasks": 2}, trialConcurrency=1, maxTrialNum=1, trial=command
    )
    wait_until(lambda: all((place.folder / node).exists() for node in NODES), "a task runs on each node")
    wait_until(lambda: place.experiment.row_count() == 1, "the first task reports")
    (trial,) = place.trials()
    place.experiment.delete(f"/trial-jobs/{trial['id']}")
    place.is_done("USER_CANCELED")
    variables = (place.slurm.variables | {"NNI_TRIAL_JOB_ID": trial["id"]}).items()
    wait_until(
        lambda: all(
            map(processes.is_dead, processes.pids_where(lambda environ: variables <= environ.items()))
        ),
        "no process of the trial is left",
    )
