"""Evolution: the better of two trials of the population, with one hyper-parameter changed."""

from __future__ import annotations

from typing import Any

from nni_manager.config.algorithm import BuiltInTuner, RandomArgs
from nni_manager.config.schema import whole
from nni_manager.tuner.lazy import BaseDistribution, FrozenTrial, Study
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import LearningSampler, SamplerSeeds, Space, best_first, loss_of


class EvolutionArgs(RandomArgs):
    """classArgs of Evolution."""

    population_size: int = whole(2, 99999, "32", 32)


class Evolution(LearningSampler):
    """Copies the better of two trials of the population, and changes one hyper-parameter.

    The population is the best trials so far. Trials are random until there are `population_size` results.
    Source: E. Real et al., Large-Scale Evolution of Image Classifiers, 2017, as NNI's Evolution.
    """

    def __init__(self, seeds: SamplerSeeds, _: Space, args: EvolutionArgs) -> None:
        super().__init__(seeds)
        self._population_size = args.population_size
        self._inherited: dict[str, Any] = {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Choose the parent, and the hyper-parameter that changes."""
        population = best_first(study)[: self._population_size]
        if len(population) == self._population_size:
            first, second = self.random.sample(population, 2)
            parent = min(first, second, key=lambda each: loss_of(study, each))
            may_change = [name for name, each in parent.distributions.items() if not each.single()]
            self._inherited = dict(parent.params)
            if may_change:
                del self._inherited[self.random.choice(may_change)]

    def draw(self, study: Study, name: str, distribution: BaseDistribution) -> Any:
        """The parent's draw, or a random one if the parent has none to inherit."""
        if name in self._inherited:
            return self._inherited[name]
        return super().draw(study, name, distribution)


DECLARED = BuiltInTuner("Evolution", __doc__, over_a_study(Evolution), EvolutionArgs)
