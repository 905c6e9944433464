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
from typing import Any

from nni_manager.config.algorithm import RandomArgs
from nni_manager.config.schema import whole
from nni_manager.tuner import samplers
from nni_manager.tuner.flat_study import MAX_TRIALS, FlatStudy, bounded, in_order
from nni_manager.tuner.lazy import BaseDistribution, Floats, FrozenTrial, Study, np, optuna

# Distances from a good candidate at which neighbours are searched, in turn.
_STEPS = (0.1, 0.03, 0.01)


class ModelArgs(RandomArgs):
    """The args shared by tuners that fit a model: they start with random parameters, then score many candidates."""

    cold_start_num: int = whole(1, 99999, "10", 10)
    selection_num_starting_points: int = whole(1, 5000, "250", 250)


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

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Choose the point of the trial, once there are `cold_start` results."""
        past = in_order(each for each in study.get_trials(deepcopy=False) if each.number != trial.number)
        ended = [each for each in past if each.state is optuna.trial.TrialState.COMPLETE]
        if self._space.width and len(ended) >= self._cold_start:
            if not self.repeats:
                self._flat_study.note_tried(past)
            running = [each for each in past if each.state is optuna.trial.TrialState.RUNNING][-MAX_TRIALS:]
            losses = _standardised([samplers.loss_of(study, each) for each in ended])
            self._positions = self._most_promising(*bounded(ended, losses), running)

    def draw(self, study: Study, name: str, distribution: BaseDistribution) -> Any:
        """The draw at the chosen point, or a random one."""
        if self._positions is None:
            return super().draw(study, name, distribution)
        return self._space.draw_at(self._positions, name, distribution)

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


def expected_improvement(means: Floats, deviations: Floats, best: float) -> Floats:
    """The mean amount by which losses of these normal distributions are below `best`; a loss above it counts as 0."""
    margins = (best - means) / deviations
    densities = np.exp(-0.5 * margins**2) / math.sqrt(2 * math.pi)
    improvements: Floats = deviations * (margins * normal_share(margins) + densities)
    return improvements


def normal_share(margins: Floats) -> Floats:
    """The probability that a standard normal variable is below each margin."""
    return 0.5 * (1 + np.array([math.erf(margin / math.sqrt(2)) for margin in margins]))


def _standardised(losses: Sequence[float]) -> Floats:
    # Scale to at most 1 first: the square of a large float overflows.
    values = np.array(losses) / max(1.0, *map(abs, losses))
    values = values - values.mean()
    deviation = float(values.std())
    standardised: Floats = values / deviation if deviation > 1e-12 else values
    return standardised
