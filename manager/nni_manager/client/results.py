"""Results as a table with a column for each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nni_sdk.nesting import parsed_json

_COLUMNS = ("trialJobId", "value", "intermediate")
PARAMETER_PREFIX = "parameter/"
"""Before the name of a parameter that another column has."""
NO_RESULT = object()
"""In place of a final result: the trial has none that counts."""


def all_trials(
    trials: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    metrics: Sequence[str] = ("default",),
    further: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of the columns, and a row for each trial, also without a result.

    The columns are those of `flat_columns`, `number`, `state`, `durationS`, `tags` and `note`, and those of `further`.

    `trials`: entries of the list of trials; `results`: the final results that count, by trial; `metrics`: see `flat_columns`.
    `further`: the values of each further column, by trial.
    """
    last = ("state", "durationS", "tags", "note", *further)
    names, rows = flat_columns(
        [(each["id"], each["parameters"], results.get(each["id"], NO_RESULT)) for each in trials],
        ("number", *last),
        metrics,
    )
    for each, row in zip(trials, rows, strict=True):
        row |= {"number": each["sequenceId"], "state": each["state"]}
        row |= {"tags": each.get("tags", []), "note": each.get("note", "")}
        if (took_s := duration_s(each)) is not None:
            row["durationS"] = took_s
        row |= {name: values.get(each["id"]) for name, values in further.items()}
    return ["number", *names, *last], rows


def with_tags(entries: Sequence[Mapping[str, Any]], given: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """The entries of a list of trials or experiments that have all of these tags.

    Raises:
        RemarksInvalid: a given text is no tag.
    """
    from nni_manager.domain.remarks import tag_of

    wanted = set(map(tag_of, given))
    return [each for each in entries if wanted <= {*each.get("tags", ())}]


def duration_s(trial: Mapping[str, Any]) -> float | None:
    """How long a trial of the list ran, in seconds; None: it has not started, or still runs."""
    if trial.get("startTime") is None or trial.get("endTime") is None:
        return None
    return float(trial["endTime"] - trial["startTime"]) / 1000


def flat_columns(
    results: Sequence[tuple[str, Mapping[str, Any], Any]],
    reserved: Sequence[str] = (),
    metrics: Sequence[str] = ("default",),
) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of the columns, and a row for each result: the trial's id, its parameters, and its final result.

    Names of nested parameters contain a slash (`layer/size`). Column `value` has the result or, if the result is a dict with all
    `metrics`, the first one, that of the first objective. `entry_columns` describes the columns `value/NAME`. A parameter with
    the name of another column, or one of `reserved`, becomes `parameter/NAME`.
    """
    rows = [(dict(flat(parameters)), _columns_of(value, metrics)) for _, parameters, value in results]
    values = dict.fromkeys(["value", *(name for _, result in rows for name in result)])
    parameters = dict.fromkeys(name for given, _ in rows for name in given)
    taken = {*_COLUMNS, *reserved, *values}
    named = {name: PARAMETER_PREFIX + name if name in taken else name for name in parameters}
    made = [
        {"trialJobId": trial_id} | {named[name]: value for name, value in given.items()} | result
        for (trial_id, _, _), (given, result) in zip(results, rows, strict=True)
    ]
    return ["trialJobId", *named.values(), *values], made


def parsed(text: Any) -> Any:
    """The value of JSON text. Other text, and what is nested too deeply, stays text: a program other than an SDK wrote it."""
    try:
        return parsed_json(text)
    except (ValueError, TypeError):
        return text


def finite(value: Any) -> Any:
    """The value with None in place of NaN and infinities: they are valid metrics, but JSON has none."""
    match value:
        case dict():
            return {name: finite(entry) for name, entry in value.items()}
        case list():
            return [finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value


def entry_columns(value: Mapping[str, Any], first: str) -> dict[str, Any]:
    """The columns `value/NAME` of a result. `first`: the metric of the first objective, which as `default` has no such column."""
    return {f"value/{name}": each for name, each in value.items() if (name, first) != ("default", "default")}


def _columns_of(value: Any, metrics: Sequence[str]) -> dict[str, Any]:
    if value is NO_RESULT:
        return {}
    if not isinstance(value, dict):
        return {"value": value}
    entries = entry_columns(value, metrics[0])
    # A result without one of the metrics has no value.
    return {"value": value[metrics[0]], **entries} if all(name in value for name in metrics) else entries


def flat(parameters: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The parameters by path: a nested one is `outer/inner`."""
    for name, value in parameters.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value
