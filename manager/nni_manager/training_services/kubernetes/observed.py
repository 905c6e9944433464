"""The objects of an experiment's jobs that the watches have shown, and the reasons and outcomes derived from them."""

from __future__ import annotations

from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.events import WarningEventCache
from nni_manager.training_services.kubernetes.operator import JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.pods import (
    blocking_init_step,
    has_node,
    has_run,
    is_pending,
    pending_reason,
    termination_message,
)
from nni_manager.training_services.kubernetes.render import job_of

# An idle operator creates pods within a second.
_PODS_TIMEOUT_S = 10.0


class ObservedObjects:
    """The latest documents: resources by name, pods by job and name, and warnings."""

    def __init__(self, operator: Operator, namespace: str, experiment_id: str) -> None:
        self._operator, self._namespace = operator, namespace
        self.resources: dict[str, Document] = {}
        self.warnings = WarningEventCache(experiment_id)
        self._pods: dict[str, dict[str, Document]] = {}
        """Pods of a job are kept until its end is reported."""
        self._gone_pods: set[str] = set()
        """The names of kept pods that were deleted."""

    def store_pod(self, pod: Document, *, is_gone: bool, is_kept: bool) -> None:
        """Store a pod. `is_kept`: its job's end is not reported yet."""
        job_id, name = job_of(pod), pod["metadata"]["name"]
        pods = self._pods.setdefault(job_id, {})
        pods[name] = pod
        if not is_gone:
            self._gone_pods.discard(name)  # a recreated pod may have the same name
        elif is_kept:
            self._gone_pods.add(name)
        else:
            del pods[name]
            if not pods:
                del self._pods[job_id]

    def drop_resource(self, document: Document) -> None:
        """Remove a deleted resource, unless a newer one of the same name was shown."""
        name, uid = document["metadata"]["name"], document["metadata"]["uid"]
        if self.resources.get(name, document)["metadata"]["uid"] == uid:
            self.resources.pop(name, None)

    def forget_job(self, job_id: str, name: str) -> None:
        """Remove the pods and warnings of a job that has ended. Its resource stays until it is deleted."""
        self._gone_pods.difference_update(self._pods.pop(job_id, {}))
        self.warnings.forget(name)

    def has_started(self, job_id: str, resource: Document) -> bool:
        """True if the resource, or a pod of the job, shows that a task has started."""
        is_waiting = self._operator.stage_of(resource) is Stage.WAITING
        return not is_waiting or any(map(has_run, self._pods.get(job_id, {}).values()))

    def verdict(self, job_id: str, resource: Document) -> JobOutcome:
        """The outcome of a terminal resource, by the pods shown so far."""
        return self._operator.verdict_of(resource, self._pods.get(job_id, {}))

    def awaits_pods(self, job_id: str, resource: Document) -> bool:
        """True while a pod may still change the outcome of a terminal resource."""
        verdict = self.verdict(job_id, resource)
        awaited = {verdict.pod} if verdict.pod is not None else set(self._pods.get(job_id, {}))
        return verdict.awaits_pod and not (awaited and awaited <= self._gone_pods)

    def termination_message(self, job_id: str, verdict: JobOutcome) -> str:
        """The outcome, with the deciding pod's own message, for people."""
        pod = self._pods.get(job_id, {}).get(verdict.pod or "", {})
        message = "\n".join(part for part in (verdict.message, termination_message(pod)) if part)
        if verdict.exit_code is None and verdict.pod is not None:
            # No container reports a cause, e.g. after a node loss; a warning may.
            warning = self.warnings.of(verdict.pod, has_node=True)
            message += f"\nKubernetes warned: {warning}" if warning else ""
        return message

    def pending_reason(self, job_id: str, name: str, waited_s: float) -> str:
        """Why a job has not started, for people; empty if unknown."""
        pods, seen = self._pods.get(job_id, {}), self.resources.get(name)
        # If one pod lacks its image, the others wait at a barrier, which explains less and is reported last.
        for explain in (pending_reason, self._warning_of, blocking_init_step):
            if reason := next(filter(None, map(explain, pods.values())), ""):
                return reason
        if reason := "" if seen is None else self._operator.pending_reason(seen):
            return reason
        if pods or waited_s < _PODS_TIMEOUT_S:
            return "" if pods else self.warnings.of(name)
        # Not every operator reports a missing pod: FrameworkController retries without a message.
        return self.warnings.of(name) or (
            f"{self._operator.title} has created no pod of this job yet; check the namespace's quota with "
            f"`kubectl describe quota -n {self._namespace}`, and check that {self._operator.title} runs"
        )

    def _warning_of(self, pod: Document) -> str:
        return self.warnings.of(pod["metadata"]["name"], has_node=has_node(pod)) if is_pending(pod) else ""
