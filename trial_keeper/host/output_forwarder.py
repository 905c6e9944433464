"""Forwards output to the keeper's own stdout and stderr, where clusters collect logs."""

import os
import queue
import threading
from collections import deque
from pathlib import Path

from trial_keeper.wire.small_files import write_fully

_COPY_BYTES = 64 * 1024
# A log collector that does not read must not block the job's end.
_MAX_DRAIN_S = 5.0
# The limit of lines buffered for a stalled reader. A keeper writes a line or two per trial, so this covers thousands of trials.
_MAX_LINES_BYTES = 1 << 20
# Each source is an open file, and a process may have 1,024; a job that runs trials in turn continues without the reader.
_MAX_SOURCES = 64


class OutputForwarder:
    """The only writer of one descriptor: a thread, so that a full pipe blocks only the forwarding.

    It copies files one after another, up to their current end at each wake-up, and writes lines in between. It ends if the reader
    is gone, or if the disk under the descriptor is full: the workspace has everything in any case.
    """

    def __init__(self, target: int) -> None:
        """`target`: the descriptor."""
        self._target = target
        self._sources: deque[int] = deque()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lines_bytes = 0
        self._left_out = 0
        self._lock = threading.Lock()
        self._wakeup = threading.Event()
        self._wakeup.set()  # copy the existing content at once
        self._no_more_comes = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay {target}", daemon=True)
        self._thread.start()

    def follow(self, source: Path) -> None:
        """Copy this existing file from now on. The previous one is copied to its end first, and grows no more.

        If the reader has stalled for very many files, the file is skipped: the workspace has it in any case.
        """
        if self._thread.is_alive() and len(self._sources) < _MAX_SOURCES:
            self._sources.append(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
            self._wakeup.set()

    def say(self, line: str) -> None:
        """Write a line. Returns at once. Lines beyond the buffer's limit are dropped and counted."""
        self.hold(line)
        self._wakeup.set()

    def hold(self, line: str) -> None:
        """Buffer a line for the next `look` or `say`."""
        data = line.encode(errors="replace")
        with self._lock:
            if self._lines_bytes + len(data) > _MAX_LINES_BYTES:
                self._left_out += 1
                return
            if self._left_out:
                data = (
                    f"trial-keeper: {self._left_out} lines were left out here: nobody read them\n".encode()
                    + data
                )
                self._left_out = 0
            self._lines_bytes += len(data)
            self._lines.put(data)

    def look(self) -> None:
        """Copy the appended bytes of the source, and write the buffered lines. Returns at once."""
        self._wakeup.set()

    def finish(self) -> None:
        """Write the rest and end; waits at most a few seconds for a slow reader."""
        self._no_more_comes.set()
        self._wakeup.set()
        self._thread.join(_MAX_DRAIN_S)

    def _run(self) -> None:
        try:
            is_last_round = False
            while not is_last_round:
                self._wakeup.wait()
                self._wakeup.clear()
                is_last_round = self._no_more_comes.is_set()
                self._copy()
                while not self._lines.empty():
                    data = self._lines.get()
                    write_fully(self._target, data)
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
            while data := os.read(self._sources[0], _COPY_BYTES):
                write_fully(self._target, data)
            if not has_successor:
                return
            os.close(self._sources.popleft())
