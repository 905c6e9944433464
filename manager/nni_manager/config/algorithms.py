"""The built-in algorithms: their names and what `classArgs` of each may hold. Nothing here imports a sampler.

Source: NNI v3.0 documentation of the built-in tuners. `seed` is our addition.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from nni_manager.config.mistakes import remedy_for_unknown, shown
from nni_manager.config.model import OptimizeMode
from nni_manager.config.schema import Schema, must_be

TUNERS_OF_NNI = (
    "Anneal",
    "BatchTuner",
    "DNGOTuner",
    "Evolution",
    "GPTuner",
    "GridSearch",
    "MetisTuner",
    "NetworkMorphism",
    "PBTTuner",
    "PPOTuner",
    "RegularizedEvolutionTuner",
    "SMAC",
)


class RandomArgs(Schema):
    """classArgs of Random. NNI takes none; `optimize_mode` tells this manager which trial is the best."""

    model_config = ConfigDict(alias_generator=None)
    optimize_mode: OptimizeMode = must_be("maximize or minimize", "maximize", "maximize")
    seed: int | None = must_be("a whole number from 0 to 4294967295", "1", None, ge=0, le=2**32 - 1)


class TpeArgs(RandomArgs):
    """classArgs of TPE. NNI's documentation gives maximize as the default; its code had minimize.

    `parallel_optimize` and `constant_liar_type` are accepted and change nothing: trials that still run always
    count as bad ones, so that concurrent trials are not sent to the same place.
    """

    parallel_optimize: bool = must_be("true or false", "true", False)
    constant_liar_type: Literal["min", "max", "mean"] = must_be("min, max or mean", "min", "min")


CLASS_ARGS: dict[str, type[RandomArgs]] = {"TPE": TpeArgs, "Random": RandomArgs}


def reason_against_tuner(name: object) -> str | None:
    """Why no tuner of this name can be had, as a whole sentence; None when it can."""
    if isinstance(name, str) and name in CLASS_ARGS:
        return None
    if isinstance(name, str) and name in TUNERS_OF_NNI:
        return f"cannot use tuner.builtinTunerName: {name} is not in this version yet; use TPE or Random"
    remedy = remedy_for_unknown(name if isinstance(name, str) else "", CLASS_ARGS)
    return f"cannot use tuner.builtinTunerName: {shown(name)} is not a built-in tuner; {remedy}"
