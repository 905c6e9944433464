"""Creates the tuner and the assessor of an experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nni_manager.config.algorithm import CheckpointFolder
from nni_manager.config.algorithms import ASSESSORS, TUNERS
from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.objectives import OptimizeMode
from nni_manager.tuner.assessment import Assessment
from nni_manager.tuner.base import BaseTuner
from nni_manager.tuner.feasible_only import FeasibleOnly
from nni_manager.tuner.user_classes import UserAssessor, UserTuner


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
    declared, objectives = TUNERS[config.tuner.name], config.all_objectives
    args = declared.args.model_validate(class_args)
    learned = objectives if declared.learns_constraints else replace(objectives, constraints=())
    folder = CheckpointFolder(checkpoints, config.search_space_revision)
    tuner: BaseTuner = declared.make(config.search_space, args, folder, learned)
    return tuner if learned == objectives else FeasibleOnly(tuner, objectives)


def make_assessment(config: ExperimentSpec, log_folder: Path | None = None) -> Assessment | None:
    """A new assessor of the experiment; None if the experiment has none.

    `log_folder`: folder for the output of a user's assessor; None: the output is discarded.
    """
    if config.assessor is None:
        return None
    if config.assessor.own is not None:
        return Assessment(UserAssessor(config.assessor.own, config.assessor.class_args, log_folder))
    declared = ASSESSORS[config.assessor.name]
    args = declared.args.model_validate(config.assessor.class_args)
    written: OptimizeMode | None = config.assessor.class_args.get("optimize_mode")
    optimize_mode = config.assessor.optimize_mode or written or config.tuner.optimize_mode
    return Assessment(declared.make(optimize_mode, args))
