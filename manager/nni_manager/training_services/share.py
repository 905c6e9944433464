"""Shared storage that this machine has no mount of: what keepers are to see is sent, and what they leave is read, by calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from nni_manager.errors import TryAgain


class ShareAway(TryAgain):
    """cannot reach the shared storage now; see to the network, and to the login that the message names"""


class Share(ABC):
    """The storage as calls. Paths are those of the workspace on this machine, which has the same below its root there.

    Blocking; may be used from several threads at once. A call that fails for the moment is made again a few times.
    """

    @abstractmethod
    def send(self, path: Path, *, is_fixed: bool = False) -> None:
        """Let keepers see the file or the folder that is here: a file whole or not at all, a folder without what is in it.

        The folders on the way are made. One process sends a given path. `is_fixed`: its content is always the same, so that it
        need not be sent again.

        Raises:
            ShareAway: it cannot be sent.
        """

    @abstractmethod
    def read(self, path: Path, offset: int, longest: int) -> bytes:
        """Up to so many bytes of a file there; none when there is no such file.

        Raises:
            ShareAway: it cannot be read.
        """

    @abstractmethod
    def folders_in(self, path: Path) -> list[str]:
        """The names of the folders in a folder there; none when there is no such folder.

        Raises:
            ShareAway: they cannot be listed.
        """

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a folder there and all that is in it; no matter if there is one.

        Raises:
            ShareAway: something of it stays.
        """
