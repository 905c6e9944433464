"""What a metric means to the search."""

import json
import math

# The newest intermediate result of every trial is kept in memory and shown in lists; a longer one is in its row only.
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
