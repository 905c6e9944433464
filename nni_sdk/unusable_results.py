"""The warnings about results that tuner and assessor cannot use. Imported when a result may be one."""

import math

from nni_sdk.nesting import NestedTooDeeply, parsed_json

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# A longer value would hide the sentence around it.
_MAX_SHOWN = 80


def warning(value: str, names: "Sequence[str]", is_final: bool) -> str:
    """Return what is wrong with a result, with the remedy; empty if it is usable.

    `value`: its JSON text. `names`: the metrics that a final result must have; empty: a number is enough.
    """
    shown = value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "..."
    try:
        reported = parsed_json(value)
    except NestedTooDeeply as error:
        return (
            f"cannot use the result {shown}: it is {error}, so the tuner ignores it; report a flatter value"
        )
    numbers = reported if isinstance(reported, dict) else {"default": reported}
    missing = [name for name in names or ["default"] if not _is_number(numbers.get(name))]
    if names and not is_final:
        if len(missing) < len(names):
            return ""
        return (
            f"cannot assess the intermediate result {shown}: it has no number under {' or '.join(map(repr, names))}; "
            "if the experiment has an assessor, report a dict with this number"
        )
    if not missing:
        return ""
    if names:
        return (
            f"cannot use the result {shown}: it has no number under {', '.join(map(repr, missing))}, so the trial has no "
            "result; report a dict with these numbers"
        )
    where, hint = "is no number", ""
    if numbers is reported:
        where = "has no number under 'default'"
        hint = ", or name the metric in the experiment file under objectives"
    elif reported is None:
        hint = "; a function without `return` returns None"
    return (
        f"cannot use the result {shown}: it {where}, so the tuner ignores it; "
        f"report a number, or a dict with a number under 'default'{hint}"
    )


def _is_number(value: "Any") -> bool:
    """True if a value of JSON is a finite number."""
    try:
        return not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, OverflowError):  # a list or null, or an int beyond the range of floats
        return False
