"""Random: independent draws."""

from __future__ import annotations

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.tuner.lazy import optuna
from nni_manager.tuner.optuna_backed import over_a_study

DECLARED = BuiltInTuner(
    "Random",
    __doc__,
    over_a_study(lambda seeds, space, args: optuna.samplers.RandomSampler(seed=seeds.trial), learns=False),
    learns=False,
    has_several_objectives=True,
)
