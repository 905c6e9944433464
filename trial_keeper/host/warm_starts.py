"""Which trials of a job are forks of a warm interpreter, and what is said of the others."""

import os
from collections.abc import Callable, Mapping

from trial_keeper.core.warm_command import warm_command
from trial_keeper.errors import WarmStartRefused
from trial_keeper.host.warm import WarmInterpreter, WarmStart
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.workspace import AttemptFolder, TrialDocument


class WarmStarts:
    """One interpreter for all trials of a job, begun when the first trial tells which Python it wants.

    That trial starts plainly, as does every one that comes before the modules are imported, or cannot be a fork; each reason for
    that is told once.
    """

    def __init__(
        self, imports: tuple[str, ...], environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        """`environ` is what all trials have in common. `say` is told why a trial starts plainly."""
        self._imports = imports
        self._environ = environ
        self._say = say
        self._told: set[str] = set()
        self._python = ""
        self._interpreter: WarmInterpreter | None = None

    @property
    def spared(self) -> tuple[int, ...]:
        """The processes among the keeper's children that are no trial's."""
        interpreter = self._interpreter
        return () if interpreter is None or interpreter.has_ended else (interpreter.pid,)

    def prepare(self, command: str) -> None:
        """Let an interpreter for this command import the modules, if there is none yet. Returns at once."""
        wanted = warm_command(command)
        if self._interpreter is None and not self._python and wanted is not None:
            self._python = wanted.python
            try:
                self._interpreter = WarmInterpreter(wanted.python, self._imports, self._environ)
            except WarmStartRefused as error:
                self._tell(str(error))

    def foresee(self, trial: TrialDocument, folder: AttemptFolder, environ: Mapping[str, str]) -> None:
        """This trial is the next to start, unless something comes between: let a fork get ready for it. Returns at once."""
        try:
            interpreter, start = self._wanted(trial, folder, environ)
            if interpreter is not None and start is not None:
                interpreter.prepare(start)
        except WarmStartRefused:
            return  # its start meets the same, and tells

    def start(self, trial: TrialDocument, folder: AttemptFolder, environ: Mapping[str, str]) -> int | None:
        """The pid of the trial, which runs; None if it has to be started plainly."""
        if warm_command(trial.command) is None:
            self._tell("trials start plainly: only `python script.py arguments` can be started warm")
            return None
        try:
            interpreter, start = self._wanted(trial, folder, environ)
            return interpreter.start(start) if interpreter is not None and start is not None else None
        except WarmStartRefused as error:
            self._tell(str(error))
            return None

    def _wanted(
        self, trial: TrialDocument, folder: AttemptFolder, environ: Mapping[str, str]
    ) -> tuple[WarmInterpreter | None, WarmStart | None]:
        """Who is to start it, and what; None where it is to start plainly."""
        interpreter, command = self._interpreter, warm_command(trial.command)
        if interpreter is None or command is None or not interpreter.is_ready():
            return None, None
        if command.python != self._python:
            raise WarmStartRefused(
                f"cannot start a trial warm with {command.python!r}: this job holds {self._python!r}; "
                "use one Python for all trials"
            )
        if not os.path.isdir(trial.code_dir):
            return None, None  # the plain start says what is wrong
        stdout, stderr = folder.stream(Stream.STDOUT), folder.stream(Stream.STDERR)
        return interpreter, WarmStart(command, trial.code_dir, environ, stdout, stderr)

    def close(self) -> None:
        """End the interpreter; a trial that runs goes on."""
        if self._interpreter is not None:
            self._interpreter.close()

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)
