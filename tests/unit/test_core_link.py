"""The connection attempts of the keeper, and their retry delays."""

from collections import Counter
from itertools import product

import pytest

from trial_keeper.core.link import (
    FIRST_RETRY_S,
    MAX_RETRY_S,
    TRANSITIONS,
    Link,
    LinkEvent,
    LinkState,
    jitter,
)


def a_link(*events: LinkEvent, now_s: float = 0.0) -> Link:
    link = Link()
    for event in events:
        link.apply(event, now_s)
    return link


@pytest.mark.parametrize(("state", "event"), list(product(LinkState, LinkEvent)))
def test_an_event_without_a_transition_raises_an_error(state: LinkState, event: LinkEvent) -> None:
    link = Link()
    link.state = state
    if (state, event) in TRANSITIONS:
        link.apply(event, 0.0)
        assert link.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            link.apply(event, 0.0)


def test_a_new_keeper_connects_immediately() -> None:
    assert Link().is_due(0.0)


def test_a_keeper_opens_one_connection_at_a_time() -> None:
    assert not a_link(LinkEvent.DUE).is_due(1e9)
    assert not a_link(LinkEvent.DUE, LinkEvent.OPENED).is_due(1e9)


def test_the_retry_delay_doubles_from_a_fifth_of_a_second_to_a_minute() -> None:
    link, now_s, waits = Link(), 100.0, []
    for _ in range(12):
        link.apply(LinkEvent.DUE, now_s)
        link.apply(LinkEvent.LOST, now_s)
        waits.append(round(link.retry_at_s - now_s, 6))
        assert not link.is_due(link.retry_at_s - 0.001)
        now_s = link.retry_at_s
        assert link.is_due(now_s)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0, 60.0]
    assert (waits[0], waits[-1]) == (FIRST_RETRY_S, MAX_RETRY_S)


def test_keepers_that_lose_their_manager_at_the_same_time_reconnect_at_different_times() -> None:
    tries_s = []
    for number in range(1000):
        link = Link(jitter(f"env-{number}"))
        for now_s in (0.0, 10.0, 20.0, 30.0, 40.0):
            link.apply(LinkEvent.DUE, now_s)
            link.apply(LinkEvent.LOST, now_s)
        tries_s.append(link.retry_at_s - 40.0)
    longest_s = FIRST_RETRY_S * 2**4
    assert longest_s / 2 <= min(tries_s)
    assert max(tries_s) <= longest_s
    busiest = max(Counter(int(try_s / longest_s * 20) for try_s in tries_s).values())
    assert busiest < 150, "5 % of the interval has 10 % of the keepers, and with jitter at most 15 %"


@pytest.mark.slow
def test_the_retry_delay_is_bounded_after_years_of_failures() -> None:
    link = Link()
    for _ in range(100_000):
        link.apply(LinkEvent.DUE, 0.0)
        link.apply(LinkEvent.LOST, 0.0)
    assert link.retry_at_s == MAX_RETRY_S


def test_a_manager_that_accepts_and_drops_connections_is_retried_with_growing_delays() -> None:
    link = a_link(*[LinkEvent.DUE, LinkEvent.OPENED, LinkEvent.LOST] * 5)
    assert link.retry_at_s == FIRST_RETRY_S * 2**4


def test_after_reset_backoff_the_link_retries_with_the_first_retry_delay() -> None:
    link = a_link(*[LinkEvent.DUE, LinkEvent.LOST] * 5, LinkEvent.DUE, LinkEvent.OPENED)
    assert link.is_up
    link.reset_backoff()
    link.apply(LinkEvent.LOST, 50.0)
    assert not link.is_up
    assert link.retry_at_s == 50.0 + FIRST_RETRY_S


def test_the_link_retries_immediately_after_the_manager_moved() -> None:
    link = a_link(*[LinkEvent.DUE, LinkEvent.LOST] * 5)
    assert not link.is_due(1.0)
    link.apply(LinkEvent.MANAGER_MOVED, 1.0)
    assert link.is_due(1.0)
    link.apply(LinkEvent.DUE, 1.0)
    link.apply(LinkEvent.LOST, 1.0)
    assert link.retry_at_s == 1.0 + FIRST_RETRY_S


def test_a_refused_keeper_reconnects_only_after_the_manager_moved() -> None:
    link = a_link(LinkEvent.DUE, LinkEvent.REFUSED)
    assert not link.is_due(1e9)
    link.apply(LinkEvent.MANAGER_MOVED, 5.0)
    assert link.is_due(5.0)
