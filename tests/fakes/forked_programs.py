"""Managers and keepers for tests that are forks of one process for each program, which has imported the program.

The imports of a manager take a second, those of a keeper 0.2 s, and a fork some ms. A fork is a process like one that nnictl or
a job starts, but /proc shows the command line and the environment of the process that forked.
"""

import atexit
import enum
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

_ENVIRON = {**os.environ}
"""Without the changes that single tests make."""
_CURRENT_TEST = "PYTEST_CURRENT_TEST"
_LONGEST_REQUEST = 1 << 18
# The started process forks the server and exits. So the server is no child of the test process, of which some tests check all
# children. The folder of the tests is removed from sys.path, so that the server's sys.path equals that of a new manager.
_SERVER = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path.insert(1, {folder!r})
from forked_programs import Program, serve
del sys.path[1]
serve(Program({program!r}), {descriptor})
"""


class Program(enum.Enum):
    """What a fork runs; the value is the name of its package."""

    MANAGER = "nni_manager"
    KEEPER = "trial_keeper"


def is_of_tests(environ: Mapping[str, str]) -> bool:
    """True if the variables equal those that the tests started with, except for the name of the current test."""
    return {**environ, _CURRENT_TEST: ""} == {**_ENVIRON, _CURRENT_TEST: ""}


class ForkedProcess:
    """A process of a program, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[str] = (),
        *,
        stdout: IO[bytes],
        stderr: IO[bytes],
        environ: Mapping[str, str] = _ENVIRON,
        start_new_session: bool = False,
    ) -> None:
        """Start it."""
        umask = os.umask(0o077)
        os.umask(umask)
        self._program = program
        self.returncode: int | None = None
        """The exit code, or the negative number of the signal that has ended it; None while it runs."""
        self.stdout = self.stderr = None
        # Several threads may call wait() at the same time, but only one may read the reply.
        self._waiting = threading.Lock()
        self._replies, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([[*arguments], os.getcwd(), umask, dict(environ), start_new_session])
            descriptors = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(_server(program), [request.encode()], descriptors)
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
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired(self._program.value, timeout or 0.0)
        try:
            if self.returncode is None:
                self._replies.settimeout(timeout)
                self.returncode = int(self._replies.recv(100))
                self._replies.close()
        except (TimeoutError, BlockingIOError) as error:
            raise subprocess.TimeoutExpired(self._program.value, timeout or 0.0) from error
        finally:
            self._waiting.release()
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
def _server(program: Program) -> socket.socket:
    """The socket for requests to the server, which forks the program. The server ends with this process."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    atexit.register(ours.close)
    with theirs:
        code = _SERVER.format(
            folder=str(Path(__file__).parent), program=program.value, descriptor=theirs.fileno()
        )
        command = [sys.executable, "-c", code]
        descriptors = [theirs.fileno()]
        subprocess.run(command, pass_fds=descriptors, env=_ENVIRON, stdin=subprocess.DEVNULL, check=True)
    return ours


def serve(program: Program, descriptor: int) -> NoReturn:
    """Fork the program for each request, until the tests have ended."""
    main = _imported(program)
    requests = socket.socket(fileno=descriptor)
    # For each request, the server forks an intermediate process, which forks the program. The server does not wait for its
    # children, so the kernel must reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for each in descriptors:
            os.close(each)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    replies = socket.socket(fileno=descriptors[0])
    pid = os.fork()
    if pid:
        replies.send(b"%d" % pid)
        replies.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    replies.close()
    for standard, each in zip((1, 2), descriptors[1:], strict=True):
        os.dup2(each, standard)
        os.close(each)
    _become(program, *json.loads(request))
    sys.exit(main())


def _imported(program: Program) -> Callable[[], int]:
    """The entry point of the program. All modules that the program would import later are already loaded."""
    if program is Program.KEEPER:
        from trial_keeper.__main__ import main as keeper_main
        from trial_keeper.host import fork_server

        fork_server.import_all()
        return keeper_main
    import optuna  # noqa: F401 - the tests' usual tuner imports it

    from nni_manager.__main__ import main

    return main


def _become(
    program: Program,
    arguments: list[str],
    folder: str,
    umask: int,
    environ: dict[str, str],
    start_new_session: bool,
) -> None:
    if start_new_session:
        os.setsid()
    os.chdir(folder)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [program.value, *arguments]
