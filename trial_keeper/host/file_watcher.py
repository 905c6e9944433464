"""Schedules the polls of growing files: inotify reports writes, and a slow poll finds the writes that inotify misses.

Theory of operation. A trial's processes run on the keeper's own kernel, so inotify reports their writes even if the files are
on NFS, FUSE or an overlay. But inotify reports no writes through a memory mapping, and may be unavailable: in a sandbox, or if
the user has exhausted `max_user_instances` or `max_user_watches`. So files are also polled every second, or several times a
second without inotify.

A trial may write 200,000 times a second, and reporting each write would slow the trial down by half (0.75 µs on top of 1.5 µs).
So each watch reports one write only (IN_ONESHOT); then the file is polled and watched again. A file that is written to again soon
is throttled before the next poll and watch. So a bulk writer causes one poll every `cooldown_s`, an occasional write is reported
at once, and a bulk writer of one file does not delay the reports of another.

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

# The latency of writes that inotify does not report. These polls cost 0.03 % of a core.
SLOW_POLL_S = 1.0
# Without inotify: the interval is short after a change and grows until the next. These polls cost 0.7 % of a core.
MIN_POLL_S = 0.01
MAX_POLL_S = 0.05
_SLOWDOWN = 1.3
# linux/inotify.h
_IN_MODIFY = 0x2
_IN_IGNORED = 0x8000
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 4096


@dataclass(slots=True)
class _Watched:
    path: Path
    cooldown_s: float
    watched_since_s: float


class FileWatcher:
    """Reports changes of the files of any number of attempts to a single task."""

    def __init__(self) -> None:
        """Open inotify; without it `wait` becomes a timed poll."""
        self._watched: dict[int, _Watched] = {}
        # Files with a reported write and no new watch yet, with the time when the watch is due.
        self._throttled: list[tuple[float, _Watched]] = []
        self._poll_s = MIN_POLL_S
        self._woken = asyncio.Event()
        self._poll_is_due = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptor = descriptor if descriptor >= 0 else None
        """None without inotify: the files are polled."""

    def add(self, path: Path, *, cooldown_s: float) -> None:
        """Watch this existing file from now on: writes in quick succession are reported only every `cooldown_s`."""
        if not self._watch(_Watched(path, cooldown_s, 0.0)):
            # One unwatched file requires polling, and each poll covers all files.
            self.close()

    def remove(self, path: Path) -> None:
        """Stop watching this file."""
        self._throttled = [entry for entry in self._throttled if entry[1].path != path]
        for watch in [watch for watch, watched in self._watched.items() if watched.path == path]:
            self._libc.inotify_rm_watch(self._descriptor, watch)
            del self._watched[watch]

    def poll_now(self) -> None:
        """Make `wait` return, because another event requires a poll."""
        self._poll_is_due = True
        self._woken.set()

    async def wait(self, *, grew: bool, longest_s: float = SLOW_POLL_S) -> None:
        """Return when the files are to be polled. `grew`: true if the last poll found new bytes.

        The next call reports writes after this call's return, so no write is missed between a poll and the next wait.
        """
        if self._descriptor is None:
            self._poll_s = MIN_POLL_S if grew else min(self._poll_s * _SLOWDOWN, MAX_POLL_S)
            longest_s = min(longest_s, self._poll_s)
        deadline_s = time.monotonic() + longest_s
        while not self._poll_is_due and not self._watch_again() and time.monotonic() < deadline_s:
            wakes_at_s = min([deadline_s, *(due_s for due_s, _ in self._throttled)])
            await self._sleep(wakes_at_s - time.monotonic())
        self._poll_is_due = False

    def close(self) -> None:
        """Close inotify; afterwards `wait` is a timed poll."""
        self._watched.clear()
        self._throttled.clear()
        if self._descriptor is not None:
            self._remove_reader()
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
        """Watch files again whose throttle has expired, before they are polled. True if there were any."""
        now_s = time.monotonic()
        events = b""
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                events = os.read(self._descriptor, _READ_BYTES)
        for watch, mask, _, _ in _EVENT.iter_unpack(events):
            # The watch has ended with the first write to the file.
            if mask & _IN_IGNORED and (watched := self._watched.pop(watch, None)) is not None:
                self._throttled.append((max(now_s, watched.watched_since_s + watched.cooldown_s), watched))
        due = [watched for due_s, watched in self._throttled if due_s <= now_s]
        self._throttled = [entry for entry in self._throttled if entry[0] > now_s]
        for watched in due:
            # Fails for a file that the trial has removed; the slow poll handles that.
            self._watch(watched)
        return bool(due)

    async def _sleep(self, longest_s: float) -> None:
        """Sleep until inotify has events, or until `poll_now` is called."""
        loop = asyncio.get_running_loop()
        self._woken.clear()
        if self._descriptor is not None:
            loop.add_reader(self._descriptor, self._on_readable)
        # Not `wait_for`, which creates a task each time.
        waker = loop.call_later(max(longest_s, 0.0), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            waker.cancel()
            self._remove_reader()

    def _on_readable(self) -> None:
        # The event stays unread for now, so the reader would fire again and again.
        self._remove_reader()
        self._woken.set()

    def _remove_reader(self) -> None:
        if self._descriptor is not None:
            # Without a running loop there is no reader.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._descriptor)
