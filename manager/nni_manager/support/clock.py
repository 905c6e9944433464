"""A wall-clock time that never goes back, for ordering and for durations."""

import time

_OFFSET_S = time.time() - time.monotonic()


def monotonic_epoch_s() -> float:
    """Seconds since the epoch: the wall clock at the start of this process, plus the monotonic time since.

    Setting the wall clock does not change the result in this process. The next process uses the corrected clock.
    """
    return _OFFSET_S + time.monotonic()
