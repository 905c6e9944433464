"""Decides which trials of a job start as forks of a warm interpreter, and logs the reasons for plain starts."""

import contextlib
import os
from collections.abc import Callable, Mapping

from trial_keeper.core.warm_command import warm_command
from trial_keeper.errors import WarmStartRefused
from trial_keeper.host.warm import WarmInterpreter, WarmStart
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.workspace import AttemptFolder


class WarmStarts:
    """One interpreter for all trials of a job, started with the first trial, which determines the Python.

    The first trial starts plainly, as do trials that start before the modules are imported, and trials that cannot be forks. Each
    reason is logged once.
    """

    def __init__(
        self,
        imports: tuple[str, ...],
        environ: Mapping[str, str],
        log: Callable[[str], None],
        register: Callable[[int], None],
    ) -> None:
        """`environ` has the variables that all trials have in common. `log` receives the reason for a plain start.

        `register` is called with the pid of the interpreter, and of each trial, before it executes any user code. The pid is, or
        will become, the id of a session.
        """
        self._imports = imports
        self._environ = environ
        self._log = log
        self._register = register
        self._logged: set[str] = set()
        self._python = ""
        self._interpreter: WarmInterpreter | None = None

    @property
    def exempt_sessions(self) -> tuple[int, ...]:
        """The children of the keeper that belong to no trial."""
        interpreter = self._interpreter
        return () if interpreter is None or interpreter.has_ended else (interpreter.pid,)

    def prewarm(self, trial: TrialDocument, folder: AttemptFolder, environ: Mapping[str, str]) -> None:
        """Let the standby fork prepare for the trial that is probably next. Returns at once."""
        # If the interpreter refuses, the trial's start raises and logs the same error.
        with contextlib.suppress(WarmStartRefused):
            start = self._wanted(trial, folder, environ)
            if start is not None and self._interpreter is not None:
                self._interpreter.prepare(start)

    def start(self, trial: TrialDocument, folder: AttemptFolder, environ: Mapping[str, str]) -> int | None:
        """Start the trial and return its pid; None if it has to be started plainly.

        The first trial that could be a fork starts the interpreter, in the background.
        """
        command = warm_command(trial.command)
        if command is None:
            self._log_once(
                "cannot start trials warm: the command is not of the form `python script.py arguments`"
            )
            return None
        try:
            if not self._python:
                self._python = command.python
                self._interpreter = WarmInterpreter(
                    self._python, self._imports, self._environ, self._register
                )
            start = self._wanted(trial, folder, environ)
            if start is not None and self._interpreter is not None:
                return self._interpreter.start(start)
        except WarmStartRefused as error:
            self._log_once(str(error))
        return None

    def _wanted(
        self, trial: TrialDocument, folder: AttemptFolder, environ: Mapping[str, str]
    ) -> WarmStart | None:
        """Return the start request; None if the trial must start without a fork server."""
        interpreter, command = self._interpreter, warm_command(trial.command)
        if interpreter is None or command is None or not interpreter.is_ready():
            return None
        if command.python != self._python:
            raise WarmStartRefused(
                f"cannot start a trial warm with {command.python!r}: this job's warm interpreter is {self._python!r}; "
                "use one Python for all trials"
            )
        if not os.path.isdir(trial.code_dir):
            return None  # the plain start reports the problem
        stdout, stderr = folder.stream(Stream.STDOUT), folder.stream(Stream.STDERR)
        return WarmStart(command, trial.code_dir, environ, stdout, stderr)

    def close(self) -> None:
        """End the interpreter; a running trial continues."""
        if self._interpreter is not None:
            self._interpreter.close()

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)
