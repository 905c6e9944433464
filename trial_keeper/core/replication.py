"""Replication by offset: which bytes of an attempt's files to send next, and which are durable at the manager.

Theory of operation. A stream is a file that only grows. Each stream has three numbers, durable <= sent <= size:

    size     bytes known to be in the file
    sent     bytes handed to the link since it came up
    durable  bytes that the manager has acknowledged as durable: they survive the manager's death

The keeper stores none of these numbers on disk. When a link comes up, the manager's Welcome sets both sent and durable to its
durable offsets; when the link goes down nothing changes. So a chunk may be sent twice, and the manager drops the bytes that it
already has. No chunk is ever skipped, because only the manager's acks advance `durable`.

The distance between sent and durable is bounded per stream (the window), so neither side ever holds more than a window in
memory. However long the manager is unreachable, the bytes wait in the file.

Each stream has a quota (`trial_keeper.wire.limits`); bytes beyond the quota stay in the file and are never sent.

A truncated file is detected when due bytes cannot be read because the file is shorter. The lost bytes cannot be sent, so the
stream ends there permanently, and bytes that are appended later do not count.
"""

from collections.abc import Iterable

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.limits import QUOTA_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Offsets, Stream

# A metric waits for at most one of these chunks on its way into the link: 20 ms at 100 Mbit/s. Smaller chunks would cost half as
# much CPU again: most of the cost is per message.
LOG_CHUNK_BYTES = 256 * 1024
METRICS_CHUNK_BYTES = 256 * 1024
# With an ack after 10 ms this window carries 200 MB/s; logs reach this rate only between trials, as the link throttles them
# otherwise. Bytes that arrive during a disk sync wait for the next sync, so half of this window gives two thirds of the log rate.
# Doubling it gains little.
LOG_WINDOW_BYTES = 2 * 1024 * 1024
# A metric record is durable only as a whole, so the window must hold the longest record (999,999 bytes and its frame).
METRICS_WINDOW_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Effect: read bytes of a file and send them over the link that is up. `size_bytes` is at least 1."""

    key: AttemptKey
    stream: Stream
    offset: int
    size_bytes: int


@dataclass(slots=True)
class _Progress:
    size: int = 0
    sent: int = 0
    durable: int = 0
    end: int | None = None
    """Bytes after this offset do not count: the attempt has ended, or the file was truncated."""

    def counted(self, size: int) -> int:
        return size if self.end is None else min(size, self.end)


class Replication:
    """The replication of one attempt's streams. Streams are sent in the given order, most urgent first."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._progress = {stream: _Progress() for stream in streams}
        self._link_is_up = False

    def grew(self, sizes: Offsets) -> None:
        """Record the current sizes of the files. A smaller size is ignored: appended bytes stay counted."""
        for stream, size in sizes.items():
            progress = self._progress[stream]
            progress.size = max(progress.size, progress.counted(size))

    def size_of(self, stream: Stream) -> int:
        """Bytes known to be in the stream."""
        return self._progress[stream].size

    def truncated(self, sizes: Offsets) -> list[Stream]:
        """Return the streams whose files are shorter in `sizes` than before, except streams that have ended."""
        return [
            stream
            for stream, progress in self._progress.items()
            if progress.end is None and sizes.get(stream, progress.size) < progress.size
        ]

    @property
    def over_quota(self) -> tuple[Stream, ...]:
        """The streams that exceed their quota."""
        return tuple(
            stream for stream, progress in self._progress.items() if progress.size > QUOTA_BYTES[stream]
        )

    def ended(self, final_sizes: Offsets) -> None:
        """End the attempt: bytes after these sizes do not count."""
        for stream, progress in self._progress.items():
            # The size shrinks if the file was truncated.
            progress.size = progress.end = progress.counted(final_sizes[stream])

    def cut(self, stream: Stream, offset: int, size: int) -> int:
        """End a truncated stream: the chunk at `offset` is unreadable, as the file has only `size` bytes.

        Returns the stream's end.
        """
        progress = self._progress[stream]
        # All bytes before the chunk are in transit. If the link loses them, the next read finds the new end.
        progress.end = progress.counted(max(offset, size))
        progress.size = min(progress.size, progress.end)
        progress.sent = min(progress.sent, offset)
        return progress.end

    def final_sizes(self, sizes: Offsets) -> dict[Stream, int]:
        """Return how many bytes of each stream count if the files have these sizes at the end of the attempt.

        Bytes that the manager has, or that are in transit, count even if the file no longer has them.
        """
        return {
            stream: progress.counted(
                max(sizes.get(stream, 0), progress.sent if self._link_is_up else progress.durable)
            )
            for stream, progress in self._progress.items()
        }

    def is_due(self, chunk: SendChunk) -> bool:
        """True if a chunk may still be read and sent: the link is up, and the stream does not end before the chunk does."""
        return self._link_is_up and chunk.offset + chunk.size_bytes <= self._progress[chunk.stream].size

    def link_came_up(self, durable: Offsets) -> None:
        """Reset to the manager's durable offsets. A stream that is missing in `durable` starts at 0."""
        self._link_is_up = True
        for stream, progress in self._progress.items():
            progress.sent = progress.durable = durable.get(stream, 0)

    def link_went_down(self) -> None:
        """Record the loss of the link. The next Welcome reports whether bytes without an ack have arrived."""
        self._link_is_up = False

    def confirmed(self, durable: Offsets) -> None:
        """Record the manager's durable offsets. Ignores streams that are not replicated, and smaller offsets."""
        for stream, offset in durable.items():
            progress = self._progress.get(stream)
            if progress is not None:
                progress.durable = max(progress.durable, offset)
                progress.sent = max(progress.sent, offset)

    def next_chunks(self, key: AttemptKey) -> list[SendChunk]:
        """Return all chunks that may be sent now, in sending order, and count them as sent. `key`: the attempt."""
        if not self._link_is_up:
            return []
        chunks: list[SendChunk] = []
        for stream, progress in self._progress.items():
            urgent = stream is Stream.METRICS
            largest = METRICS_CHUNK_BYTES if urgent else LOG_CHUNK_BYTES
            window = METRICS_WINDOW_BYTES if urgent else LOG_WINDOW_BYTES
            limit = min(collected(stream, progress.size), progress.durable + window)
            while progress.sent < limit:
                size_bytes = min(largest, limit - progress.sent)
                chunks.append(SendChunk(key, stream, progress.sent, size_bytes))
                progress.sent += size_bytes
        return chunks
