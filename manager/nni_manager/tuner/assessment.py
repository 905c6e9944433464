"""The contract of an assessor, which decides from its intermediate results whether a running trial may continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from trial_keeper.frozen_dataclass import dataclass

# Later results are not assessed: the quality of a trial shows earlier, and ten thousand such trials fit into memory.
MAX_STEPS = 10_000


class BaseAssessor(ABC):
    """Stops unpromising trials. Used from one thread only; does no I/O.

    `learning_curve`: the intermediate results of one trial, in order and finite.
    """

    @abstractmethod
    def may_go_on(self, trial_id: str, learning_curve: Sequence[float]) -> bool:
        """True if the trial may continue. `learning_curve` has at least one result."""

    @abstractmethod
    def end(self, trial_id: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """Record that the trial has ended. `learning_curve`: all its results, possibly none.

        Also called for a failed attempt; the trial may then be assessed again, from its first result on.
        """

    def close(self) -> None:  # noqa: B027 - most assessors start nothing
        """Stop all that the assessor has started. May be called from any thread, also during another call."""


@dataclass(frozen=True, slots=True)
class PastLearningCurve:
    """The learning curve of a trial before the manager restarted. `has_succeeded` None: the trial still runs."""

    trial_id: str
    attempt: int
    learning_curve: Sequence[float]
    has_succeeded: bool | None


class Assessment:
    """An assessor and the learning curves of the running trials."""

    def __init__(self, assessor: BaseAssessor) -> None:
        """Start without any results."""
        self._assessor = assessor
        self._curves: dict[str, tuple[int, list[float]]] = {}

    def report(self, trial_id: str, attempt: int, values: Sequence[float]) -> bool:
        """Add results of a trial; True if it may continue. A new attempt starts a new learning curve.

        Results that arrive together are assessed together, at the newest one.
        """
        learning_curve = self._curve_of(trial_id, attempt)
        room = MAX_STEPS - len(learning_curve)
        learning_curve += values[:room]
        return room <= 0 or self._assessor.may_go_on(trial_id, learning_curve)

    def end(self, trial_id: str, *, has_succeeded: bool) -> None:
        """Record that the trial is terminal."""
        _, learning_curve = self._curves.pop(trial_id, (0, []))
        self._assessor.end(trial_id, learning_curve, has_succeeded=has_succeeded)

    def close(self) -> None:
        """See `BaseAssessor`."""
        self._assessor.close()

    def restore(self, curves: Iterable[PastLearningCurve]) -> None:
        """Restore earlier results, trial by trial. Running trials are assessed when they report again."""
        for past in curves:
            self._curve_of(past.trial_id, past.attempt).extend(past.learning_curve[:MAX_STEPS])
            if past.has_succeeded is not None:
                self.end(past.trial_id, has_succeeded=past.has_succeeded)

    def _curve_of(self, trial_id: str, attempt: int) -> list[float]:
        known = self._curves.get(trial_id)
        if known is not None and known[0] != attempt:
            self._assessor.end(trial_id, known[1], has_succeeded=False)
            known = None
        if known is None:
            known = self._curves[trial_id] = (attempt, [])
        return known[1]
