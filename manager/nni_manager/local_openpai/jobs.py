"""Immutable snapshots of jobs, as the cluster returns them. Times in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.policies import RetryCounts, Trigger
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.core.states import EventType, ExecutionType, State, SubState

__all__ = [
    "AttemptSummary",
    "EventType",
    "ExecutionType",
    "JobDetail",
    "JobEventRecord",
    "JobSummary",
    "LogFile",
    "LogPiece",
    "ResourceCounts",
    "RetryCounts",
    "State",
    "StorageView",
    "SubState",
    "TaskAttempt",
    "TaskDetail",
    "TaskExit",
    "TaskRoleDetail",
    "Trigger",
    "VirtualClusterView",
]


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt of a job. `exit` and `trigger` are None until they are decided."""

    attempt_id: int
    state: State
    sub_state: SubState
    created_at_s: float
    launched_at_s: float | None
    completed_at_s: float | None
    exit: TaskExit | None
    trigger: Trigger | None


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job in a list. `debug_id` is its name inside FrameworkController.

    `attempt_id` is the newest attempt's. `exit_code` is None until it is decided.
    """

    debug_id: str
    user: str
    name: str
    state: State
    sub_state: SubState
    execution_type: ExecutionType
    tags: tuple[str, ...]
    retries: RetryCounts
    submitted_at_s: float
    created_at_s: float
    launched_at_s: float | None
    completed_at_s: float | None
    exit_code: int | None
    virtual_cluster: str
    priority: str | None
    total_gpus: int
    total_tasks: int
    total_task_roles: int
    attempt_id: int

    @property
    def framework_name(self) -> str:
        """`user~job`: the job's id in the API and its PAI_JOB_NAME."""
        return f"{self.user}~{self.name}"


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One attempt of a task. `container_id` is OpenPAI's pod uid. Before allocation the address is None and ports are empty."""

    attempt_id: int
    container_id: str
    state: State
    sub_state: SubState
    created_at_s: float
    launched_at_s: float | None
    completed_at_s: float | None
    container_ip: str | None
    node_name: str | None
    ports: Mapping[str, tuple[int, ...]] = field(hash=False)
    gpus: tuple[int, ...]
    exit: TaskExit | None


@dataclass(frozen=True, slots=True)
class TaskDetail:
    """A task of a job's attempt, with its newest attempt. `created_at_s` is that of its first."""

    index: int
    task_uid: str
    state: State
    sub_state: SubState
    retries: RetryCounts
    created_at_s: float
    launched_at_s: float | None
    completed_at_s: float | None
    attempt: TaskAttempt


@dataclass(frozen=True, slots=True)
class TaskRoleDetail:
    """A task role of an attempt. `name` is from the job file, `mangled_name` from OpenPAI's API."""

    name: str
    mangled_name: str
    tasks: tuple[TaskDetail, ...]


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job with one of its attempts: the newest, or the requested one."""

    job: JobSummary
    attempt: AttemptSummary
    task_roles: tuple[TaskRoleDetail, ...]


@dataclass(frozen=True, slots=True)
class JobEventRecord:
    """An event of a job, or of one of its tasks (then role, index and container are set)."""

    uid: str
    type: EventType
    reason: str
    message: str
    at_s: float
    attempt_id: int
    role: str | None = None
    index: int | None = None
    container_id: str | None = None


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log of a task's attempt: `stdout`, `stderr`, `all`, `runtime.log`, and rotated files: `stdout.1` (newest)."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a log, starting at `offset`. `size_bytes` is the size of the whole log."""

    data: bytes
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class VirtualClusterView:
    """A virtual cluster: its capacity, the resources in use, and the number of queued jobs."""

    name: str
    capacity: ResourceCounts
    used: ResourceCounts
    waiting_jobs: int


@dataclass(frozen=True, slots=True)
class StorageView:
    """A storage: a folder of this machine. Jobs that name no storage get those with `is_default`.

    `is_mounted` is True if tasks see it at the path that they request, and False if at `path` only.
    """

    name: str
    path: str
    is_default: bool
    is_read_only: bool
    is_mounted: bool
