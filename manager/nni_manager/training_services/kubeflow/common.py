"""Common to this package's operators: names, labels, and outcomes read from conditions and pods.

Source: NNI v2.10 for names; Kueue for the label of a queue; Kubernetes API Conventions for conditions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import SUCCESS, JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.pods import failure_of, first_failed
from nni_manager.training_services.kubernetes.render import labels_of, short_name
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason

_QUEUE = "kueue.x-k8s.io/queue-name"


class ConditionedOperator(Operator):
    """An operator whose resources report their stage in conditions. `stages` maps the relevant ones."""

    stages: ClassVar[Mapping[str, Stage]]
    failed: ClassVar[str] = "Failed"

    def name_of(self, experiment_id: str, job_id: str) -> str:
        """As in NNI, in lower case; names of two jobs may therefore collide."""
        return f"nni-exp-{experiment_id}-{short_name(job_id, '-')}".lower()

    def render(self, namespace: str, settings: KeeperSettings) -> Document:
        """Returns the common document around the operator's own `spec`."""
        name = self.name_of(settings.experiment_id, settings.job_id)
        labels = labels_of(settings.experiment_id, settings.job_id)
        queue = {} if self.config.queue is None else {_QUEUE: self.config.queue}
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "metadata": {"name": name, "namespace": namespace, "labels": labels | queue},
            "spec": self.spec(name, settings, {"labels": labels}),
        }

    @abstractmethod
    def spec(self, name: str, settings: KeeperSettings, of_pods: Document) -> Document:
        """Returns the operator's own part of a job named `name`. `of_pods` is the metadata of every pod."""

    def stage_of(self, document: Document) -> Stage:
        """The latest stage of all true conditions; WAITING if none is known."""
        said = {self.stages[each] for each in true_conditions(document) if each in self.stages}
        return next((stage for stage in (Stage.ENDED, Stage.RUNNING) if stage in said), Stage.WAITING)

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """Based on the failure condition, and the exit code of the pod that failed first."""
        condition = true_conditions(document).get(self.failed)
        if condition is None:
            return SUCCESS
        said = condition.get("message") or condition.get("reason") or "it does not say why"
        message = f"{self.title} says of {self.resource.kind} {document['metadata']['name']}: {said}"
        pod = first_failed(pods)
        if pod is None:
            return JobOutcome(None, message, ExitReason.KEEPER_LOST, awaits_pod=True)
        exit_code, is_out_of_memory = failure_of(pods[pod])
        reason = ExitReason.OUT_OF_MEMORY if is_out_of_memory else ExitReason.KEEPER_LOST
        return JobOutcome(exit_code, message, reason, pod)

    def pending_reason(self, document: Document) -> str:
        """Reports a suspended job: Kueue keeps it suspended until its queue has capacity."""
        if "Suspended" not in true_conditions(document):
            return ""
        if self.config.queue is None:
            return f"{self.resource.kind} is suspended; somebody has to let it go on"
        return (
            f"Kueue has not let it begin; see why with `kubectl describe workloads`, and the room of its queue with "
            f"`kubectl describe localqueue {self.config.queue}`"
        )


def true_conditions(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the conditions of a resource with status True, by type."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}
