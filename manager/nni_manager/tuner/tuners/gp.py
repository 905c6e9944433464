"""GP: the largest expected improvement of Optuna's Gaussian process."""

from __future__ import annotations

from nni_manager.config.algorithm import BuiltInTuner, Need, RandomArgs
from nni_manager.config.schema import flag, whole
from nni_manager.tuner.lazy import BaseSampler, optuna
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import SamplerSeeds, Space, settings_of


class GpSamplerArgs(RandomArgs):
    """classArgs of GP, with Optuna's names."""

    n_startup_trials: int = whole(1, 99999, "10", 10)
    deterministic_objective: bool = flag("false", False)


def _sampler(seeds: SamplerSeeds, _: Space, args: GpSamplerArgs) -> BaseSampler:
    return optuna.samplers.GPSampler(
        seed=seeds.trial,
        independent_sampler=optuna.samplers.RandomSampler(seed=seeds.trial),
        warn_independent_sampling=False,
        **settings_of(args),
    )


DECLARED = BuiltInTuner(
    "GP",
    __doc__,
    over_a_study(_sampler),
    GpSamplerArgs,
    origin="Optuna",
    need=Need("torch", "PyTorch", "gp", "GPTuner, a Gaussian process as well"),
    has_several_objectives=True,
    learns_constraints=True,
)
