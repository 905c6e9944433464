"""A time of day that only goes forward, for what is put in order or subtracted."""

import time

_OFFSET_S = time.time() - time.monotonic()


def steady_s() -> float:
    """Seconds since the epoch: the wall clock's when this process began, and as many more as have passed since.

    Setting the clock does not change it. A clock that was put right is followed by the next process.
    """
    return _OFFSET_S + time.monotonic()
