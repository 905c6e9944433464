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
from dataclasses import dataclass, field

from nni_sdk import records
from nni_sdk.records import Decoded, Garbage, Record, decode
from trial_keeper.wire.limits import QUOTA_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Offsets, Stream

# The most records in one write, so that many attempts share the store: 2 ms of its time, and about one chunk of a keeper.
RECORDS_AT_ONCE = 600
_UNFINISHED = "the record was never finished"


class OffsetGap(ValueError):
    """The keeper skipped bytes; it must reconnect and continue from the durable offset."""


@dataclass(frozen=True, slots=True)
class StreamWrite:
    """Effect: make this durable in one transaction.

    `data`: the bytes of a log, starting at `offset`; metrics have `records` instead. `new_offset`: the durable offset afterwards.
    `postscript`: a note to store after the last byte of a truncated log, not part of the log.
    """

    key: AttemptKey
    stream: Stream
    offset: int
    new_offset: int
    data: bytes = b""
    records: tuple[Record, ...] = ()
    garbage: tuple[Garbage, ...] = ()
    postscript: bytes = b""

    @property
    def is_last_collected(self) -> bool:
        """True if the stream is truncated here: it has reached its quota."""
        return self.new_offset >= QUOTA_BYTES[self.stream]


@dataclass(slots=True)
class _StreamCursor:
    durable: int
    received: int
    # A partial record: received, and not yet part of a write. It starts where the last write ended.
    torn: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class AttemptIngest:
    """The received streams of one attempt."""

    key: AttemptKey
    _cursors: dict[Stream, _StreamCursor] = field(default_factory=dict)
    _final_sizes: Offsets | None = None

    @classmethod
    def restored(cls, key: AttemptKey, durable: Offsets) -> "AttemptIngest":
        """Continue from the durable offsets in the store."""
        return cls(key, {stream: _StreamCursor(offset, offset) for stream, offset in durable.items()})

    @property
    def durable(self) -> Mapping[Stream, int]:
        """The durable offsets, which a keeper receives in Welcome."""
        return {stream: inflow.durable for stream, inflow in self._cursors.items()}

    @property
    def is_complete(self) -> bool:
        """True if the attempt has ended and all of it is durable, including received bytes beyond its final sizes."""
        return (
            self._final_sizes is not None
            and all(self._inflow(stream).durable >= size for stream, size in self._final_sizes.items())
            and all(inflow.durable >= inflow.received for inflow in self._cursors.values())
        )

    def received(self, stream: Stream) -> int:
        """The offset up to which bytes have arrived, durable or not."""
        return self._inflow(stream).received

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        """Accept a chunk and return the writes for its new bytes. Bytes beyond the final size of an ended attempt are ignored.

        Raises:
            OffsetGap: bytes are missing before the chunk.
        """
        inflow = self._inflow(stream)
        if offset > inflow.received:
            raise OffsetGap(
                f"cannot take {stream.value} of {self.key} from offset {offset}: only {inflow.received} bytes are here; "
                "connect again and go on from the offset in Welcome"
            )
        if self._final_sizes is not None and stream in self._final_sizes:
            data = data[: max(0, self._final_sizes[stream] - offset)]
        if inflow.received >= QUOTA_BYTES[stream]:
            return []
        new = data[inflow.received - offset : collected(stream, offset + len(data)) - offset]
        if not new:
            return []
        inflow.received += len(new)
        if stream is Stream.METRICS:
            return self._take_metrics(inflow, new)
        return [StreamWrite(self.key, stream, inflow.received - len(new), inflow.received, data=new)]

    def end(self, final_sizes: Offsets) -> list[StreamWrite]:
        """Record that the attempt has ended with these stream sizes, which the quotas may reduce."""
        self._final_sizes = {stream: collected(stream, size) for stream, size in final_sizes.items()}
        inflow = self._inflow(Stream.METRICS)
        return self._give_up_torn(inflow) if self._ends_with(inflow) else []

    def committed(self, commit: StreamWrite) -> None:
        """Record that the store has made a write durable."""
        self._inflow(commit.stream).durable = commit.new_offset

    def _take_metrics(self, inflow: _StreamCursor, new: bytes) -> list[StreamWrite]:
        is_cut = inflow.received >= QUOTA_BYTES[Stream.METRICS]
        inflow.torn += new
        if b"\n" not in new and len(inflow.torn) < records.MAX_FRAME_BYTES:
            commits = []  # no record can be complete; decoding each time would cost quadratic time
        else:
            whole = bytes(inflow.torn)
            start = inflow.received - len(whole)
            decoded = decode(whole, start)
            del inflow.torn[: decoded.consumed]
            commits = list(self._pieces(decoded, start))
        if is_cut or self._ends_with(inflow):
            commits += self._give_up_torn(
                inflow, "it lies where the metrics are cut" if is_cut else _UNFINISHED
            )
        return commits

    def _pieces(self, decoded: Decoded, start: int) -> Iterator[StreamWrite]:
        """Writes of moderate size, each of complete records and the corrupt spans before and between them."""
        end, garbage = start + decoded.consumed, deque(decoded.garbage)
        for first in range(0, max(len(decoded.records), 1), RECORDS_AT_ONCE):
            piece = tuple(decoded.records[first : first + RECORDS_AT_ONCE])
            is_last = first + RECORDS_AT_ONCE >= len(decoded.records)
            new_offset = end if is_last else piece[-1].offset + piece[-1].size
            spans = []
            while garbage and garbage[0].offset < new_offset:
                spans.append(garbage.popleft())
            if new_offset > start:
                yield StreamWrite(
                    self.key, Stream.METRICS, start, new_offset, records=piece, garbage=tuple(spans)
                )
            start = new_offset

    def _ends_with(self, inflow: _StreamCursor) -> bool:
        """True if the attempt has ended and all metrics up to its final size have arrived."""
        return self._final_sizes is not None and inflow.received >= self._final_sizes.get(Stream.METRICS, 0)

    def _give_up_torn(self, inflow: _StreamCursor, reason: str = _UNFINISHED) -> list[StreamWrite]:
        """Store the partial record as corrupt: its writer was killed, or the disk was full, while it was written."""
        if not inflow.torn:
            return []
        start = inflow.received - len(inflow.torn)
        garbage = Garbage(start, len(inflow.torn), reason)
        inflow.torn.clear()
        return [StreamWrite(self.key, Stream.METRICS, start, inflow.received, garbage=(garbage,))]

    def _inflow(self, stream: Stream) -> _StreamCursor:
        return self._cursors.setdefault(stream, _StreamCursor(0, 0))
