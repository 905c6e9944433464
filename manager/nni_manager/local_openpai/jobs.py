"""Snapshots of stored jobs, as queries return them. Times in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping

from nni_manager.local_openpai.core.job import JobAttempt, RecordEvent, Task
from nni_manager.local_openpai.core.policies import RetryCounts
from nni_manager.local_openpai.core.states import ExecutionType, State, SubState, state_of
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job in a list. `debug_id` is its name inside FrameworkController.

    `attempt_id` and `code` are those of the newest attempt. `code` is its exit code, actual or already decided.
    """

    job_id: int
    debug_id: str
    user: str
    name: str
    sub_state: SubState
    execution_type: ExecutionType
    retries: RetryCounts
    submitted_at_s: float
    launched_at_s: float | None
    completed_at_s: float | None
    code: int | None
    virtual_cluster: str
    priority: str | None
    total_gpus: int
    total_tasks: int
    total_task_roles: int
    attempt_id: int
    tags: tuple[str, ...]

    @property
    def state(self) -> State:
        """The state in terms of OpenPAI's API."""
        return state_of(self.sub_state, self.code)

    @property
    def exit_code(self) -> int | None:
        """The exit code of a terminal job."""
        return self.code if self.sub_state is SubState.COMPLETED else None

    @property
    def framework_name(self) -> str:
        """`user~job`: the job's id in the API and its PAI_JOB_NAME."""
        return f"{self.user}~{self.name}"


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job with one of its attempts: the newest, or the requested one. `tasks` by the mangled name of their role."""

    job: JobSummary
    attempt: JobAttempt
    tasks: Mapping[str, list[Task]]


@dataclass(frozen=True, slots=True)
class JobEvent(RecordEvent):
    """A stored event."""

    event_id: int = 0
    at_s: float = 0.0
