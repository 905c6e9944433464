"""The contract of a tuner: asked for parameters, told results, rebuilt from what the store kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
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


class Later(Enum):
    """The answer of a tuner that has no parameters at present, and may have some once another trial is over."""

    LATER = "later"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended.

    `value` is the number to learn from, None if there is none. `metric` is all that the trial reported as its result, as JSON
    text: a number, or an object with what else there is; None: it gave no result, or it failed.
    """

    trial_id: str
    value: float | None
    metric: str | None
    has_succeeded: bool


@dataclass(frozen=True, slots=True)
class PastTrial:
    """A trial this tuner proposed before the manager restarted.

    `value` None of an ended trial means that it failed or gave nothing usable; of a running one, that it has yet to
    say. A running trial is told later, as any other. The rest is as in `TrialResult`.
    """

    key: int
    parameters: Mapping[str, Any]
    memo: Mapping[str, JsonScalar]
    value: float | None
    ended: bool
    trial_id: str = ""
    metric: str | None = None
    has_succeeded: bool = False


class Tuner(ABC):
    """Proposes parameters and learns from results. Used by one thread at a time; does no I/O."""

    learns: bool = True
    """Whether what it proposes depends on results. If not, it may be asked before they are known."""

    @abstractmethod
    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """Parameters for the trial of this key; None when the space is exhausted and asking again is no use.

        After `LATER` the key may be asked for again. Whoever asks does so when another trial is over, and takes the space for
        exhausted when none is left that could be.

        Raises:
            Bug: the key was asked for before, and was given parameters.
        """

    @abstractmethod
    def tell(self, trial_key: int, value: float | None) -> None:
        """Learn a trial's result. None, NaN and infinities mean that it failed: no sampler can weigh them.

        Only the first result of a trial counts; telling again is harmless, so the caller may repeat itself.

        Raises:
            Bug: the key was never asked for.
        """

    def hear(self, trial_key: int, result: TrialResult) -> None:
        """As `tell`, with all that there is to tell: for tuners to which the value alone is not enough."""
        self.tell(trial_key, result.value)

    def import_results(self, results: Iterable[KnownResult]) -> int:
        """Learn from results of elsewhere; how many of them were of use.

        Those of another search space are none, nor are any to a tuner that does not learn from them. A tuner that is rebuilt
        has to be given them again, before or after `restore`.
        """
        return 0

    def close(self) -> None:  # noqa: B027 - most have started nothing
        """End what the tuner has started. May be called from any thread, also while another call is under way."""

    @abstractmethod
    def restore(self, trials: Iterable[PastTrial]) -> None:
        """Know these trials as if they had been asked for and told; in the order in which they were asked for.

        To be called before the first `ask`. The tuner then goes on as the one before it would have.

        Raises:
            Bug: the tuner is in use already, or a memo is not of this search space.
        """
