"""Runs Slurm's commands, on this machine or on a login node over SSH. Each call blocks until its command ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from nni_manager.errors import RetryableError
from nni_manager.training_services.slurm.render import commands_environ, login_script
from nni_manager.training_services.ssh.login import SshLogin, require_client

NOT_FOUND = 127
"""The exit code of a command that is not on PATH. Source: bash(1)."""


class Commands(Protocol):
    """Where the commands run. Methods may be called by several threads."""

    def run(
        self, command: Sequence[str], stdin: str, variables: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Run a command; returns its exit code, its stdout and its stderr. `variables`: those of its environment, besides others.

        Raises:
            TimeoutError: it does not end in time.
            NniManagerError: it cannot be started.
        """

    def close(self) -> None:
        """End the commands that run. Later calls raise RetryableError."""


class CommandsHere:
    """The commands of this machine, in the manager's environment."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def run(
        self, command: Sequence[str], stdin: str, variables: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Run a command, see `Commands`."""
        try:
            with self._lock:
                if self._is_closed:
                    raise RetryableError(f"cannot run {command[0]}: the manager is closing")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env={**commands_environ(os.environ), **variables},
                    start_new_session=True,
                )
                self._running.add(process)
        except FileNotFoundError:
            return NOT_FOUND, "", ""
        except OSError as error:
            why = f"{error.strerror}; free memory or processes on this machine"
            raise RetryableError(f"cannot run {command[0]}: {why}") from error
        has_ended = False
        try:
            printed, errors = process.communicate(stdin, timeout_s)
            has_ended = True
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            with self._lock:
                self._running.discard(process)
            if not has_ended:
                _kill(process)
                process.communicate()
        return process.returncode, printed, errors

    def close(self) -> None:
        """End the commands that run, see `Commands`."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    # Many clusters wrap the commands in scripts, whose children hold the pipes.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class CommandsOnLoginNode:
    """The commands of a login node, in the environment of the user's login shell there."""

    def __init__(self, login: SshLogin) -> None:
        require_client("slurmConfig.login")
        from nni_manager.training_services.ssh.remote_shell import RemoteShell

        self._shell = RemoteShell(login)

    def run(
        self, command: Sequence[str], stdin: str, variables: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Run a command, see `Commands`."""
        return self._shell.run(login_script(command, stdin, variables), timeout_s)

    def close(self) -> None:
        """End the commands that run, see `Commands`."""
        self._shell.close()
