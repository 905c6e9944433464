"""Replication by offset: which bytes of an attempt's files to send next, and which are safe with the manager.

Theory of operation. A stream is a file that only grows. For each stream three numbers are kept, durable <= sent <= size:

    size     bytes known to be in the file
    sent     bytes handed to the link since it came up
    durable  bytes that the manager has confirmed to survive its own death

The keeper stores none of them. When a link comes up the manager says what it durably has, and sent = durable = that; when
the link goes down nothing is done at all. So a chunk may travel twice, and the manager drops what it already has; a chunk
can never be skipped, because nothing but the manager's word moves `durable`.

The distance between sent and durable is bounded per stream (the window), so neither side ever holds more than that in
memory, however long the manager is away: the bytes wait in the file.

Only the first bytes of a stream are collected (`trial_keeper.wire.limits`); those beyond stay in the file and are never sent.

Somebody may cut a file all the same. That is noticed, and believed, when bytes that are due cannot be read because the file is
shorter: what is gone can be sent by nobody, so the stream ends there for good, and what is appended later does not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trial_keeper.wire.limits import COLLECTED_BYTES, collected
from trial_keeper.wire.messages import Offsets, Stream

# A metric never waits behind more than one of these on its way into the link: 20 ms at 100 Mbit/s. Smaller ones would cost half
# as much CPU again: most of that is for a message, whatever its size.
LOG_CHUNK_BYTES = 256 * 1024
METRICS_CHUNK_BYTES = 256 * 1024
# At 10 ms per confirmed round trip these carry 100 MB/s each, of logs only when no trial runs that the link holds them back for.
# What comes while the disk syncs is synced together the next time: with half of this, logs come at two thirds of the rate.
LOG_WINDOW_BYTES = 1024 * 1024
# A metric record is durable only as a whole, so the window must hold the longest one (999,999 bytes and its frame).
METRICS_WINDOW_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChunkToSend:
    """Effect: read these bytes of the stream and send them. `size_bytes` is at least 1."""

    stream: Stream
    offset: int
    size_bytes: int


@dataclass(slots=True)
class _Progress:
    size: int = 0
    sent: int = 0
    durable: int = 0
    end: int | None = None
    """No byte from here on counts: the attempt is over, or the file was cut."""

    def counted(self, size: int) -> int:
        return size if self.end is None else min(size, self.end)


class Replication:
    """The replication of one attempt's streams. Streams are sent in the order given, so the most urgent comes first."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._progress = {stream: _Progress() for stream in streams}
        self._link_is_up = False

    @property
    def streams(self) -> tuple[Stream, ...]:
        """What is replicated, most urgent first."""
        return tuple(self._progress)

    def grew(self, sizes: Offsets) -> None:
        """The files have these sizes now. A size that shrank is ignored: what was appended stays appended."""
        for stream, size in sizes.items():
            progress = self._progress[stream]
            progress.size = max(progress.size, progress.counted(size))

    @property
    def beyond_collection(self) -> tuple[Stream, ...]:
        """The streams of which there is more than is ever sent."""
        return tuple(
            stream for stream, progress in self._progress.items() if progress.size > COLLECTED_BYTES[stream]
        )

    def ended(self, final_sizes: Offsets) -> None:
        """The attempt is over: bytes after these sizes do not count."""
        for stream, progress in self._progress.items():
            # Smaller than before if somebody cut the file.
            progress.size = progress.end = progress.counted(final_sizes[stream])

    def cut(self, stream: Stream, offset: int, size: int) -> int:
        """The chunk at `offset` could not be read: the file has only `size` bytes. Where the stream ends now."""
        progress = self._progress[stream]
        # Everything before the chunk is on its way. Should that be lost with the link, the next read finds the new end.
        progress.end = progress.counted(max(offset, size))
        progress.size = min(progress.size, progress.end)
        progress.sent = min(progress.sent, offset)
        return progress.end

    def final_sizes(self, sizes: Offsets) -> dict[Stream, int]:
        """How many bytes of each stream count, when the files have these sizes at the end of the attempt.

        What the manager has, or has on its way, counts also if the file has lost it since.
        """
        return {
            stream: progress.counted(
                max(sizes.get(stream, 0), progress.sent if self._link_is_up else progress.durable)
            )
            for stream, progress in self._progress.items()
        }

    def is_due(self, chunk: ChunkToSend) -> bool:
        """Whether a chunk may still be read and sent: the link is up, and its stream does not end before."""
        return self._link_is_up and chunk.offset + chunk.size_bytes <= self._progress[chunk.stream].size

    def link_came_up(self, durable: Offsets) -> None:
        """A manager is there and has this much. A stream it does not name it does not know."""
        self._link_is_up = True
        for stream, progress in self._progress.items():
            progress.sent = progress.durable = durable.get(stream, 0)

    def link_went_down(self) -> None:
        """What was sent and not confirmed may be lost or not; only the next Welcome tells."""
        self._link_is_up = False

    def confirmed(self, durable: Offsets) -> None:
        """The manager has made these offsets durable. A stream that is not replicated is ignored; so is an older word."""
        for stream, offset in durable.items():
            progress = self._progress.get(stream)
            if progress is not None:
                progress.durable = max(progress.durable, offset)
                progress.sent = max(progress.sent, offset)

    def next_chunks(self) -> list[ChunkToSend]:
        """All that may be sent now, in sending order. They count as sent from here on."""
        if not self._link_is_up:
            return []
        chunks: list[ChunkToSend] = []
        for stream, progress in self._progress.items():
            urgent = stream is Stream.METRICS
            largest = METRICS_CHUNK_BYTES if urgent else LOG_CHUNK_BYTES
            window = METRICS_WINDOW_BYTES if urgent else LOG_WINDOW_BYTES
            limit = min(collected(stream, progress.size), progress.durable + window)
            while progress.sent < limit:
                size_bytes = min(largest, limit - progress.sent)
                chunks.append(ChunkToSend(stream, progress.sent, size_bytes))
                progress.sent += size_bytes
        return chunks
