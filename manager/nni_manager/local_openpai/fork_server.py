"""Starts supervisors with a fork server, a process with all modules imported. A fork takes a few ms, a new Python 60 ms.

The fork server ends with the cluster, and is replaced if it was killed. Running supervisors do not depend on the fork server.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import trial_keeper
from nni_manager.local_openpai import supervisor
from nni_manager.local_openpai.environment import inherited
from nni_manager.startup import open_files

_LAST_BYTES = 2048
_ENDS_TIMEOUT_S = 5.0


def program(argument: str) -> list[str]:
    """The supervisor's command line. An import of the module uses the bytecode cache; site-packages are ignored."""
    folders = [str(Path(supervisor.__file__).parents[2]), str(Path(trial_keeper.__file__).parents[1])]
    code = f"import sys; sys.path += {folders!r}; from nni_manager.local_openpai import supervisor; supervisor.start()"
    return [sys.executable, "-I", "-S", "-c", code, argument]


class ProcessNotStarted(Exception):
    """The supervisor could not be started; the message has the reason."""


class SupervisorForkServer:
    """The client of the fork server process; thread-safe."""

    def __init__(self) -> None:
        """No process is started before the first `start`."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> dict[str, Any]:
        """Start the container of this folder and return the identity of its supervisor.

        Raises:
            ProcessNotStarted: the supervisor did not start.
            OSError: the machine cannot start a process now.
        """
        with self._lock:
            try:
                has_started = self._request_fork(folder)
            except BrokenPipeError:
                # The fork server was killed. A retry is safe: a supervisor forked before has claimed the folder, so a second
                # supervisor exits at once.
                self._end()
                self._request_fork(folder)
                has_started = True
        try:
            document: dict[str, Any] = json.loads((folder / supervisor.PROCESS).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProcessNotStarted(f"cannot fork a supervisor: {_last_output(folder)}") from error
        if not has_started:
            raise ProcessNotStarted(_last_output(folder))
        return document

    def close(self) -> None:
        """End the fork server. Supervisors continue."""
        with self._lock:
            self._end()

    def _request_fork(self, folder: Path) -> bool:
        """Request a fork; True if the supervisor reports that it has started."""
        if self._process is None:
            self._process = subprocess.Popen(
                program(supervisor.FORKS),
                env=inherited(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            open_files.restore_limit(self._process.pid)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(os.fsencode(folder) + b"\0")
        process.stdin.flush()
        answer = process.stdout.read(1)
        if not answer:
            raise BrokenPipeError
        return answer == supervisor.BEGUN

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        try:
            process.wait(_ENDS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_output(folder: Path) -> str:
    with contextlib.suppress(OSError):
        output = (folder / supervisor.STDERR).read_text(encoding="utf-8", errors="replace").strip()
        return f"last output: {output[-_LAST_BYTES:]}"
    return "no output"
