"""FrameworkController's states and completion codes, and their mapping to ours.

Source: FrameworkController v1, FrameworkState, CompletionStatus and its predefined completion codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from nni_manager.training_services.kubernetes.operator import SUCCESS, JobOutcome, Stage
from nni_manager.training_services.kubernetes.pods import is_over, reason_and_message
from trial_keeper.wire.reasons import ExitReason


class FrameworkState(Enum):
    """The states of a Framework. UNKNOWN is ours: a state of another version, or no status yet."""

    CREATION_PENDING = "AttemptCreationPending"
    CREATION_REQUESTED = "AttemptCreationRequested"
    PREPARING = "AttemptPreparing"
    RUNNING = "AttemptRunning"
    DELETION_PENDING = "AttemptDeletionPending"
    DELETION_REQUESTED = "AttemptDeletionRequested"
    DELETING = "AttemptDeleting"
    ATTEMPT_COMPLETED = "AttemptCompleted"  # another attempt may follow
    COMPLETED = "Completed"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, framework: Mapping[str, Any]) -> FrameworkState:
        """Returns the state of a Framework."""
        value = (framework.get("status") or {}).get("state")
        return cls(value) if value in cls._value2member_map_ else cls.UNKNOWN

    @property
    def stage(self) -> Stage:
        """The job's stage. UNKNOWN counts as WAITING, because a later event shows a known state."""
        if self is FrameworkState.COMPLETED:
            return Stage.ENDED
        return Stage.WAITING if self in _BEFORE_RUNNING else Stage.RUNNING


_S = FrameworkState
_BEFORE_RUNNING = frozenset({_S.CREATION_PENDING, _S.CREATION_REQUESTED, _S.PREPARING, _S.UNKNOWN})
# FrameworkController's codes for pods or jobs that were deleted externally.
_DELETED_EXTERNALLY = frozenset({-100, -101, -210, -220, -230})


def verdict_of(framework: Mapping[str, Any], pods: Mapping[str, Mapping[str, Any]]) -> JobOutcome:
    """Returns the outcome of a Framework in state COMPLETED."""
    attempt = framework["status"].get("attemptStatus") or {}
    completion = attempt.get("completionStatus") or {}
    if (completion.get("type") or {}).get("name") == "Succeeded":
        return SUCCESS
    code = int(completion.get("code") or 0)
    task = _deciding_task(attempt, completion.get("trigger") or {})
    ended = (task.get("completionStatus") or {}).get("pod") or {}
    failed = [each for each in ended.get("containers") or [] if each.get("code")]
    name = framework["metadata"]["name"]
    because = (
        (completion.get("trigger") or {}).get("message") or completion.get("diagnostics") or "no reason given"
    )
    message = (
        f"FrameworkController reports {name}: {completion.get('phrase') or 'failed'}, code {code}; {because}"
    )
    if pod_message := reason_and_message(ended):
        message += f"\nKubernetes reports for its pod: {pod_message}"
    reason = ExitReason.JOB_LOST if code in _DELETED_EXTERNALLY else ExitReason.KEEPER_LOST
    exit_code = None
    if failed:
        exit_code = int(failed[-1]["code"])
        if failed[-1].get("reason") == "OOMKilled":
            reason = ExitReason.OUT_OF_MEMORY
    pod = task.get("podName")
    return JobOutcome(exit_code, message, reason, pod, pod is not None and not is_over(pods.get(pod, {})))


def _deciding_task(attempt: Mapping[str, Any], trigger: Mapping[str, Any]) -> Mapping[str, Any]:
    for role in attempt.get("taskRoleStatuses") or []:
        for task in role.get("taskStatuses") or []:
            if (role.get("name"), task.get("index")) == (
                trigger.get("taskRoleName"),
                trigger.get("taskIndex"),
            ):
                found: Mapping[str, Any] = task.get("attemptStatus") or {}
                return found
    return {}
