"""A folder that one process owns at a time, and none once that has died, however it died."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Whoever looks whether a folder is owned holds its lock for a moment, and must not keep an owner from starting.
_OWNED_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class OwnerLock:
    """The lock file of such a folder."""

    path: Path

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the folder.

        Raises:
            BlockingIOError: another process does.
        """
        gives_up_at_s = time.monotonic() + _OWNED_WITHIN_S
        with self._open(os.O_RDWR | os.O_CREAT) as descriptor:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > gives_up_at_s:
                        raise
                    time.sleep(0.01)
            yield

    def is_owned(self) -> bool:
        """Whether a process owns the folder now.

        Raises:
            OSError: nobody can tell.
        """
        try:
            # Only for reading: a mount may be read-only for those who look.
            with self._open(os.O_RDONLY) as descriptor:
                try:
                    # Shared: two who look at the same time are not taken for owners by each other.
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        except FileNotFoundError:
            pass  # nobody has ever owned it, or it is gone
        return False

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
