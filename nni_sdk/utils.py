"""Helpers NNI offers under this very name: to training code, and to tuners and assessors of one's own."""

from enum import Enum

from nni_sdk.errors import ParameterMistyped, ParameterUnknown

TYPE_CHECKING = False  # the typing module costs more to import than the SDK; type checkers know this name
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Base = TypeVar("Base")


def merge_parameter(base_params: "Base", override_params: "dict[str, Any] | None") -> "Base":
    """`base_params` itself, a dict or an `argparse.Namespace`, with the tuner's values in place of its own.

    All or nothing: after an error `base_params` is as it was. `None` as override changes nothing. A base value of None takes
    any type; every other keeps exactly its own, so an int does not replace a float.

    Raises:
        ParameterUnknown: the base has no such key; a ValueError too.
        ParameterMistyped: the value's type is not that of the base; a TypeError too.
    Source: NNI v3.0, nni.utils.merge_parameter.
    """
    if override_params is None:
        return base_params
    values = base_params if isinstance(base_params, dict) else vars(base_params)
    for key, value in override_params.items():
        if key not in values:
            raise ParameterUnknown(
                f"cannot override {key!r}: the base parameters have no such key, only {sorted(map(str, values))}; "
                "add it there, or take it out of the search space"
            )
        if values[key] is not None and type(values[key]) is not type(value):
            raise ParameterMistyped(
                f"cannot override {key!r}, a {type(values[key]).__name__}, with {value!r}, a {type(value).__name__}; "
                "give the default and the search space the same type"
            )
    for key, value in override_params.items():
        if isinstance(base_params, dict):
            base_params[key] = value
        else:
            setattr(base_params, key, value)
    return base_params


class OptimizeMode(Enum):
    """Which results are better."""

    Minimize = "minimize"
    Maximize = "maximize"


class MetricType:
    """What a metric is."""

    PERIODICAL = "PERIODICAL"
    FINAL = "FINAL"
    REQUEST_PARAMETER = "REQUEST_PARAMETER"


class ClassArgsValidator:
    """The base of what checks the classArgs of a registered tuner or assessor."""

    def validate_class_args(self, **kwargs: "Any") -> None:
        """Raise, whatever suits, when the arguments are wrong."""


def extract_scalar_reward(value: "Any", scalar_key: str = "default") -> "float | int":
    """The number of a result: the result itself, or what a dict holds under `scalar_key`.

    Raises:
        RuntimeError: there is no number.
    Source: NNI v2.10, nni.utils.
    """
    found = value.get(scalar_key) if isinstance(value, dict) else value
    if isinstance(found, (int, float)):
        return found
    raise RuntimeError(
        f"cannot find a number in the result {value!r}; report a float or int, or a dict with the key {scalar_key!r}"
    )


def extract_scalar_history(trial_history: "list[Any]", scalar_key: str = "default") -> "list[float | int]":
    """The numbers of the results of a trial.

    Raises:
        RuntimeError: there is no number in one of them.
    """
    return [extract_scalar_reward(each, scalar_key) for each in trial_history]
