"""The contract of an assessor: shown the intermediate results of a trial that runs, says whether it may go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A trial that reports more is not assessed beyond: what it is worth shows earlier, and ten thousand such trials fit into memory.
MOST_STEPS = 10_000


class Assessor(ABC):
    """Stops trials that promise little. Used from one thread only; does no I/O.

    A course is the intermediate results of one trial, in order and finite.
    """

    @abstractmethod
    def may_go_on(self, trial_id: str, course: Sequence[float]) -> bool:
        """Whether the trial of this course, of at least one result, may go on."""

    @abstractmethod
    def end(self, trial_id: str, course: Sequence[float], *, has_succeeded: bool) -> None:
        """The trial is over, and this is all it reported, if anything, whether it was shown before or not.

        Also for an attempt that failed; the trial may then be shown again, from its first result on.
        """

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """End what the assessor has started. May be called from any thread, also while another call is under way."""


@dataclass(frozen=True, slots=True)
class PastCourse:
    """What a trial had reported before the manager restarted. `has_succeeded` None: it still runs."""

    trial_id: str
    attempt: int
    course: Sequence[float]
    has_succeeded: bool | None


class Assessment:
    """An assessor and the courses of the trials that run."""

    def __init__(self, assessor: Assessor) -> None:
        """Nothing has been reported yet."""
        self._assessor = assessor
        self._courses: dict[str, tuple[int, list[float]]] = {}

    def hear(self, trial_id: str, attempt: int, values: Sequence[float]) -> bool:
        """Whether the trial may go on that has reported these as well. A new attempt begins its course anew.

        What comes together is judged together: by the newest result.
        """
        course = self._course_of(trial_id, attempt)
        room = MOST_STEPS - len(course)
        course += values[:room]
        return room <= 0 or self._assessor.may_go_on(trial_id, course)

    def end(self, trial_id: str, *, has_succeeded: bool) -> None:
        """The trial is final."""
        _, course = self._courses.pop(trial_id, (0, []))
        self._assessor.end(trial_id, course, has_succeeded=has_succeeded)

    def close(self) -> None:
        """See `Assessor`."""
        self._assessor.close()

    def restore(self, courses: Iterable[PastCourse]) -> None:
        """Know what was reported before, trial by trial. Those that run are judged when they report again."""
        for past in courses:
            self._course_of(past.trial_id, past.attempt).extend(past.course[:MOST_STEPS])
            if past.has_succeeded is not None:
                self.end(past.trial_id, has_succeeded=past.has_succeeded)

    def _course_of(self, trial_id: str, attempt: int) -> list[float]:
        known = self._courses.get(trial_id)
        if known is not None and known[0] != attempt:
            self._assessor.end(trial_id, known[1], has_succeeded=False)
            known = None
        if known is None:
            known = self._courses[trial_id] = (attempt, [])
        return known[1]
