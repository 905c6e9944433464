"""Filters, order and pages of a list of jobs, as a query requests them. Pure.

Operates on the items of the response. The sort is stable, so that pages neither repeat nor skip a job.

Source: microsoft/pai v1.8.1, REST server, controllers/v2/job.js; PostgreSQL for where nothing is sorted to (above all).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nni_manager.config.diagnostics import remedy_for_unknown, shown
from nni_manager.local_openpai.errors import ApiError

DEFAULT_LIMIT, MAX_LIMIT = 5_000, 50_000

Item = Mapping[str, Any]

# Field names in queries, and in items.
_ORDER_FIELDS = {
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
_FILTER_FIELDS = {
    "username": "username",
    "vc": "virtualCluster",
    "state": "state",
    "jobPriority": "jobPriority",
}
_DIRECTIONS = {"ASC": False, "DESC": True}
# The value in queries for jobs without a priority.
_NO_PRIORITY = "default"


@dataclass(frozen=True, slots=True)
class Listing:
    """A decoded query. `wanted` maps a field of an item to the accepted values; a keyword of None matches all items."""

    wanted: Mapping[str, frozenset[str]]
    keyword: str | None = None
    tags_contain: frozenset[str] | None = None
    tags_not_contain: frozenset[str] = frozenset()
    order_field: str = "submissionTime"
    is_descending: bool = True
    offset: int = 0
    limit: int = DEFAULT_LIMIT
    with_total_count: bool = False

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Listing:
        """Decode the parameters of a request. Unknown parameters are ignored, as in OpenPAI.

        Raises:
            ApiError: InvalidParametersError.
        """
        field, descending = _order(query.get("order", "submissionTime,DESC"))
        limit = _count("limit", query.get("limit", str(DEFAULT_LIMIT)))
        if limit > MAX_LIMIT:
            raise ApiError("InvalidParametersError", f"Limit exceeds max number {MAX_LIMIT}.")
        return cls(
            wanted={_FILTER_FIELDS[name]: _words(query[name]) for name in _FILTER_FIELDS if name in query},
            keyword=query.get("keyword"),
            tags_contain=_words(query["tagsContain"]) if "tagsContain" in query else None,
            tags_not_contain=_words(query["tagsNotContain"]) if "tagsNotContain" in query else frozenset(),
            order_field=field,
            is_descending=descending,
            offset=_count("offset", query.get("offset", "0")),
            limit=limit,
            with_total_count=query.get("withTotalCount") == "true",
        )

    def matches(self, item: Item) -> bool:
        """True if the item matches the query."""
        return (
            all(_value_of(item, field) in values for field, values in self.wanted.items())
            and (
                self.keyword is None
                or any(self.keyword in item[key] for key in ("username", "name", "virtualCluster"))
            )
            and (self.tags_contain is None or not self.tags_contain.isdisjoint(item["tags"]))
            and self.tags_not_contain.isdisjoint(item["tags"])
        )

    def answer(self, items: Iterable[Item]) -> list[Item] | dict[str, Any]:
        """The requested page and, if requested, the number of items on all pages."""
        chosen = self.sorted([item for item in items if self.matches(item)])
        page = chosen[self.offset : self.offset + self.limit]
        return {"totalCount": len(chosen), "data": page} if self.with_total_count else page

    def sorted(self, items: Iterable[Item]) -> list[Item]:
        """The items in the requested order; None sorts as greater than any value."""

        def key(item: Item) -> tuple[bool, Any]:
            value = item[self.order_field]
            return (True, 0) if value is None else (False, value)

        return sorted(items, key=key, reverse=self.is_descending)


def _value_of(item: Item, field: str) -> str:
    value = item[field]
    return _NO_PRIORITY if value is None else str(value)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


def _order(text: str) -> tuple[str, bool]:
    field, _, direction = text.partition(",")
    if field not in _ORDER_FIELDS:
        raise ApiError(
            "InvalidParametersError",
            f"cannot order by {shown(field)}; {remedy_for_unknown(field, _ORDER_FIELDS)}",
        )
    if direction not in _DIRECTIONS:
        raise ApiError(
            "InvalidParametersError",
            f"cannot use order={field},{direction[:60]}; write {field},ASC or {field},DESC",
        )
    return _ORDER_FIELDS[field], _DIRECTIONS[direction]


def _count(name: str, text: str) -> int:
    # No count has more than 15 digits, and int() rejects thousands of them.
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise ApiError(
            "InvalidParametersError", f"cannot use {name}={text[:60]}; write a whole number from 0 on"
        )
    return int(text)
