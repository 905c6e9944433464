"""Tuner metadata from an untrusted source. This module imports no sampler: the import would cost nnictl seconds."""

import json
from typing import Any

NOTED_ON_TRIAL = "noted on the trial"
NOTED_ON_STUDY = "noted on the study"
"""Keys in metadata for the samplers' attributes, as JSON text. Keys of draws are JSON pointers, which start with a slash."""


def strip_pickles(metadata: str) -> str:
    """The metadata (JSON text) without values that a sampler would execute when reading them.

    CMA-ES stores itself as a pickle, and a pickle is a program. It is hexadecimal text, and no other attribute is text, so text
    attributes are removed. The sampler recomputes what is missing from the results.

    Raises:
        ValueError: the metadata, or a sampler's attributes in it, are not a JSON object.
    """
    notes = _object(metadata)
    for name in (NOTED_ON_TRIAL, NOTED_ON_STUDY):
        if name in notes:
            kept = {key: value for key, value in _object(notes[name]).items() if not _holds_text(value)}
            notes[name] = json.dumps(kept)
    return json.dumps(notes)


def _object(text: Any) -> dict[str, Any]:
    found = json.loads(text) if isinstance(text, str) else None
    if not isinstance(found, dict):
        raise ValueError("the tuner metadata is not a JSON object")  # noqa: TRY004 - the text is wrong, not the program
    return found


def _holds_text(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_holds_text, value.values()))
        case list():
            return any(map(_holds_text, value))
    return isinstance(value, str)
