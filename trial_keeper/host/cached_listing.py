"""A folder's listing, for folders that are polled often and change rarely."""

import contextlib
import os
import time

# No file system has coarser timestamps, so a change after this time gets a different timestamp.
_SETTLED_NS = 2_500_000_000


class CachedListing:
    """The names in a folder. A folder is not listed again while it has not changed for some seconds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: frozenset[str] = frozenset()
        self._stamp: tuple[int, int, int] | None = None
        """The folder's stamp when it was listed; None if the stamp could hide a later change."""

    def names(self) -> frozenset[str]:
        """Return the current names; empty if the folder cannot be read."""
        with contextlib.suppress(OSError):
            status = os.stat(self._path)
            stamp = status.st_dev, status.st_ino, status.st_mtime_ns
            if stamp != self._stamp:
                is_settled = 0 <= status.st_mtime_ns < time.time_ns() - _SETTLED_NS
                self._names = frozenset(os.listdir(self._path))
                self._stamp = stamp if is_settled else None
            return self._names
        self._stamp = None
        return frozenset()
