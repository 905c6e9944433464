"""How much of a trial is collected. Keeper and manager count alike, so neither waits for bytes that the other leaves out.

What lies beyond stays in the attempt's folder, whole: nothing is ever cut from a file.
"""

from trial_keeper.wire.messages import Stream

# Ten million reports of a number are 1.1 GB and 0.7 GB of database; nobody reads a curve of more. Beyond that a trial reports in
# a loop that forgot to end, and would fill the manager's disk for all others.
_METRICS_BYTES = 2 << 30
# Of each log. CI services end at 4 MiB and less; a training log of days has some hundred. More is a flood that nobody reads.
_LOG_BYTES = 1 << 30

COLLECTED_BYTES: dict[Stream, int] = {
    Stream.METRICS: _METRICS_BYTES,
    Stream.STDOUT: _LOG_BYTES,
    Stream.STDERR: _LOG_BYTES,
    Stream.KEEPER: _LOG_BYTES,
}
"""The first so many bytes of each stream of an attempt are collected; of several tasks, from each."""


def collected(stream: Stream, size: int) -> int:
    """How many bytes are collected of a stream that has this size."""
    return min(size, COLLECTED_BYTES[stream])
