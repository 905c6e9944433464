"""GridSearch: every combination of values; without lists of values, a grid that becomes finer.

If each hyper-parameter has a list of values, there is one grid. Else the first grid has only the middle of each one that is no
choice and no randint. Each further grid divides all intervals, at the quantile between their ends. A grid repeats the points of
the coarser ones, which are skipped. Source: NNI v2.10, gridsearch_tuner.py.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, TypeAlias

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.config.search_space import (
    Choice,
    LogNormal,
    LogUniform,
    Nested,
    Normal,
    Parameter,
    QLogNormal,
    QLogUniform,
    QNormal,
    QUniform,
    RandInt,
    SearchSpace,
    Uniform,
    multiple_of,
)
from nni_manager.tuner.enumerating import EnumeratingTuner, Points

# More than an experiment can have trials, and few enough to be in memory: a stored index may come from another's archive.
MAX_POINTS = 2**20
_STANDARD = NormalDist()
_FINEST = 2**-52
_MAX_EXPONENT = math.log(sys.float_info.max)


class Grid(Points):
    """All points of all grids, coarse to fine; in each grid the last hyper-parameter changes first.

    An index counts the points of the grids in order, repeated ones too, so it says which grid a point is of.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._is_listed = is_countable(space)
        self._grids = _Combined(space, is_listed=self._is_listed)
        self._ends: list[int] = []

    def has(self, index: int) -> bool:
        """See `Points`."""
        if index >= MAX_POINTS and not self._is_listed:
            return False
        while not self._ends or index >= self._ends[-1]:
            level = len(self._ends)
            if level and self._grids.is_last(level - 1):
                return False
            self._ends.append((self._ends[-1] if level else 0) + self._grids.count(level))
        return True

    def at(self, index: int) -> dict[str, Any]:
        """See `Points`."""
        return self._grids.at(*self._position_of(index))[0]

    def is_repeated(self, index: int) -> bool:
        """True if a coarser grid has the point."""
        return self._grids.at(*self._position_of(index))[1]

    def _position_of(self, index: int) -> tuple[int, int]:
        """The grid of an index, and the index in that grid."""
        if not self.has(index):
            raise IndexError(index)
        level = bisect.bisect_right(self._ends, index)
        return level, index - (self._ends[level - 1] if level else 0)


class _Combined:
    """All combinations of the hyper-parameters of a space; the last one changes first.

    As of each hyper-parameter: `count` is the number of values in a grid, `at` a value and True if a coarser grid has it, and
    `is_last` True if no finer grid has more values. `level` 0 is the first grid.
    """

    def __init__(self, space: SearchSpace, *, is_listed: bool) -> None:
        self._axes = {
            name: _axis_of(parameter, is_listed=is_listed) for name, parameter in space.parameters.items()
        }

    def count(self, level: int) -> int:
        return math.prod(axis.count(level) for axis in self._axes.values())

    def at(self, level: int, index: int) -> tuple[dict[str, Any], bool]:
        values, is_repeated = {}, level > 0
        for name, axis in reversed(self._axes.items()):
            index, here = divmod(index, axis.count(level))
            values[name], is_old = axis.at(level, here)
            is_repeated = is_repeated and is_old
        return {name: values[name] for name in self._axes}, is_repeated

    def is_last(self, level: int) -> bool:
        return all(axis.is_last(level) for axis in self._axes.values())


class _Options:
    """The options of a choice; one with its own hyper-parameters counts once for each of their combinations."""

    def __init__(self, options: Sequence[Any], *, is_listed: bool) -> None:
        self._options = [
            (each, _Combined(each.space, is_listed=is_listed) if isinstance(each, Nested) else None)
            for each in options
        ]

    def count(self, level: int) -> int:
        return sum(1 if inner is None else inner.count(level) for _, inner in self._options)

    def at(self, level: int, index: int) -> tuple[Any, bool]:
        for option, inner in self._options:
            count = 1 if inner is None else inner.count(level)
            if index < count and inner is None:
                return option, level > 0
            if index < count and inner is not None:
                values, is_old = inner.at(level, index)
                return {"_name": option.name, **values}, is_old
            index -= count
        raise IndexError(index)

    def is_last(self, level: int) -> bool:
        return all(inner.is_last(level) for _, inner in self._options if inner is not None)


class _Listed:
    """A list of values, which need not be in memory: `value_at` returns that of an index below `count`."""

    def __init__(self, count: int, value_at: Callable[[int], float]) -> None:
        self._count, self._value_at = count, value_at

    def count(self, level: int) -> int:
        return self._count

    def at(self, level: int, index: int) -> tuple[float, bool]:
        return self._value_at(index), level > 0

    def is_last(self, level: int) -> bool:
        return True


class _Quantiles:
    """The values of a distribution at quantiles: 1/2, then 1/4 and 3/4, then the odd eighths, without repeated values."""

    def __init__(self, value_at: Callable[[float], float]) -> None:
        """`value_at` is the value of a quantile from 0 to 1."""
        self._value_at = value_at
        self._values = [value_at(0.5)]
        self._counts = [1]
        self._divisible = [each for each in ((0.0, 0.5), (0.5, 1.0)) if self._is_less(*each)]
        self._last: int | None = None

    def _is_less(self, left: float, right: float) -> bool:
        return self._value_at(left) < self._value_at(right)

    def count(self, level: int) -> int:
        while len(self._counts) <= level:
            self._refine()
        return self._counts[level]

    def at(self, level: int, index: int) -> tuple[float, bool]:
        return self._values[index], level > 0 and index < self.count(level - 1)

    def is_last(self, level: int) -> bool:
        self.count(level + 1)
        return self._last is not None and self._last <= level

    def _refine(self) -> None:
        """Divide each interval. The values of 0 and 1 are not in the grid: those of a normal distribution are infinite."""
        divisible: list[tuple[float, float]] = []
        is_refined = False
        # All intervals have the same width. Below the finest, a quantile near 1 has no neighbour.
        intervals = self._divisible if 2.0 ** -len(self._counts) > _FINEST else []
        for left, right in intervals:
            middle = (left + right) / 2
            is_left, is_right = self._is_less(left, middle), self._is_less(middle, right)
            if (is_left or left == 0.0) and (is_right or right == 1.0):
                self._values.append(self._value_at(middle))
                is_refined = True
            if is_left:
                divisible.append((left, middle))
                is_refined = is_refined or left == 0.0
            if is_right:
                divisible.append((middle, right))
                is_refined = is_refined or right == 1.0
        if not is_refined and self._last is None:
            self._last = len(self._counts) - 1
        self._divisible = divisible
        self._counts.append(len(self._values))


_Axis: TypeAlias = _Options | _Listed | _Quantiles


def is_countable(space: SearchSpace) -> bool:
    """True if each hyper-parameter, also of the options, has a list of values."""
    return all(map(_is_countable, space.parameters.values()))


def _is_countable(parameter: Parameter) -> bool:
    if isinstance(parameter, Choice):
        return all(is_countable(option.space) for option in parameter.options if isinstance(option, Nested))
    return isinstance(parameter, QUniform | RandInt)


def _axis_of(parameter: Parameter, *, is_listed: bool) -> _Axis:
    match parameter:
        case Choice(options):
            return _Options(options, is_listed=is_listed)
        case RandInt(low, high):
            return _Listed(high - low, lambda index: low + index)
        case QUniform(low, high, q) if is_listed:
            return _multiples(low, high, q)
        case _:
            return _Quantiles(_value_of(parameter))


def _multiples(low: float, high: float, q: float) -> _Listed:
    """The multiples of q from the one nearest to low to the one nearest to high, clipped.

    The result may include bounds that sampling never yields: (2.5, 5.5, 1) gives 2.5, 3, 4, 5, 5.5.
    Source: NNI v2.10, the grid of GridSearch.
    """
    first = round(low / q)
    return _Listed(round(high / q) + 1 - first, lambda index: min(max((first + index) * q + 0.0, low), high))


def _value_of(parameter: Parameter) -> Callable[[float], float]:
    """The value at a quantile from 0 to 1; infinite for the ends of a normal distribution."""

    def quantised(value: float, q: float) -> float:
        return value if math.isinf(value) else multiple_of(value, q)

    def normal(mu: float, sigma: float, quantile: float) -> float:
        return (
            mu + sigma * _STANDARD.inv_cdf(quantile)
            if 0.0 < quantile < 1.0
            else math.copysign(math.inf, quantile - 0.5)
        )

    def log_uniform(low: float, high: float, quantile: float) -> float:
        return min(max(math.exp(math.log(low) + (math.log(high) - math.log(low)) * quantile), low), high)

    def exponential(value: float) -> float:
        return math.exp(value) if value < _MAX_EXPONENT else math.inf

    match parameter:
        case Uniform(low, high):
            return lambda quantile: low + (high - low) * quantile
        case QUniform(low, high, q):
            return lambda quantile: min(max(multiple_of(low + (high - low) * quantile, q), low), high)
        case LogUniform(low, high):
            return lambda quantile: log_uniform(low, high, quantile)
        case QLogUniform(low, high, q):
            return lambda quantile: min(max(multiple_of(log_uniform(low, high, quantile), q), low), high)
        case Normal(mu, sigma):
            return lambda quantile: normal(mu, sigma, quantile)
        case QNormal(mu, sigma, q):
            return lambda quantile: quantised(normal(mu, sigma, quantile), q)
        case LogNormal(mu, sigma):
            return lambda quantile: exponential(normal(mu, sigma, quantile))
        case QLogNormal(mu, sigma, q):
            return lambda quantile: quantised(exponential(normal(mu, sigma, quantile)), q)
    raise TypeError(parameter)


DECLARED = BuiltInTuner(
    "GridSearch",
    __doc__,
    lambda space, *_: EnumeratingTuner(Grid(space)),
    learns=False,
    has_several_objectives=True,
)
