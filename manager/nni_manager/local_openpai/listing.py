"""Filters, order and pages of a list of jobs, as a query requests them. Pure.

Operates on the items of the response. The sort is stable, so that pages neither repeat nor skip a job.

Source: microsoft/pai v1.8.1, REST server, controllers/v2/job.js; PostgreSQL for the order of null, which is above all values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nni_manager.config.diagnostics import remedy_for_unknown, shown
from nni_manager.local_openpai.errors import invalid_parameters

DEFAULT_LIMIT, MAX_LIMIT = 5_000, 50_000

Item = Mapping[str, Any]

# Field names in queries, and in items.
_FIELDS = {
    "jobName": "name",
    "submissionTime": "submissionTime",
    "username": "username",
    "vc": "virtualCluster",
    "retries": "retries",
    "totalTaskNumber": "totalTaskNumber",
    "totalGpuNumber": "totalGpuNumber",
    "state": "state",
    "completionTime": "completedTime",
    "jobPriority": "jobPriority",
}
_FILTERS = ("username", "vc", "state", "jobPriority")
_DIRECTIONS = {"ASC": False, "DESC": True}
# The value in queries for jobs without a priority.
_NO_PRIORITY = "default"


def listed(query: Mapping[str, str], items: Iterable[Item]) -> list[Item] | dict[str, Any]:
    """The requested page and, if requested, the number of items on all pages. Unknown parameters are ignored, as in OpenPAI.

    Raises:
        ApiError: InvalidParametersError.
    """
    field, is_descending = _order(query.get("order", "submissionTime,DESC"))
    offset, limit = (
        _count(name, query.get(name, str(default)))
        for name, default in (("offset", 0), ("limit", DEFAULT_LIMIT))
    )
    if limit > MAX_LIMIT:
        raise invalid_parameters(f"Limit exceeds max number {MAX_LIMIT}.")
    # None sorts as greater than any value.
    chosen = sorted(
        _matching(query, items),
        key=lambda item: (item[field] is None, 0 if item[field] is None else item[field]),
        reverse=is_descending,
    )
    page = chosen[offset : offset + limit]
    return {"totalCount": len(chosen), "data": page} if query.get("withTotalCount") == "true" else page


def _matching(query: Mapping[str, str], items: Iterable[Item]) -> list[Item]:
    wanted = {_FIELDS[name]: _split(query[name]) for name in _FILTERS if name in query}
    keyword = query.get("keyword")
    any_of = _split(query["tagsContain"]) if "tagsContain" in query else None
    none_of = _split(query["tagsNotContain"]) if "tagsNotContain" in query else frozenset()
    return [
        item
        for item in items
        if all(_value_of(item, field) in values for field, values in wanted.items())
        and (keyword is None or any(keyword in item[key] for key in ("username", "name", "virtualCluster")))
        and (any_of is None or not any_of.isdisjoint(item["tags"]))
        and none_of.isdisjoint(item["tags"])
    ]


def _value_of(item: Item, field: str) -> str:
    value = item[field]
    return _NO_PRIORITY if value is None else str(value)


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


def _order(text: str) -> tuple[str, bool]:
    field, _, direction = text.partition(",")
    if field not in _FIELDS:
        raise invalid_parameters(f"cannot order by {shown(field)}; {remedy_for_unknown(field, _FIELDS)}")
    if direction not in _DIRECTIONS:
        raise invalid_parameters(
            f"cannot use order={field},{direction[:60]}; use {field},ASC or {field},DESC"
        )
    return _FIELDS[field], _DIRECTIONS[direction]


def _count(name: str, text: str) -> int:
    # Bounded, since int() rejects a text of thousands of digits.
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise invalid_parameters(f"cannot use {name}={text[:60]}; use a whole number of 0 or more")
    return int(text)
