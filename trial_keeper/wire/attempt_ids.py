"""Attempt ids: random, never used twice, and sortable by start.

An id is a ULID: 48 bits of milliseconds since the epoch, then 80 random bits, as 26 letters of Crockford's base 32. So the ids of
one task sort by the attempts' starts, and the signature of an id covers its start. Attempts of version 0.6 and earlier keep
their number, which sorts before every ULID.

Source: github.com/ulid/spec.
"""

import os
import re

_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# The first letter holds three bits: 26 letters are 130 bits, and a ULID has 128.
_ULID = re.compile(rf"[0-7][{_LETTERS}]{{25}}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_RANDOM_BYTES = 10
_TIME_LETTERS = 10
MAX_START_MS = 2**48 - 1


def new_attempt_id(now_s: float, after: str | None = None) -> str:
    """Return a new id of an attempt that starts at `now_s`, in seconds since the epoch.

    `after`: an earlier attempt of the same task. The new id sorts after it, even if the clock was set back meanwhile.
    """
    start_ms = int(now_s * 1000)
    if after is not None and is_attempt_id(after):
        start_ms = max(start_ms, start_ms_of(after) + 1)
    number = (min(start_ms, MAX_START_MS) << 8 * _RANDOM_BYTES) | int.from_bytes(
        os.urandom(_RANDOM_BYTES), "big"
    )
    return "".join(_LETTERS[(number >> shift) & 31] for shift in range(125, -1, -5))


def is_attempt_id(text: str) -> bool:
    """True for an id of this version's format."""
    return _ULID.fullmatch(text) is not None


def is_legacy_number(text: str) -> bool:
    """True for the number that names an attempt of version 0.6 or earlier."""
    return _NUMBER.fullmatch(text) is not None


def start_ms_of(attempt_id: str) -> int:
    """Return the attempt's creation time, in milliseconds since the epoch; 0 for one of version 0.6 or earlier."""
    if not is_attempt_id(attempt_id):
        return 0
    start_ms = 0
    for letter in attempt_id[:_TIME_LETTERS]:
        start_ms = start_ms << 5 | _LETTERS.index(letter)
    return start_ms


def sort_key(attempt_id: str) -> tuple[int, str]:
    """Sort key: attempts of one task by their start; numbers of version 0.6 come first."""
    return len(attempt_id), attempt_id
