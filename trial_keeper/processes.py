"""Reads /proc, and ends processes. Keeper, manager and the supervisors of containers use this module; standard library only.

Theory of operation. A pid may be reused; pid, start time and boot together identify a process. The processes to end are found by
their environment, by ancestry and by session. Orphans of a dead keeper are adopted elsewhere, so all processes are stopped before
any is killed: a stopped process cannot fork, and its descendants are below it. Once all are found and have stopped, they are
killed. The cycle repeats until two scans in a row find nothing. A scan can miss a process that forks, executes or is adopted at
that moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from trial_keeper.wire.small_files import read_all

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Freeing hundreds of gigabytes of memory, or a GPU's memory, takes seconds.
MAX_DEATH_S = 10.0
EMPTY_SCANS = 2
"""One scan can miss a process whose parent dies, or that executes another program, during the scan."""
_RETRY_DELAY_S = 0.001
# The pid of an ended process may be the id of a thread now: ENOENT, or EINVAL from older kernels.
_NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


# ---- one process


class ProcessStat(NamedTuple):
    """/proc/PID/stat of one process. `cpu_s` includes the time of waited-for children."""

    state: str
    parent: int
    session: int
    cpu_s: float
    start_ticks: int
    """Since the boot. A time of day is unsuitable: it would change when the wall clock is set."""
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> ProcessStat | None:
        """The process that has this pid now, also as a zombie; None if there is none."""
        try:
            return cls.from_bytes(read_all(f"/proc/{pid}/stat"))
        except OSError:
            return None

    @classmethod
    def from_bytes(cls, content: bytes) -> ProcessStat:
        """Parse /proc/PID/stat.

        Raises:
            ValueError: the content has too few fields.
        Source: proc_pid_stat(5).
        """
        # The name is in brackets and may contain any character, also brackets and spaces.
        fields = content[content.rindex(b")") + 1 :].split()
        if len(fields) < 22:
            raise ValueError(f"cannot read {content!r} as the stat of a process: it is too short")
        return cls(
            fields[0].decode(),
            int(fields[1]),
            int(fields[3]),
            sum(map(int, fields[11:15])) * _TICK_S,
            int(fields[19]),
            int(fields[21]) * _PAGE_BYTES,
        )


@cache
def boot_id() -> str:
    """An id of this machine's current boot, different from every other machine's; empty if the kernel provides none.

    Source: proc_sys_kernel(5), random/boot_id.
    """
    try:
        return read_all("/proc/sys/kernel/random/boot_id").decode("ascii").strip()
    except OSError:
        return ""


class ProcessIdentity(NamedTuple):
    """A process of this machine, distinguished from others with the same pid. `_asdict` is its JSON document."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of the process that has this pid now; None if there is none, or only a zombie."""
        stat = ProcessStat.of(pid)
        return None if stat is None or stat.state in "ZX" else cls(pid, stat.start_ticks, boot_id())

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessIdentity:
        """Read an identity that `_asdict` has written.

        Raises:
            KeyError: a field is missing.
        """
        return cls(document["pid"], document["start_ticks"], document["boot_id"])

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return ProcessIdentity.of(self.pid) == self

    def open_pidfd(self) -> int | None:
        """A pidfd of the process; None if the process has ended, even if its pid has been reused."""
        descriptor = open_pidfd(self.pid)
        if descriptor is None or self.is_alive:  # checked once the pidfd pins the process
            return descriptor
        os.close(descriptor)
        return None


def open_pidfd(pid: int) -> int | None:
    """A pidfd, readable once the process has ended; None if no process has this pid. A thread that has it does not count.

    Raises:
        OSError: the process has too many open files, or the kernel has no pidfds (before Linux 5.3).
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return None
        raise


def state_of(pid: int) -> str:
    """The state letter of proc_pid_stat(5); X also if there is no such process."""
    stat = ProcessStat.of(pid)
    return "X" if stat is None else stat.state


def is_dead(pid: int) -> bool:
    """True if the process does not exist, or is a zombie."""
    return state_of(pid) in "ZX"


def session_of(pid: int) -> int | None:
    """The pid of the session's leader, which may be gone; None if the process is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid)
    return None


def environ_of(pid: int) -> dict[str, str]:
    """The environment with which the process was started; empty if the process is gone, or another user's."""
    with contextlib.suppress(OSError):
        entries = os.fsdecode(read_all(f"/proc/{pid}/environ")).split("\0")
        return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}
    return {}


# ---- many processes


def all_pids() -> frozenset[int]:
    """The visible processes of this machine."""
    return frozenset(map(int, filter(str.isdecimal, os.listdir("/proc"))))


def pids_where(is_wanted: Callable[[dict[str, str]], bool]) -> list[int]:
    """This user's processes whose initial environment satisfies `is_wanted`."""
    return [pid for pid in all_pids() if is_wanted(environ_of(pid))]


def children(pid: int) -> list[int]:
    """The children of a process; empty if it is gone."""
    found: list[int] = []
    try:
        # Of a keeper's dozen threads only the first starts processes and adopts orphans.
        for thread in (pid,) if pid == os.getpid() else os.listdir(f"/proc/{pid}/task"):
            found += map(int, read_all(f"/proc/{pid}/task/{thread}/children").split())
    except OSError:
        if not os.path.exists("/proc/thread-self/children"):
            # The slow way for a kernel without the children files, which take a hundredth of the time.
            return [each for each in all_pids() if (stat := ProcessStat.of(each)) and stat.parent == pid]
    return found  # the process, or one of its threads, may be gone


def descendants(pids: Iterable[int], is_left_out: Callable[[int], bool] = lambda _: False) -> list[int]:
    """Return the children of these processes, their children, and so on, without the excluded ones and those below them.

    Processes that fork or die meanwhile may be missed.
    """
    found: list[int] = []
    following = list(pids)
    while following:
        below = [pid for pid in children(following.pop()) if not is_left_out(pid)]
        found += below
        following += below
    return found


def ancestors() -> list[int]:
    """Return the parent of this process, its parent, and so on."""
    found = [os.getppid()]
    while found[-1] > 1 and (stat := ProcessStat.of(found[-1])) is not None:
        found.append(stat.parent)
    return found


def families(pids: Iterable[int], sessions: Collection[int] = ()) -> set[int]:
    """Return these processes, those in these sessions or in one that they lead, and all that are below any of them.

    A session counts only if a found process leads it: a trial's daemon may be in a session of others.
    """
    found = set(pids)
    found.update(descendants(found))
    leaders = found.union(sessions)
    if leaders:
        found.update(pid for pid in all_pids() if session_of(pid) in leaders)
    return found.union(descendants(found))


# ---- the end


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, as the first process of a container is by default.

    If the kernel does not support this, orphans get another parent.
    """
    import ctypes  # not at the top: the import takes 2 ms, and few programs need it

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_sent(pid: int, number: int) -> bool:
    """True if the process was signalled or is gone; False if it is another user's."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def kill(pid: int) -> bool:
    """Send SIGKILL. True if the process is going to end."""
    return is_sent(pid, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; 0 sends none. True if the group has a process.

    A process that has become another user's cannot be signalled.
    """
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def terminate(descriptor: int, within_s: float) -> bool:
    """Send SIGTERM, and SIGCONT for a stopped process, to a pidfd and close it. True if the process ended within `within_s`."""
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        ended, _, _ = select.select([descriptor], [], [], within_s)
        return bool(ended)
    finally:
        os.close(descriptor)


def wait_for_ends(pids: Iterable[int], deadline_s: float) -> None:
    """Wait until all of these processes have ended, or until the deadline. Children are not reaped."""
    for pid in pids:
        try:
            descriptor = open_pidfd(pid)
        except OSError:  # a kernel before 5.3, or too many open files
            while not is_dead(pid) and time.monotonic() < deadline_s:
                time.sleep(_RETRY_DELAY_S)
            continue
        if descriptor is None:
            continue
        try:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            end.poll(max(deadline_s - time.monotonic(), 0.0) * 1e3)
        finally:
            os.close(descriptor)


def end_all(find: Callable[[], Iterable[int]]) -> int:
    """Kill the found processes and wait for their end, until two scans in a row find nothing. Returns their number.

    Processes of other users stay.
    """
    deadline_s = time.monotonic() + MAX_DEATH_S
    ended: set[int] = set()
    empty_scans = 0
    while empty_scans < EMPTY_SCANS and time.monotonic() < deadline_s:
        stopped: set[int] = set()
        while time.monotonic() < deadline_s and (
            new := [
                pid
                for pid in find()
                if pid not in stopped and not is_dead(pid) and is_sent(pid, signal.SIGSTOP)
            ]
        ):
            stopped.update(new)
            _wait_for_stops(new, deadline_s)
        dying = [pid for pid in stopped if kill(pid)]
        empty_scans = 0 if dying else empty_scans + 1
        ended.update(dying)
        wait_for_ends(dying, deadline_s)
    return len(ended)


def end_below(pid: int) -> None:
    """Kill all descendants of this process, and wait for their end. Processes of other users stay."""
    end_all(lambda: descendants((pid,)))


def _wait_for_stops(pids: Iterable[int], deadline_s: float) -> None:
    """Wait until all of these processes, which were sent SIGSTOP, have stopped or ended, or until the deadline.

    A process that was about to fork on a busy machine forks first. A parent in vfork waits uninterruptibly for its child; the
    next scan finds that child.
    """
    for pid in pids:
        while state_of(pid) in "RS" and time.monotonic() < deadline_s:
            time.sleep(_RETRY_DELAY_S)
