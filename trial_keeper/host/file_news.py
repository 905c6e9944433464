"""When to look at growing files: the kernel says that somebody wrote, and a slow look covers what it does not see.

Theory of operation. A trial's processes run on the keeper's own kernel, so inotify sees their writes also where the files lie
on NFS, FUSE or an overlay. It does not see writes through a mapping, and it may not be there at all: a sandbox without it, a user
who has used up `max_user_instances` or `max_user_watches`. So files are looked at every second as well, or several times a second
where the kernel tells nothing.

A trial may write 200,000 times a second, and each write that the kernel has to tell would take half as long again (0.75 µs
beside 1.5 µs). So a file is watched for one write only (IN_ONESHOT), looked at, and watched again. A file that was written to
soon after that rests before it is looked at and watched anew: a flood is a look every `rest_s`, one write now and then is seen
at once, and a file that is flooded does not hold up the news of another.

Source: inotify(7).
"""

import asyncio
import contextlib
import ctypes
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

# What inotify cannot see is seen this late; the looks cost 0.03 % of a core.
SLOW_LOOK_S = 1.0
# Without inotify: soon after something came, more seldom while nothing does, at 0.7 % of a core.
SHORTEST_POLL_S = 0.01
LONGEST_POLL_S = 0.05
_SLOWING = 1.3
# linux/inotify.h
_IN_MODIFY = 0x2
_IN_IGNORED = 0x8000
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 4096


@dataclass(slots=True)
class _Watched:
    path: Path
    rest_s: float
    watched_since_s: float


class FileNews:
    """News of the files of any number of attempts, for one task that looks at them."""

    def __init__(self) -> None:
        """Ask the kernel for news; where it has none to give, `wait` is a poll."""
        self._watched: dict[int, _Watched] = {}
        # Written to and not watched again yet, with the time when that is due.
        self._resting: list[tuple[float, _Watched]] = []
        self._poll_s = SHORTEST_POLL_S
        self._woken = asyncio.Event()
        self._look_is_asked = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptor = descriptor if descriptor >= 0 else None

    @property
    def comes_from_the_kernel(self) -> bool:
        """Whether inotify tells of the files; otherwise they are polled."""
        return self._descriptor is not None

    def add(self, path: Path, *, rest_s: float) -> None:
        """Hear of this file, which exists, from now on: of writes that follow each other closely only every `rest_s`."""
        if not self._watch(_Watched(path, rest_s, 0.0)):
            # One file that is not seen must be polled, and one look is at all of them.
            self.close()

    def remove(self, path: Path) -> None:
        """Hear of this file no more."""
        self._resting = [entry for entry in self._resting if entry[1].path != path]
        for watch in [watch for watch, watched in self._watched.items() if watched.path == path]:
            self._libc.inotify_rm_watch(self._descriptor, watch)
            del self._watched[watch]

    def look_now(self) -> None:
        """Let `wait` return: something else happened that is worth a look."""
        self._look_is_asked = True
        self._woken.set()

    async def wait(self, *, grew: bool, longest_s: float = SLOW_LOOK_S) -> None:
        """Return when the files are to be looked at. `grew`: whether the last look found anything.

        What is written after this returned is told by the next call, so nothing is missed between a look and the next wait.
        """
        if self._descriptor is None:
            self._poll_s = SHORTEST_POLL_S if grew else min(self._poll_s * _SLOWING, LONGEST_POLL_S)
            longest_s = min(longest_s, self._poll_s)
        gives_up_at_s = time.monotonic() + longest_s
        while not self._look_is_asked and not self._watch_again() and time.monotonic() < gives_up_at_s:
            wakes_at_s = min([gives_up_at_s, *(due_s for due_s, _ in self._resting)])
            await self._sleep(wakes_at_s - time.monotonic())
        self._look_is_asked = False

    def close(self) -> None:
        """Let go of the kernel's queue; `wait` is a poll from here on."""
        self._watched.clear()
        self._resting.clear()
        if self._descriptor is not None:
            self._stop_listening()
            os.close(self._descriptor)
            self._descriptor = None

    def _watch(self, watched: _Watched) -> bool:
        if self._descriptor is None:
            return False
        watched.watched_since_s = time.monotonic()
        watch = self._libc.inotify_add_watch(
            self._descriptor, os.fsencode(watched.path), _IN_MODIFY | _IN_ONESHOT
        )
        if watch >= 0:
            self._watched[watch] = watched
        return bool(watch >= 0)

    def _watch_again(self) -> bool:
        """Watch what has rested, before it is looked at; whether there was any."""
        now_s = time.monotonic()
        for watched in self._written():
            self._resting.append((max(now_s, watched.watched_since_s + watched.rest_s), watched))
        due = [watched for due_s, watched in self._resting if due_s <= now_s]
        self._resting = [entry for entry in self._resting if entry[0] > now_s]
        for watched in due:
            # Not of a file that the trial has removed: the slow look is enough for that.
            self._watch(watched)
        return bool(due)

    def _written(self) -> list[_Watched]:
        """What was written to since it was watched, and is not watched any more."""
        events = b""
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                events = os.read(self._descriptor, _READ_BYTES)
        ended = [watch for watch, mask, _, _ in _EVENT.iter_unpack(events) if mask & _IN_IGNORED]
        return [self._watched.pop(watch) for watch in ended if watch in self._watched]

    async def _sleep(self, longest_s: float) -> None:
        """Until the kernel has news, or somebody wakes it."""
        loop = asyncio.get_running_loop()
        self._woken.clear()
        if self._descriptor is not None:
            loop.add_reader(self._descriptor, self._hear)
        # Not `wait_for`, which is a task of its own each time.
        waker = loop.call_later(max(longest_s, 0.0), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            waker.cancel()
            self._stop_listening()

    def _hear(self) -> None:
        # Not read yet, so it would be told again and again.
        self._stop_listening()
        self._woken.set()

    def _stop_listening(self) -> None:
        if self._descriptor is not None:
            # No loop, no listener.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._descriptor)
