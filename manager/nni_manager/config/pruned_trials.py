"""What trials that were stopped early teach the tuner."""

from nni_manager.config.algorithms import ASSESSOR_ARGS
from nni_manager.config.model import ExperimentSpec

_OF_NNI = ("Medianstop", "Curvefitting")
OPTUNA_PRUNERS = tuple(name for name in ASSESSOR_ARGS if name not in _OF_NNI)
"""The assessors that are Optuna's."""
_MODELS_OF_CURVES = ("TPE",)
"""The tuners whose Optuna sampler uses the intermediate results of pruned trials. Source: Optuna 5."""
_COUNT_AS_FAILED = ("Auto",)
"""The tuners for which a trial without a result is the worst one."""


def reports_pruned(config: ExperimentSpec) -> bool:
    """True if the tuner receives trials that were stopped early as pruned, with their intermediate results, as in Optuna.

    With NNI's assessors it does not, as in NNI; and with `includeIntermediateResults` their last result is their final one.
    """
    assessor = config.assessor
    is_pruner = assessor is not None and assessor.own is None and assessor.name in OPTUNA_PRUNERS
    return is_pruner and not config.tuner.include_intermediate_results


def lesson_of_early_stops(config: ExperimentSpec) -> str:
    """One sentence about what the tuner learns from trials that were stopped early; empty if nothing stops trials early."""
    if config.assessor is None:
        return ""
    tuner, assessor = config.tuner.name, config.assessor.name
    if config.tuner.include_intermediate_results:
        return f"{tuner} learns the last intermediate result of trials that {assessor} stops"
    if reports_pruned(config) and config.tuner.own is None and tuner in _MODELS_OF_CURVES:
        return f"{tuner} learns from all intermediate results of trials that {assessor} stops, as in Optuna"
    if config.tuner.own is None and tuner in _COUNT_AS_FAILED:
        return f"{tuner} counts trials that {assessor} stops as the worst ones"
    return f"{tuner} learns nothing from trials that {assessor} stops; tuner.includeIntermediateResults changes that"
