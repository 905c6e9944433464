"""One-line summaries of why a trial ended."""

import re

from nni_manager.domain.tracebacks import exception_line
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.signals import signal_name

# Messages of these reasons start with the cause, followed by the trial's output. Other messages contain only the output.
_NOT_OF_THE_TRIAL = (
    ExitReason.KEEPER_LOST,
    ExitReason.JOB_LOST,
    ExitReason.PREEMPTED,
    ExitReason.COULD_NOT_START,
    ExitReason.MOUNT,
    ExitReason.VERSION,
    ExitReason.OUT_OF_MEMORY,
)
BEFORE_AN_ERROR = " The error:"
"""The end of a line after which an error follows, with its traceback."""
# Shells report a process that was killed by signal n with the exit code 128 + n.
_SIGNALLED = 128
# Shells, env and pyenv write a line with these words, and more lines with advice may follow it.
_NO_COMMAND = 127
_NOT_FOUND = re.compile(r".*: (?:command )?not found\b.*|.*: No such file or directory\b.*")
_NOT_EXECUTABLE = 126
HOW_TO_USE_CONDA = (
    'a trial\'s shell does not read ~/.bashrc; write `eval "$(CONDA_FOLDER/bin/conda shell.bash hook)"` before '
    "`conda activate`, or the full path of the environment's python"
)
# What a command line lacks, by the exit code (None: any) and the words of bash, dash, env, Python and conda. The first match
# counts. A carriage return at the end of a name is shown as \\r.
_HINTS = (
    (
        None,
        re.compile(r"\\r['\u2019]"),
        "the script has Windows line ends; remove them with `sed -i 's/\\r$//' FILE`",
    ),
    # bash, from 5.2 on and before, about a script whose first line names a missing interpreter, such as `/bin/bash\\r`.
    (
        None,
        re.compile(r": cannot execute: required file not found$|: bad interpreter: "),
        "the first line of the script names a program that does not exist; fix it or, if the script has Windows line ends, "
        "remove them with `sed -i 's/\\r$//' FILE`",
    ),
    (None, re.compile(r"\bconda: (?:command )?not found|'conda activate'"), HOW_TO_USE_CONDA),
    (
        _NO_COMMAND,
        re.compile(r": (?:command )?not found\b"),
        "it is not on the PATH of the trial; write its full path, or install it where trials run",
    ),
    (
        _NOT_EXECUTABLE,
        re.compile(r": Permission denied$"),
        "make the file executable with `chmod +x`, or name its interpreter",
    ),
)


def message_summary(reason: str, message: str, exit_code: int | None = None) -> str:
    """The most informative line of a trial's message; empty if there is none. `reason`: a value of `ExitReason`.

    In a trial's output: the line of the exception, or the line that names a command that was not found, or the last line.
    """
    if reason in _NOT_OF_THE_TRIAL:
        first = message.strip().partition("\n")[0].strip()
        return outline(message) if first.endswith(BEFORE_AN_ERROR) else first
    line = exception_line(message)
    if not line:
        lines = message.strip().splitlines()
        if exit_code == _NO_COMMAND:
            lines = [each for each in lines if _NOT_FOUND.fullmatch(each)] or lines
        line = lines[-1].strip() if lines else ""
    hint = _hint(line, exit_code) if reason == ExitReason.NONZERO_EXIT else ""
    return f"{line}; {hint}" if hint else line


def outline(error: str) -> str:
    """An error on one line: its first line and, if more follow, the last one, which names the exception of a traceback."""
    lines = error.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0].removesuffix(BEFORE_AN_ERROR)} ({lines[-1].strip()})"


def _hint(line: str, exit_code: int | None) -> str:
    """What to do if a command could not be run; empty if it could."""
    found = (hint for code, pattern, hint in _HINTS if code in (None, exit_code) and pattern.search(line))
    return next(found, "")


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
