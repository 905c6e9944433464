"""TFJobs and PyTorchJobs, of tf-operator, pytorch-operator, and the training operator that replaced both.

The restart policy is Never: any other would report an end too early. If the cluster's own rules restart a job
nevertheless, each of its keepers claims a new attempt of the trial, and the job is not terminal.

Source: kubeflow.org/v1 TFJob and PyTorchJob (older versions have the same fields); NNI v2.10 for the containers' names.
"""

from __future__ import annotations

from typing import ClassVar

from nni_manager.training_services.kubeflow.common import ConditionedOperator
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.render import pod_spec
from trial_keeper.settings import KeeperSettings


class _ReplicatedJobs(ConditionedOperator):
    """Common to TFJobs and PyTorchJobs: each role is a set of replicas."""

    title, software = "Kubeflow", "Kubeflow's training operator"
    group = "kubeflow.org"
    stages: ClassVar = {
        "Created": Stage.WAITING,
        "Suspended": Stage.WAITING,
        "Running": Stage.RUNNING,
        "Restarting": Stage.RUNNING,
        "Succeeded": Stage.ENDED,
        "Failed": Stage.ENDED,
    }
    replicas: ClassVar[str]
    """The spec's key of the replicas."""
    container: ClassVar[str]
    types: ClassVar[dict[str, str]]
    """The operator's name of each role."""
    of_job: ClassVar[Document] = {}

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """The replicas of each role."""
        made = {}
        for role in self.config.roles:
            pod = pod_spec(self.config, role, name, settings, container=self.container)
            # The operator sets the pod's restart policy, and warns if the pod has one already.
            restart_policy = pod.pop("restartPolicy")
            made[self.types[role.name]] = {
                "replicas": role.tasks,
                "restartPolicy": restart_policy,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            }
        return {self.replicas: made, **self.of_job}


class TfJobs(_ReplicatedJobs):
    """TFJobs. A job succeeds when all its workers have succeeded; parameter servers do not count."""

    kind, replicas, container = "TFJob", "tfReplicaSpecs", "tensorflow"
    decisive_role = "worker"
    types: ClassVar = {"worker": "Worker", "ps": "PS"}
    # By default, the end of the first worker ends all others.
    of_job: ClassVar = {"successPolicy": "AllWorkers"}


class PyTorchJobs(_ReplicatedJobs):
    """PyTorchJobs. A job succeeds when its master has succeeded."""

    kind, replicas, container = "PyTorchJob", "pytorchReplicaSpecs", "pytorch"
    decisive_role = "master"
    types: ClassVar = {"master": "Master", "worker": "Worker"}
