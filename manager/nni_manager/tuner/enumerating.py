"""Tuners that propose each entry of a list of parameters once, in order: GridSearch and BatchTuner."""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nni_manager.config.prior_results import PriorResult
from nni_manager.config.search_space import Choice, Nested, Parameter, QUniform, RandInt, SearchSpace
from nni_manager.tuner.base import KeyedTuner, PastTrial, Suggestion, natural, reading_metadata_of
from nni_manager.tuner.refining_grid import RefiningGrid


@dataclass(frozen=True, slots=True)
class Points:
    """A list of values that need not fit into memory. `at` returns the value at an index below `count`."""

    count: int
    at: Callable[[int], Any]

    def has(self, index: int) -> bool:
        """True if there is a value at the index."""
        return index < self.count

    def is_repeated(self, index: int) -> bool:
        """True if an earlier index has the same value."""
        return False


class EnumeratingTuner(KeyedTuner[int]):
    """Proposes each point once, whatever the results; a failed trial is not repeated.

    The place of a trial (see `KeyedTuner`) is the index of its point.
    """

    learns = False

    def __init__(self, points: Points | RefiningGrid) -> None:
        """The points are requested one by one, in order."""
        super().__init__()
        self._points = points
        self._proposed: set[int] = set()
        self._next = 0
        self._known_elsewhere: set[str] = set()

    def propose(self, trial_key: int) -> Suggestion | None:
        """See `KeyedTuner`."""
        while self._points.has(self._next) and self._is_known(self._next):
            self._next += 1
        if not self._points.has(self._next):
            return None
        index = self._next
        self.note(trial_key, index)
        # A copy: changes by the caller must not reach the search space.
        return Suggestion(copy.deepcopy(self._points.at(index)), {"index": index})

    def _is_known(self, index: int) -> bool:
        if index in self._proposed or self._points.is_repeated(index):
            return True
        return bool(self._known_elsewhere) and _canonical(self._points.at(index)) in self._known_elsewhere

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `BaseTuner`: an imported point is not proposed again, whatever its result."""
        known = [_canonical(dict(result.parameters)) for result in results]
        self._known_elsewhere.update(known)
        return len(known)

    def replay(self, trials: Iterable[PastTrial]) -> None:
        """See `KeyedTuner`."""
        for trial in trials:
            with reading_metadata_of(trial):
                index = natural(trial.metadata["index"])
                if not self._points.has(index):
                    raise ValueError(index)
            self.note(trial.key, index)
            if trial.ended:
                self.end(trial.key)

    def note(self, trial_key: int, place: int) -> None:
        """See `KeyedTuner`."""
        super().note(trial_key, place)
        self._proposed.add(place)


def batch(space: SearchSpace) -> Points:
    """The options of the only choice, unchanged. `reason_against_space` must accept the space."""
    (choice,) = space.parameters.values()
    assert isinstance(choice, Choice)
    return Points(len(choice.options), choice.options.__getitem__)


def grid(space: SearchSpace) -> Points:
    """Every combination; the last hyper-parameter changes first. Combinations are computed by index, never held in memory.

    Each hyper-parameter must have a list of values (`is_countable`).
    """
    axes = {name: _axis_of(parameter) for name, parameter in space.parameters.items()}

    def at(index: int) -> dict[str, Any]:
        values = {}
        for name, axis in reversed(axes.items()):
            index, here = divmod(index, axis.count)
            values[name] = axis.at(here)
        return {name: values[name] for name in axes}

    return Points(math.prod(axis.count for axis in axes.values()), at)


def is_countable(space: SearchSpace) -> bool:
    """True if each hyper-parameter, also of the options, has a list of values."""
    return all(map(_is_countable, space.parameters.values()))


def _is_countable(parameter: Parameter) -> bool:
    if isinstance(parameter, Choice):
        return all(is_countable(option.space) for option in parameter.options if isinstance(option, Nested))
    return isinstance(parameter, QUniform | RandInt)


def _axis_of(parameter: Parameter) -> Points:
    match parameter:
        case Choice(options):
            return _one_after_another([_points_of(option) for option in options])
        case RandInt(low, high):
            return Points(high - low, lambda index: low + index)
    assert isinstance(parameter, QUniform)
    return _multiples(parameter)


def _points_of(option: Any) -> Points:
    """An option with its own hyper-parameters counts once for each of their combinations."""
    if not isinstance(option, Nested):
        return Points(1, lambda _: option)
    inner = grid(option.space)
    return Points(inner.count, lambda index: {"_name": option.name, **inner.at(index)})


def _one_after_another(parts: Sequence[Points]) -> Points:
    ends = list(itertools.accumulate(part.count for part in parts))

    def at(index: int) -> Any:
        number = bisect.bisect_right(ends, index)
        return parts[number].at(index - ends[number] + parts[number].count)

    return Points(ends[-1], at)


def _multiples(parameter: QUniform) -> Points:
    """The multiples of q from the one nearest to low to the one nearest to high, clipped.

    The result may include bounds that sampling never yields: (2.5, 5.5, 1) gives 2.5, 3, 4, 5, 5.5.
    Source: NNI v2.10, the grid of GridSearch.
    """
    low, high, q = parameter.low, parameter.high, parameter.q
    first = round(low / q)
    return Points(round(high / q) + 1 - first, lambda index: min(max((first + index) * q + 0.0, low), high))


def _canonical(parameters: Any) -> str:
    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() else value  # 3 and 3.0 are the same value of a quniform

    return json.dumps(json.loads(json.dumps(parameters), parse_float=number), sort_keys=True)
