"""What is wrong with an experiment file: every mistake with its place, all of them in one error."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nni_manager.errors import UserMistake

# A value is repeated in a message so that the user finds it, not so that it can be read in full.
LONGEST_SHOWN_CHARACTERS = 60
# Of one kind, in one part of a file: nobody mends more in one go, and a program that went wrong makes thousands.
MOST_MISTAKES = 100


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong in one file.

    `file` is the path as the user would type it. `line` and `column` count from 1; None when the mistake has no
    place, such as a missing key of the whole file. `key` is dotted (`trial.codeDir`, `layer[1].size`), empty for the
    file as a whole. `message` is a sentence from "cannot" to the way out.
    """

    file: str
    line: int | None
    column: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        return f"{place}: {self.message}" if place else self.message


class ConfigInvalid(UserMistake):
    """cannot use this experiment file; mend the mistakes listed with it"""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        """Orders the mistakes as a reader of the files meets them; one line of the message each."""
        self.mistakes: list[Mistake] = list(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


def key_of(path: Sequence[str | int]) -> str:
    """The dotted name of a place: ("trial", "codeDir") is `trial.codeDir`, ("a", 1, "b") is `a[1].b`.

    A search space's `_value` is left out: the second option of `net` is `net[1]` to its author.
    """
    key = ""
    for step in path:
        if step == "_value":
            continue
        key += f"[{step}]" if isinstance(step, int) else f".{step}" if key else step
    return key


def folded(key: str) -> str:
    """A key without what its spellings differ in: memoryMB, memory_mb and MemoryMb are one."""
    return key.replace("_", "").casefold()


def shown(value: Any) -> str:
    """A value as a message repeats it: JSON, cut to one short line."""
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN_CHARACTERS else text[: LONGEST_SHOWN_CHARACTERS - 1] + "…"


def remedy_for_unknown(word: str, known: Iterable[str], *, verb: str = "use") -> str:
    """The end of a message about an unknown word: the nearest known one, and the list of all."""
    known = list(known)
    by_folded = {name.casefold(): name for name in known}
    nearest = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    if nearest:
        return f"did you mean {by_folded[nearest[0]]}? (known: {', '.join(known)})"
    return f"{verb} one of {', '.join(known)}"
