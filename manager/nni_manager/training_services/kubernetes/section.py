"""The settings of an experiment on Kubernetes, with any operator, as they are stored."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

from nni_manager.config.cluster import ClusterConfig, hidden
from nni_manager.support.keeper_bundle import KeeperSource
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class _PodStorage:
    # The name shows the kind.
    is_stored_with_name: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class NfsStorage(_PodStorage):
    """An export of an NFS server, which containers mount."""

    server: str
    path: str


@dataclass(frozen=True, slots=True)
class AzureStorage(_PodStorage):
    """An Azure file share; the key of its account is `secret` in `vault`.

    `upload_tries_again` is the maximum number of retries of an upload.
    """

    account: str
    share: str
    vault: str
    secret: str
    upload_tries_again: int = 1


@dataclass(frozen=True, slots=True)
class ClaimStorage(_PodStorage):
    """A PersistentVolumeClaim; `path` is the mount point of its volume on this machine."""

    path: Path
    name: str


MOUNT, VOLUME = "/tmp/mount", "nni-vol"
"""The mount path and the volume name of the shared storage in pods on Kubernetes."""
JOB_LABELS = ("app", "expId", "trialId", "envId")
"""The labels that identify the Kubernetes objects of a job."""

KubernetesStorage = NfsStorage | AzureStorage | ClaimStorage


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """The identical tasks of one role of a job on Kubernetes. `registry_login` is a Docker login file.

    `min_failed` and `min_succeeded` are the numbers of tasks that end the job; -1 disables the rule. Both are None if the
    operator decides.
    """

    name: str
    tasks: int
    command: str
    image: str
    gpu: int
    cpu: int
    memory_mb: int
    shm_mb: int | None = None
    registry_login: Path | None = None
    min_failed: int | None = None
    min_succeeded: int | None = None


@dataclass(frozen=True, slots=True)
class KubernetesConfig(ClusterConfig):
    """The settings of jobs on Kubernetes. `roles` are in the order of the file, or of `template` if it is a Framework.

    `api_version` is without the group; None for FrameworkController. `template_text` is the content of `template` as
    JSON: a Framework, or for other operators what is added to each pod.
    `namespace` None: that of the cluster login. `runtime` is set only for TrainJobs: `NAME` of a ClusterTrainingRuntime, or
    `TrainingRuntime/NAME`. `queue` is a Kueue queue.
    """

    has_commands = True
    operator: Literal["frameworkcontroller", "tf-operator", "pytorch-operator", "trainjob", "job"]
    storage: KubernetesStorage
    roles: tuple[RoleConfig, ...]
    api_version: str | None = None
    service_account: str | None = None
    namespace: str | None = None
    template: Path | None = None
    template_text: str | None = field(default=None, repr=False)
    runtime: str | None = None
    queue: str | None = None
    keeper: KeeperSource = "auto"

    def trial_gpu_number(self, written: int | None) -> int | None:
        """None: each role has its own."""
        return None

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The template and the Docker login files."""
        logins = {role.registry_login for role in self.roles}
        return tuple(filter(None, (self.template, *sorted(filter(None, logins)))))

    @property
    def has_job_file(self) -> bool:
        """True if there is a template."""
        return bool(self.template_text)

    @property
    def has_unmounted_share(self) -> bool:
        """True for an Azure file share."""
        return isinstance(self.storage, AzureStorage)

    def without_secrets(self) -> KubernetesConfig:
        """A copy without the text of the template."""
        return dataclasses.replace(self, template_text=hidden(self.template_text))

    @classmethod
    def of_stored(cls, fields: dict[str, Any]) -> ClusterConfig:
        """The section with these fields; the kind of the storage is stored before its fields."""
        _, storage = fields["storage"]
        return super(KubernetesConfig, cls).of_stored({**fields, "storage": storage})  # noqa: UP008 - slots make a new class
