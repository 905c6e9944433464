"""One-line summaries of why a trial ended."""

import re

from nni_manager.domain.tracebacks import exception_line
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.signals import signal_name

# Messages of these reasons start with the cause, followed by the trial's output. Other messages contain only the output.
_NOT_OF_THE_TRIAL = (
    ExitReason.KEEPER_LOST,
    ExitReason.JOB_LOST,
    ExitReason.COULD_NOT_START,
    ExitReason.MOUNT,
    ExitReason.VERSION,
    ExitReason.OUT_OF_MEMORY,
)
# Shells report a process that was killed by signal n with the exit code 128 + n.
_SIGNALLED = 128
# Shells, env and pyenv write a line with these words, and more lines with advice may follow it.
_NO_COMMAND = 127
_NOT_FOUND = re.compile(r".*: (?:command )?not found\b.*|.*: No such file or directory\b.*")


def message_summary(reason: str, message: str, exit_code: int | None = None) -> str:
    """The most informative line of a trial's message; empty if there is none. `reason`: a value of `ExitReason`.

    In a trial's output: the line of the exception, or the line that names a command that was not found, or the last line.
    """
    is_of_the_trial = reason not in _NOT_OF_THE_TRIAL
    if is_of_the_trial and (line := exception_line(message)):
        return line
    lines = message.strip().splitlines()
    if is_of_the_trial and exit_code == _NO_COMMAND:
        lines = [line for line in lines if _NOT_FOUND.fullmatch(line)] or lines
    return lines[-1 if is_of_the_trial else 0].strip() if lines else ""


def how_it_ended(reason: str, exit_code: int | None) -> str:
    """The reason with the exit code, or with the name of the signal. `reason`: a value of `ExitReason`."""
    if reason not in (ExitReason.SIGNAL.value, ExitReason.NONZERO_EXIT.value):
        return reason
    number = (exit_code or _SIGNALLED) - _SIGNALLED
    name = signal_name(number)
    if reason == ExitReason.SIGNAL.value:
        return f"signal {number} ({name})" if name else f"signal {number}"
    # A shell passes the signal of its command on as an exit code.
    return f"exit code {exit_code} (128 + {name})" if name else f"exit code {exit_code}"


def why_it_ended(reason: str, exit_code: int | None, message: str) -> str:
    """How a trial ended, with the most informative line of its message."""
    how, line = how_it_ended(reason, exit_code), message_summary(reason, message, exit_code)
    return f"{how}: {line}" if line else how
