"""Warm starts: trials as forks of a fork server, an interpreter that has already imported the user's modules."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trial_keeper.core.warm_command import WarmCommand
from trial_keeper.errors import WarmStartRefused
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.processes import end_below
from trial_keeper.wire.safe_open import open_to_append

_INTERPRETER = Path(__file__).with_name("warm_main.py")
_HEADER_BYTES = 4
_MAY_IMPORT = b"i"
_RECEIVED_BYTES = 4096
# A fork of a process with gigabytes takes a second on a busy machine; a longer one is stuck.
_MAX_START_S = 30.0
_MAX_DEATH_S = 5.0
# Variables that Python and its numerical libraries read only at start or import; locales determine encodings.
_READ_ONCE = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "NUMEXPR_",
)
_SET_BY_FORK = "PYTHONUNBUFFERED"
# If `python` is a shell script, its shell has set these to their values at the interpreter's start.
_SET_BY_SHELLS = ("PWD", "OLDPWD")
_DIED_WAITING = "cannot start a trial warm: its fork died before the start; the trial gets a plain start"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """One trial to start. `environ` is complete. The start creates stdout and stderr if needed, and opens them for appending."""

    command: WarmCommand
    cwd: str
    environ: Mapping[str, str]
    stdout: Path
    stderr: Path


class WarmInterpreter:
    """A process of the user's Python that has imported modules and forks itself for each trial.

    A trial is a child of the calling process, which must adopt orphans (`processes.adopt_orphans`, or be process 1). So its pid
    can be signalled and waited for like any child's. The trial leads its own session. Not thread-safe.
    """

    def __init__(
        self,
        python: str,
        imports: tuple[str, ...],
        environ: Mapping[str, str],
        register: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Start the interpreter, which imports in the background. `environ` is the container's; a trial may have more variables.

        `register` is called with the interpreter's pid, which is also its session id, before the imports, and with each trial's
        pid, which becomes a session id too, before the script runs.

        Raises:
            WarmStartRefused: there is no such Python.
        """
        self._environ = dict(environ)
        self._register = register
        self._refusal: str | None = None
        self._is_ready = False
        self._occupation = "it started"
        self._asked: WarmStart | None = None
        """The trial that the standby fork was asked to prepare."""
        self._word: socket.socket | None = None
        """The socket for the standby fork's start command; closing it ends that fork."""
        self._last_pid: int | None = None
        """The pid of the last fork that was prepared."""
        self._leaving: socket.socket | None = None
        """The socket on which the last trial confirms that it has left the interpreter's session."""
        self._received = b""
        """Bytes of the channel that were received and not parsed yet."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [python, "-u", str(_INTERPRETER), str(theirs.fileno()), *imports],
                    # No trial runs in this folder, so `sys.path` entries below it come from a relative PYTHONPATH.
                    cwd="/proc",
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    # The output of the imports belongs to no trial.
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                self._channel.close()
                raise WarmStartRefused(
                    f"cannot start {python!r} as a warm interpreter: {error}; use the name of a Python that the container has"
                ) from error
        register(self.pid)
        with contextlib.suppress(OSError):  # the interpreter has died, which the next start reports
            self._channel.sendall(_MAY_IMPORT)

    @property
    def pid(self) -> int:
        """The interpreter's own pid. The interpreter belongs to no trial, so a trial's cleanup must exempt it."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True once the process was waited for: its pid may have been reused."""
        return self._process.returncode is not None

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """True if all modules are imported, after waiting for at most `timeout_s`.

        Raises:
            WarmStartRefused: a module cannot be imported or preloaded, or the interpreter died. Every later call raises it too.
        """
        self._raise_refusal()
        deadline_s = time.monotonic() + timeout_s
        while not self._is_ready and self._is_readable(max(0.0, deadline_s - time.monotonic())):
            self._note(self._receive())
        return self._is_ready

    def prepare(self, start: WarmStart) -> None:
        """Let the standby fork prepare this trial up to its first step, while another trial may run.

        Returns at once; `start` reports the outcome. The trial has no visible effect yet: its script has not started, and its
        files are unchanged. A previously prepared trial that has not started is dropped.

        Raises:
            WarmStartRefused: nothing is prepared. After the interpreter's death every later start raises it too.
        """
        self._check_alive()
        self._compare(start.environ)
        while not self._is_ready:
            self._note(self._receive())
        self._forget()
        request = _request(start, self._environ)
        theirs, ours = socket.socketpair()
        with theirs:
            self._asked, self._word = start, ours
            self._send(request, [theirs.fileno()])

    def start(self, start: WarmStart) -> int:
        """Start a trial and return its pid. On return the script is about to run. Waits until the modules are imported.

        A prepared trial starts fastest.

        Raises:
            WarmStartRefused: nothing was started; start the trial plainly. After the interpreter's death every later start raises
            it too.
        """
        self._check_alive()
        if start != self._asked:
            self.prepare(start)
        stdio: list[int] = []
        try:
            for path in (start.stdout, start.stderr):
                stdio.append(open_to_append(path.parent, path))
            return self._begin(self._word, stdio)
        except OSError as error:
            raise WarmStartRefused(
                f"cannot open {error.filename}: {error.strerror}; allow the keeper's user to write the file"
            ) from error
        finally:
            for descriptor in stdio:
                os.close(descriptor)
            self._forget()

    def _begin(self, word: socket.socket | None, stdio: list[int]) -> int:
        """Send the start command to the prepared fork and return its pid."""
        message = self._answer()
        pid: int | None = message.get("prepared")
        if "refused" in message:
            self._dismiss(pid)
            raise WarmStartRefused(message["refused"])
        if pid is None or word is None or not _is_own_child(pid):
            if pid is not None and not os.path.exists(f"/proc/{pid}"):
                raise WarmStartRefused(_DIED_WAITING)
            raise WarmStartRefused(
                "cannot start a trial warm: this keeper does not adopt orphans, so it could not wait for the trial's end; "
                "run the keeper as the first process of a container or on Linux 3.4 or later"
            )
        self._register(pid)
        try:
            socket.send_fds(word, [b"1"], stdio)
        except OSError as error:
            self._dismiss(pid)
            raise WarmStartRefused(_DIED_WAITING) from error
        self._forget_leaving()
        self._leaving, self._word = word, None
        return pid

    def _forget_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.close()
            self._leaving = None

    def _answer(self) -> dict[str, Any]:
        self._asked = None
        message = self._receive(_MAX_START_S)
        # Skip a late message about the previous fork, which replied here and died before it reported to the interpreter.
        while "died" in message and message["died"] == self._last_pid:
            message = self._receive(_MAX_START_S)
        self._last_pid = message.get("prepared")
        return message

    def _dismiss(self, pid: int | None) -> None:
        """End a fork that is no longer needed. The fork exits when its socket is closed without a start command."""
        if self._word is not None:
            self._word.close()
            self._word = None
        if pid is not None:
            with contextlib.suppress(ChildProcessError):  # another process has adopted it and reaps it
                os.waitpid(pid, 0)

    def _forget(self) -> None:
        """Drop a trial that was prepared and has not started."""
        if self._asked is not None:
            self._dismiss(self._answer().get("prepared"))
        self._dismiss(None)

    def close(self) -> None:
        """End the interpreter, and the processes that its modules have started. Trials continue: they are not its children."""
        if self._process.poll() is None:
            end_below(self._process.pid)  # before the channel is closed, on which the interpreter exits
        self._channel.close()
        self._asked = None
        self._dismiss(None)
        if self._leaving is not None:
            self._leaving.settimeout(_MAX_DEATH_S)
            with contextlib.suppress(OSError):  # the trial has ended, or does not respond
                self._leaving.recv(1)
            self._forget_leaving()
        # Once waited for, here or by another reaper, the pid could be reused.
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that is stuck in the kernel is left to its adopter.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MAX_DEATH_S)
        self._refusal = (
            self._refusal or "cannot start a trial warm: the interpreter was closed; start the trial plainly"
        )

    def _compare(self, environ: Mapping[str, str]) -> None:
        for name in sorted(self._environ.keys() | environ.keys()):
            if not name.startswith(_READ_ONCE) or name == _SET_BY_FORK:
                continue
            if self._environ.get(name) != environ.get(name):
                raise WarmStartRefused(
                    f"cannot start a trial warm with {name}={environ.get(name, '')!r}: the interpreter read "
                    f"{self._environ.get(name, '')!r} when it started; set it for the whole job, or start the trial plainly"
                )

    # ---- the channel

    def _note(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            self._fail(message["refused"])
        if "importing" in message:
            self._occupation = f"it imported {message['importing']}"
        if "ready" in message:
            self._is_ready = True
            self._occupation = "it waited for a trial"

    def _check_alive(self) -> None:
        self._raise_refusal()
        if self._process.poll() is not None:
            self._fail(self._death())  # this also ends the remaining standby fork, which must not run a trial

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise WarmStartRefused(self._refusal)

    def _fail(self, text: str, cause: BaseException | None = None) -> None:
        self._refusal = text
        self.close()
        raise WarmStartRefused(text) from cause

    def _is_readable(self, timeout_s: float) -> bool:
        if self._received:
            return True
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def _send(self, data: bytes, descriptors: list[int]) -> None:
        data = len(data).to_bytes(_HEADER_BYTES, "big") + data
        try:
            self._channel.settimeout(_MAX_START_S)
            sent = socket.send_fds(self._channel, [data], descriptors)
            self._channel.sendall(data[sent:])
        except OSError as error:
            self._fail(self._death(), error)

    def _receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        self._channel.settimeout(timeout_s)
        size = int.from_bytes(self._exactly(_HEADER_BYTES), "big")
        message: dict[str, Any] = json.loads(self._exactly(size))
        return message

    def _exactly(self, size: int) -> bytes:
        """Return the next bytes of the channel. Surplus bytes are buffered."""
        while len(self._received) < size:
            try:
                piece = self._channel.recv(_RECEIVED_BYTES)
            except TimeoutError as error:
                self._fail(
                    f"cannot start a trial warm: no reply of the interpreter for {_MAX_START_S:g} s; start the trial plainly",
                    error,
                )
            except OSError as error:
                self._fail(self._death(), error)
            if not piece:
                self._fail(self._death())
            self._received += piece
        data, self._received = self._received[:size], self._received[size:]
        return data

    def _death(self) -> str:
        try:
            code = self._process.wait(_MAX_DEATH_S)
        except subprocess.TimeoutExpired:
            how = "closed its channel"
        else:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return (
            f"cannot start a trial warm: the interpreter {how} while {self._occupation}; "
            "read its output on the keeper's stderr; trials get a plain start"
        )


def _request(start: WarmStart, given: Mapping[str, str]) -> bytes:
    """Encode the request for the interpreter's `_Request`. `given`: the environment that the interpreter was started with."""
    command, environ = start.command, start.environ
    argv = [command.script, *command.arguments]
    flags = ["-u"] if command.is_unbuffered else []
    changed = {
        name: value for name, value in environ.items() if given.get(name) != value or name in _SET_BY_SHELLS
    }
    orig_argv = (command.python, *flags, *argv)
    unset = [name for name in (*given, *_SET_BY_SHELLS) if name not in environ]
    is_unbuffered = command.is_unbuffered or bool(environ.get(_SET_BY_FORK))
    counts = f"{len(argv)} {len(orig_argv)} {len(unset)} {is_unbuffered:d}"
    words = [counts, start.cwd, *argv, *orig_argv, *unset, *map("=".join, changed.items())]
    text = "\0".join(words)
    try:
        if text.count("\0") < len(words):
            return os.fsencode(text)
        problem = "a null byte"
    except UnicodeEncodeError as error:
        problem = f"{text[error.start : error.end]!r}"
    raise WarmStartRefused(
        f"cannot start a trial warm: its command or its environment contains {problem}; use only printable characters"
    )


def _is_own_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
