"""Which commands a warm interpreter can run: `python script.py arguments`, and nothing a shell would have to do."""

import re
from dataclasses import dataclass
from functools import lru_cache

_PYTHON = re.compile(r"(?:[A-Za-z0-9_@%+:,./-]*/)?python(?:3(?:\.[0-9]+)?)?")
# Characters that mean themselves to bash wherever they stand in a word. `=` does not in the first word, which is the
# interpreter's; `~` is left out because bash replaces it in some places.
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
    """Whether the command says `-u`."""


@lru_cache(maxsize=16)  # mostly all trials of a job have one
def warm_command(command: str) -> WarmCommand | None:
    """The command as a warm start; None when only a shell, or an interpreter of its own, does what it says.

    Quotes are understood where bash would take what they enclose as it stands. Variables, wildcards, redirections, several
    commands, assignments before the command, and options of the interpreter other than `-u` are not.
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
    """The words bash would make of it, or None when it holds anything but words."""
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
