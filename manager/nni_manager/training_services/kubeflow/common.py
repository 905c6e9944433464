"""Common to this package's operators: names, labels, completion, and outcomes read from conditions and pods.

Source: NNI v2.10 for names; Kueue for the label of a queue; Kubernetes API Conventions for conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import SUCCESS, JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.pods import failure_of, first_failed
from nni_manager.training_services.kubernetes.render import short_name
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.wire.reasons import ExitReason

_QUEUE = "kueue.x-k8s.io/queue-name"


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
        stages = {self.stages[each] for each in true_conditions(document) if each in self.stages}
        counts = self.pod_counts_of(document.get("status") or {})
        if any(each.get(key) for each in counts for key in ("ready", "succeeded", "failed")):
            stages.add(Stage.RUNNING)
        return next((stage for stage in (Stage.ENDED, Stage.RUNNING) if stage in stages), Stage.WAITING)

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """Based on the failure condition, and the exit code of the pod that failed first."""
        condition = true_conditions(document).get("Failed")
        if condition is None:
            return SUCCESS
        why = condition.get("message") or condition.get("reason") or "no reason given"
        message = f"{self.title} reports {self.resource.kind} {document['metadata']['name']}: {why}"
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
            return f"{self.resource.kind} is suspended; set its field suspend to false with `kubectl edit {self.resource.plural}`"
        return (
            f"Kueue has not admitted the job; find the reason with `kubectl describe workloads`, and the queue's free capacity "
            f"with `kubectl describe localqueue {self.config.queue}`"
        )


def true_conditions(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the conditions of a resource with status True, by type."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}
