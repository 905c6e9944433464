"""Our own samplers for Optuna studies, and Optuna's samplers as an experiment uses them.

Each sampler serves one trial, with its own seeds, and reads only the trials of the study. So a restart does not change its draws.
Samplers that learn model the raw draws of hyper-parameters, see `optuna_backed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from optuna import Study

Space = Mapping[str, BaseDistribution]

IMPORTED = "imported"
"""The user attribute of a study's trials that the tuner did not propose."""


@dataclass(frozen=True, slots=True)
class SamplerSeeds:
    """Random seeds of one trial's sampler; `experiment` seeds what all trials share."""

    experiment: int
    trial: int


class FixedSpace:
    """Mixin of samplers that sample a fixed set of hyper-parameters together, instead of the set of all past trials."""

    always_there: Space

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The hyper-parameters that are sampled together; the others are sampled one by one."""
        return dict(self.always_there)


class Tpe(FixedSpace, optuna.samplers.TPESampler):
    """TPE over the hyper-parameters that every trial has."""

    def __init__(self, seeds: SamplerSeeds, always_there: Space, **settings: Any) -> None:
        """See `MakeSampler`; `settings` are Optuna's."""
        # Running trials count as bad, so that concurrent trials are not sent to the same point.
        super().__init__(seed=seeds.trial, constant_liar=True, multivariate=True, **settings)
        self.always_there = without_single(always_there)


class LearningSampler(optuna.samplers.BaseSampler):
    """Base of our own samplers, which use a random generator of the trial and the results of the study's trials."""

    def __init__(self, seeds: SamplerSeeds) -> None:
        """Create a generator from the trial's seed."""
        self.random = Random(seeds.trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """No parameters: by default nothing is sampled together."""
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """No draws: by default nothing is sampled together."""
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A random draw; subclasses may override it."""
        return from_unit(param_distribution, self.random.random())


class Anneal(LearningSampler):
    """Draws near one of the best trials, nearer as the number of trials grows.

    The rank of the chosen trial has a geometric distribution, with the best trial as the most frequent. After T trials, a
    neighbourhood is the whole range divided by 1 + T/10.
    Source: hyperopt's anneal, which NNI's Anneal wraps.
    """

    _MEAN_RANK = 2.0
    _SHRINKING = 0.1

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Rank the past trials once for all hyper-parameters."""
        self._ranked = best_first(study)
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A draw near that of a good trial that has this hyper-parameter."""
        seen = [past for past in self._ranked if param_name in past.params]
        anywhere = self.random.random()
        if not seen:
            return from_unit(param_distribution, anywhere)
        beyond = math.log(1 - self.random.random()) / math.log(1 - 1 / self._MEAN_RANK)
        anchor = seen[min(int(beyond), len(seen) - 1)].params[param_name]
        width = 1 / (1 + self._SHRINKING * len(seen))
        if isinstance(param_distribution, CategoricalDistribution):
            is_kept = self.random.random() >= width
            return anchor if is_kept else from_unit(param_distribution, anywhere)
        middle = to_unit(param_distribution, anchor)
        low, high = max(0.0, middle - width / 2), min(1.0, middle + width / 2)
        return from_unit(param_distribution, low + (high - low) * anywhere)


class Evolution(LearningSampler):
    """Copies the better of two trials of the population, and changes one hyper-parameter.

    The population is the best trials so far. Trials are random until there are `population_size` results.
    Source: E. Real et al., Large-Scale Evolution of Image Classifiers, 2017, as NNI's Evolution.
    """

    def __init__(self, seeds: SamplerSeeds, population_size: int) -> None:
        """`population_size` is at least 2."""
        super().__init__(seeds)
        self._population_size = population_size
        self._inherited: dict[str, Any] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Choose the parent, and the hyper-parameter that changes."""
        population = best_first(study)[: self._population_size]
        if len(population) == self._population_size:
            first, second = self.random.sample(population, 2)
            parent = min(first, second, key=lambda each: loss_of(study, each))
            may_change = [name for name, each in parent.distributions.items() if not each.single()]
            self._inherited = dict(parent.params)
            if may_change:
                del self._inherited[self.random.choice(may_change)]
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The parent's draw, or a random one if the parent has none to inherit."""
        if param_name in self._inherited:
            return self._inherited[param_name]
        return super().sample_independent(study, trial, param_name, param_distribution)


class Qmc(FixedSpace, LearningSampler):
    """The next point of a low-discrepancy sequence, which fills the space evenly; nested hyper-parameters are random.

    The sequence is that of `scipy.stats.qmc`, as in Optuna's QMCSampler; here it includes choices.
    """

    def __init__(self, seeds: SamplerSeeds, always_there: Space, qmc_type: str, scramble: bool) -> None:
        """All trials of an experiment share one sequence."""
        super().__init__(seeds)
        self.always_there = without_single(always_there)
        self._seed, self._type, self._scramble = seeds.experiment, qmc_type, scramble

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The point of this trial's number."""
        if not search_space:
            return {}
        from scipy.stats import qmc  # an extra

        make = {"sobol": qmc.Sobol, "halton": qmc.Halton}[self._type]
        sequence = make(len(search_space), scramble=self._scramble, rng=self._seed)
        if trial.number:
            sequence.fast_forward(trial.number)
        (point,) = sequence.random(1)
        return draws_at(search_space, point)


def draws_at(space: Space, point: Iterable[float]) -> dict[str, Any]:
    """The draws at a point that has a position, 0 to 1, for each hyper-parameter."""
    return {
        name: from_unit(each, float(unit)) for (name, each), unit in zip(space.items(), point, strict=True)
    }


def without_single(space: Space) -> dict[str, BaseDistribution]:
    """The hyper-parameters that have more than one value."""
    return {name: each for name, each in space.items() if not each.single()}


def completed(study: Study) -> list[FrozenTrial]:
    """The trials that have a value, in the order in which they were asked for; the caller must not modify them."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def loss_of(study: Study, trial: FrozenTrial) -> float:
    """The value of a completed trial as a loss: lower is better."""
    value = float(trial.value or 0.0)
    return -value if study.direction is StudyDirection.MAXIMIZE else value


def best_first(study: Study) -> list[FrozenTrial]:
    """The completed trials, best first."""
    return sorted(completed(study), key=lambda trial: loss_of(study, trial))


def from_unit(distribution: BaseDistribution, unit: float) -> Any:
    """The draw at this position, 0 to 1, of the distribution."""
    unit = min(max(unit, 0.0), 1.0)
    match distribution:
        case CategoricalDistribution(choices=choices):
            return choices[min(int(unit * len(choices)), len(choices) - 1)]
        case IntDistribution(low=low, high=high):
            return min(low + int(unit * (high - low + 1)), high)
    assert isinstance(distribution, FloatDistribution)
    start, end = distribution.low, distribution.high
    if distribution.log:
        return min(max(math.exp(_between(math.log(start), math.log(end), unit)), start), end)
    return min(max(_between(start, end, unit), start), end)


def to_unit(distribution: BaseDistribution, drawn: Any) -> float:
    """The position, 0 to 1, of a draw in the distribution; for a discrete value, the middle of its interval."""
    match distribution:
        case CategoricalDistribution(choices=choices):
            return (choices.index(drawn) + 0.5) / len(choices)
        case IntDistribution(low=low, high=high):
            return float((drawn - low + 0.5) / (high - low + 1))
    assert isinstance(distribution, FloatDistribution)
    start, end = distribution.low, distribution.high
    if distribution.log:
        start, end, drawn = math.log(start), math.log(end), math.log(drawn)
    return float((drawn - start) / (end - start)) if end > start else 0.5


def _between(low: float, high: float, unit: float) -> float:
    return low + (high - low) * unit
