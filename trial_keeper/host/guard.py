"""Ends the trial of a keeper that was killed, where no container ends with it.

The kernel's own means, a parent-death signal, reaches the command's first process only and none of what that one started, and
to set it takes another program's start or a slow fork before each trial. A second process is told by the kernel at once that
the keeper is gone, whatever ended it: the pipe between them is closed.
"""

import os
import signal
from collections.abc import Iterable

from trial_keeper.host.process import end_marked


class Guard:
    """A process beside the keeper that waits for its end. It is nobody's child, so it counts as no part of any trial.

    To be made before `process.adopt_orphans` and before any thread runs. What the keeper said last holds: while nothing is
    watched, the keeper's end is none of the guard's business.
    """

    def __init__(self) -> None:
        read_end, self._pipe = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            code = 1
            try:
                pid = os.fork()
                if pid == 0:
                    _become_guard(read_end)
                os.write(tell, str(pid).encode())
                code = 0
            finally:
                # Whatever happens, there is no second keeper.
                os._exit(code)
        os.close(read_end)
        os.close(tell)
        os.waitpid(between, 0)
        with open(told, "rb") as file:
            self.pid = int(file.read() or b"0")

    def watch(self, markers: Iterable[str], session: int = 0) -> None:
        """From now on, the keeper's death is to end what is marked so, and what is in this session, if any."""
        self._say("\n".join((str(session), *markers)))

    def rest(self) -> None:
        """The attempt is over."""
        self._say("")

    def close(self) -> None:
        """Let it go, with what it was told last."""
        os.close(self._pipe)

    def _say(self, text: str) -> None:
        # Shorter than PIPE_BUF, so it arrives whole. Without a guard, which somebody may have killed, the manager sweeps.
        try:
            os.write(self._pipe, os.fsencode(text) + b"\0")
        except BrokenPipeError:
            return


def _become_guard(read_end: int) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the keeper, whose end it waits for
    if read_end != 0:
        os.dup2(read_end, 0)
    # Whoever reads what the keeper prints waits for the last process that could.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    said, rest = b"", b""
    while piece := os.read(0, 4096):
        *whole, rest = (rest + piece).split(b"\0")
        said = whole[-1] if whole else said
    session, *markers = os.fsdecode(said).split("\n")
    if markers:
        end_marked(markers, {int(session)} - {0})
