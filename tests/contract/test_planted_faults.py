"""Each part of this file has one planted fault. The state machine of the exactly-once test must detect the fault."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from amounts import amount
from hypothesis import Phase

import trial_keeper.core.replication as replication_module
from nni_manager.domain.ingest import AttemptIngest, OffsetGap, StreamWrite
from trial_keeper.core.replication import Replication
from trial_keeper.wire.messages import Offsets, Stream

# Each fault is found within a few hundred examples, where the run stops, so 4000 examples are enough. `derandomize` makes the
# examples nearly the same in every run: they differ only because Hypothesis also draws constants from imported modules.
GAME: dict[str, Any] = {"max_examples": 4000, "derandomize": True, "phases": [Phase.generate]}


class ResumesOneByteLate(Replication):
    """Off by one: regards `durable` as the offset of the last stored byte, although it is the offset of the next byte."""

    def link_came_up(self, durable: Offsets) -> None:
        super().link_came_up({stream: offset + 1 for stream, offset in durable.items()})


class StoresOneByteTwice(AttemptIngest):
    """Off by one: if a chunk starts with bytes that were already received, the last of these bytes is stored again."""

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        repeats = 0 < self.received(stream) - offset < len(data)
        return super().take(stream, offset + repeats, data)


class AcknowledgesBeforeCommit(AttemptIngest):
    """Regards received bytes as stored."""

    @property
    def durable(self) -> Mapping[Stream, int]:
        return {stream: self.received(stream) for stream in super().durable}


class StoresResentBytesAgain(AttemptIngest):
    """Ignores offsets, so it stores resent bytes as if they were new bytes."""

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        return super().take(stream, self.received(stream), data)


class OmitsAStream(Replication):
    """Replicates all streams except the last."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = tuple(streams)[:-1]
        super().__init__(self._streams)

    def grew(self, sizes: Offsets) -> None:
        super().grew({stream: sizes[stream] for stream in self._streams})


class ClosesBeforeDurable(AttemptIngest):
    """Regards an attempt as complete when its bytes have been received."""

    @property
    def is_complete(self) -> bool:
        return self._final_sizes is not None and all(
            self.received(stream) >= size for stream, size in self._final_sizes.items()
        )


class ChecksOnlyMetricsAtTheEnd(AttemptIngest):
    """Checks only the final size of the metrics stream."""

    @property
    def is_complete(self) -> bool:
        return (
            self._final_sizes is not None
            and self.durable.get(Stream.METRICS, 0) >= self._final_sizes[Stream.METRICS]
        )


class ResumesFromSentOffset(Replication):
    """Assumes after a lost link that all sent bytes were stored."""

    def link_came_up(self, durable: Offsets) -> None:
        sent = {stream: progress.sent for stream, progress in self._progress.items()}
        super().link_came_up({stream: max(durable.get(stream, 0), sent[stream]) for stream in sent})


class IgnoresTheWindow(Replication):
    """Sends all bytes without waiting for acknowledgements."""

    def confirmed(self, durable: Offsets) -> None:
        super().confirmed({stream: progress.size for stream, progress in self._progress.items()})


class KeepsPartialRecords(AttemptIngest):
    """Waits for the remainder of a record after its writer has ended."""

    def end(self, final_sizes: Offsets) -> list[StreamWrite]:
        self._final_sizes = dict(final_sizes)
        return []


FAULTS: list[tuple[type[Replication], type[AttemptIngest]]] = [
    (ResumesOneByteLate, AttemptIngest),
    (Replication, StoresOneByteTwice),
    (Replication, AcknowledgesBeforeCommit),
    (Replication, StoresResentBytesAgain),
    (OmitsAStream, AttemptIngest),
    (Replication, ClosesBeforeDurable),
    (Replication, ChecksOnlyMetricsAtTheEnd),
    (ResumesFromSentOffset, AttemptIngest),
    (IgnoresTheWindow, AttemptIngest),
    (Replication, KeepsPartialRecords),
]


def _name(part: object) -> str | None:
    return part.__name__ if isinstance(part, type) and part not in (Replication, AttemptIngest) else ""


@pytest.mark.parametrize(("replication_type", "receiver_type"), FAULTS, ids=_name)
def test_the_state_machine_test_detects_a_planted_fault(
    play: Callable[..., None], replication_type: type[Replication], receiver_type: type[AttemptIngest]
) -> None:
    with pytest.raises((AssertionError, OffsetGap)):
        play(replication_type, receiver_type, **GAME)


def test_the_state_machine_test_passes_without_a_planted_fault(play: Callable[..., None]) -> None:
    # A short run needs only 100 examples here, because other tests also run the state machine without a planted fault.
    play(**GAME | {"max_examples": amount(100, 400)})


def test_the_state_machine_test_detects_a_window_smaller_than_a_record(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_module, "METRICS_WINDOW_BYTES", 64)
    with pytest.raises(AssertionError, match="never closed"):
        play(**GAME)
