"""A search space as a vector with one number for each hyper-parameter, nested ones included.

A *position* from 0 to 1 determines a draw (see `optuna_backed`). *Features* are the input of a model: the position of the middle
of the values that have the same effect, so that two equal trials have equal features:

- A continuous hyper-parameter: its position. An integer or quantised one: the centre of the cell of positions with this value.
- A choice: the index of its option. Two choices are equal or different; the distance of two indices has no meaning.
- An inactive hyper-parameter, of an option that is not chosen: the centre, 0.5; an inactive choice: -1.

NNI's format repeats a parameter in each option that has it. Parameters of the same name and range in several options of a choice
are one dimension: at most one of them is active, and they usually have the same effect.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nni_manager.config import search_space
from nni_manager.config.search_space import Choice, Nested, SearchSpace
from nni_manager.tuner.lazy import BaseDistribution, Floats, NDArray, np
from nni_manager.tuner.optuna_backed import PROBABILITIES, distribution_of, pointer_of
from nni_manager.tuner.samplers import from_unit, to_unit

Conditions: TypeAlias = tuple[tuple[int, int], ...]

INACTIVE_CHOICE = -1.0
_CONTINUOUS = (search_space.Uniform, search_space.LogUniform, search_space.Normal, search_space.LogNormal)
_CENTRE = 0.5


@dataclass(slots=True)
class Dimension:
    """One hyper-parameter, or several of the same name and range of which at most one is active.

    `conditions`: it is active if one of these choices, by dimension, has this option; without conditions always.
    """

    parameter: search_space.Parameter
    distribution: BaseDistribution
    conditions: list[tuple[int, int]] = field(default_factory=list)


class FlatSpace:
    """The dimensions of a search space: all hyper-parameters with more than one draw. A choice precedes its nested ones."""

    def __init__(self, space: SearchSpace) -> None:
        """Flatten a search space."""
        self.dimensions: list[Dimension] = []
        self._index_of: dict[str, int] = {}
        """The dimension of each hyper-parameter, by JSON pointer."""
        self._flatten(space)
        self.are_choices = np.array([isinstance(each.parameter, Choice) for each in self.dimensions], bool)
        self._continuous = [
            index for index, each in enumerate(self.dimensions) if isinstance(each.parameter, _CONTINUOUS)
        ]
        self.is_continuous = any(not self.dimensions[each].conditions for each in self._continuous)
        """True if every trial has a continuous hyper-parameter, so that independent draws are never equal."""

    def _flatten(self, space: SearchSpace) -> None:
        known: dict[tuple[str, ...], int] = {}
        # Level by level, so that all choices on which a dimension depends have lower indices.
        waiting: deque[tuple[tuple[str, ...], str, SearchSpace, Conditions]] = deque([((), "", space, ())])
        while waiting:
            names, above, inner, conditions = waiting.popleft()
            for name, parameter in inner.parameters.items():
                pointer, distribution = pointer_of(above, name), distribution_of(parameter)
                here, of_options = (*names, name), conditions
                if not distribution.single():
                    # The path has no options in it: equal paths differ in the option of a common choice.
                    index = known.setdefault((*here, repr(parameter)), len(self.dimensions))
                    if index == len(self.dimensions):
                        self.dimensions.append(Dimension(parameter, distribution))
                    self.dimensions[index].conditions += conditions
                    self._index_of[pointer] = index
                for number, option in enumerate(parameter.options if isinstance(parameter, Choice) else ()):
                    if isinstance(option, Nested):
                        if not distribution.single():
                            of_options = ((index, number),)
                        waiting.append((here, f"{pointer}/{number}", option.space, of_options))

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return len(self.dimensions)

    def positions_of(self, draws: Mapping[str, Any]) -> Floats:
        """The position of each draw; NaN for inactive dimensions. Keys that are no hyper-parameters are ignored."""
        positions = np.full(self.width, np.nan)
        for pointer, drawn in draws.items():
            index = self._index_of.get(pointer)
            if index is not None:
                positions[index] = to_unit(self.dimensions[index].distribution, drawn)
        return positions

    def draw_at(self, positions: Floats, pointer: str, distribution: BaseDistribution) -> Any:
        """The draw of an active hyper-parameter at the positions of one trial; the only draw if it has just one."""
        index = self._index_of.get(pointer)
        return from_unit(distribution, _CENTRE if index is None else float(positions[index]))

    def features(self, positions: Floats) -> Floats:
        """The features at positions, one trial per row. NaN is allowed for inactive dimensions."""
        features = np.empty_like(positions)
        active = np.ones(positions.shape, bool)
        for index, each in enumerate(self.dimensions):
            if each.conditions:
                chosen = [features[:, choice] == option for choice, option in each.conditions]
                active[:, index] = np.any(chosen, axis=0)
            column = np.where(active[:, index], positions[:, index], _CENTRE)
            features[:, index] = _features_of(each.parameter, column)
            outside = INACTIVE_CHOICE if self.are_choices[index] else _CENTRE
            features[~active[:, index], index] = outside
        return features

    def neighbours(
        self, positions: Floats, step: float, share: float, numbers: np.random.Generator
    ) -> Floats:
        """A neighbour of each row. Inactive hyper-parameters, and choices that change, are drawn at random.

        `step`: the deviation of a move. `share`: how many hyper-parameters move, so that a choice can stay while a number moves.
        """
        shape, anywhere = positions.shape, numbers.random(positions.shape)
        moved = np.clip(positions + numbers.normal(scale=step, size=shape), 0.0, 1.0)
        moves = numbers.random(shape) < share
        is_new = np.isnan(positions) | (moves & self.are_choices & (numbers.random(shape) < 0.3))
        return np.where(is_new, anywhere, np.where(moves & ~self.are_choices, moved, positions))

    def one_hot(self, features: Floats) -> Floats:
        """Features with a column for each option of a choice. Two options are 1 apart; an inactive choice has none."""
        columns: list[Floats] = []
        for column, each in zip(features.T, self.dimensions, strict=True):
            if isinstance(each.parameter, Choice):
                columns += [
                    (column == option) / math.sqrt(2) for option in range(len(each.parameter.options))
                ]
            else:
                columns.append(column)
        return np.column_stack(columns)

    def may_recur(self, features: Floats) -> NDArray[np.bool_]:
        """For each row of features: whether no continuous hyper-parameter is active, so that independent draws may be equal."""
        # A continuous one is exactly at the centre if, with probability 1, it is inactive.
        recurs: NDArray[np.bool_] = (features[:, self._continuous] == _CENTRE).all(axis=1)
        return recurs


def _features_of(parameter: search_space.Parameter, positions: Floats) -> Floats:
    """The features of one active hyper-parameter at these positions."""
    match parameter:
        case Choice(options):
            return np.minimum(np.floor(positions * len(options)), len(options) - 1)
        case search_space.RandInt(low, high):
            count = high - low
            return (np.minimum(np.floor(positions * count), count - 1) + 0.5) / count
        case search_space.QUniform(low, high) | search_space.QLogUniform(low, high):
            return _centres_in_range(
                parameter, positions, is_log=isinstance(parameter, search_space.QLogUniform)
            )
        case search_space.QNormal() | search_space.QLogNormal():
            return _centres_of_normal(parameter, positions)
    return positions


def _centres_in_range(
    parameter: search_space.QUniform | search_space.QLogUniform, positions: Floats, *, is_log: bool
) -> Floats:
    low, high, q = parameter.low, parameter.high, parameter.q
    start, end = (math.log(low), math.log(high)) if is_log else (low, high)
    drawn = start + (end - start) * positions
    cells = np.round((np.exp(drawn) if is_log else drawn) / q)
    # The cells of `quantised`: those at both ends reach to the bounds.
    first = math.floor(low / q + 0.5)
    last = max(first, math.ceil(high / q - 0.5))
    cells = np.clip(cells, first, last)
    with np.errstate(over="ignore"):  # an edge beyond the largest float is clipped
        lower = np.where(cells == first, low, (cells - 0.5) * q)
        upper = np.where(cells == last, high, (cells + 0.5) * q)
    edges = np.clip([lower, upper], low, high)
    middles: Floats = (np.log(edges) if is_log else edges).mean(axis=0)
    return np.clip((middles - start) / (end - start), 0.0, 1.0)


def _centres_of_normal(
    parameter: search_space.QNormal | search_space.QLogNormal, positions: Floats
) -> Floats:
    from scipy.special import ndtr, ndtri  # costs a tenth of a second, which nnictl does without

    is_log = isinstance(parameter, search_space.QLogNormal)
    drawn = parameter.mu + parameter.sigma * ndtri(np.clip(positions, *PROBABILITIES))
    cells = np.round((np.exp(drawn) if is_log else drawn) / parameter.q)
    # Infinite where a cell reaches beyond the largest float, or below the logarithm of 0.
    with np.errstate(over="ignore", divide="ignore"):
        edges = np.array([(cells - 0.5) * parameter.q, (cells + 0.5) * parameter.q])
        if is_log:
            edges = np.log(np.maximum(edges, 0.0))
        shares: Floats = ndtr((edges - parameter.mu) / parameter.sigma)
    centres: Floats = shares.mean(axis=0)
    return centres
