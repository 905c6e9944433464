"""The settings of an experiment on machines over SSH, as they are stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nni_manager.config.cluster import ClusterConfig, hidden
from nni_manager.training_services.ssh.login import SshLogin
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RemoteMachine(SshLogin):
    """A machine, its login, and how trials share its GPUs.

    `gpu_indices` None means all GPUs. `may_use_active_gpu`: also those on which other programs compute. `python_path` is the
    folder of the trials' Python there, absolute or below `~/`, the home there.
    """

    gpu_indices: tuple[int, ...] | None = None
    max_trials_per_gpu: int = 1
    may_use_active_gpu: bool = False
    python_path: str | None = None

    def keys_of_profile(self) -> dict[str, Any]:
        """The keys of the machine that a profile shows; no secrets."""
        keys = {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "sshKeyFile": self.ssh_key_file,
            "gpuIndices": None if self.gpu_indices is None else list(self.gpu_indices),
            "maxTrialNumberPerGpu": self.max_trials_per_gpu,
            "useActiveGpu": self.may_use_active_gpu,
            "pythonPath": self.python_path,
        }
        return {name: value for name, value in keys.items() if value is not None}

    def with_secrets(self, password: str | None, passphrase: str | None) -> RemoteMachine:
        """A copy with another password and passphrase."""
        return dataclasses.replace(self, password=password, ssh_passphrase=passphrase)


@dataclass(frozen=True, slots=True)
class RemoteSection(ClusterConfig):
    """The machines, in the order of the file."""

    machines: tuple[RemoteMachine, ...] = ()

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The private keys."""
        return tuple(sorted({Path(each.ssh_key_file) for each in self.machines if each.ssh_key_file}))

    @property
    def receiver_of_login(self) -> str:
        """The machines."""
        return ", ".join(each.address for each in self.machines)

    @property
    def has_unmounted_share(self) -> bool:
        """True: the files of trials are on the machines."""
        return True

    def without_secrets(self) -> RemoteSection:
        """A copy without passwords and passphrases."""
        return RemoteSection(
            tuple(
                each.with_secrets(hidden(each.password), hidden(each.ssh_passphrase))
                for each in self.machines
            )
        )

    def without_login(self) -> RemoteSection:
        """A copy without passwords and passphrases."""
        return RemoteSection(tuple(each.with_secrets(None, None) for each in self.machines))

    def keys_of_profile(self) -> dict[str, Any]:
        """The machines and their users."""
        return {"machineList": [each.keys_of_profile() for each in self.machines]}


SECTION = RemoteSection
