"""Hyper-parameters in the notation of Optuna or W&B, for error messages that show them in NNI's.

Source: Weights & Biases, Sweep configuration options, `parameters`; Optuna 4, `optuna.distributions.distribution_to_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nni_manager.domain.metrics import finite_number

# W&B's distributions: NNI's type, and the keys of its numbers.
_OF_WANDB = {
    "uniform": ("uniform", ("min", "max")),
    "q_uniform": ("quniform", ("min", "max", "q")),
    "log_uniform_values": ("loguniform", ("min", "max")),
    "q_log_uniform_values": ("qloguniform", ("min", "max", "q")),
    "normal": ("normal", ("mu", "sigma")),
    "q_normal": ("qnormal", ("mu", "sigma", "q")),
    "log_normal": ("lognormal", ("mu", "sigma")),
    "q_log_normal": ("qlognormal", ("mu", "sigma", "q")),
}
_KINDS = {"float": "FloatDistribution", "int": "IntDistribution", "categorical": "CategoricalDistribution"}


def in_nni_notation(raw: Mapping[Any, Any]) -> tuple[str, dict[str, Any]] | None:
    """The library whose notation a hyper-parameter has, and the same hyper-parameter in NNI's; None: it has another form."""
    for library, translated in (("Optuna", _from_optuna), ("W&B", _from_wandb)):
        found = translated(raw)
        if found is not None and _is_complete(found):
            return library, found
    return None


def _is_complete(found: Mapping[str, Any]) -> bool:
    values = found["_value"]
    if found["_type"] == "choice":
        return isinstance(values, list) and bool(values)
    return all(finite_number(each) is not None for each in values)


def _of(kind: str, values: Any) -> dict[str, Any]:
    return {"_type": kind, "_value": values}


def _integers(low: Any, high: Any) -> dict[str, Any] | None:
    # NNI's randint excludes its upper bound.
    return _of("randint", [low, high + 1]) if isinstance(low, int) and isinstance(high, int) else None


def _from_wandb(raw: Mapping[Any, Any]) -> dict[str, Any] | None:
    name, low, high = raw.get("distribution"), raw.get("min"), raw.get("max")
    if "values" in raw and name in (None, "categorical"):
        return _of("choice", raw["values"])
    if "value" in raw and name in (None, "constant"):
        return _of("choice", [raw["value"]])
    if name == "int_uniform" or (name is None and isinstance(low, int) and isinstance(high, int)):
        return _integers(low, high)
    kind, keys = _OF_WANDB.get("uniform" if name is None else str(name), ("", ()))
    return _of(kind, [raw.get(key) for key in keys]) if kind else None


def _from_optuna(raw: Mapping[Any, Any]) -> dict[str, Any] | None:
    attributes = raw.get("attributes")
    keys = attributes if isinstance(attributes, Mapping) else raw
    kind = raw.get("name", raw.get("type"))
    name = _KINDS.get(str(kind), kind)
    if name == "CategoricalDistribution":
        return _of("choice", keys.get("choices"))
    if not {"low", "high"} <= keys.keys():
        return None
    low, high, step, is_log = keys["low"], keys["high"], keys.get("step"), keys.get("log") is True
    if name == "IntDistribution" and step in (None, 1) and not is_log:
        return _integers(low, high)
    if name == "IntDistribution":
        step = step or 1
    prefix = "q" if step is not None else ""
    return _of(f"{prefix}{'loguniform' if is_log else 'uniform'}", [low, high, *([step] if prefix else [])])
