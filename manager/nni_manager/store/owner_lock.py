"""A lock on a folder: one process owns it at a time. Ownership ends with the process, however it ends."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trial_keeper.frozen_dataclass import dataclass

# `is_owned` holds the lock for a moment; an owner that starts waits for that.
_OWNED_TIMEOUT_S = 1.0


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of the file, closed after the block. A new file is private to its owner."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class OwnerLock:
    """The lock file of a folder."""

    path: Path

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the folder.

        Raises:
            BlockingIOError: another process owns it.
        """
        deadline_s = time.monotonic() + _OWNED_TIMEOUT_S
        with opened(self.path, os.O_RDWR | os.O_CREAT) as descriptor:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.01)
            self._refuse_replaced(descriptor, self.path)
            yield

    @contextlib.contextmanager
    def taken_over(self, prepare: Callable[[Path], None]) -> Iterator[None]:
        """Own the folder although another process holds its lock: a new lock file replaces the locked one.

        `prepare` receives the new file before it is renamed. It decides whether the other process is replaced,
        and raises if not.

        Raises:
            BlockingIOError: a third process is taking over the folder at this moment.
        """
        successor = self.path.with_name(f".{self.path.name}.next")
        with opened(successor, os.O_RDWR | os.O_CREAT) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._refuse_replaced(descriptor, successor)
            prepare(successor)
            os.replace(successor, self.path)
            yield

    def _refuse_replaced(self, descriptor: int, path: Path) -> None:
        if _is_replaced(descriptor, path):
            message = "another process has just replaced the lock file"
            raise BlockingIOError(errno.EWOULDBLOCK, message, str(self.path))

    def is_owned(self) -> bool:
        """True if a process owns the folder now.

        Raises:
            OSError: it cannot be determined.
        """
        try:
            # Read-only: the mount may be read-only for this process.
            with opened(self.path, os.O_RDONLY) as descriptor:
                try:
                    # Shared: concurrent checks must not take each other for an owner.
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        except FileNotFoundError:
            pass  # no process has owned the folder, or the folder is deleted
        return False


def _is_replaced(descriptor: int, path: Path) -> bool:
    """True if the path names another file now, or none."""
    held = os.fstat(descriptor)
    try:
        named = path.stat()
    except FileNotFoundError:
        return True
    # Check both: some FUSE file systems assign a new inode number at every stat, and some do not count links.
    return held.st_nlink == 0 and not os.path.samestat(held, named)
