"""A process for a class of the user's own, so that nothing it does can reach the manager.

It may crash, hang, print without end, call sys.exit or fill the memory: whatever it is, a call raises `UserCodeFailed` within a
bound of time, with the traceback or the last lines that were printed. A process that cannot be relied on any more is ended with
all it has started.
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

import psutil

import nni_sdk
from nni_manager.config.model import UserClass
from nni_manager.errors import UserMistake

# Parameters have some kB. A million results would have to be told before an answer is as long.
MOST_ANSWER_BYTES = 16 * 1024 * 1024
# What is printed beyond is lost; the end of it is shown when the process dies.
MOST_PRINTED_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 4096
_READ_BYTES = 64 * 1024
_LAST_WORDS_S = 5.0
# Where it is not beside this package, as in a checkout.
_SDK = (str(Path(nni_sdk.__file__).parents[1]),)


class UserCodeFailed(UserMistake):
    """cannot go on with the tuner or assessor of your own: it failed; mend it and resume the experiment"""


class UserProcess:
    """The process that runs one class. Calls come from one thread; `close` may come from any."""

    def __init__(
        self, kind: str, of: UserClass, printed: Path | None, checkpoints: Path | None = None
    ) -> None:
        """Starts nothing yet. `kind` is tuner or assessor; `printed` is the file for what the code prints."""
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
        """Whether the process was started, and has not been ended here."""
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
                    start_new_session=True,  # so that all it starts can be ended with it
                )
            except OSError as error:
                ours.close()
                raise UserCodeFailed(self._refusal(f"its process does not start: {error}")) from error
            self._connection = ours
        self._printer = threading.Thread(target=self._keep_what_is_printed, daemon=True)
        self._printer.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """What the worker's method of this name answers.

        Raises:
            UserCodeFailed: the code raised, ended its process, did not answer in time or with too much; or did so before.
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
                f"it has not come back from {name!r} for {self._of.call_timeout_s:g} s; mend what takes so long, or allow more "
                f"with {self._kind}.callTimeout"
            )
        except OSError:
            self._fail(self._how_it_died())
        try:
            outcome, answer = json.loads(line)
        except (ValueError, RecursionError):
            self._fail(f"its answer to {name!r} cannot be read")
        if outcome == "raised":
            # The process lives, and may be told what comes next.
            raise UserCodeFailed(self._refusal(f"it raised in {name!r}; mend it\n{answer}"))
        return answer

    def close(self) -> None:
        """End the process and all it has started."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            process = self._process
        if process is None or was_closed:
            return  # the number of a process that has ended may be somebody else's by now
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in started:  # some may have left the group
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                each.kill()
        process.wait()
        if self._connection is not None:
            # Whoever waits for an answer on another thread hears the end of it.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if self._printer is not None:
            self._printer.join(_LAST_WORDS_S)

    def _next_line(self, connection: socket.socket, ends_at_s: float) -> bytes:
        while (end := self._received.find(b"\n", max(0, len(self._received) - _READ_BYTES - 1))) < 0:
            if len(self._received) > MOST_ANSWER_BYTES:
                self._fail(f"its answer has more than {MOST_ANSWER_BYTES} bytes; let it propose less at once")
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
        """End the process, whose state is unknown now; every later call fails in the same way."""
        self.close()
        self._failure = self._refusal(how)
        raise UserCodeFailed(self._failure)

    def _how_it_died(self) -> str:
        if self._is_closed or self._process is None:
            return "the manager ends"
        try:
            code = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "it has closed its connection to the manager; mend what closes files it did not open"
        if self._printer is not None:
            self._printer.join(_LAST_WORDS_S)  # its last words may still be in the pipe
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        words = bytes(self._tail).decode("utf-8", "replace").strip()
        return f"its process {how}; mend it" + (f". The last it printed:\n{words}" if words else "")

    def _refusal(self, how: str) -> str:
        return f"cannot go on with {self._kind} {self._of.class_name}: {how}"

    def _keep_what_is_printed(self) -> None:
        """Take all that is printed, so that it never waits; as much as is bearable goes into the file."""
        assert self._process is not None
        assert self._process.stdout is not None
        left = MOST_PRINTED_BYTES
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
    """The path on which the process finds this package, however this one did; after what the user has set."""
    own = str(Path(__file__).parents[2])
    return os.pathsep.join(each for each in (os.environ.get("PYTHONPATH"), own, *_SDK) if each)
