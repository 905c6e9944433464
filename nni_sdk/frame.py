"""One metric as bytes: the half of the record format that runs in the training process.

A frame is `ME`, a byte length as six digits, one JSON object and a newline. The length counts the JSON and the newline. The JSON
itself contains no newline, so a reader can find whole frames between partial ones (`nni_sdk.records`).

This module has no top-level imports of its own: a number, the usual metric, never needs the json module.

Source: NNI v3.0 SDK, local platform (`ME%06d`, payload below 1,000,000 bytes, `value` a JSON document inside a JSON string).
"""

from nni_sdk.errors import MetricInvalid, MetricTooLong

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any

MAX_PAYLOAD_BYTES = 999_999  # the largest number of six digits, and NNI's own limit

_INFINITY = float("inf")
_MAX_INT = 2**1024  # no float is larger; Python raises when it prints ints of some thousand digits


def encode(parameter_id: "int | str", trial_job_id: str, type_: str, sequence: int, value: object) -> bytes:
    """Return the frame of one metric, ready for a single write.

    `type_` is `PERIODICAL` or `FINAL`. `value` is anything that `value_json` accepts. Pure ASCII.

    Raises:
        MetricInvalid: JSON cannot represent the value.
        MetricTooLong: JSON and newline exceed `MAX_PAYLOAD_BYTES`.
    """
    return frame(frame_head(parameter_id, trial_job_id, type_), sequence, value_json(value))


def frame_head(parameter_id: "int | str", trial_job_id: str, type_: str) -> str:
    """Return the part of a frame's JSON that is the same for all metrics of one type in one trial."""
    from json import dumps  # already loaded to read the parameter file

    return (
        f'{{"parameter_id": {dumps(parameter_id)}, "trial_job_id": {dumps(trial_job_id)}, '
        f'"type": {dumps(type_)}, "sequence": '
    )


def frame(head: str, sequence: int, json: str) -> bytes:
    """Return the frame for a head from `frame_head` and a value from `value_json`.

    Raises:
        MetricTooLong: JSON and newline exceed `MAX_PAYLOAD_BYTES`.
    """
    # A number or a list of numbers has neither quotes nor backslashes; all JSON here is ASCII.
    if '"' in json:
        json = json.replace("\\", "\\\\").replace('"', '\\"')
    payload = f'{head}{sequence}, "value": "{json}"}}\n'
    length = len(payload)
    # The usual length: the format `06d` alone would take a sixth of the time of a report.
    if 100 <= length <= 999:
        return f"ME000{length}{payload}".encode()
    if length > MAX_PAYLOAD_BYTES:
        raise MetricTooLong(
            f"cannot report a metric of {length:,} bytes: a record holds at most {MAX_PAYLOAD_BYTES:,}; "
            "report a summary and write the rest to a file in $NNI_OUTPUT_DIR"
        )
    return f"ME{length:06d}{payload}".encode()


def value_json(value: object) -> str:
    """Return the metric as an ASCII JSON document, as Python's json writes it: with NaN, Infinity and -Infinity.

    Scalars and arrays of numpy, torch, jax and similar libraries are converted with their `tolist()` or `item()`, also inside
    dicts, lists and tuples. Dict keys follow json's rules: str, int, float, bool and None.

    Raises:
        MetricInvalid: JSON cannot represent the value; the message names the part, such as `value["curve"][3]`.
    """
    if type(value) is float and -_INFINITY < value < _INFINITY:
        return repr(value)
    if isinstance(value, float):
        # float.__repr__ instead of repr: a numpy.float64 is a float whose repr is "np.float64(0.5)".
        if -_INFINITY < value < _INFINITY:
            return float.__repr__(value)
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124 - NaN only
    if type(value) is int and -_MAX_INT <= value <= _MAX_INT:
        return repr(value)
    return _document(value)


def _document(value: object) -> str:
    from json import dumps

    try:
        return dumps(value, default=_unwrapped)
    except (TypeError, ValueError, RecursionError) as error:
        try:
            fault = _fault(value, "value")
        except RecursionError:
            fault = None
        if fault is None:
            fault = "value contains itself or is nested too deeply"
        raise MetricInvalid(
            f"cannot report this metric: {fault}; use only numbers, strings, booleans, None, lists and dicts"
        ) from error


def _unwrapped(value: "Any") -> object:
    """Return a scalar or an array of numpy, torch, jax, … as Python numbers, without importing these libraries."""
    if not isinstance(value, type):
        for name in ("tolist", "item"):
            convert = getattr(value, name, None)
            if not callable(convert):
                continue
            try:
                plain: object = convert()
            except (TypeError, ValueError, RuntimeError):
                continue  # torch raises for a tensor without storage; the caller raises MetricInvalid
            if type(plain) is not type(value):  # numpy.longdouble.tolist() is a numpy.longdouble again
                return plain
    raise TypeError(type(value).__qualname__)


def _fault(value: object, place: str) -> "str | None":
    """Describe the first part of `value` that JSON cannot represent, with its place; None if there is none."""
    if value is None or isinstance(value, (str, float, bool)):
        return None
    if isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError:
            return f"{place} is an int with more digits than Python prints"
        return None
    if isinstance(value, dict):
        for key in value:
            if not (key is None or isinstance(key, (str, int, float))):
                return f"a key of {place} is {_named(key)}: {key!r}"
        children = [(item, f"{place}[{key!r}]") for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(item, f"{place}[{index}]") for index, item in enumerate(value)]
    else:
        try:
            children = [(_unwrapped(value), place)]
        except TypeError:
            return f"{place} is {_named(value)}"
    for child, child_place in children:
        fault = _fault(child, child_place)
        if fault is not None:
            return fault
    return None


def _named(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
