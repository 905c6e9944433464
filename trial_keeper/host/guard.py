"""Ends the trial of a keeper that was killed, where no container ends with it.

The kernel's own means, a parent-death signal, reaches the command's first process only and none of what that one started, and
to set it takes another program's start or a slow fork before each trial. A second process is told by the kernel at once that
the keeper is gone, whatever ended it: the pipe between them is closed. What it has to do then lies in memory that the two share,
so that it sleeps until then: a keeper may have hundreds of short trials a minute.
"""

import mmap
import os
import signal
from collections.abc import Iterable

from trial_keeper.host.process import end_marked

# Room for two paths and a number. What is told lies in one of two places, so that a keeper which dies in the middle of a word
# leaves the one before whole.
_WORD_BYTES = 16 * 1024
_LENGTH_BYTES = 4


class Guard:
    """A process beside the keeper that waits for its end. It is nobody's child, so it counts as no part of any trial.

    To be made before `process.adopt_orphans` and before any thread runs. What the keeper said last holds: while nothing is
    watched, the keeper's end is none of the guard's business.
    """

    def __init__(self) -> None:
        self._told = mmap.mmap(-1, 1 + 2 * _WORD_BYTES)
        read_end, self._pipe = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            code = 1
            try:
                pid = os.fork()
                if pid == 0:
                    _become_guard(read_end, self._told)
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
        word = os.fsencode(text)
        place = 1 - self._told[0]
        start = 1 + place * _WORD_BYTES
        self._told[start : start + _LENGTH_BYTES + len(word)] = (
            len(word).to_bytes(_LENGTH_BYTES, "big") + word
        )
        self._told[0] = place


def _last_word(told: mmap.mmap) -> str:
    start = 1 + told[0] * _WORD_BYTES + _LENGTH_BYTES
    return os.fsdecode(told[start : start + int.from_bytes(told[start - _LENGTH_BYTES : start], "big")])


def _become_guard(read_end: int, told: mmap.mmap) -> None:
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
    os.read(0, 1)  # its end
    session, *markers = _last_word(told).split("\n")
    if markers:
        end_marked(markers, {int(session)} - {0})
