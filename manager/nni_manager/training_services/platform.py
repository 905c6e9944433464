"""A platform: what the manager and nnictl ask it about an experiment. Each platform's package has a module `platform`.

Modules of a platform are imported only for experiments on it: OpenPAI's schema and HTTP client alone would be a fifth of a
manager's imports.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nni_manager.config.cluster import ClusterConfig
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.platforms import of_stored
from nni_manager.errors import UserError
from nni_manager.store.folders import WORLD_WRITABLE_STICKY, ExperimentFolder
from nni_manager.support.plain_text import escaped
from nni_manager.training_services.base import JobEnded, TrainingService
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_manager.training_services.share import Share
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.workspace import Workspace

LOOPBACK = "127.0.0.1"
# Any port: connecting a UDP socket selects the route and sends no packet.
_ANY_PORT = 9

ServiceFactory = Callable[[Callable[[JobEnded], None]], TrainingService]
"""Creates a training service on the event loop that will run it. The argument receives the ends of jobs."""

ServiceKeys = Callable[[Sequence[str]], list[Any]]
"""Returns the values of keys of `trainingService`, in the second schema, as a configuration has them now; None: absent."""


@dataclass(frozen=True, slots=True)
class PlatformCheck:
    """The place where trials run, as text (empty: this machine), and warnings for the user."""

    where: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Locations:
    """Locations of an experiment from an archive; None: as in the archive, or the default."""

    log_dir: Path
    code_dir: Path | None = None
    storage: Path | None = None


class Platform(ABC):
    """The platform of one experiment. The defaults are those of a platform without shared storage."""

    def __init__(self, config: ExperimentSpec) -> None:
        self.config = config

    @abstractmethod
    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """A factory for the experiment's training service.

        Raises:
            UserError: the cluster or its job file cannot be used.
            RetryableError: the cluster cannot be used now.
        """

    # ---- checks before anything starts

    def check_offline(self) -> None:  # noqa: B027 - nothing to check is the usual case
        """Check what the experiment file needs of this machine. Starts nothing and contacts no cluster.

        Raises:
            UserError: this machine cannot run trials, or a key is missing with which trials can run.
        """

    @abstractmethod
    def check(self) -> PlatformCheck:
        """Check that trials can run here.

        Raises:
            UserError: this machine cannot run them.
            UserError, RetryableError: the cluster cannot run them.
        """

    # ---- locations

    def storage_here(self) -> Path | None:
        """Local path of the storage that jobs share; None if there is none, or if this machine has not mounted it.

        Raises:
            UserError: the storage is not mounted on this machine, or containers cannot mount it.
        """
        return None

    @property
    def mount(self) -> str | None:
        """The path of the shared storage in containers; None if trials see the paths of this machine."""
        return None

    @property
    def runs_as_manager(self) -> bool:
        """True if trials run as the manager's user."""
        return False

    def share(self, workspace: Workspace, retry_policy: ClientRetryPolicy | None = None) -> Share | None:
        """The share that jobs mount and this machine does not; None if the jobs use other storage.

        Raises:
            UserError, RetryableError: the share cannot be used.
        """
        return None

    def checkpoints(self, folder: ExperimentFolder) -> Path:
        """The path of the checkpoint folder inside trials. The folder is created if the tuner uses it.

        Raises:
            OSError: the storage refuses the folder.
        """
        here = folder.workspace.checkpoints
        if self.config.tuner.name == "PBTTuner":
            here.mkdir(0o755, exist_ok=True)
            if not self.runs_as_manager:
                here.chmod(WORLD_WRITABLE_STICKY)  # for the users that containers run as
        if self.mount is None:
            return here.resolve()
        return Workspace(Path(self.mount) / folder.experiment_id).checkpoints

    def remove_from_share(self, workspace: Workspace) -> str:
        """Remove the experiment's folder from its share, if any. Returns the error message; empty if none."""
        return ""

    # ---- addresses

    @property
    def keepers_run_here(self) -> bool:
        """True if keepers run on this machine."""
        return False

    def api(self) -> tuple[str, str]:
        """The cluster's name and the URL of its API, unless keepers run on this machine.

        Raises:
            UserError: there is no login, or it cannot be used.
        """
        raise NotImplementedError

    def address_for_keepers(self) -> str:
        """The address at which keepers reach this machine; loopback if they run here.

        Raises:
            UserError: there is no route to the cluster's host.
        """
        if self.keepers_run_here:
            return LOOPBACK
        if self.config.nni_manager_ip is not None:
            return self.config.nni_manager_ip
        name, address = self.api()
        host = urlsplit(address).hostname
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, _ANY_PORT))
            except OSError as error:
                raise UserError(
                    f"cannot find a route to {name} at {host}: {error.strerror}; correct that address, or set nniManagerIp to "
                    "the address of this machine"
                ) from error
            return str(probe.getsockname()[0])

    @staticmethod
    def address_to_listen_on(address: str) -> str:
        """The address to listen on for clients of `address`: the same on loopback, otherwise all networks of this machine."""
        return address if address.startswith("127.") else "0.0.0.0"

    # ---- changes of the section

    def section_with_login(self, keys: ServiceKeys) -> ClusterConfig:
        """The platform's section with the login of another configuration; the stored one if that has none.

        Raises:
            UserError: that login is incomplete, or is for another user or cluster.
        """
        return self.config.cluster

    def section_from_archive(self, locations: Locations, archive: Path) -> ClusterConfig:
        """The platform's section of an experiment from an archive, with the paths and the login of this machine.

        Raises:
            UserError: the storage or the login is missing.
        """
        return self.config.cluster


def platform_of(config: ExperimentSpec) -> Platform:
    """The platform of an experiment. Imports only its modules.

    Raises:
        PlatformUnusable: the package that provides the platform is absent, or fails.
    """
    platform: Platform = of_stored(config.training_service).load("platform")(config)
    return platform


def storage_for_archive(storage: Path, archive: Path) -> Path:
    """The folder of the shared storage, for an experiment from an archive.

    Raises:
        UserError: there is no such folder.
    """
    if not storage.is_dir():
        raise UserError(
            f"cannot load {archive}: there is no folder {escaped(str(storage))}; set --storage to the mount point of the shared "
            "storage on this machine"
        )
    return storage
