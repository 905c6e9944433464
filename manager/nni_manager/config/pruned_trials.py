"""What trials that were stopped early teach the tuner."""

from nni_manager.config.algorithms import ASSESSORS, TUNERS
from nni_manager.config.model import ExperimentSpec


def reports_pruned(config: ExperimentSpec) -> bool:
    """True if the tuner receives trials that were stopped early as pruned, with their intermediate results, as in Optuna.

    With NNI's assessors it does not, as in NNI; and with `includeIntermediateResults` their last result is their final one.
    """
    assessor = config.assessor
    is_pruner = assessor is not None and assessor.own is None and ASSESSORS[assessor.name].origin == "Optuna"
    return is_pruner and not config.tuner.include_intermediate_results


def lesson_of_early_stops(config: ExperimentSpec) -> str:
    """One sentence about what the tuner learns from trials that were stopped early; empty if nothing stops trials early."""
    if config.assessor is None:
        return ""
    tuner, assessor = config.tuner.name, config.assessor.name
    declared = TUNERS[tuner] if config.tuner.own is None else None
    if config.tuner.include_intermediate_results:
        return f"{tuner} learns the last intermediate result of trials that {assessor} stops"
    if declared is not None and declared.learns_curves and reports_pruned(config):
        return f"{tuner} learns from all intermediate results of trials that {assessor} stops, as in Optuna"
    if declared is not None and declared.counts_failures:
        return f"{tuner} counts trials that {assessor} stops as the worst ones"
    return f"{tuner} learns nothing from trials that {assessor} stops; tuner.includeIntermediateResults changes that"
