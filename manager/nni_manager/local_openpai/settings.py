"""What a local cluster is made of. Read once, where it is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from nni_manager.local_openpai.jobs import ResourceCounts

# What Kubernetes grants a container after SIGTERM.
GRACE_S = 30.0
# As the original's multilog, but with text never lost within the files that are kept.
LOG_FILE_BYTES = 256 * 2**20
OLD_LOG_FILES = 2
# A port conflict or a SIGKILL from outside is retried without counting; the original does so for ever.
MOST_PLATFORM_RETRIES = 10


class Sandbox(Enum):
    """What a task runs in: processes of this machine, or a real container of its job's image."""

    PROCESS = "process"
    PODMAN = "podman"


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """A folder that tasks may ask for by name. Without a name of a storage, a job gets those with `is_default`."""

    name: str
    path: Path
    is_default: bool = True
    is_read_only: bool = False


def this_machine(gpus: int = 0) -> ResourceCounts:
    """The CPUs and the memory there are, and so many GPUs."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ResourceCounts(cpu=os.cpu_count() or 1, memory_mb=pages // 2**20, gpu=gpus)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A cluster: its folder, what its virtual clusters have, its storages, whom it tells of changes.

    Virtual clusters may be given more than the machine has: they are counted, not measured. GPUs are numbered through all of
    them, in their order.
    """

    state_dir: Path
    virtual_clusters: dict[str, ResourceCounts] = field(default_factory=lambda: {"default": this_machine()})
    storages: tuple[StorageSettings, ...] = ()
    grace_s: float = GRACE_S
    sandbox: Sandbox = Sandbox.PROCESS
    host_ip: str = "127.0.0.1"
    notification_url: str | None = None
    notification_file: Path | None = None
    log_file_bytes: int = LOG_FILE_BYTES
    old_log_files: int = OLD_LOG_FILES
    most_platform_retries: int = MOST_PLATFORM_RETRIES
    first_port: int = 15000
    end_port: int = 40000
