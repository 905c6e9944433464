"""The start options of the local OpenPAI, on its command line and in its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nni_manager.errors import UserError
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.settings import ClusterSettings, Sandbox, StorageSettings, this_machine
from nni_manager.training_services.local.gpus import gpus_of_this_machine

# The port of OpenPAI's REST server.
DEFAULT_PORT = 9186
# The name in NNI's documentation of OpenPAI. The storage is mounted below /mnt.
DEFAULT_STORAGE = "confignfs-data"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class OptionInvalid(UserError):
    """cannot use an option of the local OpenPAI; see `nnictl openpai start --help`"""


@dataclass(frozen=True, slots=True)
class Options:
    """The options. `storages`: folders by name. `virtual_clusters`: CPUs, megabytes of memory and GPUs by name.

    Without `virtual_clusters`, the only virtual cluster is `default`, with the resources of this machine.
    """

    port: int = DEFAULT_PORT
    storages: Mapping[str, str] = field(default_factory=dict)
    virtual_clusters: Mapping[str, list[int]] = field(default_factory=dict)
    sandbox: str = Sandbox.PROCESS.value
    notification_url: str | None = None
    notification_file: str | None = None

    def to_arguments(self) -> list[str]:
        """The equivalent command line."""
        return [
            f"--port={self.port}",
            *(f"--storage={name}={path}" for name, path in self.storages.items()),
            *(
                f"--virtual-cluster={name}={','.join(map(str, counts))}"
                for name, counts in self.virtual_clusters.items()
            ),
            f"--sandbox={self.sandbox}",
            *([f"--notification-url={self.notification_url}"] if self.notification_url else []),
            *([f"--notification-file={self.notification_file}"] if self.notification_file else []),
        ]

    def settings(self, state_dir: Path) -> ClusterSettings:
        """The settings of a cluster with these options and this state directory."""
        clusters = {name: ResourceCounts(*counts) for name, counts in self.virtual_clusters.items()}
        return ClusterSettings(
            state_dir=state_dir,
            virtual_clusters=clusters or {"default": this_machine(len(gpus_of_this_machine()))},
            storages=tuple(StorageSettings(name, Path(path)) for name, path in self.storages.items()),
            sandbox=Sandbox(self.sandbox),
            notification_url=self.notification_url,
            notification_file=None if self.notification_file is None else Path(self.notification_file),
        )


def storage_of(text: str) -> tuple[str, str]:
    """Name and folder of a storage written as NAME=DIR, or as DIR alone.

    Raises:
        OptionInvalid.
    """
    name, equals, path = text.partition("=")
    if not equals:
        name, path = DEFAULT_STORAGE, text
    if not _NAME.fullmatch(name):
        raise OptionInvalid(
            f"cannot use --storage {text}: {name!r} is not a valid name; use NAME=DIR, e.g. team=/srv/team"
        )
    return name, absolute(path)


def new_storage_of(text: str) -> tuple[str, str]:
    """As `storage_of`, but the folder must exist. Stored options skip this check: a missing folder must not prevent a restart.

    Raises:
        OptionInvalid.
    """
    name, folder = storage_of(text)
    if not Path(folder).is_dir():
        raise OptionInvalid(
            f"cannot use --storage {text}: folder {folder} does not exist; create it, or use another folder"
        )
    return name, folder


def virtual_cluster_of(text: str) -> tuple[str, list[int]]:
    """Name and resources of a virtual cluster written as NAME=CPUS,MEMORY_MB,GPUS.

    Raises:
        OptionInvalid.
    """
    match = re.fullmatch(rf"({_NAME.pattern})=([0-9]{{1,9}}),([0-9]{{1,9}}),([0-9]{{1,9}})", text)
    if match is None:
        raise OptionInvalid(
            f"cannot use --virtual-cluster {text}; use NAME=CPUS,MEMORY_MB,GPUS, e.g. default=8,32768,2"
        )
    name, *counts = match.groups()
    return name, list(map(int, counts))


def absolute(path: str) -> str:
    """The absolute path, since the daemon runs in another working directory."""
    return str(Path(path).expanduser().absolute())
