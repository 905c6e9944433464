"""Starts supervisors: a small process that has all modules imported forks one in some milliseconds; a new Python takes sixty.

Nothing depends on that process: when it is killed there is another one, and when the cluster is gone it ends.
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

from nni_manager.local_openpai import supervisor
from nni_manager.local_openpai.environment import inherited

_LAST_BYTES = 2048
_ENDS_WITHIN_S = 5.0


def program(argument: str) -> list[str]:
    """The supervisor's program: imported, so that Python finds it compiled; nothing of site-packages is seen."""
    folder = str(Path(supervisor.__file__).parent)
    code = f"import sys; sys.path.append({folder!r}); import supervisor; supervisor.start()"
    return [sys.executable, "-I", "-S", "-c", code, argument]


class NotStarted(Exception):
    """There is no supervisor; the message says why."""


class Starter:
    """Calls may come from any thread."""

    def __init__(self) -> None:
        """Starts nothing before it is asked to."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> dict[str, Any]:
        """Have the container of this folder run; which process its supervisor is.

        Raises:
            NotStarted: it does not.
            OSError: this machine can start no process now.
        """
        with self._lock:
            try:
                may_run = self._ask(folder)
            except BrokenPipeError:
                # Somebody has killed the process that forks. If it had forked already, the folder is claimed: nothing runs twice,
                # and whoever has claimed it is the supervisor.
                self._end()
                self._ask(folder)
                may_run = True
        try:
            document: dict[str, Any] = json.loads((folder / supervisor.PROCESS).read_text(encoding="utf-8"))
        except OSError as error:
            raise NotStarted(f"it could not be forked; {_last_words(folder)}") from error
        if not may_run:
            raise NotStarted(_last_words(folder))
        return document

    def close(self) -> None:
        """Let go of the process that forks. Supervisors go on."""
        with self._lock:
            self._end()

    def _ask(self, folder: Path) -> bool:
        """Whether it says that it has begun."""
        if self._process is None:
            self._process = subprocess.Popen(
                program(supervisor.FORKS),
                env=inherited(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
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
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(folder: Path) -> str:
    with contextlib.suppress(OSError):
        said = (folder / supervisor.LAST_WORDS).read_text(encoding="utf-8", errors="replace").strip()
        return f"its last words: {said[-_LAST_BYTES:]}"
    return "it said nothing"
