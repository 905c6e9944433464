"""The objects of an experiment's jobs that the watches have shown, and the reasons and outcomes derived from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from nni_manager.training_services.base import JobEnded
from nni_manager.training_services.kubernetes import pods, sidecars
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.render import job_of
from trial_keeper.wire.reasons import ExitReason

# A scheduler event that is outdated once the pod has a node.
_NO_NODE = "FailedScheduling"
# The node controller's event about the pods of a node that has stopped reporting.
_NODE_NOT_READY = "NodeNotReady"
_PREEMPTED = "pod {} was preempted for one of higher priority"
_MAX_CHARS = 500
# An idle operator creates pods within a second.
_PODS_TIMEOUT_S = 10.0


class ObservedObjects:
    """The latest documents: resources by name, pods by job and name, and warnings."""

    def __init__(
        self, operator: Operator, namespace: str, experiment_id: str, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds since the epoch, as Kubernetes' timestamps."""
        self._operator, self._namespace, self._clock = operator, namespace, clock
        self.resources: dict[str, Document] = {}
        self._experiment_id = experiment_id
        self.warnings = WarningEventCache(experiment_id)
        self._pods: dict[str, dict[str, Document]] = {}
        """Pods of a job are kept until its end is reported."""
        self._preempted_uids: set[str] = set()
        """The uids of pods with an event Preempted."""
        self._gone_pods: set[str] = set()
        """The names of kept pods that were deleted."""
        self._replacement_uids: set[str] = set()
        """The uids of the pods that were created in place of an earlier pod of their job."""

    def store_pod(self, pod: Document, *, is_gone: bool, is_kept: bool) -> None:
        """Store a pod. `is_kept`: its job's end is not reported yet."""
        job_id, name = job_of(pod), pod["metadata"]["name"]
        shown = self._pods.setdefault(job_id, {})
        if any(pods.replaces(pod, each) for each in shown.values()):
            self._replacement_uids.add(pod["metadata"]["uid"])
        shown[name] = pod
        if not is_gone:
            self._gone_pods.discard(name)  # a recreated pod may have the same name
        elif is_kept:
            self._gone_pods.add(name)
        else:
            del shown[name]
        self._drop_replaced(shown)
        if not shown:
            del self._pods[job_id]

    def _drop_replaced(self, shown: dict[str, Document]) -> None:
        """Drop the pods that are gone and were replaced: they do not explain the end of their job."""
        present = [pod for name, pod in shown.items() if name not in self._gone_pods]
        for name in [name for name in shown if name in self._gone_pods]:
            if any(pods.replaces(pod, shown[name]) for pod in present):
                del shown[name]
                self._gone_pods.discard(name)

    def note_preempted(self, event: Document) -> None:
        """Store the scheduler's event that it has preempted a pod."""
        self._preempted_uids.add(str((event.get("involvedObject") or {}).get("uid", "")))

    def preempted_pod(self, job_id: str) -> str | None:
        """The name of a pod of the job that the cluster reports as preempted; None: it reports none."""
        for name, pod in self._pods.get(job_id, {}).items():
            if pods.is_preempted(pod) or pod["metadata"].get("uid") in self._preempted_uids:
                return name
        return None

    def _preempted_pod_of(self, resource: Document) -> str | None:
        """The name of a preempted pod that only the resource still names; None: there is none. Its event is kept for an hour."""
        pods_of_job = self._operator.pod_uids_of(resource)
        return next((name for name, uid in pods_of_job.items() if uid in self._preempted_uids), None)

    def has_pods(self, job_id: str) -> bool:
        """True if the watch shows a pod of the job."""
        return bool(self._pods.get(job_id))

    def has_one_pod(self, job_id: str) -> bool:
        """True if the job consists of one pod, as far as the watch has shown."""
        return len(self._pods.get(job_id, {})) == 1

    def drop_resource(self, document: Document) -> None:
        """Remove a deleted resource, unless a newer one of the same name was shown."""
        name, uid = document["metadata"]["name"], document["metadata"]["uid"]
        if self.resources.get(name, document)["metadata"]["uid"] == uid:
            self.resources.pop(name, None)

    def forget_job(self, job_id: str, name: str) -> None:
        """Remove the pods and warnings of a job that has ended. Its resource stays until it is deleted."""
        forgotten = self._pods.pop(job_id, {})
        self._gone_pods.difference_update(forgotten)
        self._replacement_uids.difference_update(pod["metadata"].get("uid") for pod in forgotten.values())
        self.warnings.forget(name)

    def has_started(self, job_id: str, resource: Document) -> bool:
        """True if the resource, or a pod of the job, shows that a task has started."""
        return self._operator.stage_of(resource) is not Stage.WAITING or self.pod_has_run(job_id)

    def pod_has_run(self, job_id: str) -> bool:
        """True if a pod of the job shows that a task has started."""
        return any(map(pods.has_run, self._pods.get(job_id, {}).values()))

    def pods_may_start(self, job_id: str) -> bool:
        """True while it is open whether a task of a deleted job has started: no pod is shown, or an existing one has not run."""
        shown = self._pods.get(job_id, {})
        return not self.pod_has_run(job_id) and (not shown or not shown.keys() <= self._gone_pods)

    def has_only_sidecars(self, job_id: str) -> bool:
        """True if the tasks of a job have ended, but not its pods, because of sidecars."""
        shown = self._pods.get(job_id, {})
        present = [pod for name, pod in shown.items() if name not in self._gone_pods]
        gone = [pod for name, pod in shown.items() if name in self._gone_pods]
        return sidecars.are_over(present, gone, self._operator.completion)

    def verdict(self, job_id: str, resource: Document) -> JobOutcome:
        """The outcome of a terminal resource, or of a job that has only sidecars, by the pods shown so far."""
        shown = self._pods.get(job_id, {})
        if self._operator.stage_of(resource) is not Stage.ENDED:
            return sidecars.outcome_of(shown.values(), self._operator.completion)
        return self._operator.verdict_of(resource, shown)

    def awaits_pods(self, job_id: str, resource: Document) -> bool:
        """True while a pod may still change the outcome of a terminal resource."""
        verdict = self.verdict(job_id, resource)
        awaited = {verdict.pod} if verdict.pod is not None else set(self._pods.get(job_id, {}))
        return verdict.awaits_pod and not (awaited and awaited <= self._gone_pods)

    def end_of(self, job_id: str, resource: Document, *, stop_was_asked: bool = False) -> JobEnded:
        """The end of a job with a terminal resource, or with only sidecars, by the pods shown so far."""
        verdict = self.verdict(job_id, resource)
        exit_code, reason = verdict.exit_code, verdict.reason
        message = self._message_of(job_id, verdict)
        cause = "" if stop_was_asked else self.cause(job_id, verdict.pod) or verdict.cause
        preempted = self.preempted_pod(job_id)
        if preempted is None and exit_code != 0:
            preempted = self._preempted_pod_of(resource)
            if preempted is not None and not stop_was_asked:
                cause = cause or _PREEMPTED.format(preempted)
        if preempted is not None:
            # Whatever the exit code: training code may use the grace period to end without an error.
            exit_code, reason = None, ExitReason.PREEMPTED
            message += f"\nKubernetes preempted pod {preempted} for one of higher priority"
        text = "\n".join(filter(None, (cause, message)))
        return JobEnded(job_id, exit_code, text, reason, bool(cause))

    def _message_of(self, job_id: str, verdict: JobOutcome) -> str:
        """The outcome, with the deciding pod's own message, for people."""
        pod = self._pods.get(job_id, {}).get(verdict.pod or "", {})
        message = "\n".join(part for part in (verdict.message, pods.termination_message(pod)) if part)
        if verdict.exit_code is None and verdict.pod is not None and not pods.init_failure(pod):
            # No container reports a cause, e.g. after a node loss; a warning may.
            warning = self.warnings.of(verdict.pod, has_node=True)
            message += f"\nKubernetes warned: {warning}" if warning else ""
        return message

    def cause(self, job_id: str, pod: str | None) -> str:
        """Why the cluster ends a job, in one line; empty if it does not. `pod`: the deciding one, if it is known."""
        shown = self._pods.get(job_id, {})
        # An operator deletes the other pods of a job that has ended.
        decisive = (
            shown.get(pod) if pod is not None else next(iter(shown.values())) if len(shown) == 1 else None
        )
        if decisive is None:
            return ""
        name = decisive["metadata"]["name"]
        if why := pods.why_ended(decisive):
            return why
        if decisive["metadata"].get("uid") in self._preempted_uids:
            return _PREEMPTED.format(name)
        at = pods.deleted_at(decisive)
        if at is None and (name not in self._gone_pods or pods.is_terminal(decisive)):
            return ""
        # Kubernetes deletes the pods of a lost node.
        if node := self._node_warning_of(name, decisive):
            return node
        when = "" if at is None else f" at {at}"
        return f"pod {name} was deleted{when}, but not by this manager; the API server's audit log records by whom"

    def warning(self, job_id: str, name: str) -> str:
        """What may end a running job, for people; empty if nothing is known."""
        return self.suspension(name) or self.cause(job_id, None) or self.node_warning(job_id)

    def suspension(self, name: str) -> str:
        """Why the job of this name was suspended after its start; empty if it was not."""
        seen = self.resources.get(name)
        return "" if seen is None else self._operator.suspension(seen)

    def has_new_pod(self, job_id: str, name: str) -> bool:
        """True if a pod that replaces an ended one runs or will run, on nodes that are ready."""
        seen = self.resources.get(name)
        if seen is None or self._operator.stage_of(seen) is Stage.ENDED or self.node_warning(job_id):
            return False
        return any(
            pod["metadata"].get("uid") in self._replacement_uids
            and not (
                pods.is_terminal(pod) or "deletionTimestamp" in pod["metadata"] or each in self._gone_pods
            )
            for each, pod in self._pods.get(job_id, {}).items()
        )

    def pending_reason(self, job_id: str, name: str, waited_s: float, refusal: str = "") -> str:
        """Why a job has not started, for people; empty if unknown. `refusal`: why the cluster refuses missing pods."""
        shown, seen = self._pods.get(job_id, {}), self.resources.get(name)
        # If one pod lacks its image, the others wait at a barrier, which explains less and is reported last.
        for explain in (pods.pending_reason, self._warning_of, pods.blocking_init_step):
            if reason := next(filter(None, map(explain, shown.values())), ""):
                return reason
        if reason := "" if seen is None else self._operator.pending_reason(seen):
            return reason
        if not shown and refusal:
            return refusal
        if shown or waited_s < _PODS_TIMEOUT_S:
            return "" if shown else self.warnings.of(name)
        return self.warnings.of(name) or (
            f"{self._operator.title} has created no pod of this job yet; check the namespace's quota with "
            f"`kubectl describe quota -n {self._namespace}`, and check that {self._operator.title} runs"
        )

    def missing_pod(self, job_id: str, name: str) -> Document | None:
        """A pod that the operator has not created for the job, and would not report as refused; None: there is none."""
        seen = None if self._pods.get(job_id) else self.resources.get(name)
        return None if seen is None else self._operator.unreported_pod(seen)

    def node_warning(self, job_id: str) -> str:
        """Which node of the job's pods is not ready, and since when, for people; empty if all are ready."""
        warnings = (self._node_warning_of(name, pod) for name, pod in self._pods.get(job_id, {}).items())
        return next(filter(None, warnings), "")

    def _node_warning_of(self, name: str, pod: Document) -> str:
        (is_ready, since), now_s = pods.readiness(pod), self._clock()
        is_pending = pods.is_pending(pod)
        if is_ready or not pods.has_node(pod) or (is_pending and name in self._gone_pods):
            return ""
        # Only pods that were ready have this event: that of a pending pod is about an earlier pod of its name.
        has_event = not is_pending and self.warnings.of(name, has_node=True).startswith(_NODE_NOT_READY)
        # The condition alone may have another cause, such as a probe of a container. The API server keeps events for an hour.
        if not (has_event or pods.is_left_by_node(pod, now_s)):
            return ""
        node, since_s = pod["spec"].get("nodeName"), pods.seconds_since(since, now_s)
        return (
            f"node {node} is not ready"
            if since_s is None
            else f"node {node} has not been ready for {since_s:.0f} s"
        )

    @property
    def title(self) -> str:
        """The operator's name, for people."""
        return self._operator.title

    def how_to_find_reasons(self) -> str:
        """The kubectl command that shows why jobs do not start."""
        return f"`kubectl describe {self._operator.resource.plural},pods -n {self._namespace} -l expId={self._experiment_id}`"

    def _warning_of(self, pod: Document) -> str:
        return (
            self.warnings.of(pod["metadata"]["name"], has_node=pods.has_node(pod))
            if pods.is_pending(pod)
            else ""
        )


class WarningEventCache:
    """The newest warning event of each object of an experiment, while the cluster stores the event.

    No status contains some reasons of a pending pod: a failed mount, or a quota that keeps an operator from creating pods.
    Objects are identified by name, which starts with the name of their job. `concerns` is thread-safe.

    Source: Kubernetes core/v1 Event, its supported field selectors, and how recorders of client-go fill it in.
    """

    def __init__(self, experiment_id: str) -> None:
        self._id = experiment_id.lower()
        self._newest: dict[str, Document] = {}
        """By object name and each of its prefixes: `job`, `job-worker`, `job-worker-0`."""

    def concerns(self, event: Document) -> bool:
        """True if the event's object has the experiment's id in its name."""
        return self._id in _about(event).lower()

    def take(self, event: Document) -> None:
        """Add a new or repeated event."""
        for name in self._names(_about(event)):
            if (known := self._newest.get(name)) is None or _at(known) <= _at(event):
                self._newest[name] = event

    def drop(self, event: Document) -> None:
        """Remove an event that the cluster has deleted."""
        for name in self._names(_about(event)):
            if name in self._newest and self._newest[name]["metadata"]["uid"] == event["metadata"]["uid"]:
                del self._newest[name]

    def forget(self, name: str) -> None:
        """Remove the events of a job that has ended."""
        for each in [each for each in self._newest if each == name or each.startswith(f"{name}-")]:
            del self._newest[each]

    def of(self, name: str, *, has_node: bool = False) -> str:
        """Returns the newest warning of this job or pod, for people; empty if there is none. `has_node`: the pod has a node."""
        event = self._newest.get(name)
        if event is None or (has_node and event.get("reason") == _NO_NODE):
            return ""
        return " ".join(pods.reason_and_message(event).split())[:_MAX_CHARS]

    def _names(self, name: str) -> Iterator[str]:
        while self._id in name.lower():
            yield name
            name = name.rpartition("-")[0]


def is_about_node(event: Document) -> bool:
    """True for the warning about a pod whose node has stopped reporting."""
    return event.get("reason") == _NODE_NOT_READY


def _about(event: Document) -> str:
    return str((event.get("involvedObject") or {}).get("name", ""))


def _at(event: Document) -> str:
    """Returns the time of the last occurrence, as text that sorts by time."""
    series: dict[str, Any] = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp", "")
    )
