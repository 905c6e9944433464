"""The trials of a study as points of its flat space, for samplers that fit a model to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nni_manager.config.search_space import SearchSpace
from nni_manager.tuner.flat_space import FlatSpace
from nni_manager.tuner.lazy import Floats, FrozenTrial, NDArray, np
from nni_manager.tuner.samplers import IMPORTED
from trial_keeper.frozen_dataclass import dataclass

# The cost of a fit grows with the cube of the number of trials. The best and the latest are kept, half of each.
MAX_TRIALS = 200


@dataclass(frozen=True, slots=True)
class PastPoint:
    """A trial of the study in the flat space. `positions` as in `FlatSpace`."""

    positions: Floats
    features: Floats


class FlatStudy:
    """The points of a study's trials. Only a cache: the draws of a trial do not change."""

    def __init__(self, space: SearchSpace) -> None:
        """Start without trials."""
        self.space = FlatSpace(space)
        self.points: dict[int, PastPoint] = {}
        """Those of the last call of `points_of`, by trial: a study may have very many."""
        self.tried: set[bytes] = set()
        """The features of trials that could recur; see `note_tried`."""
        self._noted = 0

    def points_of(self, trials: Sequence[FrozenTrial]) -> list[PastPoint]:
        """The points of these trials."""
        known = self.points
        new = [each for each in trials if each.number not in known]
        if new:
            positions = np.array([self.space.positions_of(each.params) for each in new])
            pairs = zip(positions, self.space.features(positions), strict=True)
            known |= {trial.number: PastPoint(*pair) for trial, pair in zip(new, pairs, strict=True)}
        self.points = {each.number: known[each.number] for each in trials}
        return list(self.points.values())

    def note_tried(self, trials: Sequence[FrozenTrial]) -> None:
        """Add trials to `tried`, unless they have a continuous hyper-parameter: see `are_tried` for these."""
        if self.space.is_continuous:
            return
        new = [each for each in trials if each.number >= self._noted]
        if new:
            features = self.space.features(np.array([self.space.positions_of(each.params) for each in new]))
            self.tried.update(row.tobytes() for row in features[self.space.may_recur(features)])
            self._noted = 1 + max(each.number for each in new)

    def are_tried(self, features: Floats) -> NDArray[np.bool_]:
        """For each row of features: whether a trial of `tried` or of `points` has them.

        Continuous values are equal where a neighbour of a point has not moved, or lies on the same bound.
        """
        near = {each.features.tobytes() for each in self.points.values()}
        return np.array([(row := each.tobytes()) in near or row in self.tried for each in features])


def in_order(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Imported results by value, since a restart may import them in another order; then trials as they were asked for."""
    imported: list[FrozenTrial] = []
    proposed: list[FrozenTrial] = []
    for each in trials:
        (imported if IMPORTED in each.user_attrs else proposed).append(each)
    return sorted(imported, key=lambda each: (each.value, sorted(each.params.items()))) + proposed


def bounded(trials: list[FrozenTrial], losses: Floats) -> tuple[list[FrozenTrial], Floats]:
    """At most MAX_TRIALS: the best and the latest."""
    if len(trials) <= MAX_TRIALS:
        return trials, losses
    latest = np.arange(len(trials) - MAX_TRIALS // 2, len(trials))
    others = np.argsort(losses[: latest[0]], kind="stable")[: MAX_TRIALS - len(latest)]
    kept = np.concatenate([np.sort(others), latest])
    return [trials[each] for each in kept], losses[kept]
