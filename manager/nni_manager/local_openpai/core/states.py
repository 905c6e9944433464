"""The states of jobs, attempts and tasks: FrameworkController's inside, OpenPAI's outside.

Source: FrameworkController v1 (FrameworkState, TaskState); microsoft/pai v1.8.1 (convertFrameworkState of its REST server).
"""

from __future__ import annotations

from enum import Enum

from nni_manager.local_openpai.core.exits import STOPPED


class State(Enum):
    """What OpenPAI's API calls the state of a job, an attempt or a task."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class SubState(Enum):
    """What FrameworkController calls it; the same names for jobs and for tasks."""

    ATTEMPT_CREATION_PENDING = "AttemptCreationPending"
    """It waits: for resources, or for the end of a delay."""
    ATTEMPT_PREPARING = "AttemptPreparing"
    ATTEMPT_RUNNING = "AttemptRunning"
    ATTEMPT_DELETION_REQUESTED = "AttemptDeletionRequested"
    """What runs is being ended."""
    ATTEMPT_COMPLETED = "AttemptCompleted"
    """Over for this attempt; whether there will be another is decided next."""
    COMPLETED = "Completed"


class ExecutionType(Enum):
    """What the owner of a job wants of it."""

    START = "START"
    STOP = "STOP"


class EventType(Enum):
    """Whether something that happened to a job is in the order of things."""

    NORMAL = "Normal"
    WARNING = "Warning"


class Happening(Enum):
    """What moves a job or a task on."""

    PLACED = "placed"
    STARTED = "started"
    STOP_ASKED = "stop asked"
    ENDED = "ended"
    RETRIED = "retried"
    GIVEN_UP = "given up"


_S, _H = SubState, Happening
TASK_NEXT: dict[tuple[SubState, Happening], SubState] = {
    (_S.ATTEMPT_CREATION_PENDING, _H.PLACED): _S.ATTEMPT_PREPARING,
    (_S.ATTEMPT_CREATION_PENDING, _H.ENDED): _S.ATTEMPT_COMPLETED,  # stopped, or without a place
    (_S.ATTEMPT_PREPARING, _H.STARTED): _S.ATTEMPT_RUNNING,
    (_S.ATTEMPT_PREPARING, _H.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_PREPARING, _H.ENDED): _S.ATTEMPT_COMPLETED,  # it could not be started
    (_S.ATTEMPT_RUNNING, _H.STARTED): _S.ATTEMPT_RUNNING,  # seen again by a later cluster
    (_S.ATTEMPT_RUNNING, _H.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_RUNNING, _H.ENDED): _S.ATTEMPT_COMPLETED,
    (_S.ATTEMPT_DELETION_REQUESTED, _H.STARTED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_DELETION_REQUESTED, _H.ENDED): _S.ATTEMPT_COMPLETED,
    (_S.ATTEMPT_COMPLETED, _H.RETRIED): _S.ATTEMPT_CREATION_PENDING,
    (_S.ATTEMPT_COMPLETED, _H.GIVEN_UP): _S.COMPLETED,
}
# A job is placed and started with the first of its tasks, and has ended with the last of them.
JOB_NEXT: dict[tuple[SubState, Happening], SubState] = {
    (_S.ATTEMPT_CREATION_PENDING, _H.PLACED): _S.ATTEMPT_PREPARING,
    (_S.ATTEMPT_CREATION_PENDING, _H.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_PREPARING, _H.PLACED): _S.ATTEMPT_PREPARING,
    (_S.ATTEMPT_PREPARING, _H.STARTED): _S.ATTEMPT_RUNNING,
    (_S.ATTEMPT_PREPARING, _H.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_RUNNING, _H.PLACED): _S.ATTEMPT_RUNNING,
    (_S.ATTEMPT_RUNNING, _H.STARTED): _S.ATTEMPT_RUNNING,
    (_S.ATTEMPT_RUNNING, _H.STOP_ASKED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_DELETION_REQUESTED, _H.STARTED): _S.ATTEMPT_DELETION_REQUESTED,
    (_S.ATTEMPT_DELETION_REQUESTED, _H.ENDED): _S.ATTEMPT_COMPLETED,
    (_S.ATTEMPT_COMPLETED, _H.RETRIED): _S.ATTEMPT_CREATION_PENDING,
    (_S.ATTEMPT_COMPLETED, _H.GIVEN_UP): _S.COMPLETED,
}

_OUTSIDE = {
    _S.ATTEMPT_CREATION_PENDING: State.WAITING,
    _S.ATTEMPT_PREPARING: State.WAITING,
    _S.ATTEMPT_RUNNING: State.RUNNING,
}


def state_of(sub_state: SubState, code: int | None) -> State:
    """What OpenPAI's API says of a job or a task in this state; `code` is how it ended, or will have, if that is known."""
    was_stopped = code in STOPPED
    if sub_state is SubState.COMPLETED:
        if was_stopped:
            return State.STOPPED
        return State.SUCCEEDED if code == 0 else State.FAILED
    return _OUTSIDE.get(sub_state, State.STOPPING if was_stopped else State.RUNNING)
