"""The built-in tuners and assessors: their names and the `classArgs` of each. This module imports no sampler.

Source: NNI v3.0 documentation of the built-in tuners. `seed` is our addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import ConfigDict, field_validator, model_validator

from nni_manager.config.diagnostics import remedy_for_unknown, shown
from nni_manager.config.registered_algorithms import AlgorithmFileInvalid, AlgorithmKind, registered
from nni_manager.config.schema import Schema, flag, mapping, must_be, refusal, whole
from nni_manager.config.search_space import Choice, SearchSpace, contains
from nni_manager.domain.objectives import OptimizeMode

# Tuners for architecture search, and tuners whose libraries are no longer maintained; also NNI 2.10's names, in lower case.
_UNSUPPORTED_TUNERS = ("dngo", "dngotuner", "networkmorphism", "ppo", "ppotuner", "regularizedevolutiontuner")


class RandomArgs(Schema):
    """classArgs of Random. NNI's Random has none; here `optimize_mode` determines the best trial."""

    model_config = ConfigDict(alias_generator=None)
    optimize_mode: OptimizeMode = must_be("maximize or minimize", "maximize", "maximize")
    seed: int | None = must_be("a whole number from 0 to 4294967295", "1", None, ge=0, le=2**32 - 1)
    warm_start: Literal["auto"] | list[str] | None = must_be(
        "auto, or a list of experiment ids and files of results", "auto", None, alias="warmStart"
    )


class MinimizingArgs(RandomArgs):
    """classArgs of a tuner that minimizes by default. Source: NNI v1.9 and v2.10, the tuners' code."""

    optimize_mode: OptimizeMode = must_be("maximize or minimize", "maximize", "minimize")


class TpeArguments(Schema):
    """`tpe_args` of TPE, with the names of NNI 2.10. Without a key, Optuna's default applies.

    Only the first two have an effect: Optuna's sampler has its own weights, and no liars, see `TpeArgs`.
    """

    model_config = ConfigDict(alias_generator=None)
    n_startup_jobs: int | None = whole(1, 99999, "20", None)
    n_ei_candidates: int | None = whole(1, 99999, "24", None)
    constant_liar_type: Literal["best", "worst", "mean"] | None = must_be(
        "best, worst or mean", "worst", None
    )
    linear_forgetting: int | None = whole(1, 99999, "25", None)
    prior_weight: float | None = must_be("a number above 0", "1.0", None, gt=0, le=1e6)
    gamma: float | None = must_be("a number above 0", "0.25", None, gt=0, le=1e6)


class TpeArgs(MinimizingArgs):
    """classArgs of TPE.

    `parallel_optimize` and `constant_liar_type` are accepted and have no effect: running trials always
    count as bad ones, so that concurrent trials do not sample the same region.
    """

    parallel_optimize: bool = flag("true", False)
    constant_liar_type: Literal["min", "max", "mean"] = must_be("min, max or mean", "min", "min")
    tpe_args: TpeArguments | None = mapping("{n_startup_jobs: 20}", None)


class EvolutionArgs(RandomArgs):
    """classArgs of Evolution."""

    population_size: int = whole(2, 99999, "32", 32)


class HyperbandArgs(RandomArgs):
    """classArgs of Hyperband, an advisor in NNI. `exec_mode` serial is rejected: serial execution leaves jobs idle."""

    R: int = whole(1, 99999, "60", 60)
    eta: int = whole(2, 100, "3", 3)
    exec_mode: Literal["parallelism"] = must_be("parallelism", "parallelism", "parallelism")


class BohbArgs(RandomArgs):
    """classArgs of BOHB, an advisor in NNI.

    `top_n_percent`, `bandwidth_factor` and `min_bandwidth` are accepted and have no effect: Optuna's model has its own settings.
    """

    min_budget: int = whole(1, 99999, "1", 1)
    max_budget: int = whole(1, 99999, "27", 3)
    eta: int = whole(2, 100, "3", 3)
    min_points_in_model: int | None = whole(1, 99999, "5", None)
    top_n_percent: int = whole(1, 99, "15", 15)
    num_samples: int = whole(1, 99999, "64", 64)
    random_fraction: float = must_be("a number from 0 to 1", "0.33", 0.33, ge=0, le=1)
    bandwidth_factor: float = must_be("a number above 0", "3", 3.0, gt=0)
    min_bandwidth: float = must_be("a number above 0", "0.001", 0.001, gt=0)

    @model_validator(mode="after")
    def _has_budget_range(self) -> BohbArgs:
        if self.min_budget > self.max_budget:
            raise refusal(
                f"cannot use BOHB: min_budget {self.min_budget} is above max_budget {self.max_budget}; swap them"
            )
        return self


class PbtArgs(RandomArgs):
    """classArgs of PBTTuner. Without `all_checkpoint_dir`, checkpoints are in the experiment's workspace."""

    all_checkpoint_dir: str | None = must_be(
        "an absolute path that trials can access", "/mnt/checkpoints", None, pattern=r"^/"
    )
    population_size: int = whole(1, 99999, "10", 10)
    factor: float = must_be("a number from 0 to 1", "0.2", 0.2, ge=0, le=1)
    resample_probability: float = must_be("a number from 0 to 1", "0.25", 0.25, ge=0, le=1)
    fraction: float = must_be("a number from 0 to 1", "0.2", 0.2, ge=0, le=1)


class _ModelArgs(RandomArgs):
    """The args shared by tuners that fit a model: they start with random parameters, then score many candidates."""

    cold_start_num: int = whole(1, 99999, "10", 10)
    selection_num_starting_points: int = whole(1, 5000, "250", 250)


class GpArgs(_ModelArgs):
    """classArgs of GPTuner. NNI's default of `selection_num_warm_up` is 100,000; here `nu` must be one of three values."""

    utility: Literal["ei", "ucb", "poi"] = must_be("ei, ucb or poi", "ei", "ei")
    kappa: float = must_be("a number of at least 0", "5", 5.0, ge=0, le=1e6)
    xi: float = must_be("a number of at least 0", "0", 0.0, ge=0, le=1e6)
    nu: float = must_be("0.5, 1.5 or 2.5", "2.5", 2.5)
    alpha: float = must_be("a number above 0, up to 1", "1e-6", 1e-6, gt=0, le=1)
    selection_num_warm_up: int = whole(10, 1000000, "5000", 5000)

    @field_validator("nu")
    @classmethod
    def _has_a_closed_form(cls, nu: float) -> float:
        if nu not in (0.5, 1.5, 2.5):
            raise ValueError(nu)
        return nu


class MetisArgs(_ModelArgs):
    """classArgs of MetisTuner. `no_resampling` and `no_candidates` are accepted and have no effect."""

    no_resampling: bool = flag("true", True)
    no_candidates: bool = flag("false", False)
    selection_num_starting_points: int = whole(1, 5000, "600", 600)
    exploration_probability: float = must_be("a number from 0 to 1", "0.9", 0.9, ge=0, le=1)


class SmacArgs(RandomArgs):
    """classArgs of SMAC."""

    config_dedup: bool = flag("true", False)


class GpSamplerArgs(RandomArgs):
    """classArgs of GP, with Optuna's names."""

    n_startup_trials: int = whole(1, 99999, "10", 10)
    deterministic_objective: bool = flag("false", False)


class CmaEsArgs(RandomArgs):
    """classArgs of CmaEs, with Optuna's names."""

    sigma0: float | None = must_be("a number above 0", "0.2", None, gt=0, le=1e6)
    n_startup_trials: int = whole(1, 99999, "1", 1)
    popsize: int | None = whole(2, 99999, "10", None)


class NsgaIiArgs(RandomArgs):
    """classArgs of NSGAII, with Optuna's names."""

    population_size: int = whole(2, 99999, "50", 50)
    mutation_prob: float | None = must_be("a number from 0 to 1", "0.1", None, ge=0, le=1)
    crossover_prob: float = must_be("a number from 0 to 1", "0.9", 0.9, ge=0, le=1)
    swapping_prob: float = must_be("a number from 0 to 1", "0.5", 0.5, ge=0, le=1)


class QmcArgs(RandomArgs):
    """classArgs of QMC, with Optuna's names. Without `scramble` every seed gives the same sequence."""

    qmc_type: Literal["sobol", "halton"] = must_be("sobol or halton", "sobol", "sobol")
    scramble: bool = flag("true", True)


CLASS_ARGS: dict[str, type[RandomArgs]] = {
    "Auto": RandomArgs,
    "TPE": TpeArgs,
    "Random": RandomArgs,
    "Anneal": MinimizingArgs,
    "Evolution": EvolutionArgs,
    "Hyperband": HyperbandArgs,
    "BatchTuner": RandomArgs,
    "GridSearch": RandomArgs,
    "GPTuner": GpArgs,
    "MetisTuner": MetisArgs,
    "SMAC": SmacArgs,
    "CmaEs": CmaEsArgs,
    "NSGAII": NsgaIiArgs,
    "QMC": QmcArgs,
    "GP": GpSamplerArgs,
    "BOHB": BohbArgs,
    "PBTTuner": PbtArgs,
}
DEFAULT_TUNER = "Auto"
"""The tuner of an experiment file that names none."""
_NAMES_OF_NNI_2_10 = {"batch": "BatchTuner", "metis": "MetisTuner", "pbt": "PBTTuner"}
ADVISORS = ("Hyperband", "BOHB")
"""The tuners that NNI calls advisors."""
WITHOUT_DIRECTION = ("Random", "BatchTuner", "GridSearch", "QMC")
"""The tuners that learn nothing from results: `optimize_mode` determines only the best trial."""
WITH_PARAMETERS_OF_THEIR_OWN = (*ADVISORS, "PBTTuner")
"""The tuners that add parameters to those of the search space. A trial that they do not propose would lack them."""

FOR_SEVERAL_OBJECTIVES = ("TPE", "NSGAII", "GP", *WITHOUT_DIRECTION)
"""The tuners that can search for several objectives."""
LEARN_CONSTRAINTS = ("TPE", "NSGAII", "GP")
"""The tuners that learn how far a result violates constraints. To other built-in tuners, such a trial counts as failed."""
DEFAULT_FOR_SEVERAL = "TPE"
"""The tuner of an experiment file with several objectives that names none."""


class AssessorArgs(Schema):
    """classArgs of an assessor. The default of `optimize_mode` is the tuner's."""

    model_config = ConfigDict(alias_generator=None)
    optimize_mode: OptimizeMode | None = must_be("maximize or minimize", "maximize", None)


class _MaximizingArgs(AssessorArgs):
    """classArgs of an assessor that maximizes by default, whatever the tuner does. Source: NNI v1.9 and v2.10."""

    optimize_mode: OptimizeMode | None = must_be("maximize or minimize", "maximize", "maximize")


class MedianstopArgs(_MaximizingArgs):
    """classArgs of Medianstop."""

    start_step: int = whole(0, None, "0", 0)


class CurvefittingArgs(_MaximizingArgs):
    """classArgs of Curvefitting."""

    epoch_num: int = whole(1, None, "20")
    start_step: int = whole(0, None, "6", 6)
    threshold: float = must_be("a number from 0 to 1", "0.95", 0.95, ge=0, le=1)
    gap: int = whole(1, None, "1", 1)


class MedianPrunerArgs(AssessorArgs):
    """classArgs of MedianPruner, with Optuna's names."""

    n_startup_trials: int = whole(0, None, "5", 5)
    n_warmup_steps: int = whole(0, None, "0", 0)
    interval_steps: int = whole(1, None, "1", 1)
    n_min_trials: int = whole(1, None, "1", 1)


class PercentilePrunerArgs(MedianPrunerArgs):
    """classArgs of PercentilePruner, with Optuna's names."""

    percentile: float = must_be("a number from 0 to 100", "25", ge=0, le=100)


class SuccessiveHalvingPrunerArgs(AssessorArgs):
    """classArgs of SuccessiveHalvingPruner, with Optuna's names."""

    min_resource: int = whole(1, None, "1", 1)
    reduction_factor: int = whole(2, None, "4", 4)
    min_early_stopping_rate: int = whole(0, None, "0", 0)
    bootstrap_count: int = whole(0, None, "0", 0)


class HyperbandPrunerArgs(AssessorArgs):
    """classArgs of HyperbandPruner, with Optuna's names."""

    min_resource: int = whole(1, None, "1", 1)
    max_resource: int = must_be("a whole number of at least 1, the steps of a full trial", "20", ge=1)
    reduction_factor: int = whole(2, None, "3", 3)
    bootstrap_count: int = whole(0, None, "0", 0)


class PatientPrunerArgs(AssessorArgs):
    """classArgs of PatientPruner, with Optuna's names. `wrapped_pruner` names a built-in pruner, used with its defaults."""

    patience: int = whole(0, None, "3")
    min_delta: float = must_be("a number of at least 0", "0.01", 0.0, ge=0)
    wrapped_pruner: Literal["MedianPruner", "SuccessiveHalvingPruner"] | None = must_be(
        "MedianPruner or SuccessiveHalvingPruner", "MedianPruner", None
    )


class ThresholdPrunerArgs(AssessorArgs):
    """classArgs of ThresholdPruner, with Optuna's names. At least one of `lower` and `upper` is required."""

    lower: float | None = must_be("a number", "0.1", None)
    upper: float | None = must_be("a number", "10", None)
    n_warmup_steps: int = whole(0, None, "0", 0)
    interval_steps: int = whole(1, None, "1", 1)

    @model_validator(mode="after")
    def _has_a_threshold(self) -> ThresholdPrunerArgs:
        if self.lower is None and self.upper is None:
            raise refusal(
                "cannot use ThresholdPruner without a threshold; write lower, upper or both into «assessor.classArgs»"
            )
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise refusal(
                f"cannot use «assessor.classArgs»: lower {self.lower} is above upper {self.upper}; swap them"
            )
        return self


class WilcoxonPrunerArgs(AssessorArgs):
    """classArgs of WilcoxonPruner, with Optuna's names."""

    p_threshold: float = must_be("a number from 0 to 1", "0.1", 0.1, ge=0, le=1)
    n_startup_steps: int = whole(0, None, "2", 2)


ASSESSOR_ARGS: dict[str, type[AssessorArgs]] = {
    "Medianstop": MedianstopArgs,
    "Curvefitting": CurvefittingArgs,
    "MedianPruner": MedianPrunerArgs,
    "PercentilePruner": PercentilePrunerArgs,
    "SuccessiveHalvingPruner": SuccessiveHalvingPrunerArgs,
    "HyperbandPruner": HyperbandPrunerArgs,
    "PatientPruner": PatientPrunerArgs,
    "ThresholdPruner": ThresholdPrunerArgs,
    "WilcoxonPruner": WilcoxonPrunerArgs,
    "NopPruner": AssessorArgs,
}
ASSESSORS_WITHOUT_DIRECTION = ("NopPruner", "ThresholdPruner")


@dataclass(frozen=True, slots=True)
class Need:
    """A library that an algorithm requires besides Optuna.

    `module` is imported, `library` is its usual name, `extra` the pip extra, `instead` an alternative algorithm.
    """

    module: str
    library: str
    extra: str
    instead: str

    @property
    def is_met(self) -> bool:
        """True if the library is installed."""
        return find_spec(self.module) is not None


NEEDS = {
    "SMAC": Need("sklearn", "scikit-learn", "tuners", "Auto"),
    "CmaEs": Need("cmaes", "cmaes", "tuners", "Auto"),
    "GP": Need("torch", "PyTorch", "gp", "GPTuner, a Gaussian process as well"),
}


def name_of(kind: Literal["tuner", "advisor", "assessor"], name: str, class_args: object) -> str:
    """Return our name of a built-in algorithm for any spelling and for NNI 2.10's names; another name as it is.

    GP is NNI's Gaussian process (`GPTuner`) if an argument is that tuner's, else Optuna's (`GP`).
    """
    known = ASSESSOR_ARGS if kind == "assessor" else CLASS_ARGS
    if name not in known and kind != "advisor" and _is_registered(kind, name):
        return name
    lower = name.lower()
    found = next((each for each in known if each.lower() == lower), name)
    found = _NAMES_OF_NNI_2_10.get(lower, found) if kind == "tuner" else found
    of_nni_alone = GpArgs.model_fields.keys() - GpSamplerArgs.model_fields
    is_nnis_gp = found == "GP" and isinstance(class_args, Mapping) and not of_nni_alone.isdisjoint(class_args)
    return "GPTuner" if is_nnis_gp else found


def reason_against(kind: Literal["tuner", "advisor", "assessor"], name: object) -> str | None:
    """The reason why this algorithm is unavailable, with the remedy; None when it is available."""
    known = {"tuner": CLASS_ARGS, "advisor": ADVISORS, "assessor": ASSESSOR_ARGS}[kind]
    text = name if isinstance(name, str) else ""
    need = NEEDS.get(text)
    if text in known and need is not None and not need.is_met:
        return (
            f"{name} requires {need.library}, which is not installed; run `pip install "
            f"'trial-keeper[{need.extra}]'`, or use {need.instead}"
        )
    if text in known or (kind != "advisor" and _is_registered(kind, text)):
        return None
    if kind == "tuner" and text.lower() in _UNSUPPORTED_TUNERS:
        return f"{text} is not supported; use Auto or Evolution"
    return f"{shown(name)} is not a built-in {kind}; {remedy_for_unknown(text, known)}"


def _is_registered(kind: AlgorithmKind, name: str) -> bool:
    try:
        return registered(kind, name) is not None
    except AlgorithmFileInvalid as error:
        raise refusal(str(error)) from error


def reason_against_space(name: str, space: SearchSpace) -> str | None:
    """The reason why this tuner cannot use the search space, as a sentence; None when it can."""
    return _reason_against_batch(space) if name == "BatchTuner" else None


def problems_within(space: SearchSpace, name: str, parameters: Mapping[str, Any]) -> list[str]:
    """The reasons why this tuner cannot have proposed these parameters; empty when it can."""
    if name == "BatchTuner":  # the parameters of a trial are one option, without the name of the choice
        return contains(space, {"combine_params": parameters})
    if name in ADVISORS:  # they add TRIAL_BUDGET to the parameters of the search space
        parameters = {key: value for key, value in parameters.items() if key != "TRIAL_BUDGET"}
    return contains(space, parameters)


def _reason_against_batch(space: SearchSpace) -> str | None:
    batch = space.parameters.get("combine_params")
    if (
        len(space.parameters) == 1
        and isinstance(batch, Choice)
        and all(isinstance(each, dict) for each in batch.options)
    ):
        return None
    return (
        "cannot use the search space: BatchTuner requires one choice of mappings as the search space; write the search "
        'space as {"combine_params": {"_type": "choice", "_value": [{"lr": 0.1, "size": 16}, {"lr": 0.2, "size": 32}]}}'
    )
