"""Anneal: draws near one of the best results, nearer with each trial, as hyperopt's."""

from __future__ import annotations

import math
from typing import Any

from nni_manager.config.algorithm import BuiltInTuner, MinimizingArgs
from nni_manager.tuner.lazy import BaseDistribution, FrozenTrial, Study, optuna
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import LearningSampler, best_first, from_unit, to_unit


class Anneal(LearningSampler):
    """Draws near one of the best trials, nearer as the number of trials grows.

    The rank of the chosen trial has a geometric distribution, with the best trial as the most frequent. After T trials, a
    neighbourhood is the whole range divided by 1 + T/10.
    Source: hyperopt's anneal, which NNI's Anneal wraps.
    """

    _MEAN_RANK = 2.0
    _SHRINKING = 0.1

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Rank the past trials once for all hyper-parameters."""
        self._ranked = best_first(study)

    def draw(self, study: Study, name: str, distribution: BaseDistribution) -> Any:
        """A draw near that of a good trial that has this hyper-parameter."""
        seen = [past for past in self._ranked if name in past.params]
        anywhere = self.random.random()
        if not seen:
            return from_unit(distribution, anywhere)
        beyond = math.log(1 - self.random.random()) / math.log(1 - 1 / self._MEAN_RANK)
        anchor = seen[min(int(beyond), len(seen) - 1)].params[name]
        width = 1 / (1 + self._SHRINKING * len(seen))
        if isinstance(distribution, optuna.distributions.CategoricalDistribution):
            is_kept = self.random.random() >= width
            return anchor if is_kept else from_unit(distribution, anywhere)
        middle = to_unit(distribution, anchor)
        low, high = max(0.0, middle - width / 2), min(1.0, middle + width / 2)
        return from_unit(distribution, low + (high - low) * anywhere)


DECLARED = BuiltInTuner("Anneal", __doc__, over_a_study(Anneal), MinimizingArgs)
