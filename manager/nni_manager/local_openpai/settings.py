"""The settings of a local cluster, read once at its start, and the options of the daemon that become settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from nni_manager.errors import UserError
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.training_services.local.gpus import gpus_of_this_machine
from trial_keeper.frozen_dataclass import dataclass

# The port of OpenPAI's REST server.
DEFAULT_PORT = 9186
# The name in NNI's documentation of OpenPAI. The storage is mounted below /mnt.
DEFAULT_STORAGE = "confignfs-data"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Sandbox(Enum):
    """The isolation of tasks: processes of this machine, or a real container of the job's image."""

    PROCESS = "process"
    PODMAN = "podman"


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """A folder that tasks can request by name. A job that names no storage gets those with `is_default`."""

    name: str
    path: Path
    is_default: bool = True
    is_read_only: bool = False


def this_machine(gpus: int = 0) -> ResourceCounts:
    """The CPUs and the memory of this machine, and the given number of GPUs."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ResourceCounts(cpu=os.cpu_count() or 1, memory_mb=pages // 2**20, gpu=gpus)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A cluster: its folder, the capacities of its virtual clusters, its storages, and its notification targets.

    The capacities may exceed the machine's, since the use of resources is not measured. GPU numbers are consecutive across
    virtual clusters, in their order.
    """

    state_dir: Path
    virtual_clusters: dict[str, ResourceCounts] = field(default_factory=lambda: {"default": this_machine()})
    storages: tuple[StorageSettings, ...] = ()
    grace_s: float = 30.0  # Kubernetes' default after SIGTERM
    sandbox: Sandbox = Sandbox.PROCESS
    host_ip: str = "127.0.0.1"
    notification_url: str | None = None
    notification_file: Path | None = None
    # As OpenPAI's multilog, but without gaps between the kept files.
    log_file_bytes: int = 256 * 2**20
    old_log_files: int = 2
    # A port conflict or an external SIGKILL is retried without being counted; OpenPAI has no limit.
    most_platform_retries: int = 10
    first_port: int = 15000
    end_port: int = 40000


# ---- options


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
    allowed_origins: list[str] = field(default_factory=list)
    """Origins whose pages may use the API from a browser."""

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
            *(f"--allow-origin={origin}" for origin in self.allowed_origins),
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


def origin_of(text: str) -> str:
    """An origin as browsers send it: scheme, host, and a port that is not the scheme's own.

    Raises:
        OptionInvalid.
    """
    origin = text.rstrip("/").lower()
    parts = urlsplit(origin)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or origin != f"{parts.scheme}://{parts.netloc}"
    ):
        raise OptionInvalid(
            f"cannot use --allow-origin {text}; use scheme and host, and the port if it is not the scheme's own, e.g. "
            "https://portal.example.com"
        )
    return origin


def absolute(path: str) -> str:
    """The absolute path, since the daemon runs in another working directory."""
    return str(Path(os.path.expanduser(path)).absolute())
