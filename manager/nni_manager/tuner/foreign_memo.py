"""A tuner's notes on a trial that come from somebody else. Imports no sampler: nnictl pays for those in seconds."""

import json
from typing import Any

NOTED_ON_TRIAL = "noted on the trial"
NOTED_ON_STUDY = "noted on the study"
"""Beside the draws in a memo, whose names are JSON pointers and so begin with a slash: what samplers note, as JSON text."""


def without_programs(memo: str) -> str:
    """The memo (JSON text) without what a sampler would run when it reads it.

    CMA-ES notes itself as a pickle, and a pickle is a program. It is text in hexadecimal, and no other note is text, so notes
    that are text are left out. What the sampler misses by that it makes anew of the results.

    Raises:
        ValueError: the memo is no JSON object, or its notes are none.
    """
    notes = _object(memo)
    for name in (NOTED_ON_TRIAL, NOTED_ON_STUDY):
        if name in notes:
            kept = {key: value for key, value in _object(notes[name]).items() if not _holds_text(value)}
            notes[name] = json.dumps(kept)
    return json.dumps(notes)


def _object(text: Any) -> dict[str, Any]:
    found = json.loads(text) if isinstance(text, str) else None
    if not isinstance(found, dict):
        raise ValueError("a note of the tuner is no JSON object")  # noqa: TRY004 - it is what was written, not the program
    return found


def _holds_text(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_holds_text, value.values()))
        case list():
            return any(map(_holds_text, value))
    return isinstance(value, str)
