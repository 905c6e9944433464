"""Who owns an experiment, written into the lock file, so that another machine can tell as well.

On one machine the kernel's lock is all that counts: it is there as long as its owner, however that dies. On shared storage it
may be one machine's own affair (NFS mounted with `nolock` or `local_lock`, many FUSE file systems), so the owner also counts up
a number in the file. Who finds an owner of another machine there watches that number for a while: no clock of either machine is
asked. An owner that was frozen for so long as to be replaced finds another's name in the file, and has to end.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from nni_manager.store.process_identity import boot_id

BEAT_EVERY_S = 3.0
# Three beats, and what shared storage lags behind.
WATCHED_FOR_S = 15.0
_LOOK_EVERY_S = 0.5
# One write of one size: who reads it sees the old or the new.
_FILE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns something. `since_s` is in seconds since the epoch, by its own clock; `machine` is for programs."""

    pid: int
    host: str
    machine: str
    since_s: float

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), this_machine(), time.time())

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine since its last start."""
        return self.machine == this_machine()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"process {self.pid} on {self.host}, since {since}"


def this_machine() -> str:
    """What no other machine says of itself; another word after the next start of this one, as far as the kernel tells."""
    return boot_id() or socket.gethostname()


def owner_in(path: Path) -> tuple[Owner, int] | None:
    """Who has written itself into a lock file, and its beat; None when nobody has, or the last one has gone in order."""
    try:
        document = json.loads(path.read_bytes())
        return Owner(**document["owner"]), int(document["beat"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def owner_elsewhere(path: Path, watched_for_s: float = WATCHED_FOR_S) -> Owner | None:
    """The process of another machine that owns this now. Takes a while, unless nobody of another machine ever did."""
    first = owner_in(path)
    if first is None or first[0].is_here:
        return None
    gives_up_at_s = time.monotonic() + watched_for_s
    while time.monotonic() < gives_up_at_s:
        time.sleep(_LOOK_EVERY_S)
        found = owner_in(path)
        if found is not None and found != first:
            return found[0]
    return None


class Ownership:
    """This process's name in a lock file that it holds; a thread counts up beside it."""

    def __init__(self, path: Path, beat_every_s: float = BEAT_EVERY_S) -> None:
        self.owner = Owner.here()
        self.is_lost = False
        """Whether another process has put its name there."""
        self._path = path
        self._beat_every_s = beat_every_s
        self._on_lost: Callable[[], object] = lambda: None
        self._ends = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name="ownership", daemon=True)
        self._thread.start()

    def call_when_lost(self, on_lost: Callable[[], object]) -> None:
        """`on_lost` is called from another thread; from this one if it has happened already."""
        self._on_lost = on_lost
        if self.is_lost:
            on_lost()

    def give_up(self) -> None:
        """Take the name out again."""
        self._ends.set()
        self._thread.join()
        if not self.is_lost:
            self._put(b"")

    def _beat(self) -> None:
        beat = 0
        while not self._ends.wait(self._beat_every_s):
            found = owner_in(self._path)
            if found is not None and found[0] != self.owner:
                self.is_lost = True
                self._on_lost()
                return
            beat += 1
            self._write(beat)

    def _write(self, beat: int) -> None:
        document = {"owner": asdict(self.owner), "beat": beat}
        self._put(json.dumps(document).encode())

    def _put(self, content: bytes) -> None:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return  # the folder was deleted, or its storage is away: the lock itself holds
        try:
            # In its place: the lock is on this file, and a new one under its name would be nobody's.
            os.pwrite(descriptor, content.ljust(_FILE_BYTES), 0)
            os.fdatasync(descriptor)
        except OSError:
            return
        finally:
            os.close(descriptor)
