"""TrainJobs of Kubeflow Trainer, which extend a runtime of the cluster. All tasks of a job have the same role: its nodes.

A job's changes to its runtime's pods are called podTemplateOverrides before Trainer 2.2, and runtimePatches since. The
document has both: a server drops an unknown field, and preflight refuses a server that supports neither. Neither field can
set a pod's termination grace period.

Source: trainer.kubeflow.org/v1alpha1 TrainJob, Kubeflow Trainer 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from nni_manager.training_services.kubeflow.common import ConditionedOperator
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.render import TERMINATION_MARGIN_S, pod_spec
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.settings import KeeperSettings

# The name of the training job in runtimes, and of its container.
_NODE = "node"
_MANAGER = "trial-keeper"
# Kubernetes' default, which runtimes do not change.
_POD_GRACE_S = 30


class TrainJobs(ConditionedOperator):
    """TrainJobs. A job succeeds when all its nodes have succeeded."""

    title = software = "Kubeflow Trainer"
    group, kind = "trainer.kubeflow.org", "TrainJob"
    stages: ClassVar = {"Suspended": Stage.WAITING, "Complete": Stage.ENDED, "Failed": Stage.ENDED}

    @property
    def required_objects(self) -> tuple[tuple[Resource, str], ...]:
        """Includes the runtime."""
        kind, name = self._runtime
        runtimes = replace(
            self.resource, plural=f"{kind.lower()}s", kind=kind, is_in_namespace=kind == "TrainingRuntime"
        )
        return (*super().required_objects, (runtimes, name))

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Nodes get their storage through one of these; Trainer 2.0 had a different field."""
        return ("podTemplateOverrides", "runtimePatches")

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """The reference to a runtime, and the job's changes to that runtime."""
        (role,) = self.config.roles
        settings = replace(settings, grace_s=min(settings.grace_s, _POD_GRACE_S - TERMINATION_MARGIN_S))
        pod = pod_spec(self.config, role, name, settings, container=_NODE)
        (container,) = pod["containers"]
        added: Document = {
            "volumes": pod["volumes"],
            "containers": [{"name": _NODE, "volumeMounts": container["volumeMounts"]}],
            **{key: pod[key] for key in ("serviceAccountName", "imagePullSecrets") if key in pod},
        }
        template = {"metadata": {"labels": labels}, "spec": added}
        node = {"name": _NODE, "template": {"spec": {"template": template}}}
        kind, runtime = self._runtime
        return {
            "runtimeRef": {"apiGroup": self.group, "kind": kind, "name": runtime},
            "trainer": {
                "image": container["image"],
                "command": container["command"],
                "env": container["env"],
                "numNodes": role.tasks,
                "resourcesPerNode": container["resources"],
            },
            "podTemplateOverrides": [{"targetJobs": [{"name": _NODE}], **template}],
            "runtimePatches": [
                {
                    "manager": _MANAGER,
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
                }
            ],
        }

    def pod_counts_of(self, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The counts of the nodes."""
        return [each for each in status.get("jobsStatus") or [] if each.get("name") == _NODE]

    @property
    def _runtime(self) -> tuple[str, str]:
        """The runtime's kind and name."""
        kind, _, name = str(self.config.runtime).rpartition("/")
        return kind or "ClusterTrainingRuntime", name
