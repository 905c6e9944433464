"""CmaEs: draws of Optuna's covariance matrix adaptation, which moves to the best results; choices at random."""

from __future__ import annotations

from nni_manager.config.algorithm import BuiltInTuner, Need, RandomArgs
from nni_manager.config.schema import must_be, whole
from nni_manager.tuner.lazy import BaseSampler, optuna
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import SamplerSeeds, Space, settings_of, with_fixed_space, without_single


class CmaEsArgs(RandomArgs):
    """classArgs of CmaEs, with Optuna's names."""

    sigma0: float | None = must_be("a number above 0", "0.2", None, gt=0, le=1e6)
    n_startup_trials: int = whole(1, 99999, "1", 1)
    popsize: int | None = whole(2, 99999, "10", None)


def _sampler(seeds: SamplerSeeds, always_there: Space, args: CmaEsArgs) -> BaseSampler:
    """CMA-ES over a fixed space without choices, which are drawn at random."""
    sampler = optuna.samplers.CmaEsSampler(
        seed=seeds.trial,
        independent_sampler=optuna.samplers.RandomSampler(seed=seeds.trial),
        warn_independent_sampling=False,
        **settings_of(args),
    )
    numbers = {
        name: each
        for name, each in without_single(always_there).items()
        if not isinstance(each, optuna.distributions.CategoricalDistribution)
    }
    # One dimension has no covariance.
    return with_fixed_space(sampler, numbers if len(numbers) > 1 else {})


DECLARED = BuiltInTuner(
    "CmaEs",
    __doc__,
    over_a_study(_sampler, takes_imports=False),
    CmaEsArgs,
    origin="Optuna",
    need=Need("cmaes", "cmaes", "tuners", "Auto"),
)
