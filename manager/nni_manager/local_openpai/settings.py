"""The settings of a local cluster, read once at its start."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from nni_manager.local_openpai.core.queue import ResourceCounts


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
