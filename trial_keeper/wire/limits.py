"""The quota of each stream. Keeper and manager apply the same, so neither waits for bytes that the other omits.

Bytes beyond it stay in the attempt's folder: no file is ever truncated.
"""

from trial_keeper.wire.messages import Stream

# Ten million reports of a number are 1.1 GB and 0.7 GB of database, more than any learning curve needs. A trial with more has an
# endless loop, and would fill the manager's disk for all others.
_METRICS_BYTES = 2 << 30
# Quota of each log. CI services truncate at 4 MiB or less; a training log of several days has a few hundred MiB.
_LOG_BYTES = 1 << 30

QUOTA_BYTES: dict[Stream, int] = {
    Stream.METRICS: _METRICS_BYTES,
    Stream.STDOUT: _LOG_BYTES,
    Stream.STDERR: _LOG_BYTES,
    Stream.KEEPER: _LOG_BYTES,
}
"""The number of bytes of each stream of an attempt that are collected; with several tasks, of each."""


def collected(stream: Stream, size: int) -> int:
    """Return how many bytes are collected of a stream of this size."""
    return min(size, QUOTA_BYTES[stream])
