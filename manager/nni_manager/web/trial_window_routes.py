"""The routes that a page uses for the trials of a large experiment: windows of its table, and samples for its charts."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nni_manager.engine.page_text import as_float
from nni_manager.engine.trial_query import (
    OPERATORS,
    AxisFilter,
    Comparison,
    Condition,
    Query,
    is_column,
)
from nni_manager.web.backend_reads import ExperimentBackend
from nni_manager.web.compression import streamed
from nni_manager.web.json_encoding import Json
from nni_manager.web.openapi import ONE, Operation, Schema
from nni_manager.web.query_values import STATUSES, is_true, refuse_unknown, whole_number
from nni_manager.web.trial_views import MAX_LIMIT, TrialViews

# Each is evaluated for every trial. Marks on all axes of the page's chart are 13 conditions.
_MAX_CONDITIONS = 50
_MAX_TEXT = 1000
_WINDOW = 100
_SAMPLE = 1500
_MAX_OFFSET = 10**9
_FILTERS = {
    "states": "NNI's statuses, separated by commas; empty: all.",
    "text": "Every word must occur in a trial; `tag:NAME` is a tag that it must have, `tag:` any tag.",
    "conditions": 'A JSON array of comparisons such as {"name": "lr", "operator": "<", "value": "0.1"}, and of marks such as '
    '{"name": "lr", "low": 0.01, "high": null, "words": [], "notChosen": false}: a range of numbers, of which null is an open '
    "end, or some values as texts, or no value. `name` is a parameter, the default metric `value/` or another one `value/NAME`. "
    f"All must hold; at most {_MAX_CONDITIONS}.",
}
_OF_SAMPLE: Mapping[str, Schema] = {
    **{name: {"type": "string", "description": each} for name, each in _FILTERS.items()},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
}
_OF_WINDOW: Mapping[str, Schema] = {
    **_OF_SAMPLE,
    "sort": {"type": "string"},
    "descending": {"type": "boolean"},
    "offset": {"type": "integer", "minimum": 0, "maximum": _MAX_OFFSET},
    "around": {"type": "string"},
    "whole": {"type": "boolean", "description": "With all parameters and metrics in full."},
}


class TrialWindowRoutes:
    """Windows and samples of the trials of one experiment."""

    def __init__(self, engine: ExperimentBackend) -> None:
        self._views = TrialViews(engine.snapshot)

    def operations(self) -> list[Operation]:
        """All operations."""
        return [
            Operation("/trial-window", self.trial_window, ONE, query=_OF_WINDOW),
            Operation("/trial-sample", self.trial_sample, ONE, query=_OF_SAMPLE),
        ]

    async def trial_window(self, request: Request) -> Response:
        """A range of the trials that match, in the order of a column: `limit` of them from `offset`, or around a trial.

        Rows leave out long values of parameters and the metrics after the first 20, and are then marked as `cut`; with `whole`
        they have all in full. `_FILTERS` describes the filters.
        """
        refuse_unknown(request, _OF_WINDOW)
        query = _query_of(request)
        first = whole_number(request, "offset", 0, _MAX_OFFSET) or 0
        limit = whole_number(request, "limit", 1, MAX_LIMIT) or _WINDOW
        around, is_whole = request.query_params.get("around"), is_true(request, "whole")
        pieces = await self._views.window(query, first, limit, around, is_whole=is_whole)
        return streamed(request, pieces, Json.media_type)

    async def trial_sample(self, request: Request) -> Response:
        """Some of the trials that match: `limit` evenly chosen ones, the best ones and all improvements.

        With the names of the parameters and of the metrics of all trials.
        """
        refuse_unknown(request, _OF_SAMPLE)
        limit = whole_number(request, "limit", 1, MAX_LIMIT) or _SAMPLE
        return streamed(request, await self._views.sample(_query_of(request), limit), Json.media_type)


def _query_of(request: Request) -> Query:
    values = request.query_params
    states = frozenset(filter(None, values.get("states", "").split(",")))
    if unknown := sorted(states.difference(STATUSES)):
        raise HTTPException(400, f"cannot use states={unknown[0][:40]}: write some of {', '.join(STATUSES)}")
    column = values.get("sort", "seq")
    if not is_column(column):
        raise HTTPException(
            400,
            f"cannot sort by {column[:40]}: name a column, or a parameter as p:NAME, or a metric as m:NAME",
        )
    text = values.get("text", "")
    if len(text) > _MAX_TEXT:
        raise HTTPException(
            400, f"cannot search for a text of {len(text)} characters: write at most {_MAX_TEXT}"
        )
    return Query(
        states, text, conditions_of(values.get("conditions", "[]")), column, is_true(request, "descending")
    )


def conditions_of(text: str) -> tuple[Condition, ...]:
    """The conditions in a JSON array.

    Raises:
        HTTPException: they are not valid conditions, or too many.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list) or len(entries) > _MAX_CONDITIONS:
        raise HTTPException(
            400, f"cannot read conditions: they are not a JSON array of at most {_MAX_CONDITIONS} conditions"
        )
    return tuple(_condition_of(entry) for entry in entries)


def _condition_of(entry: Any) -> Condition:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise _unreadable()
    return _comparison_of(entry) if "operator" in entry else _mark_of(entry)


def _comparison_of(entry: dict[str, Any]) -> Comparison:
    names = ("name", "operator", "value")
    if not all(isinstance(entry.get(name), str) for name in names):
        raise _unreadable()
    comparison = Comparison(*(entry[name] for name in names))
    if comparison.operator not in OPERATORS:
        raise HTTPException(
            400, f"cannot use operator {comparison.operator[:20]}: write one of {' '.join(OPERATORS)}"
        )
    return comparison


def _mark_of(entry: dict[str, Any]) -> AxisFilter:
    words, not_chosen = entry.get("words"), entry.get("notChosen")
    if (
        not isinstance(words, list)
        or not all(isinstance(word, str) for word in words)
        or not isinstance(not_chosen, bool)
    ):
        raise _unreadable()
    low, high = _end_of(entry, "low", -math.inf), _end_of(entry, "high", math.inf)
    return AxisFilter(entry["name"], low, high, frozenset(words), not_chosen)


def _end_of(entry: dict[str, Any], name: str, unlimited: float) -> float:
    """An end of a mark's range; JSON has no infinite numbers, so null is an end without a limit."""
    end = entry.get(name)
    if end is None and name in entry:
        return unlimited
    if isinstance(end, bool) or not isinstance(end, (int, float)):
        raise _unreadable()
    return as_float(end)


def _unreadable() -> HTTPException:
    return HTTPException(
        400,
        'cannot read a condition: write {"name": "lr", "operator": "<", "value": "0.1"}, '
        'or {"name": "lr", "low": 0.01, "high": 0.1, "words": [], "notChosen": false}',
    )
