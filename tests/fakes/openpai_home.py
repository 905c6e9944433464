"""A home with its own OpenPAI and an experiment file for it, shared by end-to-end tests."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import requests
from deadlines import DEADLINE_S
from free_ports import free_port_pair

from nni_manager.client.experiments import resolve
from nni_manager.local_openpai import daemon

BIN = Path(sys.executable).parent
TRAIN = """\
import os
import nni_sdk
print("in", os.getcwd(), flush=True)
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
nni_sdk.report_final_result(x)
"""
# Unlike TRAIN, this code does not end by itself: it reports one result and then waits for a signal.
ENDLESS = TRAIN.replace("nni_sdk.report_final", "import signal; signal.pause(); nni_sdk.report_final")
CONFIG = """\
authorName: ada
experimentName: here
trialConcurrency: 2
maxTrialNum: 3
trainingServicePlatform: pai
searchSpacePath: search_space.json
logDir: ../experiments
useAnnotation: false
tuner: {builtinTunerName: Random, classArgs: {optimize_mode: maximize}}
trial:
  command: python3 train.py
  codeDir: .
  gpuNum: 0
  cpuNum: 1
  memoryMB: 256
  image: anything
  nniManagerNFSMountPath: ../storage
  containerNFSMountPath: /mnt/confignfs-data
  paiStorageConfigName: confignfs-data
paiConfig: {userName: your_pai_user, token: your_pai_token, host: local}
"""


def environ_of(home):
    """The environment of the user of this home."""
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NNI_", "TRIAL_", "OPENPAI_"))
    }
    return outside | {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


def processes_of(home):
    """The service, managers, keepers and trials of this home; their environment contains its path."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def created(done):
    """The id of the experiment that nnictl has created."""
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    return experiment_id


def jobs(nnictl, experiment_id):
    """The state of every job of an experiment by name."""
    listed = json.loads(nnictl("openpai", "jobs", "--json").stdout)
    return {each["name"]: each["state"] for each in listed if f"_{experiment_id}_" in each["name"]}


def job_states(experiment_id):
    """The state of every job of an experiment by name, from the REST API. Polling the API costs less than running nnictl."""
    service = daemon.running(daemon.StateFolder.of_user())
    listed = requests.get(
        f"http://{service.process.address}/rest-server/api/v2/jobs",
        headers={"Authorization": f"Bearer {service.credentials.token}"},
        timeout=DEADLINE_S,
    ).json()
    return {each["name"]: each["state"] for each in listed if f"_{experiment_id}_" in each["name"]}


def trials_here(experiment_id):
    """The trials from the HTTP API, or from the store if no manager runs. Polling them costs less than running nnictl."""
    return resolve(experiment_id).get("/trials")


def attempt_of(home, experiment_id, trial_id):
    """The id of a trial's only attempt."""
    (path,) = (home / "storage" / experiment_id / "trials" / trial_id / "attempts").iterdir()
    return path.name


def trials(nnictl, experiment_id):
    """The trials as `nnictl trial ls --json` prints them."""
    return json.loads(nnictl("trial", "ls", experiment_id, "--json").stdout)


class OpenPaiHome:
    """A home whose OpenPAI runs on a free port. Its tasks are processes, or containers if `sandbox` is
    "podman".
    """

    def __init__(self, path, sandbox, environ):
        self.path = path
        self._environ = environ
        (path / "storage").mkdir()
        start = (
            "start",
            f"--port={free_port_pair()}",
            f"--storage={path}/storage",
            "--virtual-cluster=default=16,100000,0",
            f"--sandbox={sandbox}",
        )
        subprocess.run(
            [BIN / "nnictl", "openpai", *start],
            env=os.environ | environ_of(path) | environ,
            check=True,
            capture_output=True,
            timeout=DEADLINE_S,
        )

    def enter(self, monkeypatch):
        """Set the environment of its user, and write a new folder with an experiment."""
        for name, value in (environ_of(self.path) | self._environ).items():
            monkeypatch.setenv(name, value)
        work = self.path / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        (work / "train.py").write_text(TRAIN)
        (work / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
        (work / "config.yml").write_text(CONFIG)

    def is_at_rest(self):
        """True if only the service of its OpenPAI runs."""
        running = daemon.running(daemon.StateFolder(self.path / "state" / "trial-keeper" / "openpai"))
        return running is not None and [each.pid for each in processes_of(self.path)] == [running.process.pid]

    def close(self):
        """End its OpenPAI, and kill the processes that a test has left."""
        daemon.stop(daemon.StateFolder(self.path / "state" / "trial-keeper" / "openpai"))
        for process in processes_of(self.path):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
