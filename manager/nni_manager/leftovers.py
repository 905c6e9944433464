"""Ends the processes that a job has left on this machine, where no container ends with them.

The guard of a killed keeper stores the sessions of the trial, so it gets time to end them. Processes that it does not end,
or that remain because the guard was killed, too, are found by environment, by ancestry, and by the session of a found process.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

logger = logging.getLogger(__name__)

Predicate = Callable[[dict[str, str]], bool]
"""A test of a process's environment."""

# One scan can miss a process: during the scan its parent may exit, or it may execute another program.
_EMPTY_SCANS = 2
# A guard needs milliseconds. One that is frozen, or waits for a process that hangs in the kernel, is no longer needed.
_MAX_GUARD_S = 5.0
# The same limit as in keepers and their guards: the release of GPU memory takes seconds.
_MAX_DEATH_S = 10.0
_SCAN_INTERVAL_S = 0.5
_RETRY_DELAY_S = 0.001
_GOING_ON = (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING)


def reap_orphans(is_leftover: Predicate, is_guard: Predicate = lambda _: False) -> None:
    """Kill these processes and their descendants, and wait until they and their guards have ended.

    `is_guard`: a process of a keeper that has ended. It is killed only if it takes long. Processes that cannot be ended, because
    they belong to another user or hang in the kernel, are logged.
    """
    began_s = time.monotonic()
    empty_scans = 0
    stopped: set[psutil.Process] = set()
    while True:
        guards, leftovers = _scan(is_leftover, is_guard)
        empty_scans = 0 if guards or leftovers else empty_scans + 1
        if empty_scans == _EMPTY_SCANS:
            return
        took_s = time.monotonic() - began_s
        if took_s > _MAX_DEATH_S:
            logger.warning("cannot end processes %s; end them as their user", sorted({*guards, *leftovers}))
            return
        # A stopped process cannot fork, and its children stay below it: none becomes an untraceable orphan.
        if new := set(leftovers.values()) - stopped:
            stopped |= new
            _stop(new, began_s + _MAX_DEATH_S)
            continue
        for process in [*leftovers.values(), *(guards.values() if took_s > _MAX_GUARD_S else ())]:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.kill()
        _wait_for_ends([*guards, *leftovers])


def _scan(
    is_leftover: Predicate, is_guard: Predicate
) -> tuple[Mapping[int, psutil.Process], Mapping[int, psutil.Process]]:
    """The guards and the leftovers, by pid."""
    guards: dict[int, psutil.Process] = {}
    leftovers: dict[int, psutil.Process] = {}
    others: dict[int, tuple[psutil.Process, int, int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            environ = _environ(process)
            if is_guard(environ):
                guards[process.pid] = process
            elif is_leftover(environ):
                leftovers[process.pid] = process
            else:
                others[process.pid] = process, process.ppid(), os.getsid(process.pid)
    # A session counts only if a found process leads it: a trial's daemon may be in a session of others.
    while more := [pid for pid, (_, *above) in others.items() if not leftovers.keys().isdisjoint(above)]:
        leftovers.update((pid, others.pop(pid)[0]) for pid in more)
    return guards, leftovers


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.AccessDenied:  # another user's: only ancestry or session can identify it
        return {}


def _stop(processes: Iterable[psutil.Process], deadline_s: float) -> None:
    """Stop all processes and wait for it: one that is about to fork on a busy machine forks first."""
    stopping = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            process.suspend()
            stopping.append(process)
    for process in stopping:
        with contextlib.suppress(psutil.Error):
            # A parent in vfork waits uninterruptibly for its child, which the next scan finds.
            while process.status() in _GOING_ON and time.monotonic() < deadline_s:
                time.sleep(_RETRY_DELAY_S)


def _wait_for_ends(pids: Iterable[int]) -> None:
    """Wait until one of the processes has ended, whatever its parent, or until the next scan is due."""
    with contextlib.ExitStack() as opened:
        ends = select.poll()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            opened.callback(os.close, descriptor)
            ends.register(descriptor, select.POLLIN)
        ends.poll(_SCAN_INTERVAL_S * 1e3)
