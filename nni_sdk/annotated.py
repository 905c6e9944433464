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
    """Return this trial's value of the hyper-parameter `key`. The first call loads the trial's parameters, as in NNI.

    Raises:
        ParameterAbsent: the parameters have no such key.
        ParametersMissing: the parameter file is absent or damaged.
    """
    parameters = get_current_parameter()
    if parameters is None:
        parameters = get_next_parameter()
    if not isinstance(parameters, dict) or key not in parameters:
        raise ParameterAbsent(
            f"cannot find a value of {key!r} for trial {get_trial_id()}: its parameters are {parameters!r}; "
            "add the value to the trial's parameters; outside an experiment, run the original script, not this generated copy"
        )
    return parameters[key]


def takes(key: str, option: "str | float | bool | None") -> bool:
    """True if this trial's value of the choice `key` is `option`.

    Raises: as `parameter`.
    """
    value = parameter(key)
    # In Python True == 1, but these are two options.
    return bool(value == option) and isinstance(value, bool) == isinstance(option, bool)


def no_option(key: str) -> "NoReturn":
    """Raise an error: this trial's value of `key` is none of its options.

    Raises:
        ParameterAbsent: always.
    """
    raise ParameterAbsent(
        f"cannot use {parameter(key)!r} as the value of {key!r}: the annotation has no such option; use one of its options"
    )
