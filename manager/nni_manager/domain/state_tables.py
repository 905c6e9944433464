"""Builds state tables from rows by event: states with the same change share a row."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
After = TypeVar("After")


def changes_by_event(
    rows: Mapping[Event, Mapping[State, Iterable[State]]],
) -> dict[tuple[State, Event], State]:
    """The following state by state and event. `rows`: for each event, the states before it by the state after it."""
    return {
        (before, event): after
        for event, changes in rows.items()
        for after, befores in changes.items()
        for before in befores
    }


def with_ignored(
    changes: Mapping[tuple[State, Event], After], ignored: Iterable[tuple[State, Event]]
) -> dict[tuple[State, Event], After | State]:
    """All transitions: the changes, and the ignored pairs, which leave the state as it is."""
    return {**changes, **{(state, event): state for state, event in ignored}}


def pairs_by_event(rows: Mapping[Event, Iterable[State]]) -> frozenset[tuple[State, Event]]:
    """Pairs of a state and an event. `rows`: the states by event."""
    return frozenset((state, event) for event, states in rows.items() for state in states)
