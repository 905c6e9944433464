"""The state machine of one job and its tasks: events in, effects out.

Theory of operation. A job has successive attempts, an attempt has tasks, and a task has attempts, each of which is one
container. Gang allocation (the default) allocates all tasks of an attempt in one step, so each task starts with the addresses
of all. Without gang allocation, each task is allocated separately. An event concerns one container; an event of a container that
is not the task's newest is stale and ignored. Task exits decide the result of the attempt (the verdict). The remaining
tasks are then stopped, and the attempt ends with its last task. A verdict never changes: a job that is stopped after its
failure stays failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from enum import Enum

from nni_manager.local_openpai.core.exits import STOPPED, STOPPED_BY_COMPLETION, STOPPED_BY_USER, TaskExit
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.core.policies import RetryCounts, TaskEnd, Trigger, Verdict, retried, verdict
from nni_manager.local_openpai.core.queue import Request
from nni_manager.local_openpai.core.states import (
    JOB_TRANSITIONS,
    TASK_TRANSITIONS,
    EventType,
    ExecutionType,
    State,
    SubState,
    TransitionEvent,
    state_of,
)
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Allocation:
    """The address, ports and GPUs of a container."""

    host_ip: str
    ports: Mapping[str, tuple[int, ...]]
    gpus: tuple[int, ...]


@dataclass(slots=True)
class Task:
    """A task with its newest attempt, identified by `container_id`. Times without `attempt` cover all attempts."""

    role: str
    index: int
    task_uid: str
    container_id: str
    created_at_s: float
    attempt_created_at_s: float
    sub_state: SubState = SubState.ATTEMPT_CREATION_PENDING
    attempt_id: int = 0
    retries: RetryCounts = field(default_factory=RetryCounts)
    launched_at_s: float | None = None
    completed_at_s: float | None = None
    attempt_launched_at_s: float | None = None
    attempt_completed_at_s: float | None = None
    allocation: Allocation | None = None
    stop_code: int | None = None
    exit: TaskExit | None = None

    @property
    def is_terminal(self) -> bool:
        """True if no further attempt follows."""
        return self.sub_state is SubState.COMPLETED

    @property
    def code(self) -> int | None:
        """The exit code, actual or already decided; None before that."""
        return self.exit.code if self.exit is not None else self.stop_code

    @property
    def state(self) -> State:
        """The state in terms of OpenPAI's API."""
        return state_of(self.sub_state, self.code)

    @property
    def attempt_state(self) -> State:
        """The state of this attempt, which is terminal even if another attempt follows."""
        return self.state if self.attempt_completed_at_s is None else state_of(SubState.COMPLETED, self.code)


@dataclass(slots=True)
class JobAttempt:
    """An attempt of a job. `exit` and `trigger` are None until they are decided."""

    attempt_id: int = 0
    created_at_s: float = 0.0
    sub_state: SubState = SubState.ATTEMPT_CREATION_PENDING
    launched_at_s: float | None = None
    completed_at_s: float | None = None
    exit: TaskExit | None = None
    trigger: Trigger | None = None

    @property
    def code(self) -> int | None:
        """The exit code, actual or already decided; None before that."""
        return None if self.exit is None else self.exit.code

    @property
    def state(self) -> State:
        """The state in terms of OpenPAI's API."""
        return state_of(self.sub_state, self.code)


# ---- events


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job is stored."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """These containers have their allocations."""

    allocations: Mapping[str, Allocation]


@dataclass(frozen=True, slots=True)
class ContainerStarted:
    """A container's process is running."""

    container_id: str


@dataclass(frozen=True, slots=True)
class ContainerEnded:
    """A container's process and all its descendants have ended, or the container gets no allocation."""

    container_id: str
    exit: TaskExit


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The owner or an administrator stops the job."""


Event = Submitted | Allocated | ContainerStarted | ContainerEnded | StopAsked


# ---- effects


class Change(Enum):
    """A change of a job that its owner can subscribe to; the terminal ones have the names of states."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    RETRIED = "retried"


@dataclass(frozen=True, slots=True)
class LeaveQueue:
    """Remove these containers from the queue."""

    container_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReleaseAllocation:
    """Release the container's allocation."""

    container_id: str


@dataclass(frozen=True, slots=True)
class StartContainer:
    """Start this task's process. `tasks` are copies of all tasks of the job."""

    job_attempt_id: int
    task: Task
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class StopContainer:
    """Stop this container, with a grace period."""

    container_id: str


@dataclass(frozen=True, slots=True)
class SaveTask:
    """Store this copy of the task."""

    job_attempt_id: int
    task: Task


@dataclass(frozen=True, slots=True)
class SaveAttempt:
    """Store this copy of the job's attempt."""

    attempt: JobAttempt


@dataclass(frozen=True, slots=True)
class Notify:
    """Notify the job's owner."""

    change: Change
    attempt_id: int


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Store an event of the job. Role, index and container are those of a task, or None."""

    type: EventType
    reason: str
    message: str
    attempt_id: int
    role: str | None = None
    index: int | None = None
    container_id: str | None = None


Effect = (
    Request
    | LeaveQueue
    | ReleaseAllocation
    | StartContainer
    | StopContainer
    | SaveTask
    | SaveAttempt
    | Notify
    | RecordEvent
)

_TERMINAL = {SubState.COMPLETED, SubState.ATTEMPT_COMPLETED}


@dataclass(slots=True)
class PaiJob:
    """A job that is not terminal. `new_id` creates unique ids."""

    job_id: int
    plan: JobPlan
    submitted_at_s: float
    new_id: Callable[[], str]
    most_platform_retries: int
    execution_type: ExecutionType = ExecutionType.START
    retries: RetryCounts = field(default_factory=RetryCounts)
    launched_at_s: float | None = None
    completed_at_s: float | None = None
    attempt: JobAttempt = field(default_factory=JobAttempt)
    """The newest attempt."""
    tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    ends: list[TaskEnd] = field(default_factory=list)
    latest_s: float = 0.0
    """The latest stored time. New times are never earlier, even if the clock of a later cluster is behind."""

    @property
    def sub_state(self) -> SubState:
        """The sub-state of the job and of its newest attempt."""
        return self.attempt.sub_state

    @property
    def is_terminal(self) -> bool:
        """True if no further attempt follows."""
        return self.sub_state is SubState.COMPLETED

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """The effects of an event."""
        self.latest_s = max(now_s, self.latest_s)
        return list(self._handle(event, self.latest_s))

    def _handle(self, event: Event, now_s: float) -> Iterator[Effect]:
        match event:
            case Submitted():
                yield from self._begin_attempt(self.attempt.attempt_id, now_s)
            case Allocated():
                yield from self._allocate(event.allocations, now_s)
            case ContainerStarted():
                yield from self._start(event.container_id, now_s)
            case ContainerEnded():
                yield from self._end(event.container_id, event.exit, now_s)
            case StopAsked():
                yield from self._stop(now_s)
        yield SaveAttempt(replace(self.attempt))

    # ---- start

    def _begin_attempt(self, attempt_id: int, now_s: float) -> Iterator[Effect]:
        self.attempt = JobAttempt(attempt_id, now_s)
        self.ends.clear()
        self.tasks = {
            (role.name, index): Task(role.name, index, self.new_id(), self.new_id(), now_s, now_s)
            for role in self.plan.roles
            for index in range(role.tasks)
        }
        for task in self.tasks.values():
            yield self._saved(task)
        yield from self.requests()

    def requests(self) -> list[Request]:
        """The pending allocation requests; after a restart, they rebuild the queue."""
        pending = [
            task for task in self.tasks.values() if task.sub_state is SubState.ATTEMPT_CREATION_PENDING
        ]
        groups = [pending] if self.plan.is_gang else [[task] for task in pending]
        return [self._request(group) for group in groups if group]

    def _request(self, tasks: list[Task]) -> Request:
        needs = {task.container_id: self.plan.role(task.role).need for task in tasks}
        return Request(self.job_id, needs)

    def _allocate(self, allocations: Mapping[str, Allocation], now_s: float) -> Iterator[Effect]:
        allocated = [task for task in self.tasks.values() if task.container_id in allocations]
        self._move_job(TransitionEvent.ALLOCATED)
        for task in allocated:
            task.allocation = allocations[task.container_id]
            self._move(task, TransitionEvent.ALLOCATED)
            yield self._saved(task)
            yield self._event(task, EventType.NORMAL, "Scheduled", f"allocated on {task.allocation.host_ip}")
        # Barrier: every container of the group has an address before the first one starts.
        tasks = tuple(replace(task) for task in self.tasks.values())
        for task in allocated:
            yield StartContainer(self.attempt.attempt_id, replace(task), tasks)

    def _start(self, container_id: str, now_s: float) -> Iterator[Effect]:
        task = self._task_of(container_id)
        if task is None:
            return
        was_running = self.sub_state is SubState.ATTEMPT_RUNNING
        self._move(task, TransitionEvent.STARTED)
        self._move_job(TransitionEvent.STARTED)
        if task.attempt_launched_at_s is not None:
            return
        task.attempt_launched_at_s = now_s
        task.launched_at_s = task.launched_at_s or now_s
        self.attempt.launched_at_s = self.attempt.launched_at_s or now_s
        self.launched_at_s = self.launched_at_s or now_s
        yield self._saved(task)
        yield self._event(task, EventType.NORMAL, "Started", "the process has started")
        if not was_running and self.sub_state is SubState.ATTEMPT_RUNNING:
            yield Notify(Change.RUNNING, self.attempt.attempt_id)

    # ---- end

    def _end(self, container_id: str, ended: TaskExit, now_s: float) -> Iterator[Effect]:
        task = self._task_of(container_id)
        if task is None:
            return
        if task.stop_code is not None:
            # A requested stop is not a failure, whatever the process's exit code.
            ended = replace(ended, code=task.stop_code)
        self._move(task, TransitionEvent.ENDED)
        task.exit, task.attempt_completed_at_s = ended, now_s
        yield ReleaseAllocation(container_id)
        if ended.code not in STOPPED:
            kind = EventType.NORMAL if ended.code == 0 else EventType.WARNING
            what = ended.diagnostics.partition("\n")[0]
            yield self._event(task, kind, ended.spec.phrase, f"exit code {ended.code}: {what}")
        counts = None
        if self.attempt.exit is None:
            policy = self.plan.task_retry[task.role]
            counts = retried(policy, ended.code, task.retries, self.most_platform_retries)
        if counts is not None:
            yield from self._retry(task, counts, now_s)
            return
        self._move(task, TransitionEvent.NOT_RETRIED)
        task.completed_at_s = now_s
        yield self._saved(task)
        if task.stop_code is None:
            self.ends.append(TaskEnd(task.role, task.index, ended))
        yield from self._judge(now_s)

    def _retry(self, task: Task, counts: RetryCounts, now_s: float) -> Iterator[Effect]:
        yield self._saved(task)
        self._move(task, TransitionEvent.RETRIED)
        task.retries, task.attempt_id, task.container_id = counts, task.attempt_id + 1, self.new_id()
        task.attempt_created_at_s = now_s
        task.attempt_launched_at_s = task.attempt_completed_at_s = task.allocation = task.exit = None
        yield self._saved(task)
        message = f"attempt {task.attempt_id} of this task is waiting for resources"
        yield self._event(task, EventType.NORMAL, "TaskRetried", message)
        yield self._request([task])

    def _judge(self, now_s: float) -> Iterator[Effect]:
        if self.attempt.exit is None:
            policies = ((role.name, role.completion) for role in self.plan.roles)
            found = verdict(policies, self.plan.total_tasks, self.ends)
            if found is None:
                return
            yield from self._decide(found, STOPPED_BY_COMPLETION, now_s)
        elif all(task.is_terminal for task in self.tasks.values()) and self.attempt.completed_at_s is None:
            yield from self._finish(now_s)

    def _stop(self, now_s: float) -> Iterator[Effect]:
        self.execution_type = ExecutionType.STOP
        if self.attempt.exit is not None:
            return
        trigger = Trigger("the job was stopped by its owner or an administrator")
        stopped = Verdict(TaskExit(STOPPED_BY_USER, diagnostics=trigger.message), trigger)
        yield RecordEvent(EventType.NORMAL, "StopRequested", trigger.message, self.attempt.attempt_id)
        yield from self._decide(stopped, STOPPED_BY_USER, now_s)

    def _decide(self, found: Verdict, stop_code: int, now_s: float) -> Iterator[Effect]:
        """Set the verdict of the attempt and stop its running and waiting tasks."""
        self.attempt.exit, self.attempt.trigger = found.exit, found.trigger
        self._move_job(TransitionEvent.STOP_ASKED)
        waiting = []
        for task in self.tasks.values():
            if task.is_terminal:
                continue
            task.stop_code = stop_code
            if task.sub_state is SubState.ATTEMPT_CREATION_PENDING:
                waiting.append(task.container_id)
                continue
            self._move(task, TransitionEvent.STOP_ASKED)
            yield self._saved(task)
            yield self._event(task, EventType.NORMAL, "Killing", found.trigger.message)
            yield StopContainer(task.container_id)
        if waiting:
            yield LeaveQueue(tuple(waiting))
        for container_id in waiting:
            yield from self._end(
                container_id, TaskExit(stop_code, diagnostics="the task had not started"), now_s
            )
        yield from self._judge(now_s)

    def _finish(self, now_s: float) -> Iterator[Effect]:
        """End the attempt; start another one or end the job."""
        self._move_job(TransitionEvent.ENDED)
        self.attempt.completed_at_s = now_s
        code = self.attempt.code
        assert code is not None
        counts = (
            None
            if self.execution_type is ExecutionType.STOP
            else retried(self.plan.job_retry, code, self.retries, self.most_platform_retries)
        )
        if counts is not None:
            yield SaveAttempt(replace(self.attempt, sub_state=SubState.COMPLETED))
            self._move_job(TransitionEvent.RETRIED)
            self.retries, attempt_id = counts, self.attempt.attempt_id + 1
            yield Notify(Change.RETRIED, attempt_id)
            message = f"starting attempt {attempt_id}: the previous attempt ended with code {code}"
            yield RecordEvent(EventType.NORMAL, "JobRetried", message, attempt_id)
            yield from self._begin_attempt(attempt_id, now_s)
            return
        self._move_job(TransitionEvent.NOT_RETRIED)
        self.completed_at_s = now_s
        platform_retries = self.retries.platform + self.retries.resource
        if platform_retries >= self.most_platform_retries and code not in (0, *STOPPED):
            message = f"the limit of retries is reached: {self.retries.total} retries, the last one ended with code {code}"
            yield RecordEvent(EventType.WARNING, "RetriesExhausted", message, self.attempt.attempt_id)
        yield Notify(Change[self.attempt.state.name], self.attempt.attempt_id)

    # ---- helpers

    def _task_of(self, container_id: str) -> Task | None:
        """The task of this container; None if the container is unknown or its task accepts no more events."""
        task = next((task for task in self.tasks.values() if task.container_id == container_id), None)
        return None if task is None or task.sub_state in _TERMINAL else task

    def _move(self, task: Task, event: TransitionEvent) -> None:
        task.sub_state = TASK_TRANSITIONS[task.sub_state, event]

    def _move_job(self, event: TransitionEvent) -> None:
        self.attempt.sub_state = JOB_TRANSITIONS[self.sub_state, event]

    def _saved(self, task: Task) -> SaveTask:
        return SaveTask(self.attempt.attempt_id, replace(task))

    def _event(self, task: Task, kind: EventType, reason: str, message: str) -> RecordEvent:
        return RecordEvent(
            kind, reason, message, self.attempt.attempt_id, task.role, task.index, task.container_id
        )
