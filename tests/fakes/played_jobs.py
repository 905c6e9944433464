"""Scripted jobs of the local OpenPAI cluster, without processes."""

from itertools import count

from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.job import (
    Allocated,
    Allocation,
    ContainerEnded,
    ContainerStarted,
    Notify,
    PaiJob,
    Submitted,
)
from nni_manager.local_openpai.core.plan import JobPlan, RolePlan, StorageMount
from nni_manager.local_openpai.core.policies import CompletionPolicy, RetryPolicy
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.core.states import SubState, state_of


def a_role(name="worker", tasks=2, min_failed=1, min_succeeded=-1):
    return RolePlan(
        name=name,
        mangled_name=name,
        tasks=tasks,
        need=ResourceCounts(1, 10, 0),
        shm_mb=0,
        ports={"http": 1},
        completion=CompletionPolicy(min_failed, min_succeeded),
        image="ubuntu",
        image_auth=None,
        init=("i",),
        pre=("p",),
        user="u",
        post=(),
    )


def a_plan(*roles, is_gang=True, job_retries=0, task_retries=0):
    roles = roles or (a_role(),)
    return JobPlan(
        user="alice",
        name="job",
        debug_id="d",
        virtual_cluster="default",
        priority=None,
        is_gang=is_gang,
        job_retry=RetryPolicy(True, job_retries),
        task_retry={role.name: RetryPolicy(not is_gang, 0 if is_gang else task_retries) for role in roles},
        roles=roles,
        storages=(StorageMount("nfs", "/mnt/nfs"),),
        tells=("failed",),
        secrets=("hunter22",),
    )


class Played:
    """A job, and all effects that it requested."""

    def __init__(self, plan, most_platform_retries=3):
        numbers = count()
        self.job = PaiJob(1, plan, 0.0, lambda: f"id{next(numbers)}", most_platform_retries)
        self.effects = []
        self.now_s = 0.0

    def happens(self, event):
        self.now_s += 1
        new = self.job.handle(event, self.now_s)
        self.effects += new
        return new

    def of(self, kind):
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def begin(self):
        """Submit, place and start all tasks."""
        self.happens(Submitted())
        self.place_all()
        return self.start_all()

    def place_all(self):
        waiting = [
            task.container_id
            for task in self.job.tasks.values()
            if task.sub_state is SubState.ATTEMPT_CREATION_PENDING
        ]
        return self.happens(
            Allocated({each: Allocation("127.0.0.1", {"http": (1,)}, ()) for each in waiting})
        )

    def start_all(self):
        for task in list(self.job.tasks.values()):
            if task.sub_state is SubState.ATTEMPT_PREPARING:
                self.happens(ContainerStarted(task.container_id))
        return self

    def container(self, index, role="worker"):
        return self.job.tasks[role, index].container_id

    def ends(self, index, code, role="worker"):
        return self.happens(ContainerEnded(self.container(index, role), TaskExit(code)))

    def states(self):
        return [state_of(task.sub_state, task.code) for task in self.job.tasks.values()]

    @property
    def changes(self):
        return [effect.change for effect in self.of(Notify)]
