"""Delays between the tries of a call: exponential, with jitter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

# Jobs that fail together must not all be retried at the same moment.
SMALLEST_SHARE = 0.75
# 2**32 exceeds every ratio of two delays; a larger power would overflow after hours.
_MAX_EXPONENT = 32


def delay_s(failures: int, first_s: float, longest_s: float) -> float:
    """Returns the delay after `failures` consecutive failures, at least 1. Each failure doubles the delay.

    Jitter only shortens the delay, to no less than SMALLEST_SHARE of it.
    """
    nominal_s: float = min(first_s * 2 ** min(failures - 1, _MAX_EXPONENT), longest_s)
    return nominal_s * random.uniform(SMALLEST_SHARE, 1.0)


def delays_s(first_s: float, longest_s: float) -> Iterator[float]:
    """Yields the delays between the tries of a call that is repeated until it succeeds. See `delay_s`."""
    return (delay_s(failures, first_s, longest_s) for failures in itertools.count(1))
