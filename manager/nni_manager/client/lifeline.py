"""What ties a manager to the program that wants it: when that has ended, however it did, the manager learns of it.

A pipe of which nobody writes. The program holds one end and the manager the other; the system closes the program's when it ends,
by `kill -9` too, and the manager then reads the end of it.
"""

from __future__ import annotations

import os
import weakref


class Lifeline:
    """One pipe. What is forked of the program lets go of it: the end of the program itself is what counts."""

    def __init__(self) -> None:
        """Make the pipe."""
        self.their_end, self._own_end = os.pipe()
        """Of the manager, who inherits it."""
        _lifelines.add(self)

    def hand_over(self) -> None:
        """Close the manager's end here, once it has it."""
        self.their_end = _closed(self.their_end)

    def cut(self) -> None:
        """Let the manager know that it is not wanted any more; no matter if it was told before."""
        self.hand_over()
        self._own_end = _closed(self._own_end)


def _closed(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go() -> None:
    for each in list(_lifelines):
        each.cut()


os.register_at_fork(after_in_child=_let_go)
