"""The quota of each stream. Keeper and manager apply the same quota, so neither waits for bytes that the other omits.

Bytes beyond the quota stay in the attempt's folder: no file is ever truncated.
"""

from trial_keeper.wire.messages import Stream

# Ten million reports of a number are 1.1 GB, and 0.7 GB of database: more than any learning curve needs. A trial with more
# reports is in an endless loop, and would fill the manager's disk.
_METRICS_BYTES = 2 << 30
# Quota of each log. CI services truncate at 4 MiB or less; a training log of several days has a few hundred MiB.
_LOG_BYTES = 1 << 30

QUOTA_BYTES: dict[Stream, int] = dict.fromkeys(Stream, _LOG_BYTES) | {Stream.METRICS: _METRICS_BYTES}
"""The maximum number of bytes that are collected of each stream, per attempt and task."""


def collected(stream: Stream, size: int) -> int:
    """Return how many bytes are collected of a stream of this size."""
    return min(size, QUOTA_BYTES[stream])
