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
    if status.get("phase") != "Pending":
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


def last_words(pod: Mapping[str, Any]) -> str:
    """Why a pod has failed as a whole, and what its failed containers wrote last."""
    status = pod.get("status") or {}
    told = [_told(status)] if status.get("phase") == "Failed" and status.get("reason") else []
    for each in status.get("containerStatuses") or []:
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode") and ended.get("message"):
            told.append(str(ended["message"]).strip())
    return "\n".join(told)


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether it has nothing more to say."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _told(status: Mapping[str, Any]) -> str:
    return ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
