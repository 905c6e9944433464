"""Explains pod states for people: pending reasons and termination messages.

Source: Kubernetes, Pod Lifecycle (conditions, container states).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

_PREEMPTED, _TAINTED, _OUT_OF_MEMORY = "PreemptionByScheduler", "DeletionByTaintManager", "OOMKilled"
# The exit code of a keeper that Kubernetes has asked to end.
_TERMINATED = 143
_DISRUPTIONS = {
    _PREEMPTED: "was preempted for one of higher priority",
    _TAINTED: "was evicted because of a taint of its node",
    "EvictionByEvictionAPI": "was evicted through the API, as `kubectl drain` does",
    "DeletionByPodGC": "was deleted because its node is gone",
    "TerminationByKubelet": "was evicted by its node",
}
"""How the cluster ends a pod, by the reason of its condition DisruptionTarget."""

# Every pod passes through these states; they explain nothing.
_USUAL = frozenset({"ContainerCreating", "PodInitializing", ""})


def pending_reason(pod: Mapping[str, Any]) -> str:
    """Returns why a pending pod does not run; empty if it is not pending or the reason is unknown."""
    status = pod.get("status") or {}
    if not is_pending(pod):
        return ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return reason_and_message(condition)
    waiting = [
        (each.get("state") or {}).get("waiting") or {}
        for part in ("initContainerStatuses", "containerStatuses")
        for each in status.get(part) or []
    ]
    return next(
        (
            reason_and_message(each)
            for each in waiting
            if each.get("reason", "") not in _USUAL or each.get("message")
        ),
        "",
    )


def blocking_init_step(pod: Mapping[str, Any]) -> str:
    """Returns the running init container of a pending pod, e.g. a barrier; empty if none runs, or only sidecars."""
    for each in _init_statuses(pod):
        if "running" in (each.get("state") or {}):
            return f"its init container {each['name']} has not ended"
    return ""


def is_pending(pod: Mapping[str, Any]) -> bool:
    """True if none of its containers except init containers has started."""
    return (pod.get("status") or {}).get("phase") == "Pending"


def readiness(pod: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns False for a pod that its node, or the control plane, reports as not ready, and since when (RFC 3339).

    A pod that has not started is not ready, since an unknown time: the control plane changes only the status of a ready pod.
    """
    status = pod.get("status") or {}
    if is_pending(pod):
        return False, ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") == "False":
            return status.get("phase") != "Running", str(condition.get("lastTransitionTime") or "")
    return True, ""


def seconds_since(timestamp: str, now_s: float) -> float | None:
    """Returns the seconds since a time (RFC 3339); None if it is none. `now_s`: seconds since the epoch."""
    at = _time_of(timestamp)
    return None if at is None else max(now_s - at.timestamp(), 0.0)


def has_node(pod: Mapping[str, Any]) -> bool:
    """True if the pod is assigned to a node."""
    return bool((pod.get("spec") or {}).get("nodeName"))


def termination_message(pod: Mapping[str, Any]) -> str:
    """Returns why a pod failed as a whole, and the last output of its failed containers, also of init containers."""
    status = pod.get("status") or {}
    messages = (
        [reason_and_message(status)] if status.get("phase") == "Failed" and status.get("reason") else []
    )
    for ended in _ended(pod, with_init=True):
        if ended.get("exitCode") and ended.get("message"):
            messages.append(str(ended["message"]).strip())
    return "\n".join(messages)


def has_run(pod: Mapping[str, Any]) -> bool:
    """True if a container other than an init container has started."""
    phase = (pod.get("status") or {}).get("phase")
    return phase in ("Running", "Succeeded", "Failed") and _failed_init(pod) is None


def replaces(pod: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if the pod was created in place of the other one, for the same task: Kueue has admitted its job again, for example."""
    meta, before = pod["metadata"], other["metadata"]
    return (
        _task_of(meta) == _task_of(before)
        and meta.get("uid") != before.get("uid")
        and str(meta.get("creationTimestamp") or "") >= str(before.get("creationTimestamp") or "")
    )


def _task_of(meta: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the Job and the index of a pod, or the pod's name, which other operators use again.

    Source: Kubernetes, Job v1, completionMode Indexed: the index is an annotation, and a label since 1.28.
    """
    labels = meta.get("labels") or {}
    index = ((meta.get("annotations") or {}) | labels).get("batch.kubernetes.io/job-completion-index")
    return ("", str(meta["name"])) if index is None else (str(labels.get("job-name")), str(index))


def first_failed(pods: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the name of the pod that most likely failed first; None if none failed.

    Operators end the other pods within a second, which is the resolution of Kubernetes' timestamps.
    """
    failed = {name: pod for name, pod in pods.items() if (pod.get("status") or {}).get("phase") == "Failed"}

    def order(name: str) -> tuple[bool, str, str]:
        is_ended_by_others = "deletionTimestamp" in (failed[name].get("metadata") or {})
        ended_at = _ended_at(failed[name], with_init=_failed_init(failed[name]) is not None)
        return is_ended_by_others, ended_at or "~", name

    return min(failed, key=order, default=None)


def failure_of(pod: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Returns the exit code of a failed container (None: none failed), and True if one was killed for lack of memory.

    Without init containers: their exit codes are not those of a keeper.
    """
    failed = [each for each in _ended(pod) if each.get("exitCode")]
    if not failed:
        return None, False
    return int(failed[-1]["exitCode"]), any(each.get("reason") == "OOMKilled" for each in failed)


def init_failure(pod: Mapping[str, Any]) -> str:
    """Returns which init container of a pod failed by itself, and how; empty if none did."""
    failed, status = _failed_init(pod), pod.get("status") or {}
    if failed is None or _disruption(pod) or status.get("reason") or deleted_at(pod) is not None:
        return ""
    ended = failed["state"]["terminated"]
    return init_failure_text(failed.get("name"), ended["exitCode"], ended.get("reason"))


def failed_init_container(pod: Mapping[str, Any]) -> str | None:
    """Returns the name of the init container that failed by itself; None if none did."""
    failed = _failed_init(pod)
    return str(failed.get("name")) if failed is not None and init_failure(pod) else None


def init_failure_text(name: str | None, exit_code: int, reason: str | None) -> str:
    """Returns how an init container failed, for people."""
    return f"init container {name} failed: exit code {exit_code}{f', {reason}' if reason else ''}"


def is_preempted(pod: Mapping[str, Any]) -> bool:
    """True if the scheduler ended the pod to make room for one of higher priority."""
    return _disruption(pod).get("reason") == _PREEMPTED


def is_left_by_node(pod: Mapping[str, Any], now_s: float) -> bool:
    """True if a running pod should have ended: its node's taint evicts it, or its deletion is overdue. `now_s`: as above."""
    ends_at_s = deletion_due_at_s(pod)
    return _disruption(pod).get("reason") == _TAINTED or (ends_at_s is not None and ends_at_s < now_s)


def deletion_due_at_s(pod: Mapping[str, Any]) -> float | None:
    """Returns when a pod that is being deleted should have ended, in seconds since the epoch; None if it is not being deleted."""
    ends_at = _time_of(str((pod.get("metadata") or {}).get("deletionTimestamp") or ""))
    return None if ends_at is None else ends_at.timestamp()


def why_ended(pod: Mapping[str, Any]) -> str:
    """Returns why the cluster ends a pod that had not ended by itself, in one line; empty if it does not, or reports no reason.

    Source: Kubernetes 1.26, Pod disruption conditions; Pod Lifecycle, reasons of failed pods.
    """
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    name = meta.get("name")
    if condition := _disruption(pod):
        how = _DISRUPTIONS.get(str(condition.get("reason")), "is ended by the cluster")
        return f"pod {name} {how}: {_in_one_line(condition)}"
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"pod {name} failed: {_in_one_line(status)}"
    if failure := init_failure(pod):
        return f"pod {name} failed: {failure}"
    if (
        killed := next((each for each in _ended(pod) if each.get("reason") == _OUT_OF_MEMORY), None)
    ) is not None:
        return f"pod {name} failed: {_OUT_OF_MEMORY}, exit code {killed.get('exitCode')}; the memory of its container was full"
    return ""


def _disruption(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the condition that announces the end of a pod; empty if there is none."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    wanted = (
        each for each in conditions if (each.get("type"), each.get("status")) == ("DisruptionTarget", "True")
    )
    return next(wanted, {})


def deleted_at(pod: Mapping[str, Any]) -> str | None:
    """Returns when the deletion of a pod was requested (RFC 3339); None if it was not, or after its containers had ended."""
    meta = pod.get("metadata") or {}
    if not meta.get("deletionTimestamp"):
        return None
    # The timestamp is that of the end of the grace period.
    if (ends_at := _time_of(str(meta["deletionTimestamp"]))) is None:
        return None
    asked_at = ends_at - timedelta(seconds=int(meta.get("deletionGracePeriodSeconds") or 0))
    asked_at_text = asked_at.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # Operators, too, delete pods: those that have ended. The times have a resolution of one second.
    ended_at = _ended_at(pod, with_init=True)
    is_terminated = any(each.get("exitCode") == _TERMINATED for each in _ended(pod, with_init=True))
    is_before = asked_at_text < ended_at or (asked_at_text == ended_at and is_terminated)
    return asked_at_text if is_before or not is_terminal(pod) else None


def _time_of(timestamp: str) -> datetime | None:
    try:
        return datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    except ValueError:
        return None


def _in_one_line(status: Mapping[str, Any]) -> str:
    return " ".join(reason_and_message(status).split())


def is_terminal(pod: Mapping[str, Any]) -> bool:
    """True if the pod is terminal."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _ended(pod: Mapping[str, Any], *, with_init: bool = False) -> list[Mapping[str, Any]]:
    statuses = [
        *(_init_statuses(pod) if with_init else ()),
        *((pod.get("status") or {}).get("containerStatuses") or ()),
    ]
    return [(each.get("state") or {}).get("terminated") or {} for each in statuses]


def _ended_at(pod: Mapping[str, Any], *, with_init: bool) -> str:
    return max((str(each.get("finishedAt") or "") for each in _ended(pod, with_init=with_init)), default="")


def _init_statuses(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the statuses of the init containers that must end before the others start: sidecars run beside them.

    Source: Kubernetes 1.29, Sidecar Containers.
    """
    given = (pod.get("spec") or {}).get("initContainers") or []
    sidecars = {each.get("name") for each in given if each.get("restartPolicy") == "Always"}
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or []
    return [each for each in statuses if each.get("name") not in sidecars]


def _failed_init(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the status of the failed init container; None: none has failed."""
    ended = ((each, (each.get("state") or {}).get("terminated") or {}) for each in _init_statuses(pod))
    return next((each for each, how in ended if how.get("exitCode")), None)


def reason_and_message(status: Mapping[str, Any]) -> str:
    """Returns the two texts with which Kubernetes explains a status, a condition or an event."""
    return ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
