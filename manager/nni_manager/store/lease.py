"""The manager's lease on an experiment: one holder at a time, renewed by heartbeat, fenced by an epoch.

The lock file of an experiment holds the holder's name and its heartbeat. On one machine the kernel's lock on the file decides
as long as the holder renews its lease. The lock may be invisible to other machines (NFS mounted with `nolock` or
`local_lock`, many FUSE file systems). They poll the heartbeat counter, so the clocks of two machines are never compared.

A holder that was frozen for longer than `LEASE_TTL_S` can be replaced, although the kernel still holds its lock. Each manager
that opens the database for writing increments the epoch there, and every transaction checks it. So writes that a replaced
manager had queued cannot be committed (`Store.commit`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from nni_manager.errors import UserError
from nni_manager.store.owner_lock import opened
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.processes import boot_id

HEARTBEAT_INTERVAL_S = 3.0
# Five heartbeats: a loaded disk may delay a heartbeat, and shared storage shows it late.
LEASE_TTL_S = 15.0
_POLL_INTERVAL_S = 0.5
# Each write has this size, so a reader gets either the old record or the new one.
_FILE_BYTES = 512


class LeaseLost(UserError):
    """cannot store more: another manager holds the experiment's lease; this manager ends"""

    @classmethod
    def to(cls, holder: object, what: object) -> LeaseLost:
        """The error of a manager that `holder` has replaced. `what`: the file that the manager can no longer write."""
        return cls(
            f"cannot write {what}: this manager did not renew its lease for {LEASE_TTL_S:.0f} s, and {holder} holds it now; "
            "this manager ends without storing more; `nnictl experiment list` shows the other one"
        )


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A process that holds a lease. `since_s`: seconds since the epoch, by its own clock; `machine`: an id for programs."""

    pid: int
    host: str
    machine: str
    since_s: float

    @classmethod
    def here(cls) -> LeaseHolder:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), this_machine(), time.time())

    @property
    def is_here(self) -> bool:
        """True if it is, or was, a process of this machine since its last boot."""
        return self.machine == this_machine()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"process {self.pid} on {self.host}, since {since}"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Content of the lock file. `renewed_s` is on the monotonic clock of the holder's machine; None: unknown."""

    holder: LeaseHolder
    heartbeat: int
    renewed_s: float | None = None

    @classmethod
    def from_bytes(cls, content: bytes) -> LeaseRecord | None:
        """Parse the file's content; None if it names no holder: the lease was released, or the file is torn."""
        try:
            document = json.loads(content)
            renewed_s = document.get("renewed_s")
            return cls(
                LeaseHolder(**document["owner"]),
                int(document["beat"]),
                None if renewed_s is None else float(renewed_s),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_bytes(self) -> bytes:
        """The file's content. Earlier versions read the keys `owner` and `beat`."""
        document = {"owner": asdict(self.holder), "beat": self.heartbeat, "renewed_s": self.renewed_s}
        return json.dumps(document).encode().ljust(_FILE_BYTES)


def this_machine() -> str:
    """An id that no other machine has. It changes with each boot, where the kernel provides a boot id."""
    return boot_id() or socket.gethostname()


def read_record(path: Path) -> LeaseRecord | None:
    """Content of a lock file; None if it names no holder or cannot be read."""
    try:
        return LeaseRecord.from_bytes(path.read_bytes())
    except OSError:
        return None


def find_remote_holder(path: Path, ttl_s: float = LEASE_TTL_S) -> LeaseHolder | None:
    """The process of another machine that holds the lease although this machine sees no lock; None if there is none.

    Takes up to `ttl_s` when the last holder was on another machine and did not release its lease.
    """
    first = read_record(path)
    if first is None or first.holder.is_here:
        return None
    renewed = _watch(path, first, ttl_s)
    return None if renewed is None else renewed.holder


def is_expired(path: Path, ttl_s: float = LEASE_TTL_S) -> bool:
    """True if the process that holds the kernel's lock has not renewed its lease for `ttl_s`.

    Returns at once for a process of this machine; otherwise polls the file for up to `ttl_s`.
    """
    first = read_record(path)
    if first is not None and first.holder.is_here and first.renewed_s is not None:
        age_s = time.monotonic() - first.renewed_s
        if age_s >= 0:
            return age_s > ttl_s
    return _watch(path, first, ttl_s) is None


def _watch(path: Path, first: LeaseRecord | None, ttl_s: float) -> LeaseRecord | None:
    """Poll for the first record that differs from `first`; None if there is none within `ttl_s`."""
    deadline_s = time.monotonic() + ttl_s
    while time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)
        found = read_record(path)
        if found is not None and found != first:
            return found
    return None


class Lease:
    """This process's lease, in a lock file that it holds. A thread renews it."""

    def __init__(
        self,
        path: Path,
        holder: LeaseHolder | None = None,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        """`holder`: this process, as the file already names it; None: make a new record."""
        self.holder = holder or LeaseHolder.here()
        self._path = path
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat = 0
        self._renewed_s = time.monotonic()
        self._lost: LeaseLost | None = None
        self._on_lost: Callable[[LeaseLost], object] = lambda _: None
        self._is_renewing = threading.Lock()
        self._ends = threading.Event()
        write_record(path, LeaseRecord(self.holder, 0, self._renewed_s))
        self._thread = threading.Thread(target=self._renew_until_end, name="lease", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True if another process holds the lease."""
        return self._lost is not None

    def call_when_lost(self, on_lost: Callable[[LeaseLost], object]) -> None:
        """Call `on_lost` when the lease is lost: on another thread, or on this one if it is lost already."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def check(self) -> None:
        """Return if this process may write. Costs one clock read, unless the last heartbeat is too old.

        Raises:
            LeaseLost: another process holds the lease.
        """
        if time.monotonic() - self._renewed_s > LEASE_TTL_S:
            self._renew()  # after a freeze, the heartbeat thread may resume later than the calling thread
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Release the lease, so that another process can take it at once."""
        self._ends.set()
        self._thread.join()
        if not self.is_lost:
            self._put(b"")

    def _renew_until_end(self) -> None:
        while not self._ends.wait(self._heartbeat_interval_s):
            self._renew()
            if self._lost is not None:
                self._on_lost(self._lost)
                return

    def _renew(self) -> None:
        with self._is_renewing:
            if self._lost is None:
                self._heartbeat += 1
                now_s = time.monotonic()
                self._put(LeaseRecord(self.holder, self._heartbeat, now_s).to_bytes())
                self._renewed_s = now_s

    def _put(self, content: bytes) -> None:
        """Write to the file, unless it names another process."""
        # If the folder was deleted, or its storage is unavailable, the kernel's lock and the epoch still fence.
        with contextlib.suppress(OSError), opened(self._path, os.O_RDWR) as descriptor:
            found = LeaseRecord.from_bytes(os.pread(descriptor, _FILE_BYTES, 0))
            if found is not None and found.holder != self.holder:
                self._lost = LeaseLost.to(found.holder, self._path.parent)
                return
            # Write in place: the lock is on this file; a new file under its name would be unlocked.
            os.pwrite(descriptor, content.ljust(_FILE_BYTES), 0)
            os.fdatasync(descriptor)


def write_record(path: Path, record: LeaseRecord) -> None:
    """Write the new holder, whatever the file contains. If the write fails, the kernel's lock and the epoch still fence."""
    with contextlib.suppress(OSError), opened(path, os.O_WRONLY) as descriptor:
        os.pwrite(descriptor, record.to_bytes(), 0)
        os.fdatasync(descriptor)
