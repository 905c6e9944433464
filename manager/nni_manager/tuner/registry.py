"""Creates the tuner of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import optuna

from nni_manager.config.algorithms import CLASS_ARGS, LEARN_CONSTRAINTS, TpeArguments
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.search_space import SearchSpace
from nni_manager.domain.objectives import Objectives
from nni_manager.tuner.auto import Auto
from nni_manager.tuner.base import BaseTuner
from nni_manager.tuner.bohb import Bohb
from nni_manager.tuner.enumerating import EnumeratingTuner, batch, grid, is_countable
from nni_manager.tuner.feasible_only import FeasibleOnly
from nni_manager.tuner.flat_space import FlatSpace
from nni_manager.tuner.flat_study import FlatStudy
from nni_manager.tuner.hyperband import Hyperband
from nni_manager.tuner.optuna_backed import OptunaTuner
from nni_manager.tuner.population import PopulationTuner
from nni_manager.tuner.refining_grid import RefiningGrid
from nni_manager.tuner.samplers import (
    Anneal,
    Evolution,
    FixedSpace,
    Qmc,
    SamplerSeeds,
    Space,
    Tpe,
    without_single,
)
from nni_manager.tuner.surrogates import Forest, GaussianProcess, Metis
from nni_manager.tuner.user_classes import UserTuner

# An instance of the class in CLASS_ARGS for the tuner's name.
_Args: TypeAlias = Any
_MakeTuner: TypeAlias = Callable[[SearchSpace, _Args, Path, Objectives], BaseTuner]


class _CmaEs(FixedSpace, optuna.samplers.CmaEsSampler):
    """CMA-ES over a fixed space without choices, which are drawn at random."""

    def __init__(self, seeds: SamplerSeeds, always_there: Space, args: _Args) -> None:
        super().__init__(
            seed=seeds.trial,
            independent_sampler=optuna.samplers.RandomSampler(seed=seeds.trial),
            warn_independent_sampling=False,
            **_settings(args),
        )
        numbers = {
            name: each
            for name, each in without_single(always_there).items()
            if not isinstance(each, optuna.distributions.CategoricalDistribution)
        }
        # One dimension has no covariance.
        self.always_there = numbers if len(numbers) > 1 else {}


def _settings(args: _Args) -> dict[str, Any]:
    """The args that are passed to the Optuna sampler under the same names."""
    settings: dict[str, Any] = args.model_dump(exclude={"optimize_mode", "seed", "warm_start"})
    return settings


def _tpe_settings(given: TpeArguments | None) -> dict[str, int]:
    """NNI's `tpe_args` as Optuna's settings. Source: NNI v2.10, tpe_tuner.py; Optuna v5, TPESampler."""
    settings = (
        {}
        if given is None
        else {"n_startup_trials": given.n_startup_jobs, "n_ei_candidates": given.n_ei_candidates}
    )
    return {name: value for name, value in settings.items() if value is not None}


def _gp(seeds: SamplerSeeds, _: Space, args: _Args) -> optuna.samplers.BaseSampler:
    return optuna.samplers.GPSampler(
        seed=seeds.trial,
        independent_sampler=optuna.samplers.RandomSampler(seed=seeds.trial),
        warn_independent_sampling=False,
        **_settings(args),
    )


def _over_a_study(
    make_sampler: Callable[[SamplerSeeds, Space, _Args], optuna.samplers.BaseSampler],
    *,
    learns: bool = True,
    takes_imports: bool = True,
) -> _MakeTuner:
    def make(space: SearchSpace, args: _Args, _: Path, objectives: Objectives) -> BaseTuner:
        return OptunaTuner(
            space,
            objectives,
            args.seed,
            lambda seeds, always_there: make_sampler(seeds, always_there, args),
            learns=learns,
            takes_imports=takes_imports,
        )

    return make


def _over_a_flat_study(
    make_sampler: Callable[[SamplerSeeds, FlatStudy, _Args], optuna.samplers.BaseSampler],
) -> _MakeTuner:
    def make(space: SearchSpace, args: _Args, _: Path, objectives: Objectives) -> BaseTuner:
        flat_study = FlatStudy(FlatSpace(space))
        return OptunaTuner(
            space, objectives, args.seed, lambda seeds, _: make_sampler(seeds, flat_study, args)
        )

    return make


TUNERS: dict[str, _MakeTuner] = {
    "Auto": _over_a_flat_study(lambda seeds, flat_study, args: Auto(seeds, flat_study)),
    "TPE": _over_a_study(lambda seeds, space, args: Tpe(seeds, space, **_tpe_settings(args.tpe_args))),
    "Random": _over_a_study(
        lambda seeds, space, args: optuna.samplers.RandomSampler(seed=seeds.trial), learns=False
    ),
    "Anneal": _over_a_study(lambda seeds, space, args: Anneal(seeds)),
    "Evolution": _over_a_study(lambda seeds, space, args: Evolution(seeds, args.population_size)),
    "BatchTuner": lambda space, args, *_: EnumeratingTuner(batch(space)),
    "GridSearch": lambda space, args, *_: EnumeratingTuner(
        grid(space) if is_countable(space) else RefiningGrid(space)
    ),
    "Hyperband": lambda space, args, *_: Hyperband(space, args),
    "BOHB": lambda space, args, *_: Bohb(space, args),
    "PBTTuner": lambda space, args, checkpoints, _: PopulationTuner(space, args, checkpoints),
    "GP": _over_a_study(_gp),
    "GPTuner": _over_a_flat_study(GaussianProcess),
    "MetisTuner": _over_a_flat_study(Metis),
    "SMAC": _over_a_flat_study(Forest),
    # These two learn only from trials of their own generations.
    "CmaEs": _over_a_study(_CmaEs, takes_imports=False),
    "NSGAII": _over_a_study(
        lambda seeds, _, args: optuna.samplers.NSGAIISampler(seed=seeds.trial, **_settings(args)),
        takes_imports=False,
    ),
    "QMC": _over_a_study(
        lambda seeds, space, args: Qmc(seeds, space, args.qmc_type, args.scramble), learns=False
    ),
}


def make_tuner(
    config: ExperimentSpec, checkpoints: Path = Path("checkpoints"), log_folder: Path | None = None
) -> BaseTuner:
    """A new tuner over the experiment's search space; `restore` adds earlier trials.

    `checkpoints`: the folder of trial checkpoints, as trials access it; only some tuners use it. `log_folder`: the folder for
    the output of a user's tuner; None: the output is discarded.
    """
    if config.tuner.own is not None:
        return UserTuner(config.tuner.own, config.tuner.class_args, config.search_space_raw, log_folder)
    # The direction is the stored one: defaults may differ from those of the version that created the experiment.
    class_args = config.tuner.class_args | {"optimize_mode": config.tuner.optimize_mode}
    args = CLASS_ARGS[config.tuner.name].model_validate(class_args)
    objectives, make = config.all_objectives, TUNERS[config.tuner.name]
    if not objectives.constraints or config.tuner.name in LEARN_CONSTRAINTS:
        return make(config.search_space, args, checkpoints, objectives)
    unconstrained = replace(objectives, constraints=())
    return FeasibleOnly(make(config.search_space, args, checkpoints, unconstrained), objectives)
