"""Runs scripts on a host over SSH."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

import asyncssh

from nni_manager.errors import UserError
from nni_manager.training_services.ssh.client import MachineAway, error_of, open_connection
from nni_manager.training_services.ssh.login import SshLogin
from nni_manager.training_services.ssh.ssh_thread import SshThread

# The output of a login shell before this line is not that of the script.
_START = "trial-keeper: the output of the script follows"
# The exit codes of `timeout` for a script that SIGTERM or SIGKILL has ended. Source: timeout(1).
_TIMED_OUT = (124, 137)
_KILL_AFTER_S = 5


class Finished(NamedTuple):
    """The exit code of a script, and what it has printed."""

    code: int
    stdout: str
    stderr: str


class RemoteShell:
    """The user's login shells on one host. They share a connection, which is opened again after it was lost.

    Methods may be called by several threads.
    """

    def __init__(self, login: SshLogin) -> None:
        self._login = login
        self._thread = SshThread()
        self._connecting = asyncio.Lock()
        self._ssh: asyncssh.SSHClientConnection | None = None

    def run(self, script: str, timeout_s: float) -> Finished:
        """Run a script of bash. It is sent over the connection: no list of processes shows it.

        Raises:
            UserError: the host is not trusted, refuses the login, or has no usable shell.
            MachineAway: the host cannot be reached now. The script may have run.
            TimeoutError: the script did not end in time.
        """
        try:
            return self._thread.run(self._run(script, timeout_s))
        except asyncio.TimeoutError as error:
            raise TimeoutError from error

    async def _run(self, script: str, timeout_s: float) -> Finished:
        ssh = await self._connection()
        # The host itself ends the script: a script that continues would count towards the server's MaxSessions.
        # A login shell of any kind has the PATH and the modules of a user who logs in.
        command = f"exec timeout -k {_KILL_AFTER_S} {timeout_s} bash -l"
        running = _finished(ssh, command, f"echo '{_START}'\n{script}")
        try:
            done = await asyncio.wait_for(running, timeout_s + 2 * _KILL_AFTER_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise
        except (asyncssh.Error, OSError) as error:
            raise error_of(self._login, error) from error
        if done.exit_status in _TIMED_OUT:
            raise TimeoutError
        if done.exit_status is None:
            raise MachineAway(f"cannot get an answer of {self._login.address}: the connection has ended")
        _, start, stdout = str(done.stdout).partition(f"{_START}\n")
        if not start:
            said = (str(done.stderr) or str(done.stdout)).strip() or f"exit code {done.exit_status}"
            raise UserError(
                f"cannot run commands on {self._login.address}: its login shell says {said[-500:]!r}; check that "
                f"`{self._login.command('bash -l -c true')}` works"
            )
        return Finished(done.exit_status, stdout, str(done.stderr))

    async def _connection(self) -> asyncssh.SSHClientConnection:
        async with self._connecting:
            if self._ssh is None or self._ssh.is_closed():
                self._ssh = await open_connection(self._login)
            return self._ssh

    def close(self) -> None:
        """Close the connection, and end what runs. Later calls raise RetryableError."""
        if self._ssh is not None:
            self._thread.loop.call_soon_threadsafe(self._ssh.abort)
        self._thread.close()


async def _finished(
    ssh: asyncssh.SSHClientConnection, command: str, stdin: str
) -> asyncssh.SSHCompletedProcess:
    process = await ssh.create_process(command, errors="replace")
    # A shell that exits at once reads no input. Its exit code and its message are the answer.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(stdin)
        process.stdin.write_eof()
    return await process.wait()
