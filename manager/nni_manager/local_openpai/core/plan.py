"""The plan of a job: all that the cluster needs to run it. Derived once from the job's text, and stored as JSON."""

from __future__ import annotations

from nni_manager.local_openpai.core.policies import CompletionPolicy, RetryPolicy
from nni_manager.local_openpai.core.queue import ResourceCounts
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RolePlan:
    """A task role. Its scripts are bash and run in order: `init`, `pre`, `user` and, if that succeeds, `post`."""

    name: str
    mangled_name: str
    tasks: int
    need: ResourceCounts
    shm_mb: int
    ports: dict[str, int]
    completion: CompletionPolicy
    image: str
    image_auth: dict[str, str] | None
    init: tuple[str, ...]
    pre: tuple[str, ...]
    user: str
    post: tuple[str, ...]
    runs_sshd: bool = False
    """One of `pre` starts an sshd, and writes to the folder .ssh of the user's home."""


@dataclass(frozen=True, slots=True)
class SshKeyPair:
    """The key with which the tasks of a job reach each other, in OpenSSH's formats."""

    private: str
    public: str


@dataclass(frozen=True, slots=True)
class StorageMount:
    """A storage by name, and its mount path in tasks."""

    name: str
    mount_path: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job. `secrets` are the values to mask in logs; `tells` are the changes that its owner subscribes to.

    `ssh_keys`: None unless a task runs sshd.
    """

    user: str
    name: str
    debug_id: str
    virtual_cluster: str
    priority: str | None
    is_gang: bool
    job_retry: RetryPolicy
    task_retry: dict[str, RetryPolicy]
    roles: tuple[RolePlan, ...]
    storages: tuple[StorageMount, ...]
    tells: tuple[str, ...]
    secrets: tuple[str, ...]
    ssh_keys: SshKeyPair | None = None

    @property
    def framework_name(self) -> str:
        """`user~job`."""
        return f"{self.user}~{self.name}"

    @property
    def total_tasks(self) -> int:
        """The number of tasks of all roles."""
        return sum(role.tasks for role in self.roles)

    def role(self, name: str) -> RolePlan:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)
