"""`Auto`, the default tuner: a Gaussian process over the whole search space, nested hyper-parameters included.

The first trials are points of a scrambled Sobol sequence. Then a model is fitted to the results, and the most promising of
many candidates is proposed. What counts as promising alternates from trial to trial, because no acquisition function is best
everywhere. A trial that failed or was stopped early counts as the worst result, and a running one as the result that the model
expects.

The proposal depends only on the trial's number, its seed and the trials of the study, so a restart does not change it.

Source: R. Turner et al., Bayesian Optimization is Superior to Random Search for Machine Learning Hyperparameter Tuning, 2021,
for the practices of the winners of the black-box optimisation challenge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from nni_manager.tuner.flat_space import FlatSpace, Floats
from nni_manager.tuner.samplers import IMPORTED, LearningSampler, SamplerSeeds

if TYPE_CHECKING:
    from optuna import Study

    from nni_manager.tuner.gaussian_process import MaternProcess

SOBOL_TRIALS = 8
# With many trials at once, the model waits for half as many results.
MIN_RESULTS = 4
# The cost of a fit grows with the cube of the number of trials. The best and the latest are kept, half of each.
MAX_TRIALS = 200

_RANDOM_CANDIDATES = 1000
_NEAR_CANDIDATES, _NEAR_BEST, _NEAR_STEP = 300, 5, 0.1
# Candidates that remain after each round, the neighbours of each, and their distances.
_KEPT, _NEIGHBOURS = 10, 10
_STEPS = (0.06, 0.03, 0.012, 0.005)
_UCB_DEVIATIONS = 1.8
_GREEDY_DEVIATIONS = 0.2


@dataclass(frozen=True, slots=True)
class PastPoint:
    """A trial of the study in the flat space. `positions` as in `FlatSpace`."""

    positions: Floats
    features: Floats


class FlatStudy:
    """The points of a study's trials. Only a cache: the draws of a trial do not change."""

    def __init__(self, space: FlatSpace) -> None:
        """Start without trials."""
        self.space = space
        self.points: dict[int, PastPoint] = {}
        """Those of the last call of `points_of`, by trial: a study may have very many."""
        self.tried: set[bytes] = set()
        """The features of trials that could be repeated; see `note_tried`."""
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
        """Add trials to `tried`, unless they have a continuous hyper-parameter: no proposal repeats these."""
        if self.space.is_continuous:
            return
        new = [each for each in trials if each.number >= self._noted]
        if new:
            features = self.space.features(np.array([self.space.positions_of(each.params) for each in new]))
            self.tried.update(row.tobytes() for row in features[self.space.may_recur(features)])
            self._noted = 1 + max(each.number for each in new)


class Auto(LearningSampler):
    """Proposes a point of the flat space."""

    def __init__(self, seeds: SamplerSeeds, flat_study: FlatStudy) -> None:
        """All trials of an experiment share one `flat_study` and one Sobol sequence."""
        super().__init__(seeds)
        self._flat_study, self._space = flat_study, flat_study.space
        self._experiment_seed = seeds.experiment
        self._numbers = np.random.Generator(np.random.PCG64(seeds.trial))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Choose the point of the trial."""
        past = _in_order(each for each in study.get_trials(deepcopy=False) if each.number != trial.number)
        results = sum(each.state is TrialState.COMPLETE for each in past)
        if not self._space.width:
            self._positions = np.empty(0)
        elif trial.number < SOBOL_TRIALS or results < MIN_RESULTS:
            self._positions = self._sobol(trial.number)
        else:
            sign = -1.0 if study.direction is StudyDirection.MAXIMIZE else 1.0
            self._positions = self._most_promising(past, sign, trial.number)
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The draw at the chosen point."""
        return self._space.draw_at(self._positions, param_name, param_distribution)

    def _sobol(self, number: int) -> Floats:
        from scipy.stats import qmc  # half a second, needed for eight trials only

        sequence = qmc.Sobol(self._space.width, rng=self._experiment_seed)
        if number:
            sequence.fast_forward(number)
        point: Floats = sequence.random(1)[0]
        return point

    def _most_promising(self, past: list[FrozenTrial], sign: float, number: int) -> Floats:
        from nni_manager.tuner.gaussian_process import MaternProcess  # SciPy is loaded for the first fit

        ended = [each for each in past if each.state is not TrialState.RUNNING]
        running = [each for each in past if each.state is TrialState.RUNNING]
        losses = np.array([_loss_of(each, sign) for each in ended])
        # Values show the shape of the function, ranks the differences among the best when these are small.
        ended, losses = _bounded(ended, ranked(losses) if number % 4 >= 2 else standardised(losses))
        running = running[-MAX_TRIALS:]
        points = self._flat_study.points_of([*ended, *running])
        points, at = points[: len(ended)], points[len(ended) :]
        features = np.array([each.features for each in points])
        process = MaternProcess.fitted(features, losses, self._space.are_choices)
        expected = process.predict(features)[0]
        # Noise must not mislead: the best trial is that of the model.
        order = np.argsort(expected, kind="stable")
        if at:
            process = process.with_expected(np.array([each.features for each in at]))
        self._flat_study.note_tried(past)
        search = _Search(process, float(expected[order[0]]), number, self._flat_study)
        best = np.array([points[each].positions for each in order[:_NEAR_BEST]])
        return self._searched(search, best)

    def _searched(self, search: _Search, best: Floats) -> Floats:
        width = self._space.width
        near = best[self._numbers.integers(len(best), size=_NEAR_CANDIDATES)]
        pool = np.vstack(
            [self._numbers.random((_RANDOM_CANDIDATES, width)), self._neighbours(near, _NEAR_STEP)]
        )
        values = search.values(self._space.features(pool))
        for step in _STEPS:
            order = np.argsort(-values, kind="stable")[:_KEPT]
            pool, values = pool[order], values[order]
            neighbours = self._neighbours(np.repeat(pool, _NEIGHBOURS, axis=0), step)
            pool = np.vstack([pool, neighbours])
            values = np.concatenate([values, search.values(self._space.features(neighbours))])
        point: Floats = pool[np.argmax(values)]
        return point

    def _neighbours(self, places: Floats, step: float) -> Floats:
        """A neighbour of each place; inactive hyper-parameters, and choices that change, are drawn at random."""
        shape, anywhere = places.shape, self._numbers.random(places.shape)
        moved = np.clip(places + self._numbers.normal(scale=step, size=shape), 0.0, 1.0)
        # About three move, so that a choice can stay while a number moves.
        moves = self._numbers.random(shape) < max(0.25, min(1.0, 3 / shape[1]))
        is_new = np.isnan(places) | (moves & self._space.are_choices & (self._numbers.random(shape) < 0.3))
        return np.where(is_new, anywhere, np.where(moves & ~self._space.are_choices, moved, places))


class _Search:
    """What one trial looks for."""

    def __init__(self, process: MaternProcess, best: float, number: int, flat_study: FlatStudy) -> None:
        self._process, self._best, self._number, self._flat_study = process, best, number, flat_study

    def values(self, features: Floats) -> Floats:
        """The acquisition function, higher is better; -inf for a point that was tried, as in a space of few points."""
        from nni_manager.tuner.gaussian_process import log_expected_improvement

        means, deviations = self._process.predict(features)
        match self._number % 4:
            case 1:
                values = _UCB_DEVIATIONS * deviations - means
            case 3:
                values = _GREEDY_DEVIATIONS * deviations - means
            case _:
                values = log_expected_improvement(means, deviations, self._best)
        if tried := self._flat_study.tried:
            recurring = np.flatnonzero(self._flat_study.space.may_recur(features))
            values[[each for each in recurring if features[each].tobytes() in tried]] = -np.inf
        return values


def _in_order(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Imported results by value, since a restart may import them in another order; then trials as they were asked for."""
    imported: list[FrozenTrial] = []
    proposed: list[FrozenTrial] = []
    for each in trials:
        (imported if IMPORTED in each.user_attrs else proposed).append(each)
    return sorted(imported, key=lambda each: (each.value, sorted(each.params.items()))) + proposed


def _loss_of(trial: FrozenTrial, sign: float) -> float:
    """NaN: it failed or was pruned. The value of a pruned trial is its last intermediate result, which may look too good."""
    return sign * trial.value if trial.state is TrialState.COMPLETE and trial.value is not None else np.nan


def standardised(losses: Floats) -> Floats:
    """Losses with mean 0 and deviation 1. Those far worse than the median are compressed; NaN (failed) is the worst of all."""
    # Scale to at most 1 first: the difference of two large floats overflows.
    losses = losses / (float(np.nanmax(np.abs(losses))) or 1.0)
    least, median, most = float(np.nanmin(losses)), float(np.nanmedian(losses)), float(np.nanmax(losses))
    # If half of the results are the best one, nothing is compressed.
    excess = (losses - median) / ((median - least) or (most - median) or 1.0)
    compressed = np.where(excess > 1, 1 + np.log(np.fmax(excess, 1.0)), excess)
    return _scaled(np.where(np.isnan(compressed), np.nanmax(compressed), compressed))


def ranked(losses: Floats) -> Floats:
    """The quantiles of a normal distribution at the ranks of losses, with mean 0 and deviation 1; NaN (failed) is the worst."""
    from scipy.special import ndtri  # SciPy is loaded for the first fit

    filled = np.where(np.isnan(losses), np.nanmax(losses), losses)
    _, places, counts = np.unique(filled, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - counts / 2
    return _scaled(ndtri(middles / len(losses))[places])


def _scaled(losses: Floats) -> Floats:
    deviation = float(losses.std())
    centred: Floats = losses - losses.mean()
    return centred / deviation if deviation > 1e-12 else centred


def _bounded(trials: list[FrozenTrial], losses: Floats) -> tuple[list[FrozenTrial], Floats]:
    """At most MAX_TRIALS: the best and the latest."""
    if len(trials) <= MAX_TRIALS:
        return trials, losses
    latest = np.arange(len(trials) - MAX_TRIALS // 2, len(trials))
    others = np.argsort(losses[: latest[0]], kind="stable")[: MAX_TRIALS - len(latest)]
    kept = np.concatenate([np.sort(others), latest])
    return [trials[each] for each in kept], losses[kept]
