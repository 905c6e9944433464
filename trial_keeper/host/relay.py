"""What appears on the keeper's own stdout and stderr, where clusters look for it."""

import os
import queue
import threading
from collections import deque
from pathlib import Path

_COPY_BYTES = 64 * 1024
# A log collector that does not read must not keep the job from ending.
_LONGEST_DRAIN_S = 5.0
# What waits for a reader that does not read. A keeper says a line or two of each trial, so this is the story of thousands.
_MOST_LINES_BYTES = 1 << 20
# Each is an open file, of which a process may have 1,024; a job that runs trials in turn goes on without the reader.
_MOST_SOURCES = 64


class Relay:
    """The only writer of one descriptor: a thread, so that a full pipe stops the relay and nothing else.

    It copies files, one after another, as far as they have grown whenever it is told to look, and writes lines in between. When
    nobody reads any more, or the disk under the descriptor is full, it ends: the workspace has it all the same.
    """

    def __init__(self, target: int) -> None:
        """`target`: the descriptor."""
        self._target = target
        self._sources: deque[int] = deque()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lines_bytes = 0
        self._left_out = 0
        self._lock = threading.Lock()
        self._has_news = threading.Event()
        self._has_news.set()  # what the file has already
        self._no_more_comes = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay {target}", daemon=True)
        self._thread.start()

    def follow(self, source: Path) -> None:
        """Copy this file from now on; it exists. The one before is copied to its end first, and grows no more.

        When nobody has read what very many files before it hold, it is left out: the workspace has it all the same.
        """
        if self._thread.is_alive() and len(self._sources) < _MOST_SOURCES:
            self._sources.append(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
            self._has_news.set()

    def say(self, line: str) -> None:
        """Write a line. Returns at once. What nobody reads for long is left out, and counted."""
        self.hold(line)
        self._has_news.set()

    def hold(self, line: str) -> None:
        """Write a line with the next `look` or `say`."""
        data = line.encode(errors="replace")
        with self._lock:
            if self._lines_bytes + len(data) > _MOST_LINES_BYTES:
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
        """Copy what was appended to the source, and write what is held. Returns at once."""
        self._has_news.set()

    def finish(self) -> None:
        """Write the rest and end; waits for a slow reader no longer than a few seconds."""
        self._no_more_comes.set()
        self._has_news.set()
        self._thread.join(_LONGEST_DRAIN_S)

    def _run(self) -> None:
        try:
            is_last_round = False
            while not is_last_round:
                self._has_news.wait()
                self._has_news.clear()
                is_last_round = self._no_more_comes.is_set()
                self._copy()
                while not self._lines.empty():
                    data = self._lines.get()
                    _write_all(self._target, data)
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
                _write_all(self._target, data)
            if not has_successor:
                return
            os.close(self._sources.popleft())


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
