"""Pods that only sidecars keep running: containers which the cluster adds, such as Istio's, and which do not end with a trial.

Operators wait for the end of whole pods, so such a job never ends and keeps its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nni_manager.domain.completion import Completion
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import JobOutcome
from nni_manager.training_services.kubernetes.pods import is_terminal
from trial_keeper.settings import PREFIX
from trial_keeper.wire.reasons import ExitReason

REMEDY = 'to free its resources at once, keep the sidecar out of the pods, e.g. with annotation sidecar.istio.io/inject: "false"'


def are_over(present: Iterable[Document], gone: Iterable[Document], completion: Completion) -> bool:
    """True if the keepers in a job's pods have ended, or enough of them have failed, and only sidecars keep it running.

    `present`: the job's pods that exist. `gone`: those that were deleted. False while the cluster ends a pod.
    """
    shown = list(present)
    ended = [pod for pod in shown if keeper_end(pod)]
    is_held = any(_running(pod) and not is_terminal(pod) for pod in ended)
    if not is_held or any("deletionTimestamp" in pod["metadata"] for pod in shown):
        return False
    every = [*ended, *(pod for pod in gone if keeper_end(pod))]
    have_all_ended = len(ended) == len(shown) and len(every) >= completion.tasks
    return have_all_ended or bool(_decisive_failures(every, completion))


def outcome_of(pods: Iterable[Document], completion: Completion) -> JobOutcome:
    """The outcome of a job whose pods only sidecars keep running. The keeper that failed first decides a failed job."""
    ended = [pod for pod in pods if keeper_end(pod)]
    running = sorted({each for pod in ended for each in _running(pod)})
    message = f"its tasks have ended, and the manager ends the job: sidecar {', '.join(running)} still runs"
    failed = [pod for pod in ended if keeper_end(pod)["exitCode"]]
    decisive = _decisive_failures(ended, completion) or (failed if len(failed) == len(ended) else [])
    if not decisive:
        # The pods may have been deleted since `are_over`.
        return JobOutcome(0 if ended else None, message, ExitReason.KEEPER_LOST)
    first = min(decisive, key=lambda pod: str(keeper_end(pod).get("finishedAt") or "~"))
    end = keeper_end(first)
    reason = ExitReason.OUT_OF_MEMORY if end.get("reason") == "OOMKilled" else ExitReason.KEEPER_LOST
    return JobOutcome(int(end["exitCode"]), message, reason, first["metadata"]["name"])


def _decisive_failures(pods: Iterable[Document], completion: Completion) -> list[Document]:
    """Returns the pods whose keepers have failed, of the roles of which enough have failed to end the job."""
    failed: dict[str, list[Document]] = {}
    for pod in pods:
        if keeper_end(pod).get("exitCode"):
            failed.setdefault(_role_of(pod), []).append(pod)
    return [
        pod
        for role in completion.roles
        if 1 <= role.min_failed_tasks <= len(failed.get(role.name, ()))
        for pod in failed[role.name]
    ]


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
