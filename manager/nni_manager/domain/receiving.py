"""The manager's half of replication: which of the bytes that arrive are new, and which are safe.

Theory of operation. For each stream of an attempt: durable <= received. A chunk may begin before `received` (it was sent
again after a lost link): what is there already is dropped. It can never begin after it, unless the keeper breaks the
protocol. New bytes become a `Commit`; once the store has committed it, `durable` moves, and only then is the keeper told.

A metric record is durable as a whole or not at all, so the durable offset of `metrics` lies between two records; the bytes
of a torn one are kept until the rest of it comes: never more than the longest record.

Only the first bytes of a stream are collected (`trial_keeper.wire.limits`). Those beyond are passed over, whoever sends them, and
nobody waits for them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nni_sdk import records
from nni_sdk.records import Decoded, Garbage, Record, decode
from trial_keeper.wire.limits import COLLECTED_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Offsets, Stream

# What one commit holds, so that many attempts can take turns in the store: 2 ms of its time, and as many numbers as a keeper's
# stream brings in one piece.
RECORDS_AT_ONCE = 600
_UNFINISHED = "the record was never finished"


class StreamBroken(ValueError):
    """The keeper left out bytes; it must connect again and go on from what is durable."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Effect: make this durable in one transaction.

    `data` are the bytes of a log, beginning at `offset`; metrics have `records` instead. `new_offset` is durable afterwards.
    `postscript` is to stand after the last byte that is collected of a log, and is no part of it.
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
        """Whether the stream is cut here: nothing that follows is collected."""
        return self.new_offset >= COLLECTED_BYTES[self.stream]


@dataclass(slots=True)
class _Inflow:
    durable: int
    received: int
    # Received, and not yet part of a commit: the beginning of a record. It starts where the last commit ended.
    torn: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Receiver:
    """What has arrived of one attempt."""

    key: AttemptKey
    _inflows: dict[Stream, _Inflow] = field(default_factory=dict)
    _final_sizes: Offsets | None = None

    @classmethod
    def restored(cls, key: AttemptKey, durable: Offsets) -> "Receiver":
        """Go on from what the store has."""
        return cls(key, {stream: _Inflow(offset, offset) for stream, offset in durable.items()})

    @property
    def durable(self) -> Mapping[Stream, int]:
        """What a keeper is told at Welcome."""
        return {stream: inflow.durable for stream, inflow in self._inflows.items()}

    @property
    def is_complete(self) -> bool:
        """Whether the attempt has ended and all of it is durable; also what came before an end that leaves it out."""
        return (
            self._final_sizes is not None
            and all(self._inflow(stream).durable >= size for stream, size in self._final_sizes.items())
            and all(inflow.durable >= inflow.received for inflow in self._inflows.values())
        )

    def received(self, stream: Stream) -> int:
        """Up to where bytes have arrived, durable or not."""
        return self._inflow(stream).received

    def take(self, stream: Stream, offset: int, data: bytes) -> list[Commit]:
        """A chunk arrived: what of it is to be committed. Behind the end of an attempt that is over nothing is.

        Raises:
            StreamBroken: bytes are missing before it.
        """
        inflow = self._inflow(stream)
        if offset > inflow.received:
            raise StreamBroken(
                f"cannot take {stream.value} of {self.key} from offset {offset}: only {inflow.received} bytes are here; "
                "connect again and go on from the offset in Welcome"
            )
        if self._final_sizes is not None and stream in self._final_sizes:
            data = data[: max(0, self._final_sizes[stream] - offset)]
        if inflow.received >= COLLECTED_BYTES[stream]:
            return []
        new = data[inflow.received - offset : collected(stream, offset + len(data)) - offset]
        if not new:
            return []
        inflow.received += len(new)
        if stream is Stream.METRICS:
            return self._take_metrics(inflow, new)
        return [Commit(self.key, stream, inflow.received - len(new), inflow.received, data=new)]

    def end(self, final_sizes: Offsets) -> list[Commit]:
        """The attempt is over; this many bytes count, as far as they are collected."""
        self._final_sizes = {stream: collected(stream, size) for stream, size in final_sizes.items()}
        inflow = self._inflow(Stream.METRICS)
        return self._give_up_torn(inflow) if self._ends_with(inflow) else []

    def committed(self, commit: Commit) -> None:
        """The store has made this durable."""
        self._inflow(commit.stream).durable = commit.new_offset

    def _take_metrics(self, inflow: _Inflow, new: bytes) -> list[Commit]:
        is_cut = inflow.received >= COLLECTED_BYTES[Stream.METRICS]
        inflow.torn += new
        if b"\n" not in new and len(inflow.torn) < records.MAX_FRAME_BYTES:
            commits = []  # nothing can have become whole; to look each time would cost the more the longer the record is
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

    def _pieces(self, decoded: Decoded, start: int) -> Iterator[Commit]:
        """Commits of a moderate size, each of whole records and of the garbage before and between them."""
        end, garbage = start + decoded.consumed, deque(decoded.garbage)
        for first in range(0, max(len(decoded.records), 1), RECORDS_AT_ONCE):
            piece = tuple(decoded.records[first : first + RECORDS_AT_ONCE])
            is_last = first + RECORDS_AT_ONCE >= len(decoded.records)
            new_offset = end if is_last else piece[-1].offset + piece[-1].size
            spans = []
            while garbage and garbage[0].offset < new_offset:
                spans.append(garbage.popleft())
            if new_offset > start:
                yield Commit(self.key, Stream.METRICS, start, new_offset, records=piece, garbage=tuple(spans))
            start = new_offset

    def _ends_with(self, inflow: _Inflow) -> bool:
        """Whether all metrics that count have arrived, of an attempt that has ended."""
        return self._final_sizes is not None and inflow.received >= self._final_sizes.get(Stream.METRICS, 0)

    def _give_up_torn(self, inflow: _Inflow, reason: str = _UNFINISHED) -> list[Commit]:
        """A record that will never be whole: its writer was killed, or its disk was full, in the middle of it."""
        if not inflow.torn:
            return []
        start = inflow.received - len(inflow.torn)
        garbage = Garbage(start, len(inflow.torn), reason)
        inflow.torn.clear()
        return [Commit(self.key, Stream.METRICS, start, inflow.received, garbage=(garbage,))]

    def _inflow(self, stream: Stream) -> _Inflow:
        return self._inflows.setdefault(stream, _Inflow(0, 0))
