"""The settings of an experiment on OpenPAI, as they are stored."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Any

from nni_manager.config.cluster import ClusterConfig, hidden
from nni_manager.support.keeper_bundle import KeeperSource
from trial_keeper.frozen_dataclass import dataclass

# paiConfig.host of the built-in cluster on this machine (local_openpai).
LOCAL_HOST = "local"


@dataclass(frozen=True, slots=True)
class PaiConfig(ClusterConfig):
    """An OpenPAI cluster and the settings of its jobs. Exactly one of `token` and `password` is set unless `is_local`.

    `storage` is the path of the shared folder on the manager's machine, `mount` its path in containers. `ca_file` has the CA
    certificates to trust; None: those that this machine trusts. `image`, `storage_name`, `cpu`, `gpu` and `memory_mb` are None
    only if `job_text`, the content of `job_file`, describes the job.
    """

    host: str
    user: str
    token: str | None = field(repr=False)
    password: str | None = field(repr=False)
    storage: Path
    mount: str
    image: str | None
    storage_name: str | None
    virtual_cluster: str | None
    gpu: int | None
    cpu: int | None
    memory_mb: int | None
    job_file: Path | None = None
    job_text: str | None = field(default=None, repr=False)
    keeper: KeeperSource = "auto"
    ca_file: Path | None = None

    @property
    def is_local(self) -> bool:
        """True if this is the built-in cluster on this machine."""
        return self.host.lower() == LOCAL_HOST

    @property
    def has_commands(self) -> bool:
        """True if a job file describes the job."""
        return self.job_text is not None

    def trial_gpu_number(self, written: int | None) -> int | None:
        """The number of GPUs; None if a job file describes the job."""
        return self.gpu

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The job file."""
        return () if self.job_file is None else (self.job_file,)

    @property
    def has_job_file(self) -> bool:
        """True if there is a job file."""
        return bool(self.job_text)

    @property
    def receiver_of_login(self) -> str:
        """The cluster, unless it is the one on this machine."""
        return "" if self.is_local else f"OpenPAI {self.host}"

    def without_secrets(self) -> PaiConfig:
        """A copy without token, password and text of the job file."""
        return dataclasses.replace(
            self, token=hidden(self.token), password=hidden(self.password), job_text=hidden(self.job_text)
        )

    def without_login(self) -> PaiConfig:
        """A copy without token and password."""
        return dataclasses.replace(self, token=None, password=None)

    def keys_of_profile(self) -> dict[str, Any]:
        """The cluster, the user and the settings of jobs."""
        return {
            "host": self.host,
            "username": self.user,
            "caFile": None if self.ca_file is None else str(self.ca_file),
            "dockerImage": self.image,
            "trialCpuNumber": self.cpu,
            "trialMemorySize": None if self.memory_mb is None else f"{self.memory_mb}MB",
            "virtualCluster": self.virtual_cluster,
            "storageConfigName": self.storage_name,
            "localStorageMountPoint": str(self.storage),
            "containerStorageMountPoint": self.mount,
        }


SECTION = PaiConfig
