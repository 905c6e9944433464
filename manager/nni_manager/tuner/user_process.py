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

# Parameters have a few kB. An answer reaches this size only after a million reported results.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
# Further output is discarded, but an error about the end of the process still quotes the last lines.
MAX_PRINTED_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 4096
_READ_BYTES = 64 * 1024
_EXIT_TIMEOUT_S = 5.0
# In a checkout, the SDK is not in the same folder as this package.
_SDK = str(Path(nni_sdk.__file__).parents[1])


# The methods of the user's class that the calls of the worker are for, as messages name them.
_CALLED = {
    "make": "__init__",
    "ask": "generate_parameters",
    "ask_again": "generate_parameters",
    "tell": "receive_trial_result",
    "report": "receive_intermediate_result",
    "assess": "assess_trial",
    "end": "trial_end",
}


class UserCodeFailed(UserError):
    """cannot continue: your own tuner or assessor failed; fix it and resume the experiment"""


class UserProcess:
    """The process that runs one class. Calls must come from one thread; `close` may come from any."""

    def __init__(
        self, kind: str, of: UserClass, printed: Path | None, checkpoints: Path | None = None
    ) -> None:
        """Does not start the process. `kind` is tuner or assessor; `printed` is the file for its output; None: discarded."""
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
        self.stops: list[str] = []
        """The trials that the class, an advisor, has asked to stop early; the owner of this object removes them."""

    @property
    def is_running(self) -> bool:
        """True if the process was started and not closed here."""
        return self._process is not None and not self._is_closed

    def start(self) -> None:
        """Start the process.

        Raises:
            UserCodeFailed: the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        environ = dict(os.environ)
        if self._checkpoints is not None:
            environ["NNI_CHECKPOINT_DIRECTORY"] = str(self._checkpoints)
        with self._lock, theirs:
            if self._is_closed:
                ours.close()
                raise UserCodeFailed(self._message("the manager is stopping"))
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
                raise UserCodeFailed(self._message(f"its process cannot be started: {error}")) from error
            self._connection = ours
        self._printer = threading.Thread(target=self._store_output, daemon=True)
        self._printer.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the worker's method of this name and return the answer.

        Raises:
            UserCodeFailed: the code raised, its process ended, or the answer was late or too large; or an earlier call failed.
        """
        if self._failure:
            raise UserCodeFailed(self._failure)
        if self._process is None:
            self.start()
        connection = self._connection
        assert connection is not None
        called = _CALLED.get(name, name)
        ends_at_s = time.monotonic() + self._of.call_timeout_s
        try:
            connection.settimeout(self._of.call_timeout_s)
            connection.sendall(json.dumps([name, arguments]).encode() + b"\n")
            line = self._next_line(connection, ends_at_s)
        except TimeoutError:
            self._fail(
                f"{called!r} has not returned within {self._of.call_timeout_s:g} s; make it faster, or increase "
                f"{self._kind}.callTimeout"
            )
        except OSError:
            self._fail(self._exit_cause())
        try:
            outcome, answer, *stops = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            self._fail(
                f"its answer to {called!r} is not valid JSON; fix what writes to files it did not open"
            )
        if outcome == "raised":
            how = f"an exception was raised in {called!r}; fix it\n{answer}"
            if name == "make":
                self._fail(how)  # there is no object for later calls
            # The process is alive and can serve the next call.
            raise UserCodeFailed(self._message(how))
        # The user's code can write any line to its end of the connection.
        self.stops += [each for each in stops if isinstance(each, str)]
        return answer

    def close(self) -> None:
        """Kill the process and all its descendants."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            process = self._process
        if process is None or was_closed:
            return  # do not signal a pid that may have been reused
        started = descendants((process.pid,))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in started:  # some may have left the group
            kill(each)
        process.wait()
        if self._connection is not None:
            # Wakes another thread that waits for an answer.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if self._printer is not None:
            self._printer.join(_EXIT_TIMEOUT_S)

    def _next_line(self, connection: socket.socket, ends_at_s: float) -> bytes:
        while (end := self._received.find(b"\n", max(0, len(self._received) - _READ_BYTES - 1))) < 0:
            if len(self._received) > MAX_ANSWER_BYTES:
                self._fail(f"its answer has more than {MAX_ANSWER_BYTES} bytes; propose smaller parameters")
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
        self._failure = self._message(how)
        raise UserCodeFailed(self._failure)

    def _exit_cause(self) -> str:
        if self._is_closed or self._process is None:
            return "the manager is stopping"
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return (
                "its process has closed the connection to the manager; fix what closes files it did not open"
            )
        if self._printer is not None:
            self._printer.join(_EXIT_TIMEOUT_S)  # its last output may still be in the pipe
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        output = bytes(self._tail).decode("utf-8", "replace").strip()
        return f"its process {how}; fix it" + (f". Its last output:\n{output}" if output else "")

    def _message(self, how: str) -> str:
        return f"cannot continue with {self._kind} {self._of.class_name}: {how}"

    def _store_output(self) -> None:
        """Read all output, so that the process never blocks, and write it to the file up to the limit."""
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
                    with contextlib.suppress(OSError):  # with a full disk, only the log is lost
                        file.write(piece[:left])
                        left -= min(left, len(piece))
                        if not left:
                            file.write(b"\n... the size limit is reached; further output is discarded\n")


def _python_path() -> str:
    """The PYTHONPATH of the process: the user's entries, then this package and the SDK."""
    own = str(Path(__file__).parents[2])
    return os.pathsep.join(each for each in (os.environ.get("PYTHONPATH"), own, _SDK) if each)
