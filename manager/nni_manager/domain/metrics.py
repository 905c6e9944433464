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
