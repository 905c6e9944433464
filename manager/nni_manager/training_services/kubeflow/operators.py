"""The operators of Kubeflow and their alternatives, by their name in experiment files.

Source: NNI v2.10 for names, also the containers'; Kueue for the label of a queue; Kubernetes API Conventions for conditions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import SUCCESS, JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.pods import failed_init_container, failure_of, first_failed
from nni_manager.training_services.kubernetes.render import (
    TERMINATION_MARGIN_S,
    pod_spec,
    pod_template,
    short_name,
)
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason

_QUEUE = "kueue.x-k8s.io/queue-name"
# Kubernetes' default, which the runtimes of TrainJobs do not change.
_POD_GRACE_S = 30


class ConditionedOperator(Operator):
    """An operator whose resources report their stage in conditions. `stages` maps the relevant conditions."""

    group: ClassVar[str]
    kind: ClassVar[str]
    software: ClassVar[str]
    """What must be installed on the cluster, for people."""
    stages: ClassVar[Mapping[str, Stage]]
    decisive_role: ClassVar[str | None] = None
    """The role whose tasks must all succeed; None: each role's."""

    @property
    def resource(self) -> Resource:
        """Uses the version from the experiment file."""
        plural = f"{self.kind.lower()}s"
        return Resource(self.group, str(self.config.api_version), plural, self.kind, operator=self.software)

    @property
    def completion(self) -> Completion:
        """Any failure fails the job."""
        return Completion(
            tuple(
                TaskRole(
                    role.name, role.tasks, 1, role.tasks if self.decisive_role in (None, role.name) else -1
                )
                for role in self.config.roles
            )
        )

    def name_of(self, experiment_id: str, job_id: str) -> str:
        """As in NNI, in lower case; names of two jobs may therefore collide."""
        return f"nni-exp-{experiment_id}-{short_name(job_id, '-')}".lower()

    def metadata(self, labels: dict[str, str]) -> Document:
        """The labels, and the one that names the queue."""
        return {"labels": labels | ({} if self.config.queue is None else {_QUEUE: self.config.queue})}

    def pod_counts_of(self, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns the parts of a status that count pods; none if conditions report that a task has started."""
        return []

    def stage_of(self, document: Document) -> Stage:
        """The latest stage of all true conditions and of the pod counts; WAITING if none is known."""
        stages = {self.stages[each] for each in _true_conditions(document) if each in self.stages}
        counts = self.pod_counts_of(document.get("status") or {})
        if any(each.get(key) for each in counts for key in ("ready", "succeeded", "failed")):
            stages.add(Stage.RUNNING)
        return next((stage for stage in (Stage.ENDED, Stage.RUNNING) if stage in stages), Stage.WAITING)

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """Based on the failure condition, and the exit code of the pod that failed first."""
        condition = _true_conditions(document).get("Failed")
        if condition is None:
            return SUCCESS
        why = condition.get("message") or condition.get("reason") or "no reason given"
        message = f"{self.title} reports {self.resource.kind} {document['metadata']['name']}: {why}"
        pod = first_failed(pods)
        if pod is None:
            return JobOutcome(None, message, ExitReason.KEEPER_LOST, awaits_pod=True)
        exit_code, is_out_of_memory = failure_of(pods[pod])
        reason = ExitReason.OUT_OF_MEMORY if is_out_of_memory else ExitReason.KEEPER_LOST
        if (failed := failed_init_container(pods[pod])) is not None and failed in self._own_init_containers:
            # Those that operators add, e.g. to wait for a master, may succeed in the next job.
            reason = ExitReason.COULD_NOT_START
        return JobOutcome(exit_code, message, reason, pod)

    @cached_property
    def _own_init_containers(self) -> frozenset[str]:
        """The names of the init containers in the experiment's pod template."""
        spec = json.loads(self.config.template_text or "{}").get("spec") or {}
        return frozenset(str(each.get("name")) for each in spec.get("initContainers") or ())

    def suspension(self, document: Document) -> str:
        """Kueue suspends jobs whose place it gives to others, and admits them again later."""
        if "Suspended" not in _true_conditions(document):
            return ""
        if self.config.queue is None:
            return f"somebody has suspended it, and {self.pending_reason(document)}"
        return (
            f"Kueue has suspended the job, which starts again when queue {self.config.queue} admits it; find the reason with "
            "`kubectl describe workloads`"
        )

    def pending_reason(self, document: Document) -> str:
        """Reports a suspended job: Kueue keeps it suspended until its queue has capacity."""
        if "Suspended" not in _true_conditions(document):
            return ""
        if self.config.queue is None:
            return f"{self.resource.kind} is suspended; set its field suspend to false with `kubectl edit {self.resource.plural}`"
        return (
            f"Kueue has not admitted the job; find the reason with `kubectl describe workloads`, and the queue's free capacity "
            f"with `kubectl describe localqueue {self.config.queue}`"
        )


class _ReplicatedJobs(ConditionedOperator):
    """TFJobs and PyTorchJobs, of tf-operator, pytorch-operator, and the training operator that replaced both.

    Each role is a set of replicas. The restart policy is Never: any other would report an end too early. If the cluster's own
    rules restart a job nevertheless, each of its keepers claims a new attempt of the trial, and the job is not terminal.

    Source: kubeflow.org/v1 TFJob and PyTorchJob (older versions have the same fields).
    """

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
            template = pod_template(self.config, role, name, settings, labels, container=self.container)
            made[self.types[role.name]] = {
                "replicas": role.tasks,
                # The operator sets the pod's restart policy, and warns if the pod has one already.
                "restartPolicy": template["spec"].pop("restartPolicy"),
                "template": template,
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


class TrainJobs(ConditionedOperator):
    """TrainJobs, which extend a runtime of the cluster. A job succeeds when all its nodes, which have one role, have succeeded.

    A job's changes to its runtime's pods are called podTemplateOverrides before Trainer 2.2, and runtimePatches since. The
    document has both: a server drops an unknown field, and preflight refuses a server that supports neither. Neither field
    can set a pod's termination grace period.

    Source: trainer.kubeflow.org/v1alpha1 TrainJob, Kubeflow Trainer 2.1 and 2.2.
    """

    title = software = "Kubeflow Trainer"
    group, kind = "trainer.kubeflow.org", "TrainJob"
    # Nodes get their storage through one of these; Trainer 2.0 had a different field.
    required_fields = ("podTemplateOverrides", "runtimePatches")
    node: ClassVar = "node"
    """The name of the training job in runtimes, and of its container."""
    stages: ClassVar = {"Suspended": Stage.WAITING, "Complete": Stage.ENDED, "Failed": Stage.ENDED}

    @property
    def required_objects(self) -> tuple[tuple[Resource, str], ...]:
        """Includes the runtime."""
        kind, name = self._runtime
        runtimes = replace(
            self.resource, plural=f"{kind.lower()}s", kind=kind, is_in_namespace=kind == "TrainingRuntime"
        )
        return (*super().required_objects, (runtimes, name))

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """The reference to a runtime, and the job's changes to that runtime."""
        (role,) = self.config.roles
        settings = replace(settings, grace_s=min(settings.grace_s, _POD_GRACE_S - TERMINATION_MARGIN_S))
        pod = pod_spec(self.config, role, name, settings, container=self.node)
        (container,) = pod["containers"]
        added: Document = {
            "volumes": pod["volumes"],
            "containers": [{"name": self.node, "volumeMounts": container["volumeMounts"]}],
            **{key: pod[key] for key in ("serviceAccountName", "imagePullSecrets") if key in pod},
        }
        template = {"metadata": {"labels": labels}, "spec": added}
        node = {"name": self.node, "template": {"spec": {"template": template}}}
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
            "podTemplateOverrides": [{"targetJobs": [{"name": self.node}], **template}],
            "runtimePatches": [
                {
                    "manager": "trial-keeper",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
                }
            ],
        }

    def pod_counts_of(self, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The counts of the nodes."""
        return [each for each in status.get("jobsStatus") or [] if each.get("name") == self.node]

    @property
    def _runtime(self) -> tuple[str, str]:
        """The runtime's kind and name."""
        kind, _, name = str(self.config.runtime).rpartition("/")
        return kind or "ClusterTrainingRuntime", name


class PlainJobs(ConditionedOperator):
    """Indexed Jobs of batch/v1, with tasks of one role. A job succeeds when all its tasks have succeeded.

    Source: Kubernetes, Job v1: each pod gets its index, from 1.21 on; Kueue suspends a Job until its queue has capacity.
    """

    title = software = "Kubernetes"
    group, kind = "batch", "Job"
    first_server = (1, 21)
    stages: ClassVar = {"Complete": Stage.ENDED, "Failed": Stage.ENDED}

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """One pod per task, all in parallel; failed pods are not replaced."""
        (role,) = self.config.roles
        return {
            "completions": role.tasks,
            "parallelism": role.tasks,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": pod_template(self.config, role, name, settings, labels, container="trial"),
        }

    def pod_counts_of(self, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The status itself."""
        return [status]


OPERATORS: dict[str, type[Operator]] = {
    "tf-operator": TfJobs,
    "pytorch-operator": PyTorchJobs,
    "trainjob": TrainJobs,
    "job": PlainJobs,
}


def _true_conditions(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the conditions of a resource with status True, by type."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}
