"""GridSearch: every combination of values; see `refining_grid` for hyper-parameters without a list of values."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.config.search_space import Choice, Nested, Parameter, QUniform, RandInt, SearchSpace
from nni_manager.tuner.enumerating import EnumeratingTuner, Points
from nni_manager.tuner.refining_grid import RefiningGrid


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


DECLARED = BuiltInTuner(
    "GridSearch",
    "every combination of values",
    lambda space, *_: EnumeratingTuner(grid(space) if is_countable(space) else RefiningGrid(space)),
    learns=False,
    has_several_objectives=True,
)
