"""The functions and classes of `nni.utils` for training code, custom tuners and assessors."""

from enum import Enum

from nni_sdk.errors import ParameterMistyped, ParameterUnknown

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Base = TypeVar("Base")


def merge_parameter(base_params: "Base", override_params: "dict[str, Any] | None") -> "Base":
    """Override values of `base_params`, a dict or an `argparse.Namespace`, with the tuner's, and return `base_params`.

    An error leaves `base_params` unchanged. `None` as override changes nothing. A base value of None accepts any type; any other
    base value accepts only its own type, so an int does not replace a float.

    Raises:
        ParameterUnknown: the base has no such key. Also a ValueError.
        ParameterMistyped: the value's type is not that of the base. Also a TypeError.
    Source: NNI v3.0, nni.utils.merge_parameter.
    """
    if override_params is None:
        return base_params
    values = base_params if isinstance(base_params, dict) else vars(base_params)
    for key, value in override_params.items():
        if key not in values:
            raise ParameterUnknown(
                f"cannot override {key!r}: the base parameters have only {sorted(map(str, values))}; "
                f"add {key!r} to the base parameters, or remove it from the search space"
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
    """The direction of the optimisation: smaller or larger results are better."""

    Minimize = "minimize"
    Maximize = "maximize"


class MetricType:
    """The kinds of metrics."""

    PERIODICAL = "PERIODICAL"
    FINAL = "FINAL"
    REQUEST_PARAMETER = "REQUEST_PARAMETER"


class ClassArgsValidator:
    """Base class of validators for the classArgs of a registered tuner or assessor."""

    def validate_class_args(self, **kwargs: "Any") -> None:
        """Raise any exception if the arguments are invalid."""


def extract_scalar_reward(value: "Any", scalar_key: str = "default") -> "float | int":
    """Return the number of a result: the result itself, or a dict's value for `scalar_key`.

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
    """Return the numbers of a trial's results.

    Raises:
        RuntimeError: one of them has no number.
    """
    return [extract_scalar_reward(each, scalar_key) for each in trial_history]
