"""NSGAII: children of the best trials of a generation, by Optuna's genetic algorithm."""

from __future__ import annotations

from nni_manager.config.algorithm import BuiltInTuner, RandomArgs
from nni_manager.config.schema import must_be, whole
from nni_manager.tuner.lazy import optuna
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import settings_of


class NsgaIiArgs(RandomArgs):
    """classArgs of NSGAII, with Optuna's names."""

    population_size: int = whole(2, 99999, "50", 50)
    mutation_prob: float | None = must_be("a number from 0 to 1", "0.1", None, ge=0, le=1)
    crossover_prob: float = must_be("a number from 0 to 1", "0.9", 0.9, ge=0, le=1)
    swapping_prob: float = must_be("a number from 0 to 1", "0.5", 0.5, ge=0, le=1)


DECLARED = BuiltInTuner(
    "NSGAII",
    __doc__,
    over_a_study(
        lambda seeds, _, args: optuna.samplers.NSGAIISampler(seed=seeds.trial, **settings_of(args)),
        takes_imports=False,  # it learns only from trials of its own generations
    ),
    NsgaIiArgs,
    origin="Optuna",
    has_several_objectives=True,
    learns_constraints=True,
)
