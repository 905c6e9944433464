"""Ends the trial of a killed keeper, if no container does.

The kernel's parent-death signal reaches only the command's first process and none of its children, and setting it requires
another program's start or a slow fork before each trial. Instead a second process detects any death of the keeper at once: EOF
on the pipe between them. The reaper's instructions are in shared memory, so that it sleeps until then: a keeper may run hundreds
of short trials a minute. The shared memory outlives the keeper, so a process that is registered in it may execute at once,
without waiting for the reaper.
"""

import contextlib
import errno
import mmap
import os
import signal
from collections.abc import Collection, Iterable

from trial_keeper.host.process import end_marked, exhausted

# Space for two paths and some numbers. There are two slots, so that a keeper that dies during a write leaves the previous
# instruction intact.
_SLOT_BYTES = 16 * 1024
_LENGTH_BYTES = 4
_MAX_PID_BYTES = 20
_WHAT = "the process that ends the trial of a killed keeper"


class OrphanReaper:
    """A process beside the keeper that waits for the keeper's death. It is not the keeper's child, so it belongs to no trial.

    Create it before any thread runs, and call `detach` before `processes.adopt_orphans`. Only the last instruction
    counts. A reaper that has not started yet when the keeper dies still executes it. While nothing is watched, the reaper
    ignores the keeper's end.
    """

    def __init__(self) -> None:
        """Start it.

        Raises:
            KeeperRetryableError: processes, memory or open files are exhausted.
        """
        self._slots = mmap.mmap(-1, 1 + 2 * _SLOT_BYTES)
        self._markers: tuple[str, ...] = ()
        self._sessions: tuple[int, ...] = ()
        try:
            read_end, self._pipe = os.pipe()
            self._pid_reader, pid_writer = os.pipe()
            self._between = os.fork()
        except OSError as error:
            raise exhausted(_WHAT, error) from error
        if self._between == 0:
            code = 1
            try:
                pid = os.fork()
                if pid == 0:
                    _run_reaper(read_end, self._slots)
                os.write(pid_writer, str(pid).encode())
                code = 0
            finally:
                # This fork must never continue as a second keeper.
                os._exit(code)
        os.close(read_end)
        os.close(pid_writer)
        self.pid = 0
        """The reaper's pid, once it has started."""

    def wait_for_start(self) -> None:
        """Return once the reaper exists. Both forks take milliseconds, in which the keeper reads the trial.

        Raises:
            KeeperRetryableError: processes or memory are exhausted.
        """
        pid = os.read(self._pid_reader, _MAX_PID_BYTES)
        os.close(self._pid_reader)
        if not pid:
            error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            raise exhausted(_WHAT, error)
        self.pid = int(pid)

    def detach(self) -> None:
        """Return once the reaper is nobody's child: the fork between has ended. Call it after `wait_for_start`."""
        os.waitpid(self._between, 0)

    def watch(self, markers: Iterable[str], sessions: Collection[int] = ()) -> None:
        """Set the processes to kill after the keeper's death: those with these markers and those in these sessions."""
        self._markers, self._sessions = tuple(markers), tuple(sessions)
        data = os.fsencode("\n".join((" ".join(map(str, self._sessions)), *self._markers)))
        place = 1 - self._slots[0]
        start = 1 + place * _SLOT_BYTES
        data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        self._slots[start : start + len(data)] = data
        self._slots[0] = place

    def register(self, session: int) -> None:
        """Also end this process session (setsid) when the keeper dies. Call it before the session's leader executes anything."""
        self.watch(self._markers, (*self._sessions, session))

    def close(self) -> None:
        """Release the reaper, which executes its last instruction and ends, even if it was stopped by a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        os.close(self._pipe)


def _run_reaper(read_end: int, slots: mmap.mmap) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the keeper handles these
    if read_end != 0:
        os.dup2(read_end, 0)
    # A reader of the keeper's output waits for the last process that has that pipe open.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.read(0, 1)  # until EOF
    start = 1 + slots[0] * _SLOT_BYTES + _LENGTH_BYTES
    instruction = slots[start : start + int.from_bytes(slots[start - _LENGTH_BYTES : start], "big")]
    sessions, *markers = os.fsdecode(instruction).split("\n")
    if markers:
        end_marked(markers, {int(session) for session in sessions.split()})
