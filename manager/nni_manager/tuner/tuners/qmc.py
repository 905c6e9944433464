"""QMC: a sequence that fills the space evenly."""

from __future__ import annotations

from typing import Any, Literal

from nni_manager.config.algorithm import BuiltInTuner, RandomArgs
from nni_manager.config.schema import flag, must_be
from nni_manager.tuner.lazy import BaseDistribution, FrozenTrial, Study
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import LearningSampler, SamplerSeeds, Space, draws_at, without_single


class QmcArgs(RandomArgs):
    """classArgs of QMC, with Optuna's names. Without `scramble` every seed gives the same sequence."""

    qmc_type: Literal["sobol", "halton"] = must_be("sobol or halton", "sobol", "sobol")
    scramble: bool = flag("true", True)


class Qmc(LearningSampler):
    """The next point of a low-discrepancy sequence, which fills the space evenly; nested hyper-parameters are random.

    The sequence is that of `scipy.stats.qmc`, as in Optuna's QMCSampler; here it includes choices.
    """

    def __init__(self, seeds: SamplerSeeds, always_there: Space, args: QmcArgs) -> None:
        """All trials of an experiment share one sequence."""
        super().__init__(seeds)
        self._always_there = without_single(always_there)
        self._seed, self._type, self._scramble = seeds.experiment, args.qmc_type, args.scramble

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The hyper-parameters that every trial has."""
        return self._always_there

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


DECLARED = BuiltInTuner(
    "QMC",
    "the next point of a sequence that fills the space evenly",
    over_a_study(Qmc, learns=False),
    QmcArgs,
    origin="Optuna",
    learns=False,
    has_several_objectives=True,
)
