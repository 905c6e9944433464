"""Which tuner an experiment asked for."""

from __future__ import annotations

from nni_manager.config.model import ExperimentConfig
from nni_manager.tuner import optuna_backed
from nni_manager.tuner.base import Tuner

TUNERS = {"TPE": optuna_backed.tpe, "Random": optuna_backed.random}


def make_tuner(config: ExperimentConfig) -> Tuner:
    """A fresh tuner over the experiment's search space; `restore` makes it know earlier trials."""
    return TUNERS[config.tuner.name](config.search_space, config.tuner.optimize_mode, config.tuner.seed)
