"""SSH connections, sshd, machines and the manager fail while trials run.

No result is lost or stored twice, and no process is left.
"""

import contextlib
import getpass
import json
import sys
from collections import Counter

import pytest
from deadlines import DEADLINE_S
from gated_trials import GatedExperiment, gated
from real_experiment import wait_until
from ssh_machines import ssh_machines_here

from nni_manager.training_services.platform import platform_of
from trial_keeper import processes

pytestmark = pytest.mark.timeout(400)

GATED = gated("MACHINE")
# The trial saves a checkpoint after its first result, and waits until the keeper has signed the checkpoint.
CHECKPOINTED = """
import os, pathlib, time
import nni_sdk as nni
folder, number = pathlib.Path("{folder}"), nni.get_sequence_id()
x = nni.get_next_parameter()["x"]
with (folder / "ran").open("a") as ran:
    ran.write(f"{{number}} {{os.environ['MACHINE']}}\\n")
found = nni.load_checkpoint()
if found is None:
    nni.report_intermediate_result(x / 2)
    pathlib.Path("state").write_text("saved")
    nni.save_checkpoint("state")
    while not pathlib.Path(os.environ["NNI_SYS_DIR"], "checkpoints.json").exists():
        time.sleep(0.02)
    (folder / f"saved-{{number}}").touch()
while not (folder / str(number)).exists():
    time.sleep(0.02)
(folder / f"found-{{number}}").write_text(found and pathlib.Path(found).read_text() or "")
nni.report_final_result(x)
"""


class Place(GatedExperiment):
    """An experiment on two machines."""

    def __init__(self, folder, site, experiment):
        super().__init__(folder, experiment)
        self.site = site

    def machine_of(self, number):
        return self.site.machines[dict(self.ran())[str(number)]]

    def has_started(self, *numbers):
        wait_until(lambda: {each for each, _ in self.ran()} >= {*map(str, numbers)}, f"trials {numbers} run")
        self.are_stored(len(self.ran()))

    def has(self, number, status):
        wait_until(lambda: self.statuses()[number] == status, f"trial {number} is {status}")

    def has_no_problem(self):
        wait_until(lambda: not self.problem(), "the problem is over")

    def left(self):
        """The processes of jobs on all machines."""
        return processes.pids_where(
            lambda environ: any(
                "/home/.cache/trial-keeper/" in environ.get(name, "")
                and environ[name].startswith(str(self.folder))
                for name in ("TRIAL_KEEPER_WORKSPACE", "NNI_SYS_DIR")
            )
        )

    def is_done(self, *statuses):
        self.has_ended(*statuses)
        wait_until(lambda: not self.left(), "no process of a job is left")

    def each_ran_once(self):
        assert {*Counter(number for number, _ in self.ran()).values()} == {1}


@pytest.fixture
def place(tmp_path, a_real_experiment):
    """Return a function that starts the manager of an experiment. Its jobs run on two machines."""
    with contextlib.ExitStack() as stack:

        def make(reuse=False, train=GATED, conf="", gpus=0, gpus_in_use=0, **config):
            site = stack.enter_context(ssh_machines_here(tmp_path, "one", "two", conf=conf))
            for machine in site.machines.values():
                machine.set_gpus(gpus, in_use=gpus_in_use)
            (tmp_path / "ran").touch()
            machines = [
                {"ip": "127.0.0.1", "port": each.port, "username": getpass.getuser()}
                for each in site.machines.values()
            ]
            experiment = a_real_experiment(
                train.format(folder=tmp_path),
                environ=site.variables,
                trainingServicePlatform="remote",
                machineList=machines,
                remoteConfig={"reuse": reuse},
                **config,
            )
            stack.callback(experiment.close)
            experiment.start()
            return Place(tmp_path, site, experiment)

        yield make


@pytest.mark.parametrize("reuse", [False, True])
def test_trials_continue_after_the_ssh_connections_are_cut(place, reuse):
    place = place(reuse, trialConcurrency=2, maxTrialNum=4)
    place.has_started(0, 1)
    assert {machine for _, machine in place.ran()} == {"one", "two"}
    for machine in place.site.machines.values():
        machine.cut()
    place.open(0, 1)
    place.has_started(2, 3)
    place.has_no_problem()
    for machine in place.site.machines.values():
        machine.cut()
    place.open(2, 3)
    place.is_done(*["SUCCEEDED"] * 4)
    place.each_ran_once()


def test_an_unreachable_machine_keeps_its_trial_and_another_machine_runs_further_trials(place):
    place = place(trialConcurrency=2, maxTrialNum=4)
    place.has_started(0, 1)
    away = place.machine_of(1)
    away.stop()
    wait_until(lambda: f"127.0.0.1:{away.port} over SSH" in place.problem(), "the problem is shown")
    place.open(0, 1, 2)
    place.has_started(2)
    place.has(2, "SUCCEEDED")
    assert place.statuses()[:2] == ["SUCCEEDED", "RUNNING"]
    assert place.machine_of(2) is place.machine_of(0)
    away.start()
    place.has(1, "SUCCEEDED")
    place.open(3)
    place.is_done(*["SUCCEEDED"] * 4)
    place.has_no_problem()
    place.each_ran_once()


@pytest.mark.parametrize("reuse", [False, True])
def test_a_resumed_manager_adopts_the_running_trials_of_a_killed_manager(place, reuse):
    place = place(reuse, trialConcurrency=2, maxTrialNum=4)
    place.has_started(0, 1)
    place.experiment.kill_manager()
    place.open(0)
    place.experiment.start()
    place.has(0, "SUCCEEDED")
    place.open(1, 2, 3)
    place.is_done(*["SUCCEEDED"] * 4)
    place.each_ran_once()


def test_an_experiment_can_be_resumed_while_one_machine_is_unreachable(place):
    place = place(trialConcurrency=2, maxTrialNum=3)
    place.has_started(0, 1)
    away = place.machine_of(0)
    place.experiment.kill_manager()
    away.stop()
    place.open(0, 1)
    place.experiment.start()
    place.has(1, "SUCCEEDED")
    assert place.statuses()[0] == "RUNNING"
    place.has_started(2)
    away.start()
    place.has(0, "SUCCEEDED")
    place.open(2)
    place.is_done(*["SUCCEEDED"] * 3)
    place.each_ran_once()


@pytest.mark.smoke
def test_jobs_on_a_restarted_machine_are_lost_and_their_trials_are_retried(place):
    place = place(trialConcurrency=2, maxTrialNum=2, maxTrialRetry=1)
    place.has_started(0, 1)
    machine = place.machine_of(0)
    machine.stop()
    processes.end_all(machine.processes)
    for file in machine.home.glob(".cache/trial-keeper/*/*/jobs/*.json"):
        document = json.loads(file.read_bytes())
        for role in ("keeper", "shell"):
            document[role]["boot_id"] = "an-earlier-boot"
        file.write_text(json.dumps(document))
        file.with_suffix(".exit").unlink(missing_ok=True)
    machine.start()
    wait_until(lambda: len(place.ran()) == 3, "the trial runs again")
    place.open(0, 1)
    place.experiment.wait_for_status("DONE", is_stored=True, timeout_s=DEADLINE_S)
    assert place.statuses() == ["SUCCEEDED"] * 2
    assert (
        "has been restarted" in place.trials()[0]["warning"] + place.experiment.folder.manager_log.read_text()
    )


def test_a_retried_trial_returns_to_the_machine_that_has_its_checkpoint(place):
    place = place(train=CHECKPOINTED, trialConcurrency=2, maxTrialNum=2, maxTrialRetry=1)
    place.has_started(0, 1)
    number = next(int(number) for number, machine in place.ran() if machine == "two")
    place.open(1 - number)
    place.has(1 - number, "SUCCEEDED")
    wait_until((place.folder / f"saved-{number}").exists, "the checkpoint is saved")
    # After the kill, both machines are free. A retry normally goes to `one`, the first machine of machineList. Only the
    # checkpoint makes the retry prefer `two`.
    processes.end_all(place.site.machines["two"].processes)
    wait_until(lambda: len(place.ran()) == 3, "the trial runs again")
    place.open(number)
    place.is_done("SUCCEEDED", "SUCCEEDED")
    assert place.ran()[2] == (str(number), "two")
    assert (place.folder / f"found-{number}").read_text() == "saved"


def test_a_trial_fails_and_leaves_no_process_when_its_keeper_is_killed(place):
    place = place(trialConcurrency=1, maxTrialNum=1)
    place.has_started(0)
    (file,) = place.machine_of(0).home.glob(".cache/trial-keeper/*/*/jobs/*.json")
    processes.kill(json.loads(file.read_bytes())["keeper"]["pid"])
    place.is_done("FAILED")


def test_the_manager_leaves_no_process_on_the_machines_after_its_end(place):
    place = place(trialConcurrency=2, maxTrialNum=2)
    place.open(0, 1)
    place.is_done(*["SUCCEEDED"] * 2)
    place.experiment.close()
    wait_until(lambda: not place.site.processes(), "nothing runs on the machines")


def test_another_process_that_reads_trial_files_does_not_disconnect_the_manager(place, monkeypatch):
    place = place(trialConcurrency=1, maxTrialNum=1)
    place.has_started(0)
    before = sorted(place.site.processes())
    monkeypatch.setenv("HOME", str(place.site.home))
    workspace = place.experiment.folder.workspace
    with contextlib.closing(platform_of(place.experiment.config).share(workspace)) as share:
        (attempt,) = share.folders_in(workspace.trial(place.trials()[0]["id"]).attempts)
        assert attempt
    wait_until(lambda: sorted(place.site.processes()) == before, "only the reader's own program has ended")
    place.open(0)
    place.is_done("SUCCEEDED")
    assert "the connection was lost" not in place.experiment.folder.manager_log.read_text()


def test_results_are_read_from_files_if_sshd_allows_no_socket_forwarding(place):
    place = place(trialConcurrency=2, maxTrialNum=2, conf="AllowStreamLocalForwarding no\n")
    place.has_started(0, 1)
    assert "allow it with AllowStreamLocalForwarding" in place.experiment.folder.manager_log.read_text()
    place.open(0, 1)
    place.is_done("SUCCEEDED", "SUCCEEDED")


# Each trial records its machine and its GPUs, then waits for the test.
ON_GPUS = GATED.replace("os.environ['MACHINE']", "os.environ['MACHINE'] + os.environ['CUDA_VISIBLE_DEVICES']")


def test_trials_use_the_gpus_of_all_machines_and_a_waiting_trial_shows_that_it_waits_for_a_gpu(place):
    place = place(train=ON_GPUS, gpus=2, trialConcurrency=5, maxTrialNum=6, **with_gpus(1))
    place.has_started(0, 1, 2, 3)
    assert sorted(where for _, where in place.ran()) == ["one0", "one1", "two0", "two1"]
    wait_until(
        lambda: "waits for a GPU, which other trials have" in place.trials()[4]["message"],
        "the trial says what it waits for",
    )
    place.site.machines["one"].cut()
    place.experiment.kill_manager()
    place.experiment.start()
    place.open(0)
    place.has_started(4)
    assert dict(place.ran())["4"] == dict(place.ran())["0"]
    place.open(1, 2, 3, 4, 5)
    place.is_done(*["SUCCEEDED"] * 6)
    place.each_ran_once()


def test_trials_do_not_use_gpus_that_other_programs_use(place):
    place = place(train=ON_GPUS, gpus=2, gpus_in_use=1, trialConcurrency=4, maxTrialNum=4, **with_gpus(1))
    place.has_started(0, 1)
    assert sorted(where for _, where in place.ran()) == ["one1", "two1"]
    wait_until(
        lambda: "other programs compute on GPUs of" in place.trials()[2]["message"],
        "the trial says what it waits for",
    )
    for machine in place.site.machines.values():
        machine.set_gpus(2)
    place.has_started(2, 3)
    assert sorted(where for _, where in place.ran()) == ["one0", "one1", "two0", "two1"]
    place.open(*range(4))
    place.is_done(*["SUCCEEDED"] * 4)


def with_gpus(count):
    return {"trial": {"command": f"{sys.executable} train.py", "codeDir": ".", "gpuNum": count}}
