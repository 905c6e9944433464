"""Shared storage that this machine has not mounted: the manager exchanges files with keepers by API calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from nni_manager.errors import RetryableError


class StorageUnavailable(RetryableError):
    """cannot reach the shared storage; check the network, and the login that the message names"""


class Share(ABC):
    """The storage behind an API. Paths are those of the local workspace, which has the same layout below its root.

    Blocking and thread-safe. Transient failures are retried a few times.
    """

    @abstractmethod
    def close(self) -> None:
        """Release the connections."""

    @abstractmethod
    def send(self, path: Path, *, is_fixed: bool = False) -> None:
        """Upload a local file atomically, or create a folder without its content.

        Parent folders are created. Only one process may send a given path. `is_fixed`: the content never changes, so an existing
        copy is not uploaded again.

        Raises:
            StorageUnavailable: the upload failed.
            FileNotFoundError: the local file was removed meanwhile.
        """

    @abstractmethod
    def read(self, path: Path, offset: int, longest: int) -> bytes:
        """Returns up to `longest` bytes of a remote file; empty if there is no such file.

        Raises:
            StorageUnavailable: the read failed.
        """

    @abstractmethod
    def folders_in(self, path: Path) -> list[str]:
        """Returns the names of the subfolders of a remote folder; empty if there is no such folder.

        Raises:
            StorageUnavailable: the listing failed.
        """

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a remote folder recursively; idempotent.

        Raises:
            StorageUnavailable: part of it remains.
        """
