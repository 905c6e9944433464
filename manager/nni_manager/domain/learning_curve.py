"""Joins the records of a trial's attempts: those up to a checkpoint, then those of the attempt that continued from there.

Records stay under their own attempt. A checkpoint leaves a mark at its place in the metrics of its attempt. A process that
continues from it leaves a mark that names attempt and checkpoint, before its next report. From the attempt that counts, the curve
is followed backwards from mark to mark. What an attempt reported after the checkpoint is reported again, so it counts no more.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import AttemptKey

NO_END = 2**62
"""The end of a segment to which records may still be added."""
_Name: TypeAlias = tuple[str, str, str]
"""Of a checkpoint: its attempt's id, its task, and its own name."""


@dataclass(frozen=True, slots=True)
class StoredMark:
    """A mark in the metrics of an attempt: a checkpoint; with `source`, where a process continued from that attempt's one.

    `offset` is that of its record. `load`: the same in all marks of one load, of which the first counts.
    """

    attempt: int
    attempt_id: str
    task: str
    offset: int
    checkpoint: str
    source: AttemptKey | None = None
    load: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """The records of an attempt's task between two offsets, both excluded."""

    attempt: int
    task: str
    after_offset: int = -1
    end_offset: int = NO_END


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """The segments of a trial's records that count, in order.

    `missing`: the attempt whose records before the first segment are not stored, up to the checkpoint from which that segment
    continues; None: none are missing.
    """

    segments: tuple[Segment, ...]
    missing: AttemptKey | None = None

    def up_to(self, attempt: int, task: str) -> tuple[Segment, ...]:
        """The segments before the last one, up to the last of them of an attempt's task; none if they do not contain it."""
        earlier = self.segments[:-1]
        of_attempt = [n for n, each in enumerate(earlier) if (each.attempt, each.task) == (attempt, task)]
        return earlier[: of_attempt[-1] + 1] if of_attempt else ()


@dataclass(frozen=True, slots=True)
class InheritedResults:
    """The results before the checkpoint from which an attempt continues.

    `intermediate`: the newest of the `intermediate_count` intermediate ones, `final`: the first final one, both as JSON text.
    `numbers`: the intermediate ones in the form that the assessor receives; empty if there is none, or if it has them.
    """

    intermediate_count: int = 0
    intermediate: str | None = None
    numbers: tuple[float, ...] = ()
    final: str | None = None


def curve_of(
    trial_id: str, marks: Sequence[StoredMark], attempt: int, task: str, end_offset: int = NO_END
) -> LearningCurve:
    """The curve that ends in a task of an attempt, before `end_offset`. `marks`: all of the trial, those of a task in order.

    Records of another trial, or of another task, belong to no curve of this one.
    """
    continuations = _continuations(marks)
    checkpoints: dict[_Name, StoredMark] = {}
    for each in marks:
        if each.source is None:
            checkpoints.setdefault((each.attempt_id, each.task, each.checkpoint), each)
    segments: list[Segment] = []
    missing = None
    followed: set[StoredMark] = set()
    while True:
        of_task = continuations.get((attempt, task), [])
        before = bisect_left(of_task, end_offset, key=lambda each: each.offset)
        start = of_task[before - 1] if before else None
        segments.append(Segment(attempt, task, -1 if start is None else start.offset, end_offset))
        if start is None or start.source is None:
            break
        source = start.source
        if (source.trial_id, source.task) != (trial_id, task):
            break
        mark = _checkpoint(checkpoints, source, start)
        if mark is None:
            missing = source
            break
        if mark in followed:  # only a forged mark leads back
            break
        followed.add(mark)
        attempt, end_offset = mark.attempt, mark.offset
    return LearningCurve(tuple(reversed(segments)), missing)


def first_of_load(marks: Sequence[StoredMark], attempt: int, task: str, load: str) -> int | None:
    """The offset of the first mark of a load in an attempt's task; None: there is none."""
    return next(
        (each.offset for each in marks if (each.attempt, each.task, each.load) == (attempt, task, load)), None
    )


def _checkpoint(
    checkpoints: Mapping[_Name, StoredMark], source: AttemptKey, start: StoredMark
) -> StoredMark | None:
    """The mark of the checkpoint from which a process has continued; None: it is not stored."""
    mark = checkpoints.get((source.attempt_id, source.task, start.checkpoint))
    is_later = mark is not None and mark.attempt == start.attempt and mark.offset > start.offset
    return None if is_later else mark


def _continuations(marks: Sequence[StoredMark]) -> dict[tuple[int, str], list[StoredMark]]:
    """The first mark of each load by attempt and task, in the order of offsets."""
    firsts: dict[tuple[int, str, str], StoredMark] = {}
    for each in marks:
        if each.source is not None:
            firsts.setdefault((each.attempt, each.task, each.load), each)
    found: dict[tuple[int, str], list[StoredMark]] = {}
    for each in sorted(firsts.values(), key=lambda each: each.offset):
        found.setdefault((each.attempt, each.task), []).append(each)
    return found
