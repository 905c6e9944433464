"""Recognises commands that a warm interpreter can run: `python script.py arguments`, without any use of a shell."""

import re
from functools import lru_cache

from trial_keeper.frozen_dataclass import dataclass

_PYTHON = re.compile(r"(?:[A-Za-z0-9_@%+:,./-]*/)?python(?:3(?:\.[0-9]+)?)?")
# Characters without a special meaning to bash anywhere in a word. `=` is special only in the first word, the interpreter's, which
# has its own pattern. `~` is excluded because bash replaces it in some places.
_PLAIN = r"[A-Za-z0-9_@%+=:,./-]"
_WORDS = re.compile(rf"""(?:{_PLAIN}|[ \t]|'[^'\0]*'|"[^"$`\\\0]*\")*""")


@dataclass(frozen=True, slots=True)
class WarmCommand:
    """A command that is one start of a Python script. `python` and `script` are as written: names, not resolved paths."""

    python: str
    script: str
    arguments: tuple[str, ...] = ()
    is_unbuffered: bool = False
    """True if the command has `-u`."""


@lru_cache(maxsize=16)  # all trials of a job usually have the same command
def warm_command(command: str) -> WarmCommand | None:
    """Parse the command as a warm start; None if it needs a shell or its own interpreter.

    Supports quotes whose content bash does not expand. Does not support variables, wildcards, redirections, several commands,
    assignments before the command, and options of the interpreter other than `-u`.
    """
    text = command.strip(" \t\n")
    if not _WORDS.fullmatch(text):
        return None
    import shlex  # not at the top: few keepers need shlex

    python, *rest = shlex.split(text) or [""]
    if not _PYTHON.fullmatch(python):
        return None
    is_unbuffered = rest[:1] == ["-u"]
    script, *arguments = rest[is_unbuffered:] or [""]
    if not script.endswith(".py") or script.startswith("-"):
        return None
    return WarmCommand(python, script, tuple(arguments), is_unbuffered)
