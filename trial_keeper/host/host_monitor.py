"""What trials leave on the host: entries of the temporary folder, processes, and kills for lack of memory."""

import contextlib
import os
import signal
import tempfile
import time

from trial_keeper.exit_codes import of_signal
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.host.cached_listing import CachedListing
from trial_keeper.host.cgroups import MemoryCgroup
from trial_keeper.host.orphan_reaper import OrphanReaper
from trial_keeper.processes import ancestors, descendants

# Membership of a control group changes rarely, and short trials start many times a second.
SHARED_MEMORY_POLL_S = 1.0
# Exit statuses of a killed command, and of a shell whose command was killed.
_KILLED = (-signal.SIGKILL, of_signal(signal.SIGKILL))


@dataclass(frozen=True, slots=True)
class HostBaseline:
    """The host's state before a trial. The state at the end of one trial is the baseline of the next."""

    in_tmp: frozenset[str]
    """The entries of the temporary folder."""
    oom_kills: int
    pids: frozenset[int] = frozenset()
    """The processes of this machine; empty if not scanned."""


class HostMonitor:
    """Compares the host's state before and after trials."""

    def __init__(self, reaper: OrphanReaper | None, *, is_reused: bool) -> None:
        self._reaper = reaper
        self._tmp: CachedListing | None = None
        # Only with reuse: the job's next trial could use these entries.
        if is_reused:
            with contextlib.suppress(FileNotFoundError):  # no temporary folder is writable
                self._tmp = CachedListing(tempfile.gettempdir())
        self._memory = MemoryCgroup.own()
        self._is_shared = False
        self._is_shared_since_s = -SHARED_MEMORY_POLL_S

    def baseline(self, pids: frozenset[int] = frozenset()) -> HostBaseline:
        """The present state."""
        return HostBaseline(
            self._tmp.names() if self._tmp is not None else frozenset(),
            self._memory.oom_kills() if self._memory is not None else 0,
            pids,
        )

    def memory_shortage(
        self, found: HostBaseline, at_end: HostBaseline, status: int, *, shares_memory: bool
    ) -> str:
        """A sentence about the shortage that killed a trial with this exit status; empty if none did.

        `shares_memory`: whether the memory was shared at the trial's start.
        """
        if self._memory is None or at_end.oom_kills == found.oom_kills:
            return ""
        if status not in _KILLED and (shares_memory or self.shares_memory()):
            # The killed process may belong to another job, so this trial's failure has another cause.
            return ""
        return self._memory.shortage()

    def shares_memory(self, longest_ago_s: float = 0.0) -> bool:
        """True if this keeper's control group also contains other processes, as on a laptop. A container has its own group.

        Returns the previous result if that is at most `longest_ago_s` old.
        """
        if self._memory is None or os.getpid() == 1:
            return False
        now_s = time.monotonic()
        if now_s < self._is_shared_since_s + longest_ago_s:
            return self._is_shared
        before = self._memory.pids()
        known = {os.getpid(), *ancestors(), *descendants((os.getpid(),))}
        if self._reaper is not None:
            known.add(self._reaper.pid)
        # A process that started or ended meanwhile may be the trial's: a new shell forks its command.
        others = before & (self._memory.pids() - known)
        self._is_shared_since_s, self._is_shared = now_s, bool(others)
        return self._is_shared
