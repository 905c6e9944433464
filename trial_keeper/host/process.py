"""The trial's command as a process group of its own."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trial_keeper.errors import CommandNotStarted


class TrialProcess:
    """A command that runs in a session of its own, with its stdout and stderr as files.

    The files are the child's own descriptors: it never waits for its keeper and never dies of a broken pipe.
    """

    def __init__(
        self, command: str, code_dir: str, environ: Mapping[str, str], stdout: Path, stderr: Path
    ) -> None:
        """Start it.

        Raises:
            CommandNotStarted: there is no bash, or the code folder cannot be entered.
        """
        if not os.path.isdir(code_dir):
            raise CommandNotStarted(
                f"cannot enter the code folder {code_dir}: there is no such folder here; check codeDir in the experiment file"
            )
        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            try:
                self._child = subprocess.Popen(
                    # A failure inside a pipe or before the last line is a failure of the trial.
                    ["bash", "-e", "-o", "pipefail", "-c", command],
                    cwd=code_dir,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandNotStarted(
                    f"cannot start bash for the command {command!r} in {code_dir}: {error.strerror}; "
                    "use an image that has bash, and a code folder that this user may enter"
                ) from error

    def poll(self) -> int | None:
        """None while it runs; afterwards its exit code, or -n for signal n."""
        return self._child.poll()

    def signal(self, *, kill: bool) -> None:
        """Signal every process of its group: SIGKILL, or SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL if kill else signal.SIGTERM)
