"""Jobs as the local OpenPAI's cluster tells of them, for what makes answers of that."""

import hashlib

from nni_manager.local_openpai.core.states import ExecutionType, State, SubState
from nni_manager.local_openpai.jobs import (
    AttemptSummary,
    JobDetail,
    JobSummary,
    RetryCounts,
    TaskAttempt,
    TaskDetail,
    TaskExit,
    TaskRoleDetail,
    Trigger,
)


def a_summary(**changes):
    """A job that waits, with these changes."""
    user, name = changes.get("user", "ada"), changes.get("name", "job")
    values = {
        "debug_id": hashlib.md5(f"{user}~{name}".encode()).hexdigest(),
        "user": user,
        "name": name,
        "state": State.WAITING,
        "sub_state": SubState.ATTEMPT_CREATION_PENDING,
        "execution_type": ExecutionType.START,
        "tags": (),
        "retries": RetryCounts(),
        "submitted_at_s": 1.0,
        "created_at_s": 1.5,
        "launched_at_s": None,
        "completed_at_s": None,
        "exit_code": None,
        "virtual_cluster": "default",
        "priority": None,
        "total_gpus": 0,
        "total_tasks": 1,
        "total_task_roles": 1,
        "attempt_id": 0,
    }
    return JobSummary(**{**values, **changes})


def a_failed_job(**changes):
    """All there is to tell of a job that failed."""
    end = TaskExit(255, 255, 3, "the commands ended with 3", "Traceback")
    times = {"created_at_s": 1.5, "launched_at_s": 2.0, "completed_at_s": 3.25}
    job = a_summary(
        state=State.FAILED, sub_state=SubState.COMPLETED, exit_code=255, tags=("a",), **times, **changes
    )
    message = "FailedTaskCount 1 has reached MinFailedTaskCount 1 in the TaskRole"
    attempt = AttemptSummary(
        0, State.FAILED, SubState.COMPLETED, 1.5, 2.0, 3.25, end, Trigger(message, "worker1", 0)
    )
    over = (State.FAILED, SubState.COMPLETED)
    ports = {"ssh": (26055,), "nni": (1, 2)}
    task_attempt = TaskAttempt(
        0, "pod-0", *over, *times.values(), "127.0.0.1", "localhost", ports, (0, 2), end
    )
    task = TaskDetail(0, "task-0", *over, RetryCounts(1, 2), *times.values(), task_attempt)
    return JobDetail(job, attempt, (TaskRoleDetail("Worker_1", "worker1", (task,)),))
