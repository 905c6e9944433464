"""Functions that code generated from `@nni` annotations calls. Not for hand-written code."""

from nni_sdk.errors import ParameterAbsent
from nni_sdk.trial import (
    get_current_parameter,
    get_next_parameter,
    get_trial_id,
    report_final_result,
    report_intermediate_result,
)

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = [
    "get_next_parameter",
    "no_option",
    "parameter",
    "report_final_result",
    "report_intermediate_result",
    "takes",
]


def parameter(key: str) -> "Any":
    """Return this trial's value of the hyper-parameter `key`. Takes the trial's parameters first if needed, as NNI does.

    Raises:
        ParameterAbsent: the parameters have no such key.
        ParametersMissing: the parameter file is absent or damaged.
    """
    parameters = get_current_parameter()
    if parameters is None:
        parameters = get_next_parameter()
    if not isinstance(parameters, dict) or key not in parameters:
        raise ParameterAbsent(
            f"cannot find a value of {key!r} for trial {get_trial_id()}: its parameters are {parameters!r}; this code was "
            "generated from annotations, so give a value for each of them, or, outside an experiment, run the annotated code"
        )
    return parameters[key]


def takes(key: str, option: "str | float | bool | None") -> bool:
    """True if this trial takes `option` of the choice `key`.

    Raises: as `parameter`.
    """
    value = parameter(key)
    # In Python True == 1, but they are two options.
    return bool(value == option) and isinstance(value, bool) == isinstance(option, bool)


def no_option(key: str) -> "NoReturn":
    """Report that this trial's value of `key` is none of its options.

    Raises:
        ParameterAbsent: always.
    """
    raise ParameterAbsent(
        f"cannot use {parameter(key)!r} as the value of {key!r}: the annotation has no such option; write one that it has"
    )
