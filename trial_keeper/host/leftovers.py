"""Ends orphaned processes: of attempts whose keeper was killed, or of an interpreter that is closed.

Theory of operation. The orphans of a trial without a keeper are adopted elsewhere, so its processes are stopped before any of
them is killed. A stopped process forks no more, and everything it has forked is below it. Once all are found and have stopped,
they are killed. This repeats until two scans in a row find nothing.
"""

import signal
import time
from collections.abc import Callable, Collection, Iterable

from trial_keeper.host.cgroups import TrialCgroup
from trial_keeper.host.process import (
    EMPTY_SCANS,
    MAX_DEATH_S,
    POLL_RETRY_DELAY_S,
    all_pids,
    descendants,
    is_dead,
    is_sent,
    kill,
    marked,
    session_of,
    state_of,
    wait_for_ends,
)


def end_marked(sys_dirs: Collection[str], sessions: Collection[int] = ()) -> int:
    """Kill the processes that attempts of a dead keeper have left on this machine, and wait for their end. Returns their number.

    They are found by their environment, by these sessions or one that such a process leads, by the control group of these
    sessions' leaders, and by ancestry. Processes of other users stay, unless they are in the control group.
    """
    groups = [group for session in sessions if (group := TrialCgroup.of(session)) is not None]

    def find() -> set[int]:
        for group in groups:
            group.kill()
        pids = all_pids()
        found = {*marked(sys_dirs, pids), *(pid for group in groups for pid in group.pids())}
        found.update(descendants(found))
        leaders = found.union(sessions)
        found.update(pid for pid in pids if leaders and session_of(pid) in leaders)
        return found.union(descendants(found))

    ended = _end_all(find)
    for group in groups:
        group.remove()
    return ended


def end_below(pid: int) -> None:
    """Kill all descendants of this process, and wait for their end. Processes of other users stay."""
    _end_all(lambda: descendants((pid,)))


def _end_all(find: Callable[[], Iterable[int]]) -> int:
    """Kill the found processes and wait for their end, until two scans in a row find nothing. Returns their number."""
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


def _wait_for_stops(pids: Iterable[int], deadline_s: float) -> None:
    """Wait until all of them, which were sent SIGSTOP, have stopped or ended, or until the deadline.

    A process that was about to fork on a busy machine forks first. A parent in vfork waits uninterruptibly for its child, which
    the next scan finds.
    """
    for pid in pids:
        while state_of(pid) in b"RS" and time.monotonic() < deadline_s:
            time.sleep(POLL_RETRY_DELAY_S)
