"""Converts durations and sizes as they are written in experiment files and requests."""

from __future__ import annotations

import math
import re
from typing import Any

SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"^([1-9][0-9]*)([smhd])$", re.ASCII)
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([tgmk]?)(i?b)?", re.IGNORECASE)
_BYTES_OF = {"t": 1024**4, "g": 1024**3, "m": 1024**2, "k": 1024, "": 1}


def duration_s(text: Any) -> float | None:
    """The seconds of a duration such as `90m`; None for None.

    Raises:
        ValueError: the text is not a duration.
    """
    if text is None:
        return None
    match = _DURATION.match(text) if isinstance(text, str) else None
    if match is None or len(match[1]) > 9:  # nine digits of seconds are thirty years
        raise ValueError(text)
    return float(int(match[1]) * SECONDS_OF[match[2]])


def megabytes(value: Any) -> int:
    """A size in MB (1024-based), rounded up: 8192, "8192", "8gb", "4g", "1.5 GiB".

    Raises:
        ValueError: the value is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(value)
    if not found[2] and not found[3]:
        return math.ceil(float(found[1]))
    return math.ceil(float(found[1]) * _BYTES_OF[found[2].lower()] / 1024**2)
