"""What a metric means to the search."""

import json
import math

# The newest intermediate result of every trial is kept in memory and shown in lists; of a longer one its number is.
LONGEST_SHOWN_CHARACTERS = 4096


def reward(value: str) -> float | None:
    """The number the tuner is told: the metric itself, or a dict's `default`. None when there is no such finite number.

    `value` is JSON text as the training code reported it; NaN and infinities are legal there, and no reward.
    """
    try:
        metric = json.loads(value)
        if isinstance(metric, dict):
            metric = metric.get("default")
        if isinstance(metric, bool) or not isinstance(metric, (int, float)):
            return None
        number = float(metric)
    except (ValueError, RecursionError, OverflowError):
        return None  # no JSON, or nested too deeply, or an int beyond all floats
    return number if math.isfinite(number) else None


def newest_shown(value: str) -> str | None:
    """What is kept in memory of a trial's newest intermediate result; None: it is long and has no number to learn from."""
    if len(value) <= LONGEST_SHOWN_CHARACTERS:
        return value
    number = reward(value)
    return None if number is None else json.dumps(number)


class Reported(float):
    """What a trial reported: the number as above, or NaN where there is none, and all of it as JSON text."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> "Reported":
        """`text` is as the training code reported it."""
        number = reward(text)
        reported = super().__new__(cls, math.nan if number is None else number)
        reported.text = text
        return reported
