"""The contract of a tuner: asked for parameters, told results, rebuilt from what the store kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nni_manager.config.known_results import KnownResult

JsonScalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Parameters for one trial, in the shape `nni.get_next_parameter()` gives them to training code.

    `memo` is the tuner's own: what it must be handed back in `PastTrial` to know the trial again. Both can be
    written as JSON.
    """

    parameters: dict[str, Any]
    memo: dict[str, JsonScalar]


@dataclass(frozen=True, slots=True)
class PastTrial:
    """A trial this tuner proposed before the manager restarted.

    `value` None of an ended trial means that it failed or gave nothing usable; of a running one, that it has yet to
    say. A running trial is told later, as any other.
    """

    key: int
    parameters: Mapping[str, Any]
    memo: Mapping[str, JsonScalar]
    value: float | None
    ended: bool


class Tuner(ABC):
    """Proposes parameters and learns from results. Used from one thread only; does no I/O."""

    learns: bool = True
    """Whether what it proposes depends on results. If not, it may be asked before they are known."""

    @abstractmethod
    def ask(self, trial_key: int) -> Suggestion | None:
        """Parameters for the trial of this key; None when the space is exhausted and asking again is no use.

        Raises:
            Bug: the key was asked for before.
        """

    @abstractmethod
    def tell(self, trial_key: int, value: float | None) -> None:
        """Learn a trial's result. None, NaN and infinities mean that it failed: no sampler can weigh them.

        Only the first result of a trial counts; telling again is harmless, so the caller may repeat itself.

        Raises:
            Bug: the key was never asked for.
        """

    @abstractmethod
    def restore(self, trials: Iterable[PastTrial]) -> None:
        """Know these trials as if they had been asked for and told; in the order in which they were asked for.

        To be called before the first `ask`. The tuner then goes on as the one before it would have.

        Raises:
            Bug: the tuner is in use already, or a memo is not of this search space.
        """

    def import_data(self, results: Sequence[KnownResult]) -> int:
        """Learn from results of parameters that it did not propose; how many of them it makes use of.

        May be called at any time after `restore`. What does not lie in the search space is left out. A tuner that can make no use
        of such results leaves this as it is.
        """
        return 0
