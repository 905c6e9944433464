"""Whole experiments on Kubernetes: on the fake cluster, or on the one that TEST_KUBECONFIG names.

For a real cluster, the TEST_K8S_* variables contain what a test cannot determine itself (CONTRIBUTING.md lists them).
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from attempts import AttemptNumbers, attempt_id
from deadlines import scaled_s
from kube_api import KubeCluster
from kube_controllers import FRAMEWORKS
from kube_definitions import FRAMEWORK, OF_KUBEFLOW, TORCH_DISTRIBUTED
from kube_operators import RUNTIMES
from kube_store import CLAIMS, CONFIG_MAPS, DEFINITIONS, PODS, SECRETS

from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.render import selector_of
from nni_manager.training_services.kubernetes.resources import PODS as OUR_PODS
from nni_manager.training_services.kubernetes.resources import SECRETS as OUR_SECRETS
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.workspace import Workspace

BIN = Path(sys.executable).parent
CLAIM = "nni"
_REACTS_WITHIN_S = 20.0
_PAUSE = {"name": "tensorflow", "image": "registry.k8s.io/pause:3.9"}


@dataclass(frozen=True)
class Surroundings:
    """The properties of a cluster that whole experiments need. `double`: the fake cluster, if it runs in this
    process.

    `storage` is the storage section of the experiment file, `storage_here` its folder on this machine.
    """

    kubeconfig: Path
    namespace: str
    image: str
    storage: dict
    storage_here: Path
    manager_ip: str | None = None
    service_account: str | None = None
    double: KubeCluster | None = None


def storage_of(text, here):
    """The storage section for `nfs:SERVER:/path` or `pvc:NAME`; this machine has the storage at `here`."""
    kind, _, rest = text.partition(":")
    if kind == "nfs":
        server, _, path = rest.partition(":")
        return {"storage": "nfs", "nfs": {"server": server, "path": path}}
    return {"storage": "pvc", "pvc": {"path": str(here), "name": rest}}


def named_cluster(environ):
    """The cluster that the variables name; the test is skipped if a required variable is missing."""
    missing = [name for name in ("STORAGE", "STORAGE_HERE", "IMAGE") if not environ.get(f"TEST_K8S_{name}")]
    if missing:
        pytest.skip(f"{', '.join(f'TEST_K8S_{name}' for name in missing)} not set")
    here = Path(environ["TEST_K8S_STORAGE_HERE"])
    return Surroundings(
        Path(environ["TEST_KUBECONFIG"]),
        environ.get("TEST_K8S_NAMESPACE", "default"),
        environ["TEST_K8S_IMAGE"],
        storage_of(environ["TEST_K8S_STORAGE"], here),
        here,
        environ.get("TEST_K8S_MANAGER_IP") or None,
        environ.get("TEST_K8S_SERVICE_ACCOUNT") or None,
    )


@contextlib.contextmanager
def our_cluster(folder, runs=None):
    """The fake cluster with everything that experiments need. `runs`: see Kubelet. At the end, the managers that still run are
    ended.
    """
    for name in ("node", "storage"):
        (folder / name).mkdir()
    with KubeCluster(folder / "node", {CLAIM: folder / "storage"}, runs) as cluster:
        for each in (FRAMEWORK, *OF_KUBEFLOW):
            cluster.store.create(DEFINITIONS, "", each)
        cluster.store.create(RUNTIMES, "", TORCH_DISTRIBUTED)
        cluster.store.create(CLAIMS, "default", {"metadata": {"name": CLAIM}})
        (folder / "kubeconfig").write_text(cluster.api.kubeconfig())
        storage = storage_of(f"pvc:{CLAIM}", folder / "storage")
        try:
            yield Surroundings(
                *(folder / "kubeconfig", "default", "me/train:1", storage, folder / "storage"), double=cluster
            )
        finally:
            end_managers(folder / "experiments")


@contextlib.contextmanager
def surroundings(folder):
    """The cluster of TEST_KUBECONFIG, or the fake cluster if it is not set. At the end, the managers that still run are ended."""
    if not os.environ.get("TEST_KUBECONFIG"):
        with our_cluster(folder) as around:
            yield around
        return
    try:
        yield named_cluster(os.environ)
    finally:
        end_managers(folder / "experiments")


def end_managers(experiments):
    """End the managers that still run, because their experiment has not ended or because a failed test has left them."""
    for path in experiments.iterdir() if experiments.is_dir() else ():
        if (manager := ExperimentFolder(path).running_process()) is not None:
            process = psutil.Process(manager.pid)
            process.terminate()
            with contextlib.suppress(psutil.NoSuchProcess):
                try:
                    process.wait(scaled_s(5))
                except psutil.TimeoutExpired:
                    process.kill()


def reacts(cluster, resource, namespace):
    """Create a job that starts no pods, and delete it again. True if a controller writes the status of the job."""

    def replica(container):
        spec = {"containers": [_PAUSE | {"name": container}]}
        return {"replicas": 1, "restartPolicy": "Never", "template": {"spec": spec}}

    paused = {"runPolicy": {"suspend": True}}
    specs = {
        # FrameworkController starts no pods for a Framework of the type Create until its execution type is changed.
        "Framework": {
            "executionType": "Create",
            "retryPolicy": {"fancyRetryPolicy": False, "maxRetryCount": 0},
            "taskRoles": [],
        },
        "TFJob": paused | {"tfReplicaSpecs": {"Worker": replica("tensorflow")}},
        "PyTorchJob": paused | {"pytorchReplicaSpecs": {"Master": replica("pytorch")}},
        "TrainJob": {"suspend": True, "runtimeRef": {"name": "torch-distributed"}},
        "Job": {"suspend": True, "template": {"spec": {"containers": [_PAUSE], "restartPolicy": "Never"}}},
    }
    name = f"trialkeeperprobe{uuid.uuid4().hex[:6]}"
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "spec": specs[resource.kind]}
    cluster.create(resource, namespace, body | {"metadata": {"name": name, "namespace": namespace}})
    deadline_s = time.monotonic() + _REACTS_WITHIN_S
    try:
        while not cluster.get(resource, namespace, name).get("status"):
            if time.monotonic() > deadline_s:
                return False
            threading.Event().wait(0.2)
        return True
    finally:
        cluster.delete(resource, namespace, name)


class Place:
    """A home with an experiment and its cluster. Tests may change `config` and `environ` before `create`."""

    def __init__(self, folder, around, train):
        self.folder, self.around = folder, around
        self.work, self.storage = folder / "work", around.storage_here
        self.environ = {}
        self.work.mkdir()
        (self.work / "train.py").write_text(train)
        (self.work / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
        self.config = {
            "authorName": "ada",
            "experimentName": "on kubernetes",
            "trialConcurrency": 2,
            "maxTrialNum": 3,
            "searchSpacePath": "search_space.json",
            "logDir": str(folder / "experiments"),
            "useAnnotation": False,
            "tuner": {"builtinTunerName": "Random", "classArgs": {"optimize_mode": "maximize"}},
            "trial": {"codeDir": "."},
        }
        if around.manager_ip is not None:
            self.config["nniManagerIp"] = around.manager_ip

    @property
    def cluster(self):
        """The fake cluster; on any other cluster the test is skipped."""
        if self.around.double is None:
            pytest.skip("needs the fake cluster")
        return self.around.double

    def uses(self, resource):
        """Skip the test if the cluster does not serve this resource."""
        with contextlib.closing(Kubernetes(self.around.kubeconfig)) as cluster:
            if not cluster.serves(resource):
                pytest.skip(f"{cluster.login.address} has no {resource.plural} of {resource.api_version}")
            if self.around.double is None and not reacts(cluster, resource, self.around.namespace):
                pytest.skip(
                    f"{cluster.login.address} has {resource.plural}, but no controller of them: none has written a status "
                    f"within {_REACTS_WITHIN_S:g} s"
                )

    def start(self, *arguments):
        """Start nnictl."""
        (self.work / "config.yml").write_text(json.dumps(self.config))
        outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
        return subprocess.Popen(
            [str(BIN / "nnictl"), *arguments],
            cwd=self.work,
            env=outside
            | {
                "HOME": str(self.folder),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "KUBECONFIG": str(self.around.kubeconfig),
            }
            | self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def nnictl(self, *arguments):
        """Run nnictl to its end."""
        return self.completed(self.start(*arguments))

    def completed(self, process):
        """Wait until a started nnictl exits; return the completed process."""
        try:
            out, err = process.communicate(timeout=scaled_s(240))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def create(self, *options):
        return self.nnictl("create", "--config", "config.yml", "--port", "auto", *options)

    def workspace(self, done):
        (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
        return Workspace(self.storage / experiment_id)

    def left(self, workspace, resource: Resource):
        """The experiment's remaining jobs, pods and secrets on the cluster; on the fake cluster, all
        remaining objects.
        """
        selector = selector_of(workspace.root.name)
        with contextlib.closing(Kubernetes(self.around.kubeconfig)) as cluster:
            found = [
                f"{each.plural}/{document['metadata']['name']}"
                for each in (resource, OUR_PODS, OUR_SECRETS)
                for document in cluster.objects(each, self.around.namespace, selector)[0]
            ]
        if self.around.double is not None:
            store = self.around.double.store
            for kind in (FRAMEWORKS, PODS, SECRETS, CONFIG_MAPS):
                found += [each["metadata"]["name"] for each in store.list(kind)]
        return found


def worker_role(command, image=None):
    """A FrameworkController role of one task, in the format of experiment files. The trial ends when this task ends."""
    role = {
        "name": "worker",
        "taskNum": 1,
        "frameworkAttemptCompletionPolicy": {"minFailedTaskCount": 1, "minSucceededTaskCount": 1},
        "command": command,
        "gpuNum": 0,
        "cpuNum": 1,
        "memoryMB": 512,
    }
    return role if image is None else role | {"image": image}


def trials_of(workspace):
    """The ids of an experiment's trials."""
    return sorted(path.name for path in workspace.trials.iterdir())


def output_of(workspace, trial_id, task="worker-0"):
    """The output of a trial."""
    folder = AttemptNumbers(workspace).folder(AttemptKey(trial_id, attempt_id(0), task))
    return folder.stream(Stream.STDOUT).read_text()
