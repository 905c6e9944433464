"""The states of jobs, attempts and tasks: FrameworkController's inside, OpenPAI's outside.

Source: FrameworkController v1 (FrameworkState, TaskState); microsoft/pai v1.8.1 (convertFrameworkState of its REST server).
"""

from __future__ import annotations

from enum import Enum


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
