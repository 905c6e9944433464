"""GPUs on which other programs compute. nvidia-ml-py or amdsmi reads them through a fake driver library that the tests build."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from gpu_drivers import AMD, NVIDIA, build_driver
from real_experiment import wait_until
from user_home import BIN, environ_of, processes_of

from nni_manager.client.manager_client import ManagerClient
from nni_manager.store.folders import ExperimentFolder

CONFIG = """\
trialConcurrency: 1
maxTrialNumber: 1
trialGpuNumber: 1
searchSpaceFile: space.json
trialCommand: echo "GPU $CUDA_VISIBLE_DEVICES by $CUDA_DEVICE_ORDER" && python3 train.py
trainingService: {platform: local, useActiveGpu: false}
tuner: {name: Random}
"""
TRAIN = "import nni_sdk\nnni_sdk.get_next_parameter()\nnni_sdk.report_final_result(1)\n"
IN_NAMESPACE = ("unshare", "--mount", "sh", "-c")
# NVIDIA's driver lists its GPUs in /proc/driver/nvidia/gpus. AMD's driver lists its GPUs and the CPU in
# /sys/class/kfd/kfd/topology/nodes. An empty file system hides this machine's GPUs, and folders simulate two GPUs.
HIDDEN = "mount -t tmpfs none /proc/driver && mount -t tmpfs none /sys/class"
NODES = "/sys/class/kfd/kfd/topology/nodes"
TWO_GPUS = {
    NVIDIA: "mkdir -p /proc/driver/nvidia/gpus/0 /proc/driver/nvidia/gpus/1",
    AMD: f"for node in 0 1 2; do mkdir -p {NODES}/$node; echo $((node * 4711)) > {NODES}/$node/gpu_id; done",
}


class Machine:
    """A machine with two GPUs, and one experiment in a separate home folder."""

    def __init__(self, folder, vendor):
        self.namespace = (*IN_NAMESPACE, f'{HIDDEN} && {TWO_GPUS[vendor]} && exec "$@"', "-")
        self.folder = folder / "work"
        self.folder.mkdir()
        self.computing = folder / "computing"
        (self.folder / "config.yml").write_text(CONFIG)
        (self.folder / "space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
        (self.folder / "train.py").write_text(TRAIN)
        self.environ = (
            environ_of(self.folder)
            | build_driver(folder, vendor)
            | {"TEST_GPU_PROCESSES": str(self.computing)}
        )

    def nnictl(self, *arguments):
        done = subprocess.run(
            [*self.namespace, BIN / "nnictl", *arguments],
            cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    def create(self):
        return self.nnictl("create", "config.yml", "--port", str(free_port_pair())).stderr

    def gpus(self):
        (listed,) = json.loads(self.nnictl("experiment", "list", "--json").stdout)
        folder = ExperimentFolder(Path(listed["logDir"]))
        return ManagerClient(listed["id"], folder.running_process()).get("/gpus")

    def trial(self):
        found = json.loads(self.nnictl("trial", "ls", "--json").stdout)
        return found[0] if found else {"status": "", "message": ""}

    def succeeded(self):
        wait_until(lambda: self.trial()["status"] == "SUCCEEDED", "the trial succeeds")
        return re.search("GPU .*", self.nnictl("log", "trial", "--trial-id", self.trial()["id"]).stdout)[0]


@pytest.fixture
def machine(tmp_path, request):
    if (
        shutil.which("unshare") is None
        or subprocess.run([*IN_NAMESPACE, HIDDEN], capture_output=True).returncode
    ):
        pytest.skip("needs unshare and the right to mount below /proc")
    made = Machine(tmp_path, getattr(request, "param", NVIDIA))
    yield made
    for process in processes_of(made.folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("machine", [NVIDIA, AMD], indirect=True)
@pytest.mark.smoke
def test_a_trial_starts_on_an_idle_gpu_rather_than_on_a_gpu_in_use(machine):
    machine.computing.write_text("1 0")
    assert machine.create() == ""
    assert machine.succeeded() == "GPU 1 by PCI_BUS_ID"


def test_the_list_of_gpus_shows_the_trials_and_the_load_of_each_gpu(machine):
    machine.computing.write_text("1 0")
    os.mkfifo(machine.folder / "gate")
    (machine.folder / "train.py").write_text(f"open('gate').read()\n{TRAIN}")
    assert machine.create() == ""

    def used():
        found = machine.gpus()
        return found if found[1]["utilisationPercent"] is not None else None

    other, own = wait_until(used, "the trial reports its usage")
    assert (other["trialIds"], other["hasOtherPrograms"], other["memoryUsedBytes"]) == ([], True, None)
    assert (own["trialIds"], own["utilisationPercent"]) == ([machine.trial()["id"]], 80.0)
    with (machine.folder / "gate").open("w"):
        pass
    assert machine.succeeded() == "GPU 1 by PCI_BUS_ID"


def test_a_trial_waits_and_shows_the_reason_while_other_programs_use_all_gpus(machine):
    machine.computing.write_text("1 2")
    machine.create()
    wait_until(lambda: "other programs" in machine.trial()["message"], "the reason is shown")
    assert machine.trial()["message"] == (
        "not started yet: waits for a GPU: other programs compute on GPU 0, 1; end them, or set useActiveGpu: true to "
        "share these GPUs"
    )
    assert machine.trial()["status"] == "WAITING"
    seen = [(gpu["index"], gpu["trialIds"], gpu["hasOtherPrograms"]) for gpu in machine.gpus()]
    assert seen == [(0, [], True), (1, [], True)]
    replaced = machine.computing.with_suffix(".new")
    replaced.write_text("0 2")
    os.replace(replaced, machine.computing)
    assert machine.succeeded() == "GPU 0 by PCI_BUS_ID"


def test_the_option_use_active_gpu_permits_a_trial_on_a_gpu_in_use(machine):
    machine.computing.write_text("1 1")
    config = machine.folder / "config.yml"
    config.write_text(CONFIG.replace("useActiveGpu: false", "useActiveGpu: true"))
    machine.create()
    assert machine.succeeded() == "GPU 0 by PCI_BUS_ID"


def test_nnictl_create_warns_if_the_gpu_driver_cannot_be_queried(machine):
    machine.environ["TEST_GPUS"] = "broken"
    warning = " ".join(machine.create().split())
    assert "cannot list GPUs: the driver reports 'Driver Not Loaded'" in warning
    assert warning.endswith("until then trials also use GPUs that other programs use")
    assert machine.succeeded() == "GPU 0 by PCI_BUS_ID"
