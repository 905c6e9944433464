"""The states of jobs, attempts and tasks: FrameworkController's internally, OpenPAI's in the API.

Source: FrameworkController v1 (FrameworkState, TaskState); microsoft/pai v1.8.1 (convertFrameworkState of its REST server).
"""

from __future__ import annotations

from enum import Enum

from nni_manager.local_openpai.core.exits import STOPPED


class State(Enum):
    """The state of a job, an attempt or a task in OpenPAI's API."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class SubState(Enum):
    """FrameworkController's state; jobs and tasks share the names."""

    ATTEMPT_CREATION_PENDING = "AttemptCreationPending"
    """Waiting for resources, or for the end of a delay."""
    ATTEMPT_PREPARING = "AttemptPreparing"
    """Its container is being created."""
    ATTEMPT_RUNNING = "AttemptRunning"
    """Its container runs; of a job: one of its tasks has started."""
    ATTEMPT_DELETION_REQUESTED = "AttemptDeletionRequested"
    """Running containers are being stopped."""
    ATTEMPT_COMPLETED = "AttemptCompleted"
    """The attempt has ended; the retry decision follows."""
    COMPLETED = "Completed"
    """It has ended for good."""


class ExecutionType(Enum):
    """The owner's request for a job."""

    START = "START"
    STOP = "STOP"


class EventType(Enum):
    """The severity of a job's event."""

    NORMAL = "Normal"
    WARNING = "Warning"


class TransitionEvent(Enum):
    """The triggers of state transitions of jobs and tasks."""

    ALLOCATED = "allocated"
    STARTED = "started"
    STOP_ASKED = "stop asked"
    ENDED = "ended"
    RETRIED = "retried"
    NOT_RETRIED = "not retried"


_S, _E = SubState, TransitionEvent
TASK_CHANGES: dict[tuple[SubState, TransitionEvent], SubState] = {
    (_S.ATTEMPT_CREATION_PENDING, _E.ALLOCATED): _S.ATTEMPT_PREPARING,
    (_S.ATTEMPT_CREATION_PENDING, _E.ENDED): _S.ATTEMPT_COMPLETED,  # stopped, or not allocated
    (_S.ATTEMPT_PREPARING, _E.STARTED): _S.ATTEMPT_RUNNING,
    (_S.ATTEMPT_PREPARING, _E.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_PREPARING, _E.ENDED): _S.ATTEMPT_COMPLETED,  # the container could not be started
    (_S.ATTEMPT_RUNNING, _E.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_RUNNING, _E.ENDED): _S.ATTEMPT_COMPLETED,
    (_S.ATTEMPT_DELETION_REQUESTED, _E.ENDED): _S.ATTEMPT_COMPLETED,
    (_S.ATTEMPT_COMPLETED, _E.RETRIED): _S.ATTEMPT_CREATION_PENDING,
    (_S.ATTEMPT_COMPLETED, _E.NOT_RETRIED): _S.COMPLETED,
}
# Events without a transition.
TASK_IGNORED: frozenset[tuple[SubState, TransitionEvent]] = frozenset(
    {
        (_S.ATTEMPT_RUNNING, _E.STARTED),  # adopted by a later cluster
        (_S.ATTEMPT_DELETION_REQUESTED, _E.STARTED),
    }
)
TASK_TRANSITIONS = TASK_CHANGES | {(state, event): state for state, event in TASK_IGNORED}
# A job is allocated and started with its first task, and ends with its last.
JOB_CHANGES: dict[tuple[SubState, TransitionEvent], SubState] = {
    (_S.ATTEMPT_CREATION_PENDING, _E.ALLOCATED): _S.ATTEMPT_PREPARING,
    (_S.ATTEMPT_CREATION_PENDING, _E.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_PREPARING, _E.STARTED): _S.ATTEMPT_RUNNING,
    (_S.ATTEMPT_PREPARING, _E.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_RUNNING, _E.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_DELETION_REQUESTED, _E.ENDED): _S.ATTEMPT_COMPLETED,
    (_S.ATTEMPT_COMPLETED, _E.RETRIED): _S.ATTEMPT_CREATION_PENDING,
    (_S.ATTEMPT_COMPLETED, _E.NOT_RETRIED): _S.COMPLETED,
}
# Events without a transition.
JOB_IGNORED: frozenset[tuple[SubState, TransitionEvent]] = frozenset(
    {
        (_S.ATTEMPT_PREPARING, _E.ALLOCATED),
        (_S.ATTEMPT_RUNNING, _E.ALLOCATED),
        (_S.ATTEMPT_RUNNING, _E.STARTED),
        (_S.ATTEMPT_DELETION_REQUESTED, _E.STARTED),
    }
)
JOB_TRANSITIONS = JOB_CHANGES | {(state, event): state for state, event in JOB_IGNORED}

_API_STATES = {
    _S.ATTEMPT_CREATION_PENDING: State.WAITING,
    _S.ATTEMPT_PREPARING: State.WAITING,
    _S.ATTEMPT_RUNNING: State.RUNNING,
}


def state_of(sub_state: SubState, code: int | None) -> State:
    """The API state of a job or a task in this sub-state. `code` is its exit code, actual or already decided, or None."""
    was_stopped = code in STOPPED
    if sub_state is SubState.COMPLETED:
        if was_stopped:
            return State.STOPPED
        return State.SUCCEEDED if code == 0 else State.FAILED
    return _API_STATES.get(sub_state, State.STOPPING if was_stopped else State.RUNNING)
