"""Tuners that propose each entry of a list of parameters once, in order: GridSearch and BatchTuner."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from typing import Any, Protocol

from nni_manager.config.prior_results import PriorResult
from nni_manager.config.search_space import Choice, Nested, Parameter, QUniform, RandInt, SearchSpace
from nni_manager.errors import InternalError
from nni_manager.tuner.base import BaseTuner, PastTrial, Suggestion


class _Points(Protocol):
    """A list of parameters that need not fit into memory."""

    count: int

    def at(self, index: int) -> Any:
        """The point at this index, from 0 up to but not including `count`."""


class EnumeratingTuner(BaseTuner):
    """Proposes each point once, whatever the results; a failed trial is not repeated."""

    learns = False

    def __init__(self, points: _Points) -> None:
        """The points are requested one by one, in order."""
        self._points = points
        self._index_of: dict[int, int] = {}
        self._proposed: set[int] = set()
        self._next = 0
        self._known_elsewhere: set[str] = set()

    def ask(self, trial_key: int) -> Suggestion | None:
        """See `BaseTuner.ask`."""
        if trial_key in self._index_of:
            raise InternalError(
                f"cannot propose parameters for trial {trial_key} a second time; please report this"
            )
        while self._next < self._points.count and self._is_known(self._next):
            self._next += 1
        if self._next >= self._points.count:
            return None
        index = self._next
        self._note(trial_key, index)
        # A copy: changes by the caller must not reach the search space.
        return Suggestion(copy.deepcopy(self._points.at(index)), {"index": index})

    def _is_known(self, index: int) -> bool:
        if index in self._proposed:
            return True
        return bool(self._known_elsewhere) and _canonical(self._points.at(index)) in self._known_elsewhere

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `Tuner.import_results`: an imported point is not proposed again, whatever its result."""
        known = [_canonical(dict(result.parameters)) for result in results]
        self._known_elsewhere.update(known)
        return len(known)

    def tell(self, trial_key: int, value: float | None) -> None:
        """See `Tuner.tell`; the result is ignored."""
        if trial_key not in self._index_of:
            raise InternalError(
                f"cannot learn from trial {trial_key}: this tuner did not propose it; please report this"
            )

    def restore(self, trials: Iterable[PastTrial]) -> None:
        """See `BaseTuner.restore`."""
        if self._index_of:
            raise InternalError("cannot rebuild a tuner that is in use; please report this")
        for trial in trials:
            index = trial.metadata.get("index")
            if not isinstance(index, int) or not 0 <= index < self._points.count:
                raise InternalError(
                    f"cannot rebuild the tuner: the metadata of trial {trial.key} is not of this search space; "
                    "please report this"
                )
            self._note(trial.key, index)

    def _note(self, trial_key: int, index: int) -> None:
        self._index_of[trial_key] = index
        self._proposed.add(index)


class Batch:
    """The options of the only choice, unchanged."""

    def __init__(self, space: SearchSpace) -> None:
        """`reason_against_space` must accept the space."""
        (batch,) = space.parameters.values()
        assert isinstance(batch, Choice)
        self._options = batch.options
        self.count = len(self._options)

    def at(self, index: int) -> Any:
        """The option at this index."""
        return self._options[index]


class Grid:
    """Every combination; the last hyper-parameter changes first. Combinations are computed by index, never held in memory."""

    def __init__(self, space: SearchSpace) -> None:
        """`reason_against_space` must accept the space."""
        self._axes = {name: _axis_of(parameter) for name, parameter in space.parameters.items()}
        self.count = math.prod(axis.count for axis in self._axes.values())

    def at(self, index: int) -> dict[str, Any]:
        """The combination at this index."""
        values = {}
        for name, axis in reversed(self._axes.items()):
            index, here = divmod(index, axis.count)
            values[name] = axis.at(here)
        return {name: values[name] for name in self._axes}


class _Values:
    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)
        self.count = len(self._values)

    def at(self, index: int) -> Any:
        return self._values[index]


class _WholeNumbers:
    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self.count = high - low

    def at(self, index: int) -> int:
        return self._low + index


class _Multiples:
    """The multiples of q from the one nearest to low to the one nearest to high, clipped.

    The bounds themselves can be values here that sampling never yields: (2.5, 5.5, 1) is 2.5, 3, 4, 5, 5.5.
    Source: NNI v2.10, the grid of GridSearch.
    """

    def __init__(self, parameter: QUniform) -> None:
        self._of = parameter
        self._first = round(parameter.low / parameter.q)
        self.count = round(parameter.high / parameter.q) + 1 - self._first

    def at(self, index: int) -> float:
        value = (self._first + index) * self._of.q + 0.0
        return min(max(value, self._of.low), self._of.high)


class _Options:
    """A choice. An option with its own hyper-parameters counts once for each of their combinations."""

    def __init__(self, choice: Choice) -> None:
        self._options = [(option, self._points(option)) for option in choice.options]
        self.count = sum(points.count for _, points in self._options)

    @staticmethod
    def _points(option: Any) -> _Points:
        return Grid(option.space) if isinstance(option, Nested) else _Values([option])

    def at(self, index: int) -> Any:
        for option, points in self._options:
            if index < points.count:
                value = points.at(index)
                return {"_name": option.name, **value} if isinstance(option, Nested) else value
            index -= points.count
        raise InternalError(f"cannot give option {index}: there are fewer; please report this")


def _axis_of(parameter: Parameter) -> _Points:
    match parameter:
        case Choice():
            return _Options(parameter)
        case RandInt(low, high):
            return _WholeNumbers(low, high)
        case QUniform():
            return _Multiples(parameter)
        case _:
            raise InternalError(f"cannot count the values of {parameter}; please report this")


def _canonical(parameters: Any) -> str:
    # 3 and 3.0 are the same value of a quniform.
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(parameters), sort_keys=True)
