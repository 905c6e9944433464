"""The table of `nnictl trial ls`: which trials it shows, in which order, and in which columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nni_manager.client import output, watch
from nni_manager.client.results import PARAMETER_PREFIX, duration_s, parsed
from nni_manager.errors import UserError

if TYPE_CHECKING:
    from nni_manager.domain.objectives import Objectives

Trial = Mapping[str, Any]
"""An entry of the list of trials, from the manager or from the store."""

DEFAULT_COLUMNS = ("no.", "trial", "state", "value", "time", "parameters")
_NUMBERS = ("no.", "value", "time")
_METRIC_PREFIX = "value/"
"""Before the name of an entry of results, as in the columns of a CSV export."""


# What a column sorts by. Any other column is a parameter, or a number of the trials' results.
_KEYS: dict[str, Callable[[Trial], Any]] = {
    "no.": lambda trial: trial["sequenceId"],
    "trial": lambda trial: trial["id"],
    "state": lambda trial: trial["state"],
    "value": lambda trial: trial.get("value"),
    "time": duration_s,
    "started": lambda trial: trial.get("startTime"),
    "ended": lambda trial: trial.get("endTime"),
    "tags": lambda trial: " ".join(trial.get("tags", ())) or None,
    "note": lambda trial: trial.get("note") or None,
    "parameters": lambda trial: output.parameters(trial["parameters"]),
}


def in_states(trials: Sequence[Trial], states: Sequence[str]) -> Sequence[Trial]:
    """The trials in one of these states, in any case; all trials if no state is given.

    Raises:
        UserError: there is no such state.
    """
    from nni_manager.domain.trial import TrialState

    known = [state.value for state in TrialState]
    for state in states:
        if state.upper() not in known:
            raise UserError(
                f"cannot use --state {state}: there is no such state; write one of {', '.join(known)}"
            )
    wanted = {state.upper() for state in states}
    return [each for each in trials if each["state"] in wanted] if wanted else trials


def best(
    trials: Sequence[Trial], finals: Sequence[tuple[str, str]], count: int, objectives: Objectives
) -> Sequence[Trial]:
    """Those of the `count` best trials that are among `trials`, best first; among equals the first.

    `finals`: id and final result (JSON text) of every trial whose result counts. With several objectives, the trials on the
    front.
    """
    by_id = {each["id"]: each for each in trials}
    if not objectives.has_several:
        finals = [(trial_id, final) for trial_id, final in finals if trial_id in by_id]
    return [by_id[trial_id] for trial_id in objectives.ranked(finals) if trial_id in by_id][:count]


def is_built_in(column: str) -> bool:
    """True if the column needs neither the parameters nor the results of trials."""
    return column in _KEYS


def with_metrics(trials: Sequence[Trial], finals: Iterable[tuple[str, str]]) -> Sequence[Trial]:
    """The trials, each with the entries of its result in `metrics` if the result is a dict.

    `finals`: id and final result (JSON text) of every trial whose result counts.
    """
    results = {trial_id: parsed(final) for trial_id, final in finals}
    return [
        {**each, "metrics": result} if isinstance(result := results.get(each["id"]), dict) else each
        for each in trials
    ]


def sorted_by(trials: Sequence[Trial], column: str, *, is_descending: bool) -> Sequence[Trial]:
    """The trials in the order of a column; those without a value in it come last.

    Raises:
        UserError: no trial has such a column.
    """
    _check(trials, column, "--sort")
    key = _KEYS.get(column) or (lambda trial: _further(trial).get(column))
    given = [each for each in trials if not _is_empty(key(each))]
    without = [each for each in trials if _is_empty(key(each))]
    return [*sorted(given, key=lambda each: _rank(key(each)), reverse=is_descending), *without]


def _is_empty(value: Any) -> bool:
    """True for a value that has no place in an order: none at all, and NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _rank(value: Any) -> tuple[bool, int | float, str]:
    """The place of a value of any type: numbers before text. A whole number may be beyond the range of floats."""
    if isinstance(value, int | float):
        return False, value, ""
    return True, 0.0, output.short(value)


def columns_of(given: str | None, trials: Sequence[Trial], metrics: Sequence[str] = ()) -> Sequence[str]:
    """The names of the columns in a comma-separated list. `metrics`: those of several objectives, in place of the value.

    Raises:
        UserError: no trial has such a column.
    """
    if given is None:
        if not metrics:
            return DEFAULT_COLUMNS
        taken = {*_KEYS, *_names_of_parameters(trials)}
        shown = [_METRIC_PREFIX + each if each in taken else each for each in metrics]
        place = DEFAULT_COLUMNS.index("value")
        return *DEFAULT_COLUMNS[:place], *shown, *DEFAULT_COLUMNS[place + 1 :]
    columns = [each.strip() for each in given.split(",")]
    for column in dict.fromkeys(columns):
        _check(trials, column, "--columns")
    return columns


def _check(trials: Sequence[Trial], column: str, option: str) -> None:
    if column in _KEYS:
        return
    names = _names_of_parameters(trials)
    name = column if column in names else column.removeprefix(PARAMETER_PREFIX)
    metrics = dict.fromkeys(name for each in trials for name in each.get("metrics", ()))
    nested = [each for each in names if each.endswith(f"/{name}")] if name not in names else []
    if len(nested) > 1:
        raise UserError(
            f"cannot use {option} {column!r}: several parameters have this name; write one of {', '.join(nested)}"
        )
    if name not in names and not nested and column.removeprefix(_METRIC_PREFIX) not in metrics:
        own = (_METRIC_PREFIX + name if name in _KEYS or name in names else name for name in metrics)
        parameters = (PARAMETER_PREFIX + name if name in _KEYS else name for name in names)
        known = ", ".join((*_KEYS, *parameters, *own))
        raise UserError(f"cannot use {option} {column!r}: there is no such column; write one of {known}")


def _names_of_parameters(trials: Sequence[Trial]) -> Mapping[str, None]:
    return dict.fromkeys(
        "/".join(path) for each in trials for path, _ in output.flat_parameters(each["parameters"])
    )


def _further(trial: Trial) -> dict[str, Any]:
    """The parameters of a trial, and the entries of its result.

    `value/NAME` names an entry also beside a parameter NAME, and `parameter/NAME` a parameter also beside another column. A
    nested parameter is `outer/inner`, and `inner` if no other parameter has this name.
    """
    metrics = trial.get("metrics", {})
    prefixed = {_METRIC_PREFIX + name: value for name, value in metrics.items()}
    parameters = list(output.flat_parameters(trial["parameters"]))
    named = {path[-1]: value for path, value in parameters}
    named |= {"/".join(path): value for path, value in parameters}
    return {
        **prefixed,
        **metrics,
        **{PARAMETER_PREFIX + name: each for name, each in named.items()},
        **named,
    }


def show(trials: Sequence[Trial], columns: Sequence[str]) -> None:
    """Print the table; as tab-separated lines if stdout is a pipe."""
    rows = [[cells.get(column, "") for column in columns] for cells in map(_cells, trials)]
    numbers = [column for column in columns if column in _NUMBERS or column not in _KEYS]
    output.print_list(columns, rows, right=numbers)


def _cells(trial: Trial) -> dict[str, str]:
    value, time, parameters = watch.trial_cells(trial)
    since = trial.get("stoppingSince")
    state = trial["state"] if since is None else f"{trial['state']} since {output.moment(since)}"
    found = {name: output.short(each) for name, each in _further(trial).items()}
    return found | {
        "no.": str(trial["sequenceId"]),
        "trial": trial["id"],
        "state": state,
        "value": value,
        "time": time,
        "started": output.moment(trial.get("startTime")),
        "ended": output.moment(trial.get("endTime")),
        "tags": " ".join(trial.get("tags", ())),
        "note": trial.get("note", "").partition("\n")[0],
        "parameters": parameters,
    }
