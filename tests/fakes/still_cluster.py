"""A cluster in memory whose jobs do nothing: for what the REST API does before, after and beside a real one."""

import dataclasses
import hashlib
import time

from nni_manager.local_openpai import errors
from nni_manager.local_openpai.cluster import TAIL_BYTES, Cluster
from nni_manager.local_openpai.core.states import ExecutionType, State, SubState
from nni_manager.local_openpai.jobs import (
    AttemptSummary,
    EventType,
    Exit,
    JobDetail,
    JobEvent,
    JobSummary,
    LogFile,
    LogPiece,
    ResourceCounts,
    RetryCounts,
    StorageView,
    TaskAttempt,
    TaskDetail,
    TaskRoleDetail,
    Trigger,
    VirtualClusterView,
)
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.training_services.openpai.export import without_secrets
from nni_manager.training_services.openpai.mistakes import ProtocolInvalid
from nni_manager.training_services.openpai.protocol import parse


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
    end = Exit(255, 255, 3, "the commands ended with 3", "Traceback")
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


class StillCluster(Cluster):
    """Takes jobs in, and lets them wait."""

    def __init__(self, settings: ClusterSettings):
        super().__init__(settings)
        self.details = {}
        self.texts = {}
        self.logs = {}
        self.failure = None

    async def start(self):
        pass

    async def close(self):
        pass

    async def submit(self, user, config_text):
        if self.failure:
            raise self.failure
        try:
            job = parse(config_text.decode())
        except ProtocolInvalid as error:
            raise errors.JobInvalid(error.mistakes) from error
        if (user, job.name) in self.details:
            raise errors.JobExists(f"Job {user}~{job.name} already exists.")
        if job.virtual_cluster != "default":
            raise errors.VirtualClusterUnknown(
                f"cannot find virtual cluster {job.virtual_cluster}; use default"
            )
        summary = a_summary(user=user, name=job.name, submitted_at_s=time.time())
        attempt = AttemptSummary(0, State.WAITING, summary.sub_state, 1.0, None, None, None, None)
        self.details[user, job.name] = JobDetail(summary, attempt, ())
        self.texts[user, job.name] = without_secrets(job)
        return job.name

    def _mine(self, user, owner, name, is_admin):
        self._there(owner, name)
        if user != owner and not is_admin:
            raise errors.NotYours

    def _there(self, owner, name):
        if (owner, name) not in self.details:
            raise errors.JobUnknown
        return self.details[owner, name]

    def _change(self, owner, name, **changes):
        detail = self.details[owner, name]
        self.details[owner, name] = dataclasses.replace(
            detail, job=dataclasses.replace(detail.job, **changes)
        )

    async def set_execution_type(self, user, owner, name, wanted, *, is_admin=False):
        self._mine(user, owner, name, is_admin)
        self._change(owner, name, execution_type=wanted)

    async def delete(self, user, owner, name, *, is_admin=False):
        self._mine(user, owner, name, is_admin)
        if self.details[owner, name].job.execution_type is ExecutionType.START:
            raise errors.StillRunning
        del self.details[owner, name]

    async def add_tag(self, user, owner, name, tag, *, is_admin=False):
        self._mine(user, owner, name, is_admin)
        self._change(owner, name, tags=(*self.details[owner, name].job.tags, tag))

    async def remove_tag(self, user, owner, name, tag, *, is_admin=False):
        self._mine(user, owner, name, is_admin)
        tags = self.details[owner, name].job.tags
        if tag not in tags:
            raise errors.TagUnknown
        self._change(owner, name, tags=tuple(each for each in tags if each != tag))

    async def jobs(self):
        return [detail.job for detail in reversed(self.details.values())]

    async def job(self, owner, name, attempt_id=None):
        detail = self._there(owner, name)
        if attempt_id not in (None, 0):
            raise errors.JobUnknown(f"cannot find attempt {attempt_id} of job {owner}~{name}; there is 0")
        return detail

    async def task_attempts(self, owner, name, attempt_id, role, index):
        detail = await self.job(owner, name, attempt_id)
        for each in detail.task_roles:
            for task in each.tasks:
                if role in (each.name, each.mangled_name) and task.index == index:
                    return task, [task.attempt]
        raise errors.JobUnknown(f"cannot find task {role}/{index} of job {owner}~{name}; see its detail")

    async def config_text(self, owner, name):
        self._there(owner, name)
        return self.texts[owner, name]

    async def events(self, owner, name, event_type=None):
        self._there(owner, name)
        event = JobEvent("uid-1", EventType.NORMAL, "Submitted", "the job waits", 1.0, 0)
        return [event] if event_type in (None, EventType.NORMAL) else []

    async def log_files(self, owner, name, attempt_id, role, index, task_attempt_id):
        await self.task_attempts(owner, name, attempt_id, role, index)
        if not self.logs:
            raise errors.LogUnknown
        return [LogFile(file, len(data)) for file, data in self.logs.items()]

    async def read_log(
        self,
        owner,
        name,
        attempt_id,
        role,
        index,
        task_attempt_id,
        file_name,
        *,
        offset=None,
        most_bytes=TAIL_BYTES,
    ):
        if file_name not in self.logs:
            raise errors.LogUnknown
        data = self.logs[file_name]
        start = max(len(data) - most_bytes, 0) if offset is None else min(offset, len(data))
        return LogPiece(data[start : start + most_bytes], start, len(data))

    async def virtual_clusters(self):
        return [VirtualClusterView("default", ResourceCounts(4, 8192, 0), ResourceCounts(1, 1024, 0), 2)]

    async def storages(self):
        return [
            StorageView("team", "/srv/team", True, False, True),
            StorageView("data", "/srv/data", False, True, True),
        ]
