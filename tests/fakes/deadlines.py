"""The deadlines of tests, scaled by the speed of the machine at the start of the run.

Tests wait for events. A deadline only reports that an event never occurred, so it is long, and nearly all tests use the same
deadline.
"""

import os
import statistics
import subprocess
import sys
import time

# On an idle core of the reference machine, an interpreter starts and imports these modules in this time.
_REFERENCE_S = 0.2
_MODULES = "asyncio, ssl, json, http.client"
_MAX_SLOWNESS = 8.0


def _measured_slowness() -> float:
    """The startup time of an interpreter, relative to the reference machine. Most tests wait for the start of an interpreter."""
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {_MODULES}"], check=True)
        took_s.append(time.monotonic() - began_s)
    return min(max(statistics.median(took_s) / _REFERENCE_S, 1.0), _MAX_SLOWNESS)


# Only the first process measures. Workers and other child processes inherit its result, so all of them use the same deadlines.
if "TEST_SLOWNESS" not in os.environ:
    os.environ["TEST_SLOWNESS"] = f"{_measured_slowness():.2f}"
SLOWNESS = float(os.environ["TEST_SLOWNESS"])


def scaled_s(seconds: float) -> float:
    """The deadline on this machine for an operation that takes at most `seconds` on the reference machine while five test workers
    run.
    """
    return seconds * SLOWNESS


DEADLINE_S = scaled_s(90.0)
"""The deadline of an event."""
