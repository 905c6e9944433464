"""The contract of a tuner: it proposes parameters, receives results, and is rebuilt from the store."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

from nni_manager.config.prior_results import PriorResult
from nni_manager.errors import InternalError
from trial_keeper.frozen_dataclass import dataclass

JsonScalar: TypeAlias = str | int | float | bool | None
Position = TypeVar("Position")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Parameters for one trial, in the form in which `nni.get_next_parameter()` returns them to training code.

    `metadata` is private to the tuner; after a restart, `PastTrial` returns it. Both fields can be encoded as JSON. `continues`:
    the id of the trial whose checkpoint the training code is to load, if it saves any; None: it starts at its first step.
    """

    parameters: dict[str, Any]
    metadata: dict[str, JsonScalar]
    continues: str | None = None


class Later(Enum):
    """The answer of a tuner that has no parameters at present, and may have some after another trial ends."""

    LATER = "later"


@dataclass(frozen=True, slots=True)
class Observation:
    """The outcome of a trial.

    `value`: the number to learn from, or None. `metric`: the complete reported result as JSON text, a number or an object with
    further values. None: the trial failed or reported no result. `pruned_curve`: the intermediate results of a trial that was
    pruned, in order and finite; otherwise empty. `is_void`: it has no result, and a user or the cluster has ended the trial.
    `is_interrupted`: it is void because the experiment was stopped, so its parameters may be proposed once more.
    """

    trial_id: str
    value: float | None
    metric: str | None
    has_succeeded: bool
    pruned_curve: Sequence[float] = ()
    is_void: bool = False
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class PastTrial:
    """A trial that this tuner proposed before the manager restarted.

    `value` None: the trial still runs, failed, or reported no usable result. The result of a running trial is reported later, as
    usual. The other fields are as in `Observation`.
    """

    key: int
    parameters: Mapping[str, Any]
    metadata: Mapping[str, JsonScalar]
    value: float | None
    ended: bool
    trial_id: str = ""
    metric: str | None = None
    has_succeeded: bool = False
    pruned_curve: Sequence[float] = ()
    is_void: bool = False
    is_interrupted: bool = False

    @property
    def observation(self) -> Observation:
        """The outcome of an ended trial."""
        return Observation(
            self.trial_id,
            self.value,
            self.metric,
            self.has_succeeded,
            self.pruned_curve,
            self.is_void,
            self.is_interrupted,
        )


class BaseTuner(ABC):
    """Proposes parameters and learns from results. Used by one thread at a time; does no I/O."""

    restores_imports_first: bool = True
    """True if results may be imported before `restore`. Most were imported before the first trial, and samplers of Optuna weight
    results by their order."""
    learns: bool = True
    """True if proposals depend on results. Otherwise `ask` may be called before results are known."""

    @abstractmethod
    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """Parameters for the trial of this key; None if the space is exhausted: all later calls also return None.

        After `LATER` the key may be asked for again. The caller does so when another trial ends. If no other trial is left to
        end, the caller treats the space as exhausted.

        Raises:
            InternalError: the key already has parameters.
        """

    @abstractmethod
    def tell(self, trial_key: int, value: float | None) -> None:
        """Record a trial's result. None, NaN and infinities count as a failed trial: samplers cannot use them.

        Only the first result of a trial counts, so repeated calls are harmless.

        Raises:
            InternalError: the key was never asked for.
        """

    def tell_result(self, trial_key: int, result: Observation) -> None:
        """Record a trial's complete outcome, for tuners that need more than the value passed to `tell`."""
        self.tell(trial_key, result.value)

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """Record results of parameters that this tuner did not propose; return the number of usable results.

        Results outside the search space are not usable, and a tuner that does not learn from imports uses none. After a restart,
        the results must be imported again, before or after `restore`.
        """
        return 0

    def report(self, trial_key: int, trial_id: str, values: Sequence[float]) -> None:  # noqa: B027 - for advisors
        """Receive intermediate results of a running trial. The manager sends them to advisors only."""

    def take_stops(self) -> list[str]:
        """Return the trials to stop early, by id, and forget them. Only an advisor names any."""
        return []

    def close(self) -> None:  # noqa: B027 - most tuners start nothing
        """Stop what the tuner has started. May be called from any thread, also during another call."""

    @abstractmethod
    def restore(self, trials: Iterable[PastTrial]) -> None:
        """Restore trials, in the order in which they were asked for, as if `ask` and `tell` had been called for each.

        Must be called before the first `ask`. The tuner then continues as it would have without a restart.

        Raises:
            InternalError: the tuner is already in use, or metadata is not of this search space.
        """


class KeyedTuner(BaseTuner, Generic[Position]):
    """Base of tuners that store a position for each trial, e.g. its number in a study. Rejects calls out of order."""

    def __init__(self) -> None:
        """Start without trials."""
        self.position_of: dict[int, Position] = {}
        self._running: set[int] = set()

    @abstractmethod
    def propose(self, trial_key: int) -> Suggestion | Later | None:
        """See `ask`; the key is new. Calls `note` if it proposes parameters."""

    def learn(self, position: Position, value: float | None) -> None:
        """Learn the first result of a trial: a finite value, or None for a failed trial."""

    def requeue(self, position: Position) -> None:
        """Let the position of an interrupted trial be proposed once more. By default the trial counts as failed."""
        self.learn(position, None)

    @abstractmethod
    def replay(self, trials: Iterable[PastTrial]) -> None:
        """See `restore`; no trial was asked for yet. Calls `note` for each trial."""

    def note(self, trial_key: int, position: Position) -> None:
        """Store the position of a running trial."""
        self.position_of[trial_key] = position
        self._running.add(trial_key)

    def end(self, trial_key: int) -> Position | None:
        """Mark a trial as ended and return its position; None if the trial has ended before.

        Raises:
            InternalError: the key was never asked for.
        """
        if trial_key not in self.position_of:
            raise InternalError(
                f"cannot learn from trial {trial_key}: this tuner did not propose it; please report this"
            )
        if trial_key not in self._running:
            return None
        self._running.remove(trial_key)
        return self.position_of[trial_key]

    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """See `BaseTuner`."""
        if trial_key in self.position_of:
            raise InternalError(
                f"cannot propose parameters for trial {trial_key} a second time; please report this"
            )
        return self.propose(trial_key)

    def tell(self, trial_key: int, value: float | None) -> None:
        """See `BaseTuner`."""
        if (position := self.end(trial_key)) is not None:
            self.learn(position, value if value is not None and math.isfinite(value) else None)

    def tell_result(self, trial_key: int, result: Observation) -> None:
        """See `BaseTuner`."""
        if not result.is_interrupted:
            super().tell_result(trial_key, result)
        elif (position := self.end(trial_key)) is not None:
            self.requeue(position)

    def restore(self, trials: Iterable[PastTrial]) -> None:
        """See `BaseTuner`."""
        if self.position_of:
            raise InternalError("cannot rebuild a tuner that is in use; please report this")
        self.replay(trials)


@contextlib.contextmanager
def reading_metadata_of(trial: PastTrial) -> Iterator[None]:
    """Convert errors within the context: the trial's metadata is not of this search space.

    Raises:
        InternalError: an error occurred.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise InternalError(
            f"cannot rebuild the tuner: the metadata of trial {trial.key} is not of this search space; "
            "please report this"
        ) from error


def natural(number: JsonScalar) -> int:
    """Validate a number in metadata that counts from 0.

    Raises:
        ValueError: the value is not such a number.
    """
    if not isinstance(number, int) or number < 0:
        raise ValueError(number)
    return number
