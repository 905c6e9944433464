"""The manager's side of replication: tracks which bytes of each stream are received and which are durable.

Theory of operation. For each stream of an attempt: durable <= received. A chunk may start before `received` (it was resent
after a lost connection): the overlap is dropped. A chunk that starts after `received` violates the protocol. New bytes become
a `StreamWrite`. Once the store has committed it, `durable` advances, and only then the keeper gets its ack.

A metric record becomes durable as a whole or not at all, so the durable offset of `metrics` lies between two records. The bytes
of a partial record are kept until the rest arrives: never more than the longest record.

Each stream has a quota (`trial_keeper.wire.limits`). Bytes beyond it are ignored, and no attempt waits for them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field

from nni_sdk import records
from nni_sdk.records import Decoded, Garbage, Mark, Record, decode
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.checkpoints import MAX_CHECKPOINTS
from trial_keeper.wire.limits import QUOTA_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Offsets, Stream

# The most records in one write: about one chunk of a keeper. Each write takes 2 ms, so many attempts can share the store.
RECORDS_AT_ONCE = 600
# A process of a trial rarely loads a checkpoint twice. More loads of one attempt are ignored: every later mark reads them all.
MAX_CONTINUATIONS = 1000
_UNFINISHED = "the record is incomplete"


class OffsetGap(ValueError):
    """The keeper skipped bytes; it must reconnect and continue from the durable offset."""


@dataclass(frozen=True, slots=True)
class StreamWrite:
    """Effect: make this durable in one transaction.

    `data`: the bytes of a log, starting at `offset`; metrics have `records` and `marks` instead. `new_offset`: the durable offset
    afterwards. `postscript`: a note to store after the last byte of a truncated log, not part of the log.
    """

    key: AttemptKey
    stream: Stream
    offset: int
    new_offset: int
    data: bytes = b""
    records: tuple[Record, ...] = ()
    garbage: tuple[Garbage, ...] = ()
    postscript: bytes = b""
    marks: tuple[Mark, ...] = ()

    @property
    def is_last_collected(self) -> bool:
        """True if the stream is truncated here: it has reached its quota."""
        return self.new_offset >= QUOTA_BYTES[self.stream]


@dataclass(slots=True)
class _StreamCursor:
    durable: int
    received: int
    # The received bytes of a partial record, which are not part of a write yet. They start where the last write ended.
    partial: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class AttemptIngest:
    """The received streams of one attempt."""

    key: AttemptKey
    _cursors: dict[Stream, _StreamCursor] = field(default_factory=dict)
    _final_sizes: Offsets | None = None
    _continuations: int = 0

    @classmethod
    def restored(cls, key: AttemptKey, durable: Offsets) -> "AttemptIngest":
        """Continue from the durable offsets in the store."""
        return cls(key, {stream: _StreamCursor(offset, offset) for stream, offset in durable.items()})

    @property
    def durable(self) -> Mapping[Stream, int]:
        """The durable offsets, which a keeper receives in Welcome."""
        return {stream: cursor.durable for stream, cursor in self._cursors.items()}

    @property
    def is_complete(self) -> bool:
        """True if the attempt has ended and all of it is durable, including received bytes beyond its final sizes."""
        return (
            self._final_sizes is not None
            and all(self._cursor(stream).durable >= size for stream, size in self._final_sizes.items())
            and all(cursor.durable >= cursor.received for cursor in self._cursors.values())
        )

    def received(self, stream: Stream) -> int:
        """The offset up to which bytes have arrived, durable or not."""
        return self._cursor(stream).received

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        """Accept a chunk and return the writes for its new bytes. Bytes beyond the final size of an ended attempt are ignored.

        Raises:
            OffsetGap: bytes are missing before the chunk.
        """
        cursor = self._cursor(stream)
        if offset > cursor.received:
            raise OffsetGap(
                f"cannot accept {stream.value} of {self.key} from offset {offset}: only {cursor.received} bytes have arrived; "
                "reconnect and continue from the offset in Welcome"
            )
        if self._final_sizes is not None and stream in self._final_sizes:
            data = data[: max(0, self._final_sizes[stream] - offset)]
        if cursor.received >= QUOTA_BYTES[stream]:
            return []
        new = data[cursor.received - offset : collected(stream, offset + len(data)) - offset]
        if not new:
            return []
        cursor.received += len(new)
        if stream is Stream.METRICS:
            return self._take_metrics(cursor, new)
        return [StreamWrite(self.key, stream, cursor.received - len(new), cursor.received, data=new)]

    def end(self, final_sizes: Offsets) -> list[StreamWrite]:
        """Record that the attempt has ended with these stream sizes, which the quotas may reduce."""
        self._final_sizes = {stream: collected(stream, size) for stream, size in final_sizes.items()}
        cursor = self._cursor(Stream.METRICS)
        return self._store_partial(cursor) if self._ends_with(cursor) else []

    def committed(self, commit: StreamWrite) -> None:
        """Record that the store has made a write durable."""
        self._cursor(commit.stream).durable = commit.new_offset

    def _take_metrics(self, cursor: _StreamCursor, new: bytes) -> list[StreamWrite]:
        is_truncated = cursor.received >= QUOTA_BYTES[Stream.METRICS]
        cursor.partial += new
        if b"\n" not in new and len(cursor.partial) < records.MAX_FRAME_BYTES:
            commits = []  # no record is complete; decoding at every chunk would take quadratic time
        else:
            whole = bytes(cursor.partial)
            start = cursor.received - len(whole)
            decoded = decode(whole, start)
            del cursor.partial[: decoded.consumed]
            commits = list(self._pieces(decoded, start))
        if is_truncated or self._ends_with(cursor):
            commits += self._store_partial(
                cursor, "the metrics are truncated inside this record" if is_truncated else _UNFINISHED
            )
        return commits

    def _pieces(self, decoded: Decoded, start: int) -> Iterator[StreamWrite]:
        """Writes of moderate size, each of complete records and the corrupt spans before and between them."""
        end, garbage, marks = start + decoded.consumed, deque(decoded.garbage), deque(decoded.marks)
        for first in range(0, max(len(decoded.records), 1), RECORDS_AT_ONCE):
            piece = tuple(decoded.records[first : first + RECORDS_AT_ONCE])
            is_last = first + RECORDS_AT_ONCE >= len(decoded.records)
            new_offset = end if is_last else piece[-1].offset + piece[-1].size
            spans = []
            while garbage and garbage[0].offset < new_offset:
                spans.append(garbage.popleft())
            own_marks = []
            while marks and marks[0].offset < new_offset:
                own_marks.append(marks.popleft())
            if new_offset > start:
                yield StreamWrite(
                    self.key,
                    Stream.METRICS,
                    start,
                    new_offset,
                    records=piece,
                    garbage=tuple(spans),
                    marks=tuple(self._bounded(own_marks)),
                )
            start = new_offset

    def _bounded(self, marks: list[Mark]) -> list[Mark]:
        """Of these marks those that can matter: keepers sign no other checkpoints than the newest ones."""
        checkpoints = [mark for mark in marks if mark.attempt_id is None][-MAX_CHECKPOINTS:]
        continuations = [mark for mark in marks if mark.attempt_id is not None]
        continuations = continuations[: MAX_CONTINUATIONS - self._continuations]
        self._continuations += len(continuations)
        return sorted([*checkpoints, *continuations], key=lambda mark: mark.offset)

    def _ends_with(self, cursor: _StreamCursor) -> bool:
        """True if the attempt has ended and all metrics up to its final size have arrived."""
        return self._final_sizes is not None and cursor.received >= self._final_sizes.get(Stream.METRICS, 0)

    def _store_partial(self, cursor: _StreamCursor, reason: str = _UNFINISHED) -> list[StreamWrite]:
        """Store the partial record as corrupt: its writer was killed, or the disk was full, during the write."""
        if not cursor.partial:
            return []
        start = cursor.received - len(cursor.partial)
        garbage = Garbage(start, len(cursor.partial), reason)
        cursor.partial.clear()
        return [StreamWrite(self.key, Stream.METRICS, start, cursor.received, garbage=(garbage,))]

    def _cursor(self, stream: Stream) -> _StreamCursor:
        return self._cursors.setdefault(stream, _StreamCursor(0, 0))
