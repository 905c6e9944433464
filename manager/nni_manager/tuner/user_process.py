"""Runs a user's class in its own process, so that it cannot affect the manager.

The class may crash, hang, print without end, call sys.exit or fill the memory. In each case a call raises `UserCodeFailed`
within a time limit, with the traceback or the last lines of output. A process in an unknown state is killed with all its
descendants.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nni_sdk
from nni_manager.config.model import UserClass
from nni_manager.errors import UserError
from trial_keeper.processes import descendants, kill

# Parameters have some kB. An answer reaches this size only after a million reported results.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
# Output beyond this is discarded; the end of the output is shown when the process dies.
MAX_PRINTED_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 4096
_READ_BYTES = 64 * 1024
_LAST_WORDS_S = 5.0
# For a checkout, where the SDK is not beside this package.
_SDK = (str(Path(nni_sdk.__file__).parents[1]),)


class UserCodeFailed(UserError):
    """cannot go on with the tuner or assessor of your own: it failed; fix it and resume the experiment"""


class UserProcess:
    """The process that runs one class. Calls must come from one thread; `close` may come from any."""

    def __init__(
        self, kind: str, of: UserClass, printed: Path | None, checkpoints: Path | None = None
    ) -> None:
        """Does not start the process. `kind` is tuner or assessor; `printed` is the file for its output, None: not kept."""
        self._kind, self._of = kind, of
        self._printed = printed
        self._checkpoints = checkpoints
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._received = bytearray()
        self._tail = bytearray()
        self._printer: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure = ""

    @property
    def is_running(self) -> bool:
        """True if the process was started and not closed here."""
        return self._process is not None and not self._is_closed

    def start(self) -> None:
        """Start the process.

        Raises:
            UserCodeFailed: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        environ = dict(os.environ)
        if self._checkpoints is not None:
            environ["NNI_CHECKPOINT_DIRECTORY"] = str(self._checkpoints)
        with self._lock, theirs:
            if self._is_closed:
                ours.close()
                raise UserCodeFailed(self._refusal("the manager ends"))
            try:
                if self._checkpoints is not None:
                    self._checkpoints.mkdir(exist_ok=True)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "nni_manager.tuner.user_worker", str(theirs.fileno())],
                    cwd=self._of.code_dir,
                    env=environ | {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that close() can kill its descendants, too
                )
            except OSError as error:
                ours.close()
                raise UserCodeFailed(self._refusal(f"its process does not start: {error}")) from error
            self._connection = ours
        self._printer = threading.Thread(target=self._keep_what_is_printed, daemon=True)
        self._printer.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the worker's method of this name and return the answer.

        Raises:
            UserCodeFailed: the code raised, its process ended, or the answer was late or too large; or an earlier call failed so.
        """
        if self._failure:
            raise UserCodeFailed(self._failure)
        if self._process is None:
            self.start()
        connection = self._connection
        assert connection is not None
        ends_at_s = time.monotonic() + self._of.call_timeout_s
        try:
            connection.settimeout(self._of.call_timeout_s)
            connection.sendall(json.dumps([name, arguments]).encode() + b"\n")
            line = self._next_line(connection, ends_at_s)
        except TimeoutError:
            self._fail(
                f"it has not come back from {name!r} for {self._of.call_timeout_s:g} s; fix what takes so long, or allow more "
                f"with {self._kind}.callTimeout"
            )
        except OSError:
            self._fail(self._how_it_died())
        try:
            outcome, answer = json.loads(line)
        except (ValueError, RecursionError):
            self._fail(f"its answer to {name!r} cannot be read")
        if outcome == "raised":
            # The process is alive and can serve the next call.
            raise UserCodeFailed(self._refusal(f"it raised in {name!r}; fix it\n{answer}"))
        return answer

    def close(self) -> None:
        """Kill the process and all its descendants."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            process = self._process
        if process is None or was_closed:
            return  # the pid of an ended process may have been reused
        started = descendants((process.pid,))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in started:  # some may have left the group
            kill(each)
        process.wait()
        if self._connection is not None:
            # Ends the wait of another thread for an answer.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if self._printer is not None:
            self._printer.join(_LAST_WORDS_S)

    def _next_line(self, connection: socket.socket, ends_at_s: float) -> bytes:
        while (end := self._received.find(b"\n", max(0, len(self._received) - _READ_BYTES - 1))) < 0:
            if len(self._received) > MAX_ANSWER_BYTES:
                self._fail(f"its answer has more than {MAX_ANSWER_BYTES} bytes; let it propose less at once")
            left_s = ends_at_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            piece = connection.recv(_READ_BYTES)
            if not piece:
                raise ConnectionResetError
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _fail(self, how: str) -> Any:
        """Kill the process, whose state is unknown; every later call fails in the same way."""
        self.close()
        self._failure = self._refusal(how)
        raise UserCodeFailed(self._failure)

    def _how_it_died(self) -> str:
        if self._is_closed or self._process is None:
            return "the manager ends"
        try:
            code = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "it has closed its connection to the manager; fix what closes files it did not open"
        if self._printer is not None:
            self._printer.join(_LAST_WORDS_S)  # its last output may still be in the pipe
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        output = bytes(self._tail).decode("utf-8", "replace").strip()
        return f"its process {how}; fix it" + (f". The last it printed:\n{output}" if output else "")

    def _refusal(self, how: str) -> str:
        return f"cannot go on with {self._kind} {self._of.class_name}: {how}"

    def _keep_what_is_printed(self) -> None:
        """Read all output, so that the process never blocks; write it to the file, up to the limit."""
        assert self._process is not None
        assert self._process.stdout is not None
        left = MAX_PRINTED_BYTES
        with contextlib.ExitStack() as stack:
            pipe = stack.enter_context(self._process.stdout)
            file = None
            if self._printed is not None:
                with contextlib.suppress(OSError):
                    file = stack.enter_context(self._printed.open("ab", buffering=0))
                    left -= min(left, file.tell())
            while piece := os.read(pipe.fileno(), _READ_BYTES):
                self._tail = (self._tail + piece)[-_TAIL_BYTES:]
                if file is not None and left:
                    with contextlib.suppress(OSError):  # a full disk costs the log, not the search
                        file.write(piece[:left])
                        left -= min(left, len(piece))
                        if not left:
                            file.write(b"\n... what is printed from here on is not kept\n")


def _python_path() -> str:
    """The path on which the process finds this package, wherever it is; after the user's own entries."""
    own = str(Path(__file__).parents[2])
    return os.pathsep.join(each for each in (os.environ.get("PYTHONPATH"), own, *_SDK) if each)
