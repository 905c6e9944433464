"""The functions and classes of `nni.utils` for training code, custom tuners and assessors."""

from enum import Enum

from nni_sdk.errors import ParameterMistyped, ParameterUnknown

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Callable
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


class NodeType:
    """The keys of search spaces, and of parameters that name the index of an option."""

    ROOT = "root"
    TYPE = "_type"
    VALUE = "_value"
    INDEX = "_index"
    NAME = "_name"


def split_index(params: "Any") -> "Any":
    """Return parameters with the option in place of each `{"_index": 1, "_value": option}`.

    Source: NNI v3.0, nni.utils.
    """
    if not isinstance(params, dict):
        return params
    if NodeType.INDEX in params:
        return split_index(params[NodeType.VALUE])
    return {key: split_index(value) for key, value in params.items()}


def convert_dict2tuple(value: "Any") -> "Any":
    """Return a dict as a sorted tuple of its items, which can be a key or an element of a set; other values unchanged.

    Source: NNI v3.0, nni.utils, which also converts the dicts inside the given one in place.
    """
    if not isinstance(value, dict):
        return value
    return tuple(sorted((key, convert_dict2tuple(inner)) for key, inner in value.items()))


class ClassArgsValidator:
    """Base class of validators for the classArgs of a registered tuner or assessor.

    The other methods make conditions for the package `schema`, which the validator's own code installs and uses.
    """

    def validate_class_args(self, **kwargs: "Any") -> None:
        """Raise any exception if the arguments are invalid."""

    def choices(self, key: str, *args: "Any") -> "Any":
        """A condition: the argument `key` is one of the values."""
        return _condition(lambda value: value in args, f"{key} must be one of {list(args)}")

    def range(self, key: str, keyType: "Any", start: float, end: float) -> "Any":  # noqa: N803 - NNI's name
        """A condition: the argument `key` has the type, and is from start to end, both included."""
        wrong = f"{key} must be of type {keyType.__name__}, from {start} to {end}"
        return _condition(lambda value: isinstance(value, keyType) and start <= value <= end, wrong)

    def path(self, key: str) -> "Any":
        """A condition: the argument `key` is the path of a file or folder that exists."""
        import os

        return _condition(
            lambda value: isinstance(value, str) and os.path.exists(value), f"{key} must be an existing path"
        )


def _condition(is_met: "Callable[[Any], bool]", wrong: str) -> "Any":
    from importlib import import_module

    try:
        schema = import_module("schema")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "cannot make a condition for classArgs: the package schema is not installed; run `pip install schema`",
            name="schema",
        ) from error
    return schema.And(is_met, error=wrong)


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


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # each import from this module asks for __path__
        raise AttributeError(name)
    from nni_sdk.aliases import absent

    return absent("nni_sdk.utils", name)
