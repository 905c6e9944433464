"""The Pareto front of points that arrive one by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Losses = Sequence[float]


def dominates(one: Losses, other: Losses) -> bool:
    """True if `one` is nowhere worse than `other`, and better in at least one loss."""
    return one != other and all(mine <= others for mine, others in zip(one, other, strict=True))


class ParetoFront(Generic[Item]):
    """The items that no other dominates, each with its losses (lower is better). Equal losses do not dominate each other.

    Theory of operation. The front is sorted by its losses, so a new point can only be dominated by points before its place, and
    can only dominate points after it. With two losses, the second one falls as the first one rises: the neighbour before the
    place decides, and the dominated points follow the place without a gap. Adding a point costs O(log n), n points O(n log n).
    With more losses, a point is compared with the whole front.
    """

    def __init__(self) -> None:
        """Start without points."""
        self._losses: list[tuple[float, ...]] = []
        self._items: list[Item] = []
        self._dominator: tuple[float, ...] | None = None
        """The point that has dominated the latest dominated one; often it dominates the next one as well."""

    def __len__(self) -> int:
        """The number of items on the front."""
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """The items as in `items`."""
        return iter(self._items)

    @property
    def items(self) -> list[Item]:
        """The items in the order of the first loss, then of the next; equal ones in the order of their arrival."""
        return list(self._items)

    def add(self, losses: tuple[float, ...], item: Item) -> bool:
        """Add a point, and remove those that it dominates. False if the front dominates it."""
        place = bisect_left(self._losses, losses)
        if self._is_dominated(losses, place):
            return False
        end = bisect_right(self._losses, losses, place)
        for after in reversed(self._dominated_from(losses, end)):
            del self._losses[after], self._items[after]
        self._losses.insert(end, losses)
        self._items.insert(end, item)
        return True

    def _is_dominated(self, losses: tuple[float, ...], place: int) -> bool:
        if len(losses) == 2:
            return place > 0 and self._losses[place - 1][1] <= losses[1]
        if self._dominator is not None and dominates(self._dominator, losses):
            return True
        self._dominator = next((each for each in self._losses[:place] if dominates(each, losses)), None)
        return self._dominator is not None

    def _dominated_from(self, losses: tuple[float, ...], start: int) -> Sequence[int]:
        if len(losses) != 2:
            return [
                index for index in range(start, len(self._losses)) if dominates(losses, self._losses[index])
            ]
        end = start
        while end < len(self._losses) and self._losses[end][1] >= losses[1]:
            end += 1
        return range(start, end)
