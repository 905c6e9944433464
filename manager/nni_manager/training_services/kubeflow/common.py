"""What the operators of this package have in common: names, labels, and ends that are told by conditions and by pods.

Source: NNI v2.10 for names; Kueue for the label of a queue; Kubernetes API Conventions for conditions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import SUCCESS, Operator, Stage, Verdict
from nni_manager.training_services.kubernetes.pods import failure_of, first_failed
from nni_manager.training_services.kubernetes.render import labels_of, short_name
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason

_QUEUE = "kueue.x-k8s.io/queue-name"


class ConditionedOperator(Operator):
    """One whose resources say in conditions how far they are. `stages` has those that are of interest."""

    stages: ClassVar[Mapping[str, Stage]]
    failed: ClassVar[str] = "Failed"

    def name_of(self, experiment_id: str, job_id: str) -> str:
        """As NNI names them, in small letters, so that two jobs may have the same."""
        return f"nni-exp-{experiment_id}-{short_name(job_id, '-')}".lower()

    def render(self, namespace: str, settings: KeeperSettings) -> Document:
        """The job: what all have, around the operator's own `spec`."""
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
        """The operator's own part of a job of this name. `of_pods`: the metadata of every pod."""

    def stage_of(self, document: Document) -> Stage:
        """The furthest of those that a condition says; without any, it has not begun."""
        said = {self.stages[each] for each in true_conditions(document) if each in self.stages}
        return next((stage for stage in (Stage.ENDED, Stage.RUNNING) if stage in said), Stage.WAITING)

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> Verdict:
        """What the condition says, and the exit code of the pod that failed first."""
        condition = true_conditions(document).get(self.failed)
        if condition is None:
            return SUCCESS
        said = condition.get("message") or condition.get("reason") or "it does not say why"
        message = f"{self.title} says of {self.resource.kind} {document['metadata']['name']}: {said}"
        pod = first_failed(pods)
        if pod is None:
            return Verdict(None, message, ExitReason.KEEPER_LOST, awaits_pod=True)
        exit_code, is_out_of_memory = failure_of(pods[pod])
        reason = ExitReason.OUT_OF_MEMORY if is_out_of_memory else ExitReason.KEEPER_LOST
        return Verdict(exit_code, message, reason, pod)

    def why_it_waits(self, document: Document) -> str:
        """That it is suspended, as Kueue leaves jobs until their queue has room."""
        if "Suspended" not in true_conditions(document):
            return ""
        if self.config.queue is None:
            return f"{self.resource.kind} is suspended; somebody has to let it go on"
        return (
            f"Kueue has not let it begin; see why with `kubectl describe workloads`, and the room of its queue with "
            f"`kubectl describe localqueue {self.config.queue}`"
        )


def true_conditions(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The conditions of a resource that are met now, by their type."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}
