"""The fork server of keepers: a process of the manager's machine that has imported all modules, and forks itself for each keeper.

Theory of operation. A fork takes milliseconds and shares the modules' memory; a new Python takes 150 ms and 30 MB. The server's
stdin is a socket of the manager. Each request is one message with two descriptors: the log, which becomes the fork's output, and
a gate, the read end of a pipe. The fork blocks on the gate until the manager watches its pid. EOF ends the fork before it has
done anything, so there is never a keeper that the manager does not watch.

The server reports the exit codes of its children, the keepers. It ends with the manager, by EOF on its stdin. Keepers lead their
own sessions and do not depend on it.

The manager, and the cleanup after a killed manager, recognise keepers by their environment in /proc. There the kernel shows the
memory in which a program received its environment, for a fork that of the server. So a fork overwrites this memory, as
setproctitle does, and the server's environment has `SPACE` in reserve.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from trial_keeper.exit_codes import KeeperExit
from trial_keeper.wire.fork_requests import MAX_REQUEST_BYTES
from trial_keeper.wire.small_files import read_all

_CHANNEL = 0
_GATE = 3


class _ShownMemory:
    """The memory of this process that the kernel shows as /proc/PID/cmdline and /proc/PID/environ.

    Source: proc_pid_stat(5), arg_start to env_end; proc_pid_mem(5).
    """

    def __init__(self) -> None:
        fields = read_all("/proc/self/stat").rpartition(b")")[2].split()
        self._argv, self._argv_end, self._environ, self._environ_end = map(int, fields[45:49])

    def fits(self, environ: Mapping[str, str]) -> bool:
        """True if there is space for this environment."""
        return len(_block(environ)) <= self._environ_end - self._environ

    def write(self, argv: list[str], environ: Mapping[str, str]) -> None:
        """Replace both. The C library must not use the memory any more: `os.environ` was replaced before."""
        descriptor = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            shown = b"".join(os.fsencode(word) + b"\0" for word in argv)
            size = self._argv_end - self._argv
            os.pwrite(descriptor, shown.ljust(size, b"\0")[:size], self._argv)
            size = self._environ_end - self._environ
            os.pwrite(descriptor, _block(environ).ljust(size, b"\0"), self._environ)
        finally:
            os.close(descriptor)


def _block(environ: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())


def serve(run_keeper: Callable[[], int]) -> int:
    """Fork keepers until the manager has ended. `run_keeper` is called in each fork and returns the exit code."""
    import_all()
    shown = _ShownMemory()
    # Objects that a garbage collection of a fork visits would not be shared any more.
    gc.collect()
    gc.freeze()
    with (
        socket.socket(fileno=os.dup(_CHANNEL)) as channel,
        contextlib.suppress(ConnectionError),
    ):
        woken, waker = os.pipe()
        for descriptor in (woken, waker):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        poll.register(channel, select.POLLIN)
        while True:
            readable = {descriptor for descriptor, _ in poll.poll()}
            if woken in readable:
                os.read(woken, 512)
            _report_ends(channel)
            if channel.fileno() in readable and not _serve_one(channel, shown, run_keeper):
                return 0
    return 0


def import_all() -> None:
    """Import what keepers import, also late in their lives."""
    import hmac  # noqa: F401 - for signatures

    import trial_keeper.host.host
    import trial_keeper.host.link
    import trial_keeper.host.mount  # noqa: F401


def _serve_one(channel: socket.socket, shown: _ShownMemory, run_keeper: Callable[[], int]) -> bool:
    """Serve a request. False if the manager has closed the socket."""
    content, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
    if not content:
        return False
    try:
        request: dict[str, Any] = json.loads(content)
        environ: dict[str, str] = request["environ"]
        answer: dict[str, Any]
        if len(os.listdir("/proc/self/task")) > 1:
            # A fork has only the thread that forked: locks that others hold are never released.
            answer = {"refused": "a module that Python imports at its start has started a thread"}
        elif not shown.fits(environ):
            answer = {"refused": "the environment is too large"}
        else:
            pid = os.fork()
            if pid == 0:
                _become_keeper(request, descriptors, shown, run_keeper)
            answer = {"pid": pid}
    except OSError as error:
        answer = {"failed": error.strerror}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    _send(channel, {"request": request["number"], **answer})
    return True


def _report_ends(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            _send(channel, {"ended": ended[0], "exit_code": os.waitstatus_to_exitcode(ended[1])})


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode())


def _become_keeper(
    request: Mapping[str, Any], descriptors: list[int], shown: _ShownMemory, run_keeper: Callable[[], int]
) -> NoReturn:
    code: int = KeeperExit.KEEPER_BUG
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log, gate = descriptors
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.dup(gate), _GATE)
        os.closerange(_GATE + 1, os.sysconf("SC_OPEN_MAX"))
        # First: `os.environ` copies each entry, so that nothing refers to the memory that is overwritten next.
        os.environ.clear()
        os.environ.update(request["environ"])
        shown.write([sys.executable, "-m", "trial_keeper"], request["environ"])
        if os.read(_GATE, 1):
            os.close(_GATE)
            code = run_keeper()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else code
    except BaseException:  # noqa: BLE001 - the fork must never continue as a second server
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
