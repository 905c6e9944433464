"""Extracts the numbers that tuner and assessor use from reported metrics."""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from nni_sdk.nesting import NestedTooDeeply, parsed_json

# Every trial keeps its newest intermediate result in memory for lists; a longer one is reduced to its number.
MAX_SHOWN_CHARACTERS = 4096
# A result with a long list, such as predictions, has numbers, too. Results of a megabyte would delay the manager.
MAX_PARSED_CHARACTERS = 256 << 10


def reward(value: str, name: str = "default") -> float | None:
    """The number for the tuner: the metric itself, or a dict's item `name`. None if there is no such finite number.

    `value`: the JSON text that the training code reported; it may contain NaN and infinities, which are not valid rewards.
    """
    try:
        metric = parsed_json(value)
        if isinstance(metric, dict):
            metric = metric.get(name)
        elif name != "default":
            return None
    except ValueError:
        return None  # not JSON, or nested too deeply
    return finite_number(metric)


def numbers_in(
    value: str, most: int | None, first: Iterable[str], *, without_default: bool
) -> Mapping[str, float]:
    """The finite numbers of a reported dict, by name: up to `most` (None: all), those named in `first` before the others.

    `value`: its JSON text; with a limit, a text of more than `MAX_PARSED_CHARACTERS` has none.
    """
    if not value.startswith("{") or (most is not None and len(value) > MAX_PARSED_CHARACTERS):
        return {}
    # Lists of trials ask for the numbers of each trial again and again.
    is_kept = most is not None and len(value) > MAX_SHOWN_CHARACTERS
    numbers = _numbers_in_long if is_kept else _numbers_in
    return numbers(value, most, tuple(first), without_default)


def _numbers_in(
    value: str, most: int | None, first: tuple[str, ...], without_default: bool
) -> Mapping[str, float]:
    try:
        entries = parsed_json(value)
    except ValueError:
        return {}
    chosen = {name: entries[name] for name in first if name in entries} | entries
    numbers = (
        (name, number)
        for name, entry in chosen.items()
        if not (without_default and name == "default") and (number := finite_number(entry)) is not None
    )
    return dict(islice(numbers, most))


_numbers_in_long = lru_cache(maxsize=10_000)(_numbers_in)


def finite_number(metric: object) -> float | None:
    """A value of a reported result as a float; None if it is no finite number. True is 1, as in NNI's `extract_scalar_reward`."""
    if not isinstance(metric, (int, float)):
        return None
    try:
        number = float(metric)
    except OverflowError:
        return None  # an int beyond the range of floats
    return number if math.isfinite(number) else None


# A longer value of a trial would hide the sentence around it.
_MAX_QUOTED = 60


def reason_without_reward(value: str) -> str:
    """The reason why `reward` finds no number in a reported metric, as a clause with the value and its type."""
    try:
        metric = parsed_json(value)
        if not isinstance(metric, dict):
            return f"{_quoted(value)}, {_kind_of(metric)}"
        if "default" not in metric:
            return f'a dict without "default" (it has {_quoted(json.dumps(list(metric))[1:-1]) or "nothing"})'
        inner = metric["default"]
        return f'a dict whose "default" is {_quoted(json.dumps(inner))}, {_kind_of(inner)}'
    except ValueError as error:
        return _reason_without_value(value, error)


def objective_hint(value: str) -> str:
    """How the experiment file can name a metric of a reported dict without `default`; empty if it has no finite number."""
    try:
        reported = parsed_json(value)
    except ValueError:
        return ""
    if not isinstance(reported, dict) or "default" in reported:
        return ""
    name = next((name for name, each in reported.items() if finite_number(each) is not None), None)
    if name is None:
        return ""
    objective = f"objectives: [{{metric: {_quoted(json.dumps(name, ensure_ascii=False))}, mode: minimize}}]"
    return f", or name the metric in the experiment file, such as {objective} (or maximize)"


def reason_without(value: str, metrics: Sequence[str]) -> str:
    """The reason why a reported result is unusable that must have a finite number for each of these metrics, as a clause."""
    names = ", ".join(map(json.dumps, metrics))
    try:
        reported = parsed_json(value)
    except ValueError as error:
        return _reason_without_value(value, error)
    if not isinstance(reported, dict):
        return f"{_quoted(value)}, not a dict with {names}"
    missing = [name for name in metrics if name not in reported]
    if missing:
        has = _quoted(json.dumps(list(reported))[1:-1]) or "nothing"
        return f"a dict without {', '.join(map(json.dumps, missing))} (it has {has})"
    wrong = next((name for name in metrics if finite_number(reported[name]) is None), "")
    inner = reported.get(wrong)
    return f"a dict whose {json.dumps(wrong)} is {_quoted(json.dumps(inner))}, {_kind_of(inner)}"


def _reason_without_value(value: str, error: ValueError) -> str:
    return f"{_quoted(value)}, which is {error if isinstance(error, NestedTooDeeply) else 'not JSON'}"


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "nothing (None)"
        case str():
            return "a str"
        case list():
            return "a list"
        case dict():
            return "a dict"
    return "not a finite number"


def _quoted(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def truncate_for_display(value: str) -> str | None:
    """The newest intermediate result of a trial as kept in memory; None: it is too long and has no usable number.

    Of a long dict with metrics besides `default` its numbers are kept.
    """
    if len(value) <= MAX_SHOWN_CHARACTERS:
        return value
    number = reward(value)
    with contextlib.suppress(ValueError):
        reported = parsed_json(value)
        if isinstance(reported, dict):
            numbers = {name: each for name, each in reported.items() if finite_number(each) is not None}
            text = json.dumps(numbers)
            if numbers.keys() - {"default"} and len(text) <= MAX_SHOWN_CHARACTERS:
                return text
    return None if number is None else json.dumps(number)


class MetricValue(float):
    """A reported metric: its `reward`, or NaN if it has none, with the whole JSON text in `text`."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> "MetricValue":
        """Create it from the JSON text that the training code reported."""
        number = reward(text)
        reported = super().__new__(cls, math.nan if number is None else number)
        reported.text = text
        return reported
