"""What samplers of Optuna studies have in common, our own and Optuna's.

Each sampler serves one trial, with its own seeds, and reads only the trials of the study. So a restart does not change its draws.
Samplers that learn model the raw draws of hyper-parameters, see `optuna_backed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any, TypeAlias

from nni_manager.config.algorithm import RandomArgs
from nni_manager.tuner.lazy import BaseDistribution, BaseSampler, FrozenTrial, Study, optuna
from trial_keeper.frozen_dataclass import dataclass

Space: TypeAlias = Mapping[str, BaseDistribution]
IMPORTED = "imported"
"""The user attribute of a study's trials that the tuner did not propose."""
VOID = "void"
"""The user attribute of trials that a user or the cluster has ended: see `Observation.is_void`."""


@dataclass(frozen=True, slots=True)
class SamplerSeeds:
    """Random seeds of one trial's sampler; `experiment` seeds what all trials share."""

    experiment: int
    trial: int


def with_fixed_space(sampler: BaseSampler, space: Space) -> BaseSampler:
    """The sampler, which samples these hyper-parameters together from now on, instead of the set of all past trials."""
    sampler.infer_relative_search_space = lambda study, trial: dict(space)  # type: ignore[method-assign]
    return sampler


class LearningSampler(BaseSampler):
    """Base of our own samplers, which use a random generator of the trial and the results of the study's trials."""

    def __init__(self, seeds: SamplerSeeds, *_: object) -> None:
        """Create a generator from the trial's seed."""
        self.random = Random(seeds.trial)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Read the past trials, before anything is drawn."""

    def draw(self, study: Study, name: str, distribution: BaseDistribution) -> Any:
        """Draw a hyper-parameter; here at random."""
        return from_unit(distribution, self.random.random())

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        """No parameters are sampled together."""
        return {}

    def sample_relative(self, *_: object) -> dict[str, Any]:
        """See `infer_relative_search_space`."""
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """See `draw`."""
        return self.draw(study, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, *_: object) -> None:
        """Nothing to note."""


def settings_of(args: RandomArgs) -> dict[str, Any]:
    """The classArgs that are passed to the Optuna sampler under the same names."""
    return args.model_dump(exclude={"optimize_mode", "seed", "warm_start"})


def without_single(space: Space) -> dict[str, BaseDistribution]:
    """The hyper-parameters that have more than one value."""
    return {name: each for name, each in space.items() if not each.single()}


def completed(study: Study) -> list[FrozenTrial]:
    """The trials that have a value, in the order in which they were asked for; the caller must not modify them."""
    return study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))


def loss_of(study: Study, trial: FrozenTrial) -> float:
    """The value of a completed trial as a loss: lower is better."""
    value = float(trial.value or 0.0)
    return -value if study.direction is optuna.study.StudyDirection.MAXIMIZE else value


def best_first(study: Study) -> list[FrozenTrial]:
    """The completed trials, best first."""
    return sorted(completed(study), key=lambda trial: loss_of(study, trial))


def from_unit(distribution: BaseDistribution, unit: float) -> Any:
    """The draw at this position, 0 to 1, of the distribution."""
    unit = min(max(unit, 0.0), 1.0)
    match distribution:
        case optuna.distributions.CategoricalDistribution(choices=choices):
            return choices[min(int(unit * len(choices)), len(choices) - 1)]
        case optuna.distributions.IntDistribution(low=low, high=high):
            return min(low + int(unit * (high - low + 1)), high)
    assert isinstance(distribution, optuna.distributions.FloatDistribution)
    start, end = distribution.low, distribution.high
    if distribution.log:
        return min(max(math.exp(_between(math.log(start), math.log(end), unit)), start), end)
    return min(max(_between(start, end, unit), start), end)


def to_unit(distribution: BaseDistribution, drawn: Any) -> float:
    """The position, 0 to 1, of a draw in the distribution; for a discrete value, the middle of its interval."""
    match distribution:
        case optuna.distributions.CategoricalDistribution(choices=choices):
            return (choices.index(drawn) + 0.5) / len(choices)
        case optuna.distributions.IntDistribution(low=low, high=high):
            return float((drawn - low + 0.5) / (high - low + 1))
    assert isinstance(distribution, optuna.distributions.FloatDistribution)
    start, end = distribution.low, distribution.high
    if distribution.log:
        start, end, drawn = math.log(start), math.log(end), math.log(drawn)
    return float((drawn - start) / (end - start)) if end > start else 0.5


def _between(low: float, high: float, unit: float) -> float:
    return low + (high - low) * unit
