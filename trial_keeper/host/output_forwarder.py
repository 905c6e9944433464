"""Forwards output to the keeper's own stdout and stderr, where clusters collect logs."""

import contextlib
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path

from trial_keeper.wire.safe_open import open_beneath

_COPY_BYTES = 64 * 1024
# A stalled log collector must not block the job's end.
_MAX_DRAIN_S = 5.0
# The limit of lines buffered for a stalled reader: the keeper's lines of thousands of trials.
_MAX_LINES_BYTES = 1 << 20
# Each source is an open file, of which a process may have 1,024. A reused job continues while its reader has stalled.
_MAX_SOURCES = 64


class OutputForwarder:
    """The only writer of one descriptor: a thread, so that a full pipe blocks only the forwarding.

    At each wake-up the thread copies files one after another, up to their current ends, and then writes the lines. It ends if the
    reader is gone, or if the disk under the descriptor is full: the workspace has all output in any case.
    """

    def __init__(self, target: int) -> None:
        """`target`: the descriptor."""
        self._target = target
        self._sources: deque[int] = deque()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lines_bytes = 0
        self._dropped = 0
        self._lock = threading.Lock()
        self._wakeup = threading.Event()
        self._wakeup.set()  # copy the existing content at once
        self._is_finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay {target}", daemon=True)
        """Started with the first output, which is after the start of the trial."""

    def follow(self, source: Path) -> None:
        """Copy this existing file from now on. The previous file must not grow any more; its rest is copied first.

        The file is skipped if it cannot be opened, or the reader has stalled for very many files: the workspace has the file in
        any case.
        """
        if self._is_running() and len(self._sources) < _MAX_SOURCES:
            with contextlib.suppress(OSError):  # the training code has removed it, or the storage fails
                self._sources.append(open_beneath(source.parent, source))
            self._wakeup.set()

    def write(self, line: str) -> None:
        """Write a line. Returns at once. Lines beyond the buffer's limit are dropped and counted."""
        self.buffer(line)
        self.poll()

    def buffer(self, line: str) -> None:
        """Buffer a line until the next `poll` or `write`."""
        data = line.encode(errors="replace")
        with self._lock:
            if self._lines_bytes + len(data) > _MAX_LINES_BYTES:
                self._dropped += 1
                return
            if self._dropped:
                notice = f"trial-keeper: {self._dropped} lines were dropped here: the reader had stalled\n"
                data = notice.encode() + data
                self._dropped = 0
            self._lines_bytes += len(data)
            self._lines.put(data)

    def poll(self) -> None:
        """Wake the thread: it copies the appended bytes and writes the buffered lines. Returns at once."""
        if self._is_running():
            self._wakeup.set()

    def end(self) -> None:
        """Let the thread write the rest and end. Returns at once."""
        self._is_finishing.set()
        self.poll()

    def wait(self, deadline_s: float) -> None:
        """Wait for the thread's end, at most until this time of the monotonic clock."""
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _is_running(self) -> bool:
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:  # the trial has used up all pids
                return False
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            is_last_round = False
            while not is_last_round:
                self._wakeup.wait()
                self._wakeup.clear()
                is_last_round = self._is_finishing.is_set()
                self._copy()
                while not self._lines.empty():
                    data = self._lines.get()
                    self._write(data)
                    with self._lock:
                        self._lines_bytes -= len(data)
        except OSError:
            return
        finally:
            while self._sources:
                os.close(self._sources.popleft())

    def _copy(self) -> None:
        while self._sources:
            has_successor = len(self._sources) > 1
            while data := _read(self._sources[0]):
                self._write(data)
            if not has_successor:
                return
            os.close(self._sources.popleft())

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # whoever opened the descriptor made it non-blocking
                select.select([], [self._target], [])


def _read(source: int) -> bytes:
    """Read further bytes; none at the file's end, or while its storage fails."""
    try:
        return os.read(source, _COPY_BYTES)
    except OSError:
        return b""


def finish(forwarders: Collection[OutputForwarder]) -> None:
    """Let the forwarders write the rest and end. Blocks, at most a few seconds for all slow readers together."""
    deadline_s = time.monotonic() + _MAX_DRAIN_S
    for each in forwarders:
        each.end()
    for each in forwarders:
        each.wait(deadline_s)
