"""A pipe that signals the death of the program that started a manager, however it ended.

The pipe is never written to. The program holds the write end and the manager the read end. When the program ends, also by
`kill -9`, the kernel closes its end, and the manager reads EOF.
"""

from __future__ import annotations

import os
import weakref


class ParentDeathPipe:
    """One pipe. Forked children close their copies, so that only the end of the program itself counts."""

    def __init__(self) -> None:
        """Create the pipe."""
        self.manager_fd, self._own_end = os.pipe()
        """The read end, which the manager inherits."""
        _open_pipes.add(self)

    def hand_over(self) -> None:
        """Close this process's copy of the manager's end. Call this after the manager has inherited the end."""
        self.manager_fd = _closed(self.manager_fd)

    def cut(self) -> None:
        """Close the pipe, which signals EOF to the manager. Idempotent."""
        self.hand_over()
        self._own_end = _closed(self._own_end)


def _closed(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1


_open_pipes: weakref.WeakSet[ParentDeathPipe] = weakref.WeakSet()


def _cut_all() -> None:
    for each in list(_open_pipes):
        each.cut()


os.register_at_fork(after_in_child=_cut_all)
