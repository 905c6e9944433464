"""Helpers NNI offers to training code under this very name."""

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
