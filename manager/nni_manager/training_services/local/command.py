"""Checks the command of trials before anything starts."""

from __future__ import annotations

import difflib
import os
import re
import subprocess

from nni_manager.config.key_names import key_of
from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.message_summary import HOW_TO_USE_CONDA
from nni_manager.errors import UserError

# A word that bash does not expand, followed by the end of the line or by arguments. No parenthesis may follow: that would
# define a function.
_PLAIN_WORD = re.compile(r"[ \t\n]*([A-Za-z0-9_./+-]+)(?=$|[ \t\n](?![ \t]*\())")
# Python without options, and a script that bash does not expand.
_PYTHON_SCRIPT = re.compile(
    r"[ \t\n]*(?:[A-Za-z0-9_./+-]*/)?python[0-9.]*[ \t]+([A-Za-z0-9_./+-]+\.py)(?=$|[ \t\n])"
)
# BASH_ENV may name slow start-up files; the check is limited in time.
_CHECK_TIMEOUT_S = 10.0


def check_command(config: ExperimentSpec) -> None:
    """Check that bash finds the first word of the trial's command, and that a script for Python is not misspelt.

    Skipped if the answer would be uncertain.

    Bash itself resolves the word, in the code folder and with the environment of trials, so aliases, functions and
    builtins count. Words that bash would expand are not checked.

    Raises:
        UserError: every trial would end with "command not found", or because its script is not there.
    """
    folder, where = (
        key_of(config, "trial.codeDir"),
        f"{key_of(config, 'trial.command')} in {config.config_path.name}",
    )
    _check_script(config, where, folder)
    match = _PLAIN_WORD.match(config.trial_command)
    if match is None:
        return
    word = match.group(1)
    # A command_not_found_handle may run any command.
    found = _bash('type -t -- "$1" || type -t command_not_found_handle', word, config)
    if found is None or found.returncode == 0 or found.stdout.strip():
        return
    path = config.code_dir / word
    if "/" in word:
        if not path.exists():
            raise UserError(
                f"cannot find the command {word!r} of {where}: {path} does not exist; fix the path, which is relative to {folder}"
            )
        if path.is_file() and not os.access(path, os.X_OK):
            raise UserError(
                f"cannot run the command {word!r} of {where}: {path} is not executable; run `chmod +x {path}`"
            )
        return
    commands = _bash("compgen -c", word, config)
    near = difflib.get_close_matches(word, sorted(set(commands.stdout.split())), n=1) if commands else []
    hint = f"did you mean {near[0]}?" if near else "install it, or write the full path"
    if word == "conda":
        hint = HOW_TO_USE_CONDA
    raise UserError(
        f"cannot find the command {word!r} of {where}: it is neither a program on PATH nor a builtin of bash; {hint}"
    )


def _check_script(config: ExperimentSpec, where: str, folder: str) -> None:
    # An absent script may still come to be, such as by an earlier part of the command; a similar name shows a slip.
    match = _PYTHON_SCRIPT.match(config.trial_command)
    path = config.code_dir / match.group(1) if match else None
    if path is None or path.exists() or not path.parent.is_dir():
        return
    near = difflib.get_close_matches(path.name, sorted(each.name for each in path.parent.glob("*.py")), n=1)
    if near:
        raise UserError(
            f"cannot find the script {path.name!r} of {where}: there is no file {path}; did you mean {near[0]}? The path is "
            f"relative to {folder}"
        )


def _bash(script: str, argument: str, config: ExperimentSpec) -> subprocess.CompletedProcess[str] | None:
    """The result of a bash script; None after a timeout."""
    try:
        return subprocess.run(
            ["bash", "-c", script, "bash", argument],
            cwd=config.code_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except FileNotFoundError as error:
        raise UserError("cannot run trials on this machine: bash is not on PATH; install bash") from error
