"""What lies in a folder, looked at many times and seldom changed."""

import contextlib
import os
import time

# No file system notes the time of a change more coarsely; one that is this old cannot hide another.
_SETTLED_NS = 2_500_000_000


class FolderNames:
    """The names in a folder. As long as the folder has not changed for some seconds it is not listed again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: frozenset[str] = frozenset()
        self._stamp: tuple[int, int, int] | None = None
        """Of the folder when it was listed; None if something may have happened since that this does not show."""

    def names(self) -> frozenset[str]:
        """The names there now; empty when they cannot be seen."""
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
