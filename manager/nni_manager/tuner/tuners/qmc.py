"""QMC: the next point of a sequence that fills the space evenly."""

from __future__ import annotations

from typing import Any, Literal

from nni_manager.config.algorithm import BuiltInTuner, RandomArgs
from nni_manager.config.schema import flag, must_be
from nni_manager.tuner.lazy import BaseDistribution, FrozenTrial, Study
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import LearningSampler, SamplerSeeds, Space, from_unit, without_single


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

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Choose the point of this trial's number."""
        self._point: dict[str, Any] = {}
        if self._always_there:
            from scipy.stats import qmc  # half a second

            make = {"sobol": qmc.Sobol, "halton": qmc.Halton}[self._type]
            sequence = make(len(self._always_there), scramble=self._scramble, rng=self._seed)
            if trial.number:
                sequence.fast_forward(trial.number)
            units = zip(self._always_there.items(), sequence.random(1)[0], strict=True)
            self._point = {name: from_unit(each, float(unit)) for (name, each), unit in units}

    def draw(self, study: Study, name: str, distribution: BaseDistribution) -> Any:
        """The draw at the chosen point; a random one of a nested hyper-parameter."""
        return self._point[name] if name in self._point else super().draw(study, name, distribution)


DECLARED = BuiltInTuner(
    "QMC",
    __doc__,
    over_a_study(Qmc, learns=False),
    QmcArgs,
    origin="Optuna",
    learns=False,
    has_several_objectives=True,
)
