"""The contract of a tuner: it proposes parameters, receives results, and is rebuilt from the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from nni_manager.config.prior_results import PriorResult

JsonScalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Parameters for one trial, in the form in which `nni.get_next_parameter()` returns them to training code.

    `metadata` belongs to the tuner, which receives it again in `PastTrial` to identify the trial. Both can be written as JSON.
    """

    parameters: dict[str, Any]
    metadata: dict[str, JsonScalar]


class Later(Enum):
    """The answer of a tuner that has no parameters at present, and may have some after another trial ends."""

    LATER = "later"


@dataclass(frozen=True, slots=True)
class Observation:
    """The outcome of a trial.

    `value` is the number to learn from, None if there is none. `metric` is the complete reported result as JSON text: a number,
    or
    an object with further values. None: the trial reported no result, or it failed.
    """

    trial_id: str
    value: float | None
    metric: str | None
    has_succeeded: bool


@dataclass(frozen=True, slots=True)
class PastTrial:
    """A trial this tuner proposed before the manager restarted.

    `value` None: an ended trial failed or reported nothing usable; a running trial has not reported yet. The result of a running
    trial is reported later, as usual. The other fields are as in `Observation`.
    """

    key: int
    parameters: Mapping[str, Any]
    metadata: Mapping[str, JsonScalar]
    value: float | None
    ended: bool
    trial_id: str = ""
    metric: str | None = None
    has_succeeded: bool = False


class BaseTuner(ABC):
    """Proposes parameters and learns from results. Used by one thread at a time; does no I/O."""

    learns: bool = True
    """True if proposals depend on results. Otherwise `ask` may be called before results are known."""

    @abstractmethod
    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """Parameters for the trial of this key; None if the space is exhausted and asking again is useless.

        After `LATER` the key may be asked for again. The caller does so when another trial ends. If no other trial is left to
        end,
        the caller treats the space as exhausted.

        Raises:
            InternalError: the key was asked for before, and was given parameters.
        """

    @abstractmethod
    def tell(self, trial_key: int, value: float | None) -> None:
        """Record a trial's result. None, NaN and infinities mean that it failed: no sampler can weigh them.

        Only the first result of a trial counts, so repeated calls are harmless.

        Raises:
            InternalError: the key was never asked for.
        """

    def hear(self, trial_key: int, result: Observation) -> None:
        """Record a trial's complete outcome, for tuners that need more than the value passed to `tell`."""
        self.tell(trial_key, result.value)

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """Record results from elsewhere; return how many of them were usable.

        Results of another search space are not usable, and a tuner that does not learn from imports uses none. A rebuilt tuner
        must be
        given them again, before or after `restore`.
        """
        return 0

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """Stop what the tuner has started. May be called from any thread, also during another call."""

    @abstractmethod
    def restore(self, trials: Iterable[PastTrial]) -> None:
        """Restore these trials, in the order in which they were asked for, as if they had been asked for and told.

        Must be called before the first `ask`. The tuner then continues as its predecessor would have.

        Raises:
            InternalError: the tuner is in use already, or metadata is not of this search space.
        """
