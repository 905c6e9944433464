"""Which jobs a list shows: filters, order and pages, as a query asks for them. Pure.

Works on the items a list answers with. Items that are equal in what the order goes by stay in the order in which they were
given, so that pages neither repeat nor skip a job.

Source: microsoft/pai v1.8.1, REST server, controllers/v2/job.js; PostgreSQL for where nothing is sorted to (above all).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nni_manager.config.mistakes import remedy_for_unknown, shown
from nni_manager.local_openpai.refusals import Refused

DEFAULT_LIMIT, MOST_LIMIT = 5_000, 50_000

Item = Mapping[str, Any]

# What a query calls it, and what an item does.
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
# How a query names a job that says nothing of its priority.
_NO_PRIORITY = "default"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a query asks for. `wanted` has for a field of an item the values it may have; None of a keyword asks nothing."""

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
        """What the parameters of a request ask for; those it does not know it passes over, as OpenPAI does.

        Raises:
            Refused: InvalidParametersError.
        """
        field, descending = _order(query.get("order", "submissionTime,DESC"))
        limit = _count("limit", query.get("limit", str(DEFAULT_LIMIT)))
        if limit > MOST_LIMIT:
            raise Refused("InvalidParametersError", f"Limit exceeds max number {MOST_LIMIT}.")
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
        """Whether the item is one of those asked for."""
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
        """The page asked for, and, if that was asked for too, how many there are on all pages."""
        chosen = self.sorted([item for item in items if self.matches(item)])
        page = chosen[self.offset : self.offset + self.limit]
        return {"totalCount": len(chosen), "data": page} if self.with_total_count else page

    def sorted(self, items: Iterable[Item]) -> list[Item]:
        """The items in the order asked for; nothing counts as more than anything."""

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
        raise Refused(
            "InvalidParametersError",
            f"cannot order by {shown(field)}; {remedy_for_unknown(field, _ORDER_FIELDS)}",
        )
    if direction not in _DIRECTIONS:
        raise Refused(
            "InvalidParametersError",
            f"cannot use order={field},{direction[:60]}; write {field},ASC or {field},DESC",
        )
    return _ORDER_FIELDS[field], _DIRECTIONS[direction]


def _count(name: str, text: str) -> int:
    # More digits than any count has, and Python refuses to read thousands of them.
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise Refused(
            "InvalidParametersError", f"cannot use {name}={text[:60]}; write a whole number from 0 on"
        )
    return int(text)
