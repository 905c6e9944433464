"""The routes that a page uses for the trials of a large experiment: windows of its table, and samples for its charts."""

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nni_manager.domain.trial import TrialState
from nni_manager.engine.trial_query import OPERATORS, Condition, Query, is_column
from nni_manager.web.backend_reads import ExperimentBackend
from nni_manager.web.compression import streamed
from nni_manager.web.json_encoding import Json
from nni_manager.web.openapi import ONE, Operation, Schema
from nni_manager.web.query_values import is_true, whole_number
from nni_manager.web.trial_views import MAX_LIMIT, TrialViews

_STATUSES = sorted({state.nni_status for state in TrialState})
# Each is evaluated for every trial.
_MAX_CONDITIONS = 20
_MAX_TEXT = 1000
_WINDOW = 100
_SAMPLE = 1500
_MAX_OFFSET = 10**9


class TrialWindowRoutes:
    """Windows and samples of the trials of one experiment."""

    def __init__(self, engine: ExperimentBackend) -> None:
        self._views = TrialViews(engine.snapshot)

    def operations(self) -> list[Operation]:
        """All operations."""
        text: Schema = {"type": "string"}
        filters: dict[str, Schema] = {"states": text, "text": text, "conditions": text}
        limit: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}
        window: dict[str, Schema] = {
            "sort": text,
            "descending": {"type": "boolean"},
            "offset": {"type": "integer", "minimum": 0, "maximum": _MAX_OFFSET},
            "around": text,
        }
        return [
            Operation("/trial-window", self.trial_window, ONE, query=filters | window | {"limit": limit}),
            Operation("/trial-sample", self.trial_sample, ONE, query=filters | {"limit": limit}),
        ]

    async def trial_window(self, request: Request) -> Response:
        """A range of the trials that match, in the order of a column: `limit` of them from `offset`, or around a trial.

        `states`: NNI's statuses, separated by commas. `conditions`: a JSON array of {"name", "operator", "value"}.
        """
        query = _query_of(request)
        first = whole_number(request, "offset", 0, _MAX_OFFSET) or 0
        limit = whole_number(request, "limit", 1, MAX_LIMIT) or _WINDOW
        pieces = await self._views.window(query, first, limit, request.query_params.get("around"))
        return streamed(request, pieces, Json.media_type)

    async def trial_sample(self, request: Request) -> Response:
        """Some of the trials that match: `limit` evenly chosen ones, the best ones and all improvements.

        With the names of the parameters and of the metrics of all trials.
        """
        limit = whole_number(request, "limit", 1, MAX_LIMIT) or _SAMPLE
        return streamed(request, await self._views.sample(_query_of(request), limit), Json.media_type)


def _query_of(request: Request) -> Query:
    values = request.query_params
    states = frozenset(filter(None, values.get("states", "").split(",")))
    if unknown := sorted(states.difference(_STATUSES)):
        raise HTTPException(400, f"cannot use states={unknown[0][:40]}: write some of {', '.join(_STATUSES)}")
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
        states, text, _conditions_of(values.get("conditions", "[]")), column, is_true(request, "descending")
    )


def _conditions_of(text: str) -> tuple[Condition, ...]:
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
    names = ("name", "operator", "value")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in names):
        raise HTTPException(
            400, 'cannot read a condition: write {"name": "lr", "operator": "<", "value": "0.1"}'
        )
    condition = Condition(*(entry[name] for name in names))
    if condition.operator not in OPERATORS:
        raise HTTPException(
            400, f"cannot use operator {condition.operator[:20]}: write one of {' '.join(OPERATORS)}"
        )
    return condition
