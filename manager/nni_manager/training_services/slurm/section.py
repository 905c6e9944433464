"""The settings of an experiment on Slurm, as they are stored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import StringConstraints

from nni_manager.config.cluster import ClusterConfig
from nni_manager.support.keeper_bundle import KeeperSource
from nni_manager.training_services.ssh.login import ADDRESS, SshLogin
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class SlurmSection(ClusterConfig):
    """The options of the experiment's jobs. None: Slurm's own default. `gpus` is the number for a whole job.

    `container_image`: the absolute path of a file or folder, or an address for Apptainer; None: jobs run in no container.
    `login`: the login node whose commands are used, `user@host:port`; None: this machine's.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
    gres: str | None = None
    gpus: int | None = None
    cpus_per_task: int | None = None
    memory_mb: int | None = None
    constraint: str | None = None
    nodes: int | None = None
    ntasks: int | None = None
    extra_args: tuple[str, ...] = ()
    container_image: str | None = None
    container_args: tuple[str, ...] = ()
    keeper: KeeperSource = "auto"
    login: Annotated[str, StringConstraints(pattern=ADDRESS)] | None = None

    @property
    def ssh_login(self) -> SshLogin | None:
        """The login node; None: this machine."""
        return None if self.login is None else SshLogin.of(self.login)

    @property
    def receiver_of_login(self) -> str:
        """The login node."""
        return self.login or ""

    def trial_gpu_number(self, written: int | None) -> int | None:
        """The number of GPUs; None if `gres` or the partition decides."""
        return self.gpus

    def keys_of_profile(self) -> dict[str, Any]:
        """The options of jobs."""
        return {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "timeLimit": self.time_limit,
            "gres": self.gres,
            "gpus": self.gpus,
            "cpusPerTask": self.cpus_per_task,
            "memory": None if self.memory_mb is None else f"{self.memory_mb}MB",
            "constraint": self.constraint,
            "nodes": self.nodes,
            "ntasks": self.ntasks,
            "extraArgs": list(self.extra_args),
            "containerImage": self.container_image,
            "containerArgs": list(self.container_args),
            "login": self.login,
        }


SECTION = SlurmSection
