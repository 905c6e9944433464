"""TrainJobs of Kubeflow Trainer, which extend a runtime of the cluster. All tasks of a job have the same role: its nodes.

A job's changes to its runtime's pods are called podTemplateOverrides before Trainer 2.2, and runtimePatches since. The
document has both: a server drops an unknown field, and preflight refuses a server that supports neither. Neither field can
set a pod's termination grace period.

Source: trainer.kubeflow.org/v1alpha1 TrainJob, Kubeflow Trainer 2.1 and 2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.kubeflow.common import ConditionedOperator
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.render import TERMINATION_MARGIN_S, pod_spec
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.settings import KeeperSettings

GROUP = "trainer.kubeflow.org"
_OPERATOR = "Kubeflow Trainer"
# The name of the training job in runtimes, and of its container.
_NODE = "node"
_MANAGER = "trial-keeper"
# Kubernetes' default, which runtimes do not change.
_POD_GRACE_S = 30


class TrainJobs(ConditionedOperator):
    """TrainJobs. A job succeeds when all its nodes have succeeded."""

    title = _OPERATOR
    stages: ClassVar = {"Suspended": Stage.WAITING, "Complete": Stage.ENDED, "Failed": Stage.ENDED}

    @property
    def resource(self) -> Resource:
        """TrainJobs."""
        return Resource(GROUP, str(self.config.api_version), "trainjobs", "TrainJob", operator=_OPERATOR)

    @property
    def things(self) -> tuple[tuple[Resource, str], ...]:
        """Includes the runtime."""
        kind, name = self._runtime
        is_own = kind == "TrainingRuntime"
        runtimes = Resource(
            GROUP, self.resource.version, f"{kind.lower()}s", kind, operator=_OPERATOR, is_in_namespace=is_own
        )
        return (*super().things, (runtimes, name))

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Nodes get their storage through one of these; Trainer 2.0 had a different field."""
        return ("podTemplateOverrides", "runtimePatches")

    @property
    def completion(self) -> Completion:
        """Any failure fails the job."""
        (role,) = self.config.roles
        return Completion((TaskRole(role.name, role.tasks, 1, role.tasks),))

    def spec(self, name: str, settings: KeeperSettings, of_pods: Document) -> Document:
        """The runtime, and the differences from it."""
        (role,) = self.config.roles
        settings = replace(settings, grace_s=min(settings.grace_s, _POD_GRACE_S - TERMINATION_MARGIN_S))
        pod = pod_spec(self.config, role, name, settings, container=_NODE)
        (container,) = pod["containers"]
        added: Document = {
            "volumes": pod["volumes"],
            "containers": [{"name": _NODE, "volumeMounts": container["volumeMounts"]}],
            **{key: pod[key] for key in ("serviceAccountName", "imagePullSecrets") if key in pod},
        }
        template = {"metadata": of_pods, "spec": added}
        node = {"name": _NODE, "template": {"spec": {"template": template}}}
        kind, runtime = self._runtime
        return {
            "runtimeRef": {"apiGroup": GROUP, "kind": kind, "name": runtime},
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

    def stage_of(self, document: Document) -> Stage:
        """Based on the conditions and the node counts in its status."""
        stage = super().stage_of(document)
        for each in (document.get("status") or {}).get("jobsStatus") or []:
            has_run = any(each.get(key) for key in ("ready", "succeeded", "failed"))
            if each.get("name") == _NODE and has_run and stage is Stage.WAITING:
                return Stage.RUNNING
        return stage

    @property
    def _runtime(self) -> tuple[str, str]:
        """The runtime's kind and name."""
        kind, _, name = str(self.config.runtime).rpartition("/")
        return kind or "ClusterTrainingRuntime", name
