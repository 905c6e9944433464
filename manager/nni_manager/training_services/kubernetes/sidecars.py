"""Pods that only sidecars keep running: containers which the cluster adds, such as Istio's, and which do not end with a trial.

Operators wait for the end of whole pods, so such a job never ends and keeps its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from nni_manager.domain.completion import Completion
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import JobOutcome
from nni_manager.training_services.kubernetes.pods import is_terminal
from trial_keeper.settings import PREFIX
from trial_keeper.wire.reasons import ExitReason

REMEDY = 'to free its resources at once, keep the sidecar out of the pods, e.g. with annotation sidecar.istio.io/inject: "false"'


def are_over(pods: Iterable[Document], completion: Completion) -> bool:
    """True if the keepers in a job's pods have ended, or enough of them have failed, and only sidecars keep it running.

    `pods` are the job's pods that exist. False while the cluster ends one of them.
    """
    shown = list(pods)
    if any("deletionTimestamp" in pod["metadata"] for pod in shown):
        return False
    ends = [keeper_end(pod) for pod in shown]
    held = [
        pod for pod, end in zip(shown, ends, strict=True) if end and _running(pod) and not is_terminal(pod)
    ]
    failed = Counter(_role_of(pod) for pod, end in zip(shown, ends, strict=True) if end and end["exitCode"])
    has_failed = any(1 <= role.min_failed_tasks <= failed[role.name] for role in completion.roles)
    return bool(held) and (has_failed or (len(shown) >= completion.tasks and all(ends)))


def outcome_of(pods: Mapping[str, Document]) -> JobOutcome:
    """The outcome of a job whose pods only sidecars keep running, by the keeper that failed first."""
    ends = {name: end for name, pod in pods.items() if (end := keeper_end(pod))}
    running = sorted({each for name in ends for each in _running(pods[name])})
    message = f"every task has ended, and the manager ends the job: sidecar {', '.join(running)} still runs"
    failed = [name for name, end in ends.items() if end["exitCode"]]
    if not failed:
        return JobOutcome(0, message, ExitReason.KEEPER_LOST)
    first = min(failed, key=lambda name: (str(ends[name].get("finishedAt") or "~"), name))
    is_out_of_memory = ends[first].get("reason") == "OOMKilled"
    reason = ExitReason.OUT_OF_MEMORY if is_out_of_memory else ExitReason.KEEPER_LOST
    return JobOutcome(int(ends[first]["exitCode"]), message, reason, first)


def keeper_end(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns how the keeper's container has ended for good; empty if it has not."""
    spec = pod.get("spec") or {}
    if spec.get("restartPolicy") != "Never":
        return {}  # the container may start again
    keepers = {each.get("name") for each in spec.get("containers") or () if _variable(each, "JOB_ID")}
    ended: Mapping[str, Any] = next(
        (
            each["state"]["terminated"]
            for each in (pod.get("status") or {}).get("containerStatuses") or ()
            if each.get("name") in keepers and (each.get("state") or {}).get("terminated")
        ),
        {},
    )
    return ended


def _running(pod: Mapping[str, Any]) -> list[str]:
    """Returns the names of the containers that run, also of init containers that are sidecars."""
    status = pod.get("status") or {}
    statuses = (
        each for part in ("initContainerStatuses", "containerStatuses") for each in status.get(part) or ()
    )
    return [str(each.get("name")) for each in statuses if "running" in (each.get("state") or {})]


def _role_of(pod: Mapping[str, Any]) -> str:
    """Returns the role of a pod's keeper."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    return next(filter(None, (_variable(each, "ROLE") for each in containers)), "")


def _variable(container: Mapping[str, Any], name: str) -> str:
    """Returns a setting of the keeper that the container runs; empty if it runs none."""
    found = (
        each.get("value") for each in container.get("env") or () if each.get("name") == f"{PREFIX}{name}"
    )
    return str(next(found, ""))
