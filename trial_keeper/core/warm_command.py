"""Recognises commands that a warm interpreter can run: `python script.py arguments`, and nothing that needs a shell."""

import re
from dataclasses import dataclass
from functools import lru_cache

_PYTHON = re.compile(r"(?:[A-Za-z0-9_@%+:,./-]*/)?python(?:3(?:\.[0-9]+)?)?")
# Characters without a special meaning to bash anywhere in a word. `=` has one in the first word, which is the interpreter's;
# `~` is excluded because bash replaces it in some places.
_PLAIN = r"[A-Za-z0-9_@%+=:,./-]"
_PIECE = re.compile(rf"""(?P<plain>{_PLAIN}+)|'(?P<single>[^'\0]*)'|"(?P<double>[^"$`\\\0]*)\"""")
_BLANKS = re.compile(r"[ \t]+")


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

    Supports quotes whose content bash would take literally. Does not support variables, wildcards, redirections, several
    commands, assignments before the command, and options of the interpreter other than `-u`.
    """
    words = _words(command.strip(" \t\n"))
    if words is None or not words or not _PYTHON.fullmatch(words[0]):
        return None
    python, *rest = words
    is_unbuffered = rest[:1] == ["-u"]
    script, *arguments = rest[is_unbuffered:] or [""]
    if not script.endswith(".py") or script.startswith("-"):
        return None
    return WarmCommand(python, script, tuple(arguments), is_unbuffered)


def _words(text: str) -> list[str] | None:
    """Split the text into the words that bash would see; None if it contains anything but words."""
    words: list[str] = []
    at, is_inside_word = 0, False
    while at < len(text):
        if (blanks := _BLANKS.match(text, at)) is not None:
            at, is_inside_word = blanks.end(), False
            continue
        piece = _PIECE.match(text, at)
        if piece is None:
            return None
        content = piece[piece.lastgroup or 0]
        if is_inside_word:
            words[-1] += content
        else:
            words.append(content)
        at, is_inside_word = piece.end(), True
    return words
