"""The one limit of nested JSON: parameters, search spaces, results and experiment files.

A value beyond it is refused where it enters, so code that handles stored values may recurse once per level.
"""

import json

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# A search space has about ten levels. Python's recursion limit is 1,000 frames, and PyYAML's cost per bracket grows with depth.
MAX_LEVELS = 100
# A stored document or the body of a request wraps such a value: {"params": {"searchSpace": ...}}.
MAX_DOCUMENT_LEVELS = MAX_LEVELS + 10
TOO_DEEP = f"nested more than {MAX_LEVELS} levels deep"
_CONTAINERS = (dict, list, tuple)


class NestedTooDeeply(ValueError):
    """A JSON text that has more than `MAX_LEVELS` levels."""


def is_too_deep(value: "Any", most: int = MAX_LEVELS) -> bool:
    """True if more than `most` dicts and lists are nested in each other; also of a value that contains itself."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(most):
        # By id: a value that contains itself twice would double with each level.
        inner = {
            id(each): each
            for outer in level
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, _CONTAINERS)
        }
        level = list(inner.values())
    return bool(level)


def deep_entry(values: "Mapping[str, Any]") -> "str | None":
    """Return the name of the first entry by which a dict has more than `MAX_LEVELS` levels; None if it has not so many."""
    return next((name for name, value in values.items() if is_too_deep(value, MAX_LEVELS - 1)), None)


def parsed_json(text: str) -> "Any":
    """Return the value of JSON text, which may contain NaN and infinities.

    Raises:
        NestedTooDeeply: it has more than `MAX_LEVELS` levels.
        ValueError: it is no JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise NestedTooDeeply(TOO_DEEP) from None
    # Counting the brackets takes less time than parsing did; few texts have so many.
    if text.count("[") + text.count("{") > MAX_LEVELS and is_too_deep(value):
        raise NestedTooDeeply(TOO_DEEP)
    return value
