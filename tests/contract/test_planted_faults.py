"""The test of the test: parts that are wrong in one place each, and the exactly-once machine that has to notice."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import Phase

import trial_keeper.core.replication as replication_module
from nni_manager.domain.ingest import AttemptIngest, OffsetGap, StreamWrite
from trial_keeper.core.replication import Replication
from trial_keeper.wire.messages import Offsets, Stream

# The same for the right parts and for the wrong ones, and the same in every run. The best hidden fault is found after half.
SAME_GAME: dict[str, Any] = {"max_examples": 400, "derandomize": True, "phases": [Phase.generate]}


class GoesOnOneByteLate(Replication):
    """Off by one in the offset: takes `durable` for the last byte that is there, not for the first that is not."""

    def link_came_up(self, durable: Offsets) -> None:
        super().link_came_up({stream: offset + 1 for stream, offset in durable.items()})


class TakesOneByteTwice(AttemptIngest):
    """Off by one in the offset, the other way round."""

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        repeats = 0 < self.received(stream) - offset < len(data)
        return super().take(stream, offset + repeats, data)


class AcknowledgesBeforeCommit(AttemptIngest):
    """What has arrived counts as safe."""

    @property
    def durable(self) -> Mapping[Stream, int]:
        return {stream: self.received(stream) for stream in super().durable}


class CountsWhatComesAgainAsNew(AttemptIngest):
    """Forgets that offsets are what tells new from old."""

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        return super().take(stream, self.received(stream), data)


class ForgetsAStream(Replication):
    """Replicates all streams but the last."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = tuple(streams)[:-1]
        super().__init__(self._streams)

    def grew(self, sizes: Offsets) -> None:
        super().grew({stream: sizes[stream] for stream in self._streams})


class ClosesBeforeDurable(AttemptIngest):
    """Takes an attempt for complete once its bytes have arrived."""

    @property
    def is_complete(self) -> bool:
        return self._final_sizes is not None and all(
            self.received(stream) >= size for stream, size in self._final_sizes.items()
        )


class ForgetsAStreamAtTheEnd(AttemptIngest):
    """The final size of the metrics is all that counts."""

    @property
    def is_complete(self) -> bool:
        return (
            self._final_sizes is not None
            and self.durable.get(Stream.METRICS, 0) >= self._final_sizes[Stream.METRICS]
        )


class GoesOnFromWhereItWas(Replication):
    """Believes after a lost link that all it sent has come through."""

    def link_came_up(self, durable: Offsets) -> None:
        sent = {stream: progress.sent for stream, progress in self._progress.items()}
        super().link_came_up({stream: max(durable.get(stream, 0), sent[stream]) for stream in sent})


class KnowsNoWindow(Replication):
    """Sends all there is."""

    def confirmed(self, durable: Offsets) -> None:
        super().confirmed({stream: progress.size for stream, progress in self._progress.items()})


class KeepsTornRecordsForEver(AttemptIngest):
    """Waits for the rest of a record whose writer is gone."""

    def end(self, final_sizes: Offsets) -> list[StreamWrite]:
        self._final_sizes = dict(final_sizes)
        return []


FAULTS: list[tuple[type[Replication], type[AttemptIngest]]] = [
    (GoesOnOneByteLate, AttemptIngest),
    (Replication, TakesOneByteTwice),
    (Replication, AcknowledgesBeforeCommit),
    (Replication, CountsWhatComesAgainAsNew),
    (ForgetsAStream, AttemptIngest),
    (Replication, ClosesBeforeDurable),
    (Replication, ForgetsAStreamAtTheEnd),
    (GoesOnFromWhereItWas, AttemptIngest),
    (KnowsNoWindow, AttemptIngest),
    (Replication, KeepsTornRecordsForEver),
]


def _name(part: object) -> str | None:
    return part.__name__ if isinstance(part, type) and part not in (Replication, AttemptIngest) else ""


@pytest.mark.parametrize(("replication_type", "receiver_type"), FAULTS, ids=_name)
def test_the_machine_notices(
    play: Callable[..., None], replication_type: type[Replication], receiver_type: type[AttemptIngest]
) -> None:
    with pytest.raises((AssertionError, OffsetGap)):
        play(replication_type, receiver_type, **SAME_GAME)


def test_the_machine_finds_nothing_wrong_with_the_right_parts(play: Callable[..., None]) -> None:
    play(**SAME_GAME)


def test_the_machine_notices_a_window_that_is_smaller_than_a_record(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_module, "METRICS_WINDOW_BYTES", 64)
    with pytest.raises(AssertionError, match="never closed"):
        play(**SAME_GAME)
