"""The Pareto front of points that arrive one by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Item = TypeVar("Item")
Losses = Sequence[float]
_FIRST_CAPACITY = 64


def dominates(one: Losses, other: Losses) -> bool:
    """True if `one` is nowhere worse than `other`, and better in at least one loss."""
    return one != other and all(mine <= others for mine, others in zip(one, other, strict=True))


class ParetoFront(Generic[Item]):
    """The items that no other dominates, each with its losses (lower is better). Equal losses do not dominate each other.

    Theory of operation. The front is sorted by its losses, so a new point can only be dominated by points before its position,
    and can only dominate points after it. With up to two losses, the last one falls as the first one rises: the neighbour before
    the position decides, and the dominated points follow the position without a gap. Adding a point costs O(log n), n points
    O(n log n). With more losses, a point is compared with the whole front, by numpy: 20 µs if there are 1,000 points on it.
    """

    def __init__(self) -> None:
        """Start without points."""
        self._losses: list[tuple[float, ...]] = []
        self._items: list[Item] = []
        self._columns: _Columns | None = None
        """The losses again, if they are more than two."""
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
        position = bisect_left(self._losses, losses)
        if len(losses) <= 2:
            if position > 0 and self._losses[position - 1][-1] <= losses[-1]:
                return False
            dominated = self._run_of_dominated(losses, position)
        else:
            if self._dominator is not None and dominates(self._dominator, losses):
                return False
            self._columns = self._columns or _Columns(len(losses))
            dominator = self._columns.dominator_of(losses, position)
            if dominator is not None:
                self._dominator = self._losses[dominator]
                return False
            dominated = self._columns.dominated_by(losses, position)
        for after in reversed(dominated):
            del self._losses[after], self._items[after]
        end = bisect_right(self._losses, losses, position)
        self._losses.insert(end, losses)
        self._items.insert(end, item)
        if self._columns is not None:
            self._columns.replace(dominated, end, losses)
        return True

    def _run_of_dominated(self, losses: tuple[float, ...], position: int) -> Sequence[int]:
        start = end = bisect_right(self._losses, losses, position)
        while end < len(self._losses) and self._losses[end][-1] >= losses[-1]:
            end += 1
        return range(start, end)


class _Columns:
    """The losses of a sorted front, as one array for each loss."""

    def __init__(self, width: int) -> None:
        # Imported here: lists of trials and experiments with one objective must not wait for it.
        import numpy

        self._numpy: Any = numpy
        self._size = 0
        self._values: NDArray[np.float64] = numpy.empty((width, _FIRST_CAPACITY))

    def dominator_of(self, losses: Losses, position: int) -> int | None:
        """The index of a point before `position` that dominates these losses; None: there is none."""
        # A point before the position is not equal.
        found = self._where(self._values[:, :position], losses, self._numpy.less_equal)
        return int(found[0]) if len(found) else None

    def dominated_by(self, losses: Losses, position: int) -> Sequence[int]:
        """The indices of the points that these losses dominate, all of them at `position` or after it."""
        after = self._values[:, position : self._size]
        found = self._where(after, losses, self._numpy.greater_equal)
        return [position + int(index) for index in found if tuple(after[:, index]) != tuple(losses)]

    def replace(self, removed: Sequence[int], position: int, losses: Losses) -> None:
        """Remove points, then insert one."""
        if removed:
            kept = self._numpy.delete(self._values[:, : self._size], removed, axis=1)
            self._size = kept.shape[1]
            self._values[:, : self._size] = kept
        if self._size == self._values.shape[1]:
            self._values = self._numpy.concatenate(
                (self._values, self._numpy.empty_like(self._values)), axis=1
            )
        self._values[:, position + 1 : self._size + 1] = self._values[:, position : self._size].copy()
        self._values[:, position] = losses
        self._size += 1

    def _where(self, columns: NDArray[np.float64], losses: Losses, compare: Any) -> Any:
        holds = compare(columns[0], losses[0])
        for column, loss in zip(columns[1:], losses[1:], strict=True):
            holds &= compare(column, loss)
        return self._numpy.flatnonzero(holds)
