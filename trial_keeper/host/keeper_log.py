"""The keeper's log: lines on its stderr, and in the logs of the attempts that they concern."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trial_keeper.host.attempt_files import not_writable
from trial_keeper.host.output_forwarder import OutputForwarder
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.safe_open import open_to_append
from trial_keeper.wire.small_files import write_all
from trial_keeper.wire.workspace import AttemptFolder

# The writer thread competes with the loop's thread for the interpreter, while a trial may be about to start.
_LINES_COOLDOWN_S = 0.1


class KeeperLog:
    """Writes lines. `stderr` writes them in a thread, which is woken at most ten times a second once the loop runs."""

    def __init__(self, job_id: str, root: Path) -> None:
        """`root`: the workspace's folder, for messages."""
        self.stderr = OutputForwarder(2)
        self.folders: dict[AttemptKey, AttemptFolder] = {}
        """The attempts that have a log: those that are not closed."""
        self.current: AttemptKey | None = None
        """The attempt that runs."""
        self._job_id, self._root = job_id, root
        self._showing: asyncio.TimerHandle | None = None
        self._shown_at_s = -_LINES_COOLDOWN_S
        """When the stderr thread was last woken for lines, on the loop's clock."""

    def write(self, text: str, key: AttemptKey | None = None) -> None:
        """Write a line. `key`: an attempt whose log also gets the line, if it is not closed."""
        whose = self.current if key is None else key if key in self.folders else None
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        line = f"{stamp} trial-keeper [{self._job_id if whose is None else whose}] {text}\n"
        self.stderr.buffer(line)
        if self._showing is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # the trial starts before the loop
                self.stderr.poll()
            else:
                at_s = max(loop.time(), self._shown_at_s + _LINES_COOLDOWN_S)
                self._showing = loop.call_at(at_s, self._show, loop)
        if key is not None and key in self.folders:
            self.writing(partial(_append, self.folders[key], line))

    def _show(self, loop: asyncio.AbstractEventLoop) -> None:
        self._showing, self._shown_at_s = None, loop.time()
        self.stderr.poll()

    def writing(self, write: Callable[[], object]) -> None:
        """Run a write to the workspace. An error is only logged to stderr, as the link still delivers the data."""
        try:
            write()
        except OSError as error:
            self.stderr.write(f"trial-keeper: {not_writable(self._root, error)}\n")


def _append(folder: AttemptFolder, line: str) -> None:
    path = folder.stream(Stream.KEEPER)
    write_all(open_to_append(folder.path, path), line.encode(errors="replace"))
