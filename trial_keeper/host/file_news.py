"""When to look at growing files: the kernel says that somebody wrote, and a slow look covers what it does not see.

Theory of operation. A trial's processes run on the keeper's own kernel, so inotify sees their writes also where the files lie
on NFS, FUSE or an overlay. It does not see writes through a mapping, and it may not be there at all: a sandbox without it, a user
who has used up `max_user_instances` or `max_user_watches`. So files are looked at every second as well, or several times a second
where the kernel tells nothing.

A trial may write 200,000 times a second. Events that were not read yet and are alike are one to the kernel, so the queue is left
alone between two looks, which are never closer together than `SHORTEST_REST_S`. What the events say is not read: any of them,
also the one for a queue that ran over, means "look at the sizes".

Source: inotify(7).
"""

import asyncio
import contextlib
import ctypes
import os
import time
from pathlib import Path

# Two looks are this far apart at least: a trial that floods its files costs a hundred looks a second, and one that reports ten
# times a second has each report seen at once.
SHORTEST_REST_S = 0.01
# What inotify cannot see is seen this late; the looks cost 0.03 % of a core.
SLOW_LOOK_S = 1.0
# Without inotify: soon after something came, more seldom while nothing does, at 0.7 % of a core.
LONGEST_POLL_S = 0.05
_SLOWING = 1.3
_IN_MODIFY = 0x2  # linux/inotify.h
_EVENTS_BYTES = 64 * 1024


class FileNews:
    """News of the files of any number of attempts, for one task that looks at them."""

    def __init__(self) -> None:
        """Ask the kernel for news; where it has none to give, `wait` is a poll."""
        self._descriptor: int | None = None
        self._watches: dict[Path, int] = {}
        self._poll_s = SHORTEST_REST_S
        self._looked_at_s = 0.0
        self._is_news = asyncio.Event()
        self._events = bytearray(_EVENTS_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True)
        descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor >= 0:
            self._descriptor = descriptor

    @property
    def comes_from_the_kernel(self) -> bool:
        """Whether every file that was added is seen by inotify."""
        return self._descriptor is not None

    def add(self, path: Path) -> None:
        """Hear of this file, which exists, from now on."""
        if self._descriptor is None:
            return
        watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY)
        if watch >= 0:
            self._watches[path] = watch
        else:
            # One file that is not seen must be polled, and one look is at all of them.
            self.close()

    def remove(self, path: Path) -> None:
        """Hear of this file no more; the kernel's word for that is one last piece of news."""
        watch = self._watches.pop(path, None)
        if watch is not None and self._descriptor is not None:
            self._libc.inotify_rm_watch(self._descriptor, watch)

    def look_now(self) -> None:
        """Let `wait` return: something else happened that is worth a look."""
        self._is_news.set()

    async def wait(self, *, grew: bool, longest_s: float = SLOW_LOOK_S) -> None:
        """Return when the files are to be looked at. `grew`: whether the last look found anything.

        What is written after this returned is told by the next call, so nothing is missed between a look and the next wait.
        """
        if self._descriptor is None:
            self._poll_s = SHORTEST_REST_S if grew else min(self._poll_s * _SLOWING, LONGEST_POLL_S)
            longest_s = min(longest_s, self._poll_s)
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, self._hear)
        try:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._is_news.wait(), longest_s)
        finally:
            self._stop_listening()
        rest_s = self._looked_at_s + SHORTEST_REST_S - time.monotonic()
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        self._is_news.clear()
        self._forget_events()
        self._looked_at_s = time.monotonic()

    def close(self) -> None:
        """Let go of the kernel's queue; `wait` is a poll from here on."""
        self._stop_listening()
        self._watches.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _hear(self) -> None:
        # Not read yet, so it would be told again and again.
        self._stop_listening()
        self._is_news.set()

    def _stop_listening(self) -> None:
        if self._descriptor is not None:
            # No loop, no listener.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._descriptor)

    def _forget_events(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.readv(self._descriptor, [self._events])
