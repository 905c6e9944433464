"""The experiment file for machines over SSH: the machines, their logins, and how trials share their GPUs."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from nni_manager.config.diagnostics import KeyPath, ref, shown
from nni_manager.config.dialect import EACH, SERVICE
from nni_manager.config.experiment_schema import COMMAND, ExperimentKeys, GpuIndices, ServiceKeys, gpus
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.reading import Reading
from nni_manager.config.schema import (
    Schema,
    flag,
    is_placeholder,
    line,
    mapping,
    must_be,
    refusal,
    text,
    whole,
)
from nni_manager.training_services.remote.section import RemoteMachine, RemoteSection
from nni_manager.training_services.ssh.login import DEFAULT_PORT, HOST, USER

MACHINES: KeyPath = (*SERVICE, "machineList")
_EXAMPLE = "[{host: 10.1.1.1, user: ada}]"


def _example(key: str, value: str) -> str:
    """A marked example of a key of a machine."""
    return ref((*MACHINES, 0, key), value)


class RemoteMachineKeys(Schema):
    """An item of `machineList`: a machine, its login, and how trials share its GPUs."""

    python_name = "RemoteMachineConfig"
    # fmt: off
    host: str = must_be("the name or the address of a machine", "10.1.1.1", pattern=HOST, v1="ip",
        about="the machine; also a `Host` of `~/.ssh/config`")
    port: int = whole(1, 65535, "22", DEFAULT_PORT, unset="that of `~/.ssh/config`, or `22`",
        about="the port of its SSH server")
    user: str | None = must_be("the name of your account there", "ada", None, pattern=USER, v1="username",
        unset="that of `~/.ssh/config`, or your name on this machine", about="your account on the machine")
    password: str | None = text("your password there, in quotes", "'...'", None, repr=False, v1="passwd", unset="none",
        about="your password on the machine; it takes precedence over `sshKeyFile`")
    ssh_key_file: str | None = line("the path of a private key", "~/.ssh/id_ed25519", None, kind="file", v1="sshKeyPath",
        unset="those of `ssh`: the agent's, `~/.ssh/id_rsa` and the like", about="the private key of the login")
    ssh_passphrase: str | None = text("the passphrase of the key, in quotes", "'...'", None, repr=False, v1="passphrase",
        unset="none", about="the passphrase of the private key")
    gpu_indices: GpuIndices = gpus(unset="all", about="the GPUs to use")
    max_trial_number_per_gpu: int = whole(1, 99999, "1", 1, v1="maxTrialNumPerGpu",
        about="the number of trials that share one GPU")
    use_active_gpu: bool = flag("false", False, about="also use GPUs on which other programs compute")
    python_path: str | None = must_be("an absolute path of a folder on the machine", "/opt/venv/bin", None,
        pattern=r"^(/|~/)[^\x00-\x1f\x7f]*$", unset="the PATH of a shell over SSH",
        about="the folder with the `python3` of trials and its trial-keeper; it comes first on PATH")
    # fmt: on

    @field_validator("host", mode="before")
    @classmethod
    def _is_only_a_host(cls, host: Any) -> Any:
        if not isinstance(host, str) or is_placeholder(host):
            return host
        if found := re.fullmatch(r"([\w.-]+)@([\w.-]+)", host):
            examples = f"{_example('host', found[2])} and {_example('user', found[1])}"
            raise refusal(f"{shown(host)} contains a user; write {examples}")
        if found := re.fullmatch(r"([\w.-]+):([0-9]+)", host):
            examples = f"{_example('host', found[1])} and {_example('port', found[2])}"
            raise refusal(f"{shown(host)} contains a port; write {examples}")
        if ":" in host:
            ipaddress.IPv6Address(host)
        return host

    @field_validator("python_path")
    @classmethod
    def _is_a_folder(cls, path: str | None) -> str | None:
        if path is not None and (program := re.fullmatch(r"([\w./~-]*/bin)/python[0-9.]*", path)):
            raise refusal(
                f"{shown(path)} is a program; write its folder, {_example('pythonPath', program[1])}"
            )
        return path


class RemoteServiceKeys(ServiceKeys):
    """The training service whose trials run on machines over SSH."""

    python_name = "RemoteConfig"
    # fmt: off
    machine_list: list[RemoteMachineKeys] = must_be("a list of machines", _EXAMPLE, min_length=1, v1="/machineList",
        about="the machines that run trials")
    # fmt: on


class RemoteExperimentKeys(ExperimentKeys):
    """The experiment file for machines over SSH."""

    trial_command: str = text("a shell command", "python3 train.py", v1="trial.command", about=COMMAND)
    training_service: RemoteServiceKeys = mapping(
        "{platform: remote}", v1="remoteConfig", about="the machines that run trials"
    )


def _hints(names: Mapping[str, str], schema: str, above: str) -> dict[str, str]:
    return {
        f"{above}.{EACH}.{name}": f"it belongs to NNI's {schema} schema; write {other} here"
        for name, other in names.items()
    }


_NAMES_OF_V1 = {
    "ip": "host",
    "username": "user",
    "passwd": "password",
    "sshKeyPath": "sshKeyFile",
    "passphrase": "sshPassphrase",
    "maxTrialNumPerGpu": "maxTrialNumberPerGpu",
}
_PRE_COMMAND = "it is not supported; write the commands before the one of the trial, in «trialCommand»"


class RemoteFile(PlatformFile):
    """The part of machines over SSH."""

    schema = RemoteExperimentKeys
    examples_v1: ClassVar = {"remoteConfig": "reuse: true"}
    hints_v1: ClassVar = {
        **_hints({v2: v1 for v1, v2 in _NAMES_OF_V1.items()}, "second", "machineList"),
        f"machineList.{EACH}.preCommand": _PRE_COMMAND,
    }
    hints_v1_elsewhere: ClassVar = {
        "machineList": "it applies to another platform; write trainingServicePlatform: remote, or remove it"
    }
    hints: ClassVar = {
        "machineList": "it belongs to NNI's first schema; write its machines into «trainingService.machineList»",
        **_hints(_NAMES_OF_V1, "first", "trainingService.machineList"),
        f"trainingService.machineList.{EACH}.preCommand": _PRE_COMMAND,
    }

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._key_files: dict[int, Path] = {}

    def check(self) -> None:
        """Check that each machine is listed once, and that ssh can use its private key."""
        self.reading.refuse_placeholders()
        machines = self.service.get("machineList")
        listed: set[tuple[str, str, str]] = set()
        for index, machine in enumerate(machines if isinstance(machines, list) else ()):
            if isinstance(machine, Mapping):
                self._check_login(index, machine)
                self._check_gpus(index, machine)
                name = str(machine.get("host")).casefold()
                # repr, because a value of the wrong type may be a list
                login = (name, repr(machine.get("port", DEFAULT_PORT)), repr(machine.get("user")))
                if login in listed and machine.get("host") is not None:
                    why = f"{shown(machine['host'])} is listed twice with the same port and user; remove one of the two"
                    self.reading.refuse((*MACHINES, index, "host"), why)
                listed.add(login)

    def _check_login(self, index: int, machine: Mapping[str, Any]) -> None:
        key_path = (*MACHINES, index, "sshKeyFile")
        has_password = machine.get("password") is not None
        for name in ("sshKeyFile", "sshPassphrase"):
            if has_password and machine.get(name) is not None:
                password = ref((*MACHINES, index, "password"))
                self.reading.warn(
                    f"{password} takes precedence over {ref((*MACHINES, index, name))}; remove one of them"
                )
        path = self.reading.absolute(key_path, machine.get("sshKeyFile"))
        if path is None or has_password:
            return
        self._key_files[index] = path
        why = reason_against_key(path)
        if why is not None:
            self.reading.refuse(key_path, why)

    def _check_gpus(self, index: int, machine: Mapping[str, Any]) -> None:
        shared = machine.get("maxTrialNumberPerGpu")
        if shared not in (None, 1) and not self.reading.raw.get("trialGpuNumber"):
            key = ref((*MACHINES, index, "maxTrialNumberPerGpu"))
            self.reading.warn(f"{key} has no effect without «trialGpuNumber»: trials are not assigned GPUs")

    def cluster(self, file: RemoteExperimentKeys) -> RemoteSection:
        """The machines."""
        machines = enumerate(file.training_service.machine_list)
        return RemoteSection(tuple(self._machine(index, keys) for index, keys in machines))

    def _machine(self, index: int, keys: RemoteMachineKeys) -> RemoteMachine:
        key_file = self._key_files.get(index)
        return self.same_named(
            RemoteMachine,
            keys,
            ssh_key_file=None if key_file is None else str(key_file),
            ssh_passphrase=keys.ssh_passphrase if keys.password is None else None,
            max_trials_per_gpu=keys.max_trial_number_per_gpu,
            may_use_active_gpu=keys.use_active_gpu,
        )


def reason_against_key(path: Path) -> str | None:
    """The reason why ssh cannot use a private key, with the remedy; None if it can."""
    if not path.is_file():
        what = f"{path} is not a file" if path.exists() else f"there is no file {path}"
        return f"{what}; fix the path, or create a key with `ssh-keygen`"
    if path.suffix == ".pub":
        return f"{path} is a public key; name the private key, {path.with_suffix('')}"
    if not os.access(path, os.R_OK):
        return f"you cannot read {path}; run nnictl as its owner, or name a key of yours"
    status = path.stat()
    if status.st_uid == os.getuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"other users may access {path}, which ssh refuses as well; run `chmod 600 {path}`"
    return None


FILE = RemoteFile
