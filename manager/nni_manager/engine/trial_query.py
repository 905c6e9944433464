"""Filter and order of trials, the same as in web/page/query.js: tests/page/queries.json has cases for both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cmp_to_key
from typing import Any, TypeAlias, TypeGuard

from nni_manager.domain.trial import Trial
from nni_manager.engine.page_text import (
    as_float,
    code_units,
    number_in,
    number_text,
    shown_number,
    value_text,
    words_of,
)
from nni_manager.engine.serializers import ms
from nni_manager.engine.trial_rows import latest_of, row_message, row_metrics, row_note, row_parameters
from trial_keeper.frozen_dataclass import dataclass

Simple: TypeAlias = str | float | bool | None
"""A scalar parameter, or a list as its JSON text."""
METRIC_PREFIX = "value/"
"""Before the name of a metric, where it stands beside names of parameters. Alone, it names the default metric."""
TAG = "tag:"
"""The start of a word in a search that names a tag."""
_MISSING: Any = object()
"""In place of a value that a trial does not have; None is `null`."""
# As in parameters.js: deeper values are shown as JSON.
_MAX_DEPTH = 8
# A running trial sorts as a very long one, since its duration grows.
_RUNNING_MS = 10**15

OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda own, wanted: own == wanted,
    "≠": lambda own, wanted: own != wanted,
    "<": lambda own, wanted: own < wanted,
    "≤": lambda own, wanted: own <= wanted,
    ">": lambda own, wanted: own > wanted,
    "≥": lambda own, wanted: own >= wanted,
    "contains": lambda own, wanted: wanted in own,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a parameter, or of a metric by `value/` and its name."""

    name: str
    operator: str
    value: str

    def holds(self, trial: Trial) -> bool:
        """True if the trial has the value and it compares so; a trial without it matches `≠` only.

        None equals the text `null`, but is neither less nor greater than anything.
        """
        own = _value_of(trial, self.name)
        if own is _MISSING:
            return self.operator == "≠"
        if own is None and self.operator in "<≤>≥":
            return False
        compare = OPERATORS[self.operator]
        if self.operator == "contains":
            return compare(value_text(own).lower(), self.value.lower())
        if _is_number(own) and (wanted := number_in(self.value)) is not None:
            return compare(as_float(own), wanted)
        return compare(code_units(value_text(own)), code_units(self.value))


@dataclass(frozen=True, slots=True)
class AxisFilter:
    """A marked part of an axis: a range of numbers, both ends included, or some categories, as in web/page/marks.js.

    `words`: the categories. `not_chosen`: trials without the value match as well.
    """

    name: str
    low: float
    high: float
    words: frozenset[str] = frozenset()
    not_chosen: bool = False

    def holds(self, trial: Trial) -> bool:
        """True if the trial's value is marked."""
        own = _value_of(trial, self.name)
        if own is _MISSING:
            return self.not_chosen
        if _is_number(own) and self.low <= as_float(own) <= self.high:
            return True
        return bool(self.words) and value_text(own) in self.words


Condition: TypeAlias = Comparison | AxisFilter
"""A condition on a parameter or on a metric."""


@dataclass(frozen=True, slots=True)
class Query:
    """The trials to show, in order. `states`: NNI's statuses, empty: all.

    `text`: every word must occur in a trial; `tag:keep` is a tag that it must have, `tag:` any tag.
    `column`: a column of the page's table; a parameter is `p:` and its name, a metric `m:` and its name.
    """

    states: frozenset[str] = frozenset()
    text: str = ""
    conditions: tuple[Condition, ...] = ()
    column: str = "seq"
    is_descending: bool = False

    @property
    def takes_all(self) -> bool:
        """True if no trial is filtered out."""
        return not self.states and not self.conditions and not words_of(self.text)

    def matches(self, trial: Trial, text_of: "Callable[[Trial], str] | None" = None) -> bool:
        """True if the trial matches the filters. `text_of`: a cached `parameter_text`."""
        text_of = text_of or parameter_text
        if self.states and trial.state.nni_status not in self.states:
            return False
        if not all(condition.holds(trial) for condition in self.conditions):
            return False
        words = []
        for word in words_of(self.text):
            if not word.startswith(TAG):
                words.append(word)
            elif not _has_tag(trial, word.removeprefix(TAG)):
                return False
        if not words:
            return True
        reason = trial.run.reason.value if trial.run.reason else ""
        parts = str(trial.sequence_id), trial.trial_id, trial.state.nni_status, reason, row_message(trial)
        text = "\n".join((*parts, row_note(trial), *trial.remarks.tags)).lower()
        left = [word for word in words if word not in text]
        if not left:
            return True
        text = text_of(trial)
        return all(word in text for word in left)

    def arranged(
        self, trials: Iterable[Trial], text_of: "Callable[[Trial], str] | None" = None
    ) -> list[Trial]:
        """The matching trials in order. Missing values sort last in both directions; equal trials sort by number."""
        shown = (
            list(trials) if self.takes_all else [trial for trial in trials if self.matches(trial, text_of)]
        )
        shown.sort(key=lambda trial: trial.sequence_id)
        if self.column == "seq":
            return shown[::-1] if self.is_descending else shown
        read = COLUMNS.get(self.column) or _named(self.column)
        values = [read(trial) for trial in shown]
        present = [place for place, value in enumerate(values) if value is not None]
        types = {type(values[place]) for place in present}
        # Keys of one type need no tuples, which take three times as long.
        keys: list[Any] = values
        if not types <= {int, float}:
            keys = [value if value is None else _sortable(value) for value in values]
        present.sort(key=keys.__getitem__, reverse=self.is_descending)
        return [shown[place] for place in present] + [
            trial for trial, value in zip(shown, values, strict=True) if value is None
        ]

    def key(self, trial: Trial) -> Any:
        """A sort key that gives the order of `arranged`, for few trials."""
        read = COLUMNS.get(self.column) or _named(self.column)
        value = read(trial)
        return _ORDERED((None if value is None else _sortable(value), trial.sequence_id, self.is_descending))


def _has_tag(trial: Trial, wanted: str) -> bool:
    """`wanted`: in lower case; empty: any tag."""
    tags = trial.remarks.tags
    return any(tag.lower() == wanted for tag in tags) if wanted else bool(tags)


def _compared(one: tuple[Any, int, bool], other: tuple[Any, int, bool]) -> int:
    (a, one_seq, descends), (b, other_seq, _) = one, other
    if a is None or b is None:
        if a is not b:
            return 1 if a is None else -1
    elif a != b:
        return -1 if (a < b) != descends else 1
    return (one_seq > other_seq) - (one_seq < other_seq)


_ORDERED = cmp_to_key(_compared)


def _is_number(value: Simple) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sortable(value: Simple) -> tuple[str, float | bytes]:
    """The key of a value: values of different types sort by the name of their type in JavaScript."""
    if _is_number(value):
        return "number", as_float(value)
    return "boolean" if isinstance(value, bool) else "string", code_units(value_text(value))


def _duration(trial: Trial) -> int | None:
    start, end = ms(trial.run.started_at_s), ms(trial.run.ended_at_s)
    if start is None:
        return None
    return end - start if end else _RUNNING_MS - start


COLUMNS: Mapping[str, Callable[[Trial], Simple]] = {
    "seq": lambda trial: trial.sequence_id,
    "id": lambda trial: trial.trial_id,
    "state": lambda trial: trial.state.nni_status,
    "value": lambda trial: trial.run.value,
    "latest": latest_of,
    "count": lambda trial: trial.run.intermediate_count,
    "start": lambda trial: ms(trial.run.started_at_s),
    "duration": _duration,
    "tags": lambda trial: " ".join(trial.remarks.tags) or None,
    "note": lambda trial: row_note(trial) or None,
    "reason": lambda trial: trial.run.reason and trial.run.reason.value,
}
"""The value of each column that is no parameter and no metric."""


def is_column(column: str) -> bool:
    """True if trials can be sorted by this column."""
    return column in COLUMNS or column.startswith(("p:", "m:"))


def _named(column: str) -> Callable[[Trial], Simple]:
    name = column[2:]
    if column.startswith("m:"):
        return lambda trial: row_metrics(trial).get(name)
    return lambda trial: _parameter(trial, name)


def parameter_text(trial: Trial) -> str:
    """The text of the parameters in which words are searched: each as it is, and as the page shows it."""
    parts: list[str] = []
    for name, value in flat(row_parameters(trial)).items():
        if not _is_number(value):
            parts.append(f"{name}={value_text(value)}")
        elif 1e-4 <= value < 1e6 and len(text := repr(value)) > _MAX_TIE:
            parts.append(f"{name}={text}\n{value:.6g}")  # most numbers
        else:
            parts.append(f"{name}={number_text(value)}\n{shown_number(value)}")
    return "\n".join(parts).lower()


# A longer number has more than seven digits, so it is not half-way between two numbers of six.
_MAX_TIE = 12


def flat(parameters: Mapping[str, Any]) -> Mapping[str, Simple]:
    """The scalar parameters by name, as in parameters.js: the parts of a nested choice are named `net/units`."""
    if all(map(_is_plain, parameters.values())):
        return parameters
    values: dict[str, Simple] = {}
    _lay(values, "", parameters, 0)
    return values


def _is_plain(value: object) -> bool:
    """True if the API has the value as it is, and it is a scalar."""
    if isinstance(value, float):
        return value - value == 0.0  # neither NaN nor infinite
    return value is None or isinstance(value, (int, str))


def _parameter(trial: Trial, name: str, missing: Any = None) -> Any:
    """A parameter by its name in `flat`; `missing` if the trial has none."""
    value = trial.parameters.get(name)
    if isinstance(value, (int, float)) and _is_plain(value):
        return value  # most parameters are numbers
    return flat(row_parameters(trial)).get(name, missing)


def _value_of(trial: Trial, name: str) -> Any:
    """The value under the name of a condition: a parameter, or a metric by `value/` and its name; `_MISSING` without one."""
    own = _parameter(trial, name, _MISSING)
    if own is not _MISSING or not name.startswith(METRIC_PREFIX):
        return own
    if name == METRIC_PREFIX:
        return _MISSING if trial.run.value is None else trial.run.value
    return row_metrics(trial).get(name.removeprefix(METRIC_PREFIX), _MISSING)


def _lay(values: dict[str, Simple], prefix: str, value: Any, depth: int) -> None:
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for name, entry in value.items():
            path = prefix if name == "_name" and prefix else f"{prefix}/{name}" if prefix else name
            _lay(values, path, entry, depth + 1)
    elif _is_plain(value):
        values[prefix] = value
    else:
        values[prefix] = None if isinstance(value, float) else value_text(value)


def names_in(trials: Sequence[Trial], parameters: dict[str, None], metrics: dict[str, None]) -> None:
    """Add the names of the parameters and of the metrics of these trials, in order of first occurrence."""
    for trial in trials:
        own = trial.parameters
        if not parameters.keys() >= own.keys() or any(isinstance(value, dict) for value in own.values()):
            parameters |= dict.fromkeys(flat(row_parameters(trial)))
        if trial.result is not None and trial.result.startswith("{"):
            metrics |= dict.fromkeys(row_metrics(trial))
