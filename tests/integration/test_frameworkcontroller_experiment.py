"""Whole experiments with the real nnictl on a Kubernetes cluster of our own, each pod with a real keeper."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from azure_here import ACCOUNT, SECRET, SHARE, VAULT, Azure, new_key
from kube_api import KubeCluster
from kube_controllers import FRAMEWORKS
from kube_definitions import FRAMEWORK
from kube_store import ACCOUNTS, CLAIMS, CONFIG_MAPS, DEFINITIONS, PODS, SECRETS
from real_experiment import wait_until

from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.workspace import Workspace

pytest.importorskip("kubernetes")

BIN = Path(sys.executable).parent
TRAIN = """\
import os
import nni_sdk
print("in", os.environ["FC_FRAMEWORK_NAME"], "of", os.environ["TEAM"])
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
nni_sdk.report_final_result(x)
"""
ROLE = {
    "name": "worker",
    "taskNum": 1,
    "frameworkAttemptCompletionPolicy": {"minFailedTaskCount": 1, "minSucceededTaskCount": 1},
    "command": "TEAM='it''s $HOME' python3 train.py",
    "gpuNum": 0,
    "cpuNum": 1,
    "memoryMB": 512,
    "image": "me/train:1",
}


class Place:
    """A home with an experiment, and the cluster that it is for."""

    def __init__(self, folder, cluster):
        self.folder, self.cluster = folder, cluster
        self.work, self.storage = folder / "work", folder / "storage"
        self.storage.mkdir()
        self.work.mkdir()
        (self.work / "train.py").write_text(TRAIN)
        (self.work / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
        self.config = {
            "authorName": "ada",
            "experimentName": "on kubernetes",
            "trialConcurrency": 2,
            "maxTrialNum": 3,
            "trainingServicePlatform": "frameworkcontroller",
            "searchSpacePath": "search_space.json",
            "logDir": "../experiments",
            "useAnnotation": False,
            "tuner": {"builtinTunerName": "Random", "classArgs": {"optimize_mode": "maximize"}},
            "trial": {"codeDir": ".", "taskRoles": [ROLE]},
            "frameworkcontrollerConfig": {
                "storage": "pvc",
                "pvc": {"path": str(self.storage), "name": "nni"},
            },
        }
        (folder / "kubeconfig").write_text(cluster.api.kubeconfig())
        self.environ = {}

    def nnictl(self, *arguments):
        (self.work / "config.yml").write_text(json.dumps(self.config))
        outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
        return subprocess.run(
            [str(BIN / "nnictl"), *arguments],
            cwd=self.work,
            env=outside
            | {
                "HOME": str(self.folder),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "KUBECONFIG": str(self.folder / "kubeconfig"),
            }
            | self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def create(self, *options):
        return self.nnictl("create", "--config", "config.yml", "--port", "auto", *options)

    def workspace(self, done):
        (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
        return Workspace(self.storage / experiment_id)

    def is_clean(self):
        store = self.cluster.store
        return not any(store.list(kind) for kind in (FRAMEWORKS, PODS, SECRETS, CONFIG_MAPS))


@pytest.fixture
def place(tmp_path):
    node = tmp_path / "node"
    node.mkdir()
    with KubeCluster(node, {"nni": tmp_path / "storage"}) as cluster:
        cluster.store.create(DEFINITIONS, "", FRAMEWORK)
        cluster.store.create(CLAIMS, "default", {"metadata": {"name": "nni"}})
        yield Place(tmp_path, cluster)


def trials_of(workspace):
    return sorted(path.name for path in workspace.trials.iterdir())


def output_of(workspace, trial_id, task="worker-0"):
    return workspace.attempt(AttemptKey(trial_id, 0, task)).stream(Stream.STDOUT).read_text()


def test_an_experiment_runs_one_framework_per_trial_and_leaves_nothing_on_the_cluster(place):
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    assert f"run jobs on FrameworkController at {place.cluster.api.url}, in namespace default" in done.stdout
    workspace = place.workspace(done)
    trials = trials_of(workspace)
    assert len(trials) == 3
    for trial in trials:
        name = f"nniexp{workspace.root.name}trial{trial}".lower()
        assert output_of(workspace, trial) == f"in {name} of it" + "s $HOME\n"
    wait_until(place.is_clean, "nothing is left", 20)
    asked = place.cluster.api.counted()
    assert asked["create", "frameworks"] == 3
    assert asked["list", "frameworks"] == asked["list", "pods"] == 1


def test_every_role_runs_its_own_command_and_reused_jobs_run_many_trials(place):
    place.cluster.store.create(ACCOUNTS, "default", {"metadata": {"name": "frameworkbarrier"}})
    ps = ROLE | {"name": "ps", "command": "echo $FB_WORKER_ADDRESSES"}
    ps["frameworkAttemptCompletionPolicy"] = {"minFailedTaskCount": 1, "minSucceededTaskCount": -1}
    place.config["trial"]["taskRoles"] = [ps, ROLE | {"taskNum": 1}]
    place.config["frameworkcontrollerConfig"] |= {"reuse": True, "serviceAccountName": "frameworkbarrier"}
    place.config |= {"maxTrialNum": 2, "trialConcurrency": 1}
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    workspace = place.workspace(done)
    trials = trials_of(workspace)
    assert len(trials) == 2
    for trial in trials:
        assert output_of(workspace, trial, "ps-0") == "127.0.0.1:4001\n"
        assert f"in nniexp{workspace.root.name.lower()}env0 of" in output_of(workspace, trial)
    wait_until(place.is_clean, "nothing is left", 20)
    assert place.cluster.api.counted()["create", "frameworks"] == 1


def test_what_the_cluster_lacks_is_said_at_once_and_nothing_is_made(place):
    place.config["frameworkcontrollerConfig"] |= {"serviceAccountName": "nobody", "namespace": "default"}
    place.config["frameworkcontrollerConfig"]["pvc"] = {"path": str(place.storage), "name": "other"}
    place.cluster.api.denied.add(("create", "frameworks"))
    done = place.create()
    assert done.returncode == 1
    for words in (
        "this login may not create frameworks in namespace default",
        "there is no ServiceAccount nobody in namespace default",
        "there is no PersistentVolumeClaim other in namespace default",
    ):
        assert words in done.stderr
    assert not (place.folder / "experiments").exists()
    assert list(place.storage.iterdir()) == []


@pytest.fixture
def azure(place):
    pytest.importorskip("azure.storage.fileshare")
    with Azure(place.folder / "azure") as azure:
        place.environ = azure.environ
        place.cluster.node.exports[ACCOUNT, SHARE, azure.key] = azure.share
        place.storage = azure.share
        section = place.config["frameworkcontrollerConfig"]
        section |= {
            "storage": "azureStorage",
            "azureStorage": {"accountName": ACCOUNT, "azureShare": SHARE},
            "keyVault": {"vaultName": VAULT, "name": SECRET},
        }
        del section["pvc"]
        yield azure


def test_on_azure_files_the_pods_find_all_on_the_share_and_the_key_is_gone_with_the_jobs(place, azure):
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    workspace = place.workspace(done)
    trials = trials_of(workspace)
    assert len(trials) == 3
    for trial in trials:
        assert output_of(workspace, trial).startswith(f"in nniexp{workspace.root.name}trial{trial}".lower())
    wait_until(place.is_clean, "nothing is left", 20)
    assert place.cluster.api.counted()["create", "secrets"] == 6
    here = place.folder / "experiments" / workspace.root.name
    assert not list(here.glob("trials/*/attempts/*")), "what trials write is on the share alone"
    for path in [*here.rglob("*"), *workspace.root.rglob("*")]:
        assert not path.is_file() or azure.key.encode() not in path.read_bytes(), path
    log = place.nnictl("log", "trial", workspace.root.name, "--trial-id", trials[0])
    assert log.returncode == 0, log.stderr


def test_what_azure_lacks_is_said_beside_what_the_cluster_lacks(place, azure):
    azure.key = new_key("not the vault's")
    place.cluster.api.denied.add(("create", "secrets"))
    done = place.create()
    assert done.returncode == 1
    assert "this login may not create secrets in namespace default" in done.stderr
    assert "put the account's key of today into the vault" in done.stderr
    assert not (place.folder / "experiments").exists()
    assert azure.writes() == []
