"""Diagnostics of an experiment file: every error with its position, all in one exception."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

KeyPath: TypeAlias = tuple[str | int, ...]
"""The path of a value in a file: keys, and indices of items."""
# Messages truncate long values: their start is enough to find them.
MAX_SHOWN_CHARACTERS = 60
# Less similar words seldom mean the same: "demotuner" and "metistuner" have 0.63. In short words each letter counts more:
# "TEP" and "TPE" have 0.67.
_SHORT, _MIN_SIMILARITY = 6, (0.6, 0.7)
# The limit for each kind of error in each part of a file. A faulty generator can cause thousands.
MAX_DIAGNOSTICS = 100


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error in one file.

    `file` is the path as the user would type it. `line` and `column` count from 1; None when the error has no
    position, such as a missing key of the whole file. `key` is dotted (`trial.codeDir`, `layer[1].size`), empty for the
    file as a whole. `message` is a sentence that starts with "cannot" and ends with the remedy.
    """

    file: str
    line: int | None
    column: int | None
    key: str
    message: str

    def __str__(self) -> str:
        position = f"{self.file}:{self.line}" if self.line is not None else self.file
        return f"{position}: {self.message}" if position else self.message


class ConfigInvalid(UserError):
    """cannot use this experiment file; fix the diagnostics listed with it"""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Store the diagnostics in the given order; the message has one line for each."""
        self.diagnostics: list[Diagnostic] = list(diagnostics)
        super().__init__("\n".join(str(each) for each in self.diagnostics))


def key_of(path: Sequence[str | int]) -> str:
    """The dotted name of a key path: ("trial", "codeDir") is `trial.codeDir`, ("a", 1, "b") is `a[1].b`.

    A search space's `_value` is omitted: `net[1]` is the second option of `net`.
    """
    key = ""
    for step in path:
        if step == "_value":
            continue
        key += f"[{step}]" if isinstance(step, int) else f".{step}" if key else step
    return key


def steps_of(key: str) -> KeyPath:
    """The key path of a dotted name; the reverse of `key_of`."""
    steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
    return tuple(int(index) if index else step for index, step in steps)


# A marked key, with or without an example of its value, or a marked value, in a message.
MARK = re.compile(r"«(?:=(?P<value>[^«»]*)|(?P<key>[^«»]*?)(?:: (?P<example>[^«»]*))?)»")


def ref(path: Sequence[str | int], example: str | None = None) -> str:
    """A marked key of the second schema, with an example in YAML: the reader's names replace it in the message.

    >>> ref(("trainingService", "reuseMode"), "true")
    '«trainingService.reuseMode: true»'
    """
    return f"«{key_of(path)}»" if example is None else f"«{key_of(path)}: {example}»"


def leaves(value: Any, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The values within a value that are neither mappings nor lists, with their key paths."""
    if isinstance(value, Mapping | list):
        for step, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(inner, (*above, step if isinstance(step, int) else str(step)))
    else:
        yield above, value


def folded(key: str) -> str:
    """A key in a form that ignores case and underscores: memoryMB, memory_mb and MemoryMb are equal."""
    return key.replace("_", "").casefold()


def shown(value: Any) -> str:
    """A value for a message: JSON, truncated to MAX_SHOWN_CHARACTERS."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except TypeError:  # YAML also has dates and lists as keys
        text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`, in any case; None if none is similar.

    A long word that is part of exactly one known word is similar to it: trialNumber, to maxTrialNumber.
    """
    by_folded = {name.casefold(): name for name in known}
    whole = [name for name in by_folded if len(word) > _SHORT and word.casefold() in name]
    if len(whole) == 1:
        return by_folded[whole[0]]
    found = difflib.get_close_matches(
        word.casefold(), by_folded, n=1, cutoff=_MIN_SIMILARITY[len(word) > _SHORT]
    )
    return by_folded[found[0]] if found else None


def remedy_for_unknown(word: str, known: Iterable[str], *, verb: str = "use", otherwise: str = "") -> str:
    """The remedy for an unknown word: the nearest known word, and the list of all. `otherwise` follows if none is near."""
    known = list(known)
    if (found := nearest(word, known)) is not None:
        return f"did you mean {found}? (known: {', '.join(known)})"
    return f"{verb} one of {', '.join(known)}{otherwise}"
