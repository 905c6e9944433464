"""Managers for tests that are forks of one process, which has imported the manager: its import takes a second, a fork some ms.

A fork is a process like one that nnictl starts, besides its command line in /proc. It has the environment that the tests started
with: a manager with another one is a new process.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ENVIRON = {**os.environ}
"""Without the changes that single tests make."""
_CURRENT_TEST = "PYTEST_CURRENT_TEST"
_LONGEST_REQUEST = 1 << 18
# The server is no child of the tests' process: some tests look at all its children. The path is as in a new manager.
_SERVER = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path.insert(1, {folder!r})
from forked_managers import serve
del sys.path[1]
serve({descriptor})
"""


def can_fork(environ: Mapping[str, str]) -> bool:
    """Whether a fork has these variables, besides that with the name of the current test."""
    return {**environ, _CURRENT_TEST: ""} == {**_ENVIRON, _CURRENT_TEST: ""}


class ForkedManager:
    """A manager, with the interface of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        umask = os.umask(0o077)
        os.umask(umask)
        self.returncode: int | None = None
        """The exit code, or the negative number of the signal that has ended it; None while it runs."""
        self._replies, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([[*arguments], str(output), os.getcwd(), umask])
            socket.send_fds(_server(), [request.encode()], [theirs.fileno()])
        self.pid = int(self._replies.recv(100))

    def poll(self) -> int | None:
        """See `returncode`."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended in this time.
        """
        if self.returncode is None:
            self._replies.settimeout(timeout)
            try:
                self.returncode = int(self._replies.recv(100))
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired("manager", timeout or 0.0) from error
            self._replies.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """Requests to the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    atexit.register(ours.close)
    with theirs:
        program = _SERVER.format(folder=str(Path(__file__).parent), descriptor=theirs.fileno())
        command = [sys.executable, "-c", program]
        descriptors = [theirs.fileno()]
        subprocess.run(command, pass_fds=descriptors, env=_ENVIRON, stdin=subprocess.DEVNULL, check=True)
    return ours


def serve(descriptor: int) -> None:
    """Fork a manager for each request, until the tests have ended."""
    import optuna  # noqa: F401 - the tests' usual tuner imports it

    from nni_manager.__main__ import main

    requests = socket.socket(fileno=descriptor)
    # Nobody waits for the parents of the managers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, _LONGEST_REQUEST, 1)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        os.close(descriptors[0])
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    replies = socket.socket(fileno=descriptors[0])
    pid = os.fork()
    if pid:
        replies.send(b"%d" % pid)
        replies.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    replies.close()
    _become(*json.loads(request))
    sys.exit(main())


def _become(arguments: list[str], output: str, folder: str, umask: int) -> None:
    os.chdir(folder)
    os.umask(umask)
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    sys.argv = ["nni_manager", *arguments]
