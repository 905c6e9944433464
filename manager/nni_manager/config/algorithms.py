"""The built-in tuners and assessors. This module imports no sampler, no Optuna and no numpy.

Each has one file, which declares all that other modules need; a name in this table is its other place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Literal

from nni_manager.config.algorithm import AssessorArgs, BuiltIn, BuiltInAssessor, BuiltInTuner, RandomArgs
from nni_manager.config.diagnostics import remedy_for_unknown, shown
from nni_manager.config.registered_algorithms import AlgorithmFileInvalid, AlgorithmKind, registered
from nni_manager.config.schema import refusal
from nni_manager.config.search_space import SearchSpace, contains

# The modules of `nni_manager.tuner.tuners` and `nni_manager.tuner.assessors`, in the order in which messages list them.
_TUNERS = (
    "auto",
    "tpe",
    "random_search",
    "anneal",
    "evolution",
    "hyperband",
    "batch",
    "grid_search",
    "gp_tuner",
    "metis",
    "smac",
    "cma_es",
    "nsga2",
    "qmc",
    "gp",
    "bohb",
    "pbt",
)
_ASSESSORS = ("medianstop", "curvefitting", "optuna_pruners")
# Tuners for architecture search, and tuners whose libraries are no longer maintained; also NNI 2.10's names, in lower case.
_UNSUPPORTED_TUNERS = ("dngo", "dngotuner", "networkmorphism", "ppo", "ppotuner", "regularizedevolutiontuner")


def _declared(package: str, modules: tuple[str, ...]) -> dict[str, Any]:
    found = (import_module(f"nni_manager.tuner.{package}.{name}").DECLARED for name in modules)
    return {
        each.name: each
        for declared in found
        for each in (declared if isinstance(declared, tuple) else (declared,))
    }


TUNERS: dict[str, BuiltInTuner] = _declared("tuners", _TUNERS)
"""The declarations of the built-in tuners, by name."""
ASSESSORS: dict[str, BuiltInAssessor] = _declared("assessors", _ASSESSORS)
"""The declarations of the built-in assessors, by name."""
CLASS_ARGS: dict[str, type[RandomArgs]] = {name: each.args for name, each in TUNERS.items()}
ASSESSOR_ARGS: dict[str, type[AssessorArgs]] = {name: each.args for name, each in ASSESSORS.items()}
DEFAULT_TUNER = "Auto"
"""The tuner of an experiment file that names none."""
DEFAULT_FOR_SEVERAL = "TPE"
"""The tuner of an experiment file with several objectives that names none."""
ADVISORS = tuple(name for name, each in TUNERS.items() if each.is_advisor)
"""The tuners that NNI calls advisors."""


_ADDED = frozenset(name for each in TUNERS.values() for name in each.adds_parameters)


def name_of(kind: Literal["tuner", "advisor", "assessor"], name: str, class_args: object) -> str:
    """Return our name of a built-in algorithm for any spelling and for NNI 2.10's names; another name as it is.

    GP is NNI's Gaussian process (`GPTuner`) if an argument is that tuner's, else Optuna's (`GP`).
    """
    known = ASSESSOR_ARGS if kind == "assessor" else CLASS_ARGS
    if name not in known and kind != "advisor" and _is_registered(kind, name):
        return name
    spellings = {each.lower(): each for each in known}
    if kind == "tuner":
        spellings |= {alias.lower(): each.name for each in TUNERS.values() for alias in each.aliases}
    found = spellings.get(name.lower(), name)
    for each in TUNERS.values():
        if found in TUNERS and each.shares_name_of == found and isinstance(class_args, Mapping):
            own = each.args.model_fields.keys() - TUNERS[found].args.model_fields
            return found if own.isdisjoint(class_args) else each.name
    return found


def reason_against(kind: Literal["tuner", "advisor", "assessor"], name: object) -> str | None:
    """The reason why this algorithm is unavailable, with the remedy; None when it is available."""
    table: Mapping[str, BuiltIn] = ASSESSORS if kind == "assessor" else TUNERS
    known = {each: table[each].need for each in (ADVISORS if kind == "advisor" else table)}
    text = name if isinstance(name, str) else ""
    need = known.get(text)
    if need is not None and not need.is_met:
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
    return TUNERS[name].reason_against(space) if name in TUNERS else None


def problems_within(space: SearchSpace, name: str, parameters: Mapping[str, Any]) -> list[str]:
    """The reasons why this tuner cannot have proposed these parameters; empty when it can."""
    if (tuner := TUNERS.get(name)) is None:
        return contains(space, parameters)
    return contains(space, tuner.in_space(_without(tuner.adds_parameters, parameters)))


def without_added(space: SearchSpace, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a trial of another experiment, without those that its tuner may have added to its search space."""
    # Only a user's class knows an empty space.
    return _without(_ADDED - space.parameters.keys() if space.parameters else (), parameters)


def _without(names: Collection[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in names}
