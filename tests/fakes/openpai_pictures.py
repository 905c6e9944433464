"""Job snapshots of the local OpenPAI's cluster, for tests of the REST responses."""

import hashlib

from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.job import Allocation, JobAttempt, Task
from nni_manager.local_openpai.core.policies import RetryCounts, Trigger
from nni_manager.local_openpai.core.states import ExecutionType, SubState
from nni_manager.local_openpai.jobs import JobDetail, JobSummary


def a_summary(**changes):
    """A waiting job with these changes."""
    user, name = changes.get("user", "ada"), changes.get("name", "job")
    values = {
        "job_id": 1,
        "debug_id": hashlib.md5(f"{user}~{name}".encode()).hexdigest(),
        "user": user,
        "name": name,
        "sub_state": SubState.ATTEMPT_CREATION_PENDING,
        "execution_type": ExecutionType.START,
        "tags": (),
        "retries": RetryCounts(),
        "submitted_at_s": 1.0,
        "launched_at_s": None,
        "completed_at_s": None,
        "code": None,
        "virtual_cluster": "default",
        "priority": None,
        "total_gpus": 0,
        "total_tasks": 1,
        "total_task_roles": 1,
        "attempt_id": 0,
    }
    return JobSummary(**{**values, **changes})


def a_failed_job(**changes):
    """The complete detail of a failed job."""
    end = TaskExit(255, 255, 3, "the commands ended with 3", "Traceback")
    times = {"launched_at_s": 2.0, "completed_at_s": 3.25}
    job = a_summary(sub_state=SubState.COMPLETED, code=255, tags=("a",), **times, **changes)
    message = "FailedTaskCount 1 has reached MinFailedTaskCount 1 in the TaskRole"
    trigger = Trigger(message, "worker1", 0)
    attempt = JobAttempt(0, 1.5, SubState.COMPLETED, exit=end, trigger=trigger, **times)
    task = Task(
        role="Worker_1",
        index=0,
        task_uid="task-0",
        container_id="pod-0",
        created_at_s=1.5,
        attempt_created_at_s=1.5,
        sub_state=SubState.COMPLETED,
        retries=RetryCounts(1, 2),
        attempt_launched_at_s=2.0,
        attempt_completed_at_s=3.25,
        allocation=Allocation("127.0.0.1", {"ssh": (26055,), "nni": (1, 2)}, (0, 2)),
        exit=end,
        **times,
    )
    return JobDetail(job, attempt, {"worker1": [task]})
