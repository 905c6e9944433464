"""Samplers that fit a model to past results and propose the most promising point: GPTuner, MetisTuner and SMAC.

The model's input is a point of the flat space, nested hyper-parameters included; a choice is one-hot encoded. A running trial
counts as an average result, so that concurrent trials are not sent to the same point.

Source: J. Snoek et al., Practical Bayesian Optimization of Machine Learning Algorithms, 2012; F. Hutter et al., Sequential
Model-Based Optimization for General Algorithm Configuration, 2011.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from nni_manager.config.algorithms import GpArgs, MetisArgs, SmacArgs
from nni_manager.tuner import samplers
from nni_manager.tuner.flat_space import Floats
from nni_manager.tuner.flat_study import MAX_TRIALS, FlatStudy, bounded, in_order

if TYPE_CHECKING:
    from optuna import Study

# Distances from a good candidate at which neighbours are searched, in turn.
_STEPS = (0.1, 0.03, 0.01)
_LENGTH_SCALES = np.geomspace(0.05, 5.0, 7)
_NOISES = (0.0, 1e-3, 1e-1)


class ModelSampler(samplers.LearningSampler):
    """Proposes random points first, then the best predicted of many candidates and their neighbours."""

    repeats: bool = True
    """True if the same point may be proposed again."""

    def __init__(
        self,
        seeds: samplers.SamplerSeeds,
        flat_study: FlatStudy,
        *,
        cold_start: int,
        candidates: int,
        starting_points: int,
    ) -> None:
        """`candidates`: the number of random points. `starting_points`: how many of the best have their neighbours evaluated."""
        super().__init__(seeds)
        self._flat_study, self._space = flat_study, flat_study.space
        self._cold_start = cold_start
        self._candidates = candidates
        self._starting_points = min(starting_points, candidates)
        self.numbers = np.random.Generator(np.random.PCG64(seeds.trial))
        self._positions: Floats | None = None
        """Of the trial's point; None: it is drawn at random."""

    @abstractmethod
    def fit(self, points: Floats, losses: Floats) -> None:
        """Fit the model to points, one per row, and their losses, which have mean 0 and deviation 1."""

    @abstractmethod
    def acquisition(self, points: Floats) -> Floats:
        """The acquisition function at each of the points; higher is better."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Choose the point of the trial, once there are `cold_start` results."""
        past = in_order(each for each in study.get_trials(deepcopy=False) if each.number != trial.number)
        ended = [each for each in past if each.state is TrialState.COMPLETE]
        if self._space.width and len(ended) >= self._cold_start:
            if not self.repeats:
                self._flat_study.note_tried(past)
            running = [each for each in past if each.state is TrialState.RUNNING][-MAX_TRIALS:]
            losses = _standardised([samplers.loss_of(study, each) for each in ended])
            self._positions = self._most_promising(*bounded(ended, losses), running)
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The draw at the chosen point, or a random one."""
        if self._positions is None:
            return super().sample_independent(study, trial, param_name, param_distribution)
        return self._space.draw_at(self._positions, param_name, param_distribution)

    def _most_promising(self, ended: list[FrozenTrial], losses: Floats, running: list[FrozenTrial]) -> Floats:
        points = self._flat_study.points_of([*ended, *running])
        features = np.array([each.features for each in points])
        self.fit(self._space.one_hot(features), np.concatenate([losses, np.zeros(len(running))]))
        best = np.array([points[each].positions for each in np.argsort(losses, kind="stable")[:10]])
        pool = self._kept(np.vstack([self.numbers.random((self._candidates, self._space.width)), best]))
        for step in _STEPS:
            pool = self._kept(np.vstack([pool, self._space.neighbours(pool, step, 0.5, self.numbers)]))
        point: Floats = pool[0]
        return point

    def _kept(self, pool: Floats) -> Floats:
        """The most promising places, best first."""
        features = self._space.features(pool)
        values = self.acquisition(self._space.one_hot(features))
        if not self.repeats:
            values = np.where(self._flat_study.are_tried(features), -np.inf, values)
        return pool[np.argsort(-values, kind="stable")[: self._starting_points]]


class GaussianProcess(ModelSampler):
    """A Gaussian process with a Matérn kernel. Its length scale and noise maximise the likelihood of the data."""

    def __init__(self, seeds: samplers.SamplerSeeds, flat_study: FlatStudy, args: GpArgs) -> None:
        """Apply the settings of the experiment file."""
        super().__init__(
            seeds,
            flat_study,
            cold_start=args.cold_start_num,
            candidates=args.selection_num_warm_up,
            starting_points=args.selection_num_starting_points,
        )
        self._args = args

    def fit(self, points: Floats, losses: Floats) -> None:
        """See `ModelSampler`."""
        self._points, self._best = points, float(losses.min())
        distances = _distances(points, points)
        likeliest = -math.inf
        for length_scale in _LENGTH_SCALES * math.sqrt(points.shape[1]):
            kernel = _matern(distances / length_scale, self._args.nu)
            for noise in _NOISES:
                noisy = kernel + (self._args.alpha + noise) * np.eye(len(points))
                try:
                    root = np.linalg.cholesky(noisy)
                except np.linalg.LinAlgError:
                    continue  # singular in double precision; shorter scales and more noise are tried as well
                inverse = np.linalg.inv(noisy)
                scale = max(float(losses @ inverse @ losses) / len(losses), 1e-12)
                likelihood = -0.5 * len(losses) * math.log(scale) - float(np.log(np.diag(root)).sum())
                if likelihood > likeliest:
                    likeliest = likelihood
                    self._inverse, self._weights = inverse, inverse @ losses
                    self._length_scale, self._scale = length_scale, scale

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Expected losses and their standard deviations."""
        kernel = _matern(_distances(points, self._points) / self._length_scale, self._args.nu)
        variances = 1 - np.einsum("ij,ij->i", kernel @ self._inverse, kernel)
        return kernel @ self._weights, np.sqrt(self._scale * np.maximum(variances, 1e-12))

    def acquisition(self, points: Floats) -> Floats:
        """See `ModelSampler`."""
        means, deviations = self.predict(points)
        args = self._args
        if args.utility == "ucb":
            return args.kappa * deviations - means
        if args.utility == "poi":
            return _normal_share((self._best - means - args.xi) / deviations)
        return expected_improvement(means, deviations, self._best - args.xi)


class Metis(GaussianProcess):
    """Proposes the best predicted point or, with the exploration probability, the point of greatest expected improvement."""

    def __init__(self, seeds: samplers.SamplerSeeds, flat_study: FlatStudy, args: MetisArgs) -> None:
        """Apply the settings of the experiment file."""
        super().__init__(
            seeds,
            flat_study,
            GpArgs(
                cold_start_num=args.cold_start_num,
                selection_num_starting_points=args.selection_num_starting_points,
            ),
        )
        self._explores = self.random.random() < args.exploration_probability

    def acquisition(self, points: Floats) -> Floats:
        """See `ModelSampler`."""
        return super().acquisition(points) if self._explores else -self.predict(points)[0]


class Forest(ModelSampler):
    """A random forest. Its trees disagree where data is scarce. One proposal in five is random.

    scikit-learn's forest replaces SMAC's own.
    """

    _RANDOM_SHARE = 0.2

    def __init__(self, seeds: samplers.SamplerSeeds, flat_study: FlatStudy, args: SmacArgs) -> None:
        """Apply the settings of the experiment file."""
        super().__init__(seeds, flat_study, cold_start=10, candidates=5000, starting_points=100)
        self.repeats = not args.config_dedup
        self._seed = seeds.trial
        self._is_random = self.random.random() < self._RANDOM_SHARE

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See `ModelSampler`."""
        return {} if self._is_random else super().infer_relative_search_space(study, trial)

    def fit(self, points: Floats, losses: Floats) -> None:
        """See `ModelSampler`."""
        from sklearn.ensemble import RandomForestRegressor  # an extra

        self._forest = RandomForestRegressor(
            n_estimators=10, min_samples_split=3, max_features=5 / 6, random_state=self._seed
        )
        # Fit ranks instead of losses: trees disagree most about very bad losses, which would attract the search.
        scores = _scores(losses)
        self._forest.fit(points, scores)
        self._best = float(scores.min())

    def acquisition(self, points: Floats) -> Floats:
        """See `ModelSampler`."""
        votes = np.array([tree.predict(points) for tree in self._forest.estimators_])
        return expected_improvement(votes.mean(axis=0), np.maximum(votes.std(axis=0), 1e-6), self._best)


def _scores(losses: Floats) -> Floats:
    """The ranks of the losses, as quantiles of a normal distribution."""
    ranks = np.argsort(np.argsort(losses, kind="stable"), kind="stable")
    return np.array([NormalDist().inv_cdf((rank + 0.5) / len(losses)) for rank in ranks])


def expected_improvement(means: Floats, deviations: Floats, best: float) -> Floats:
    """The mean amount by which losses of these normal distributions are below `best`; a loss above it counts as 0."""
    margins = (best - means) / deviations
    densities = np.exp(-0.5 * margins**2) / math.sqrt(2 * math.pi)
    improvements: Floats = deviations * (margins * _normal_share(margins) + densities)
    return improvements


def _normal_share(margins: Floats) -> Floats:
    return 0.5 * (1 + np.array([math.erf(margin / math.sqrt(2)) for margin in margins]))


def _distances(points: Floats, others: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * points @ others.T
    distances: Floats = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _matern(distances: Floats, nu: float) -> Floats:
    scaled = math.sqrt(2 * nu) * distances
    factor = {0.5: 1.0, 1.5: 1 + scaled, 2.5: 1 + scaled + scaled**2 / 3}[nu]
    kernel: Floats = factor * np.exp(-scaled)
    return kernel


def _standardised(losses: Sequence[float]) -> Floats:
    # Scale to at most 1 first: the square of a large float overflows.
    values = np.array(losses) / max(1.0, *map(abs, losses))
    values = values - values.mean()
    deviation = float(values.std())
    standardised: Floats = values / deviation if deviation > 1e-12 else values
    return standardised
