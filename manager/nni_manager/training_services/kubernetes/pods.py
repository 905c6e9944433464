"""What Kubernetes says of a pod, for people: why it does not start, and what it said last.

Source: Kubernetes, Pod Lifecycle (conditions, container states).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every pod is in these for a moment; they say nothing.
_USUAL = frozenset({"ContainerCreating", "PodInitializing", ""})


def why_it_waits(pod: Mapping[str, Any]) -> str:
    """What keeps a pending pod from running; empty for any other, and where nothing is known."""
    status = pod.get("status") or {}
    if not is_pending(pod):
        return ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _told(condition)
    waiting = [
        (each.get("state") or {}).get("waiting") or {}
        for part in ("initContainerStatuses", "containerStatuses")
        for each in status.get(part) or []
    ]
    return next(
        (_told(each) for each in waiting if each.get("reason", "") not in _USUAL or each.get("message")), ""
    )


def what_goes_first(pod: Mapping[str, Any]) -> str:
    """The container that a pending pod runs before its others, e.g. a barrier; empty where none runs."""
    for each in (pod.get("status") or {}).get("initContainerStatuses") or []:
        if "running" in (each.get("state") or {}):
            return f"its init container {each['name']} has not ended"
    return ""


def is_pending(pod: Mapping[str, Any]) -> bool:
    """Whether none of its containers but those that go first has been started yet."""
    return (pod.get("status") or {}).get("phase") == "Pending"


def has_node(pod: Mapping[str, Any]) -> bool:
    """Whether it was given a node to run on."""
    return bool((pod.get("spec") or {}).get("nodeName"))


def last_words(pod: Mapping[str, Any]) -> str:
    """Why a pod has failed as a whole, and what its failed containers wrote last."""
    status = pod.get("status") or {}
    told = [_told(status)] if status.get("phase") == "Failed" and status.get("reason") else []
    for ended in _ended(pod):
        if ended.get("exitCode") and ended.get("message"):
            told.append(str(ended["message"]).strip())
    return "\n".join(told)


def has_run(pod: Mapping[str, Any]) -> bool:
    """Whether some container of it, other than those that come first, has begun."""
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")


def first_failed(pods: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The name of the pod that failed first, as far as is told; None where none has failed.

    Operators end the others within the same second, which is all that Kubernetes tells of the time.
    """
    failed = {name: pod for name, pod in pods.items() if (pod.get("status") or {}).get("phase") == "Failed"}

    def order(name: str) -> tuple[bool, str, str]:
        is_ended_by_others = "deletionTimestamp" in (failed[name].get("metadata") or {})
        return is_ended_by_others, _ended_at(failed[name]) or "~", name

    return min(failed, key=order, default=None)


def failure_of(pod: Mapping[str, Any]) -> tuple[int | None, bool]:
    """The exit code of a container of it that failed, None where none did, and whether its memory was full."""
    failed = [each for each in _ended(pod) if each.get("exitCode")]
    if not failed:
        return None, False
    return int(failed[-1]["exitCode"]), any(each.get("reason") == "OOMKilled" for each in failed)


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether it has nothing more to say."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _ended(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return [(each.get("state") or {}).get("terminated") or {} for each in statuses]


def _ended_at(pod: Mapping[str, Any]) -> str:
    return max((str(each.get("finishedAt") or "") for each in _ended(pod)), default="")


def _told(status: Mapping[str, Any]) -> str:
    return ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
