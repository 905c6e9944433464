"""The transport of each task, and which job is polled when; hours of it in a millisecond."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.transports import (
    MAX_POLLS_PER_S,
    POLL_INTERVAL_S,
    RECONNECT_GRACE_S,
    TRANSITIONS,
    LastSeen,
    Transport,
    TransportEvent,
    TransportTracker,
)

JOB, TASK = "job", "main-0"


@pytest.fixture
def transports() -> TransportTracker:
    transports = TransportTracker()
    transports.track(JOB, 100.0)
    return transports


def looks(transports: TransportTracker, from_s: float, to_s: float) -> list[tuple[float, str]]:
    """All looks that are given out in that time, each of them over at once."""
    found, now_s = [], from_s
    while now_s < to_s:
        job_id = transports.next_poll(now_s)
        if job_id is not None:
            found.append((now_s, job_id))
            transports.polled(job_id, now_s)
        due_at_s = transports.next_poll_at_s()
        if due_at_s is None:
            break
        now_s = max(due_at_s, now_s + 1e-6)
    return found


def test_the_transition_table() -> None:
    words = [f"{before.value} {event.value} {after.value}" for (before, event), after in TRANSITIONS.items()]
    assert sorted(words) == [
        "grpc connected grpc",
        "grpc found grpc",
        "grpc lost none",
        "none connected grpc",
        "none found shared_storage",
        "shared_storage connected grpc",
        "shared_storage found shared_storage",
    ]


def test_a_job_whose_keeper_never_connects_is_looked_at_after_some_patience_and_then_steadily(
    transports,
) -> None:
    assert transports.next_poll_at_s() == 100 + RECONNECT_GRACE_S
    assert [
        at_s for at_s, _ in looks(transports, 100, 100 + RECONNECT_GRACE_S + 3 * POLL_INTERVAL_S)
    ] == pytest.approx([100 + RECONNECT_GRACE_S + count * POLL_INTERVAL_S for count in range(3)])


def test_a_job_whose_keepers_are_connected_costs_nothing(transports) -> None:
    for number in range(1000):
        transports.connected(f"job{number}", TASK, 100.0)
    transports.connected(JOB, TASK, 101.0)
    assert looks(transports, 100, 10_000) == []
    assert transports.next_poll_at_s() is None


def test_a_keeper_that_is_gone_for_a_moment_is_not_looked_for(transports) -> None:
    transports.connected(JOB, TASK, 101.0)
    transports.lost(JOB, TASK, 200.0)
    assert transports.last_seen(JOB).transport is Transport.NONE
    assert not transports.polls_storage(JOB, TASK, 200 + RECONNECT_GRACE_S - 0.1)
    transports.connected(JOB, TASK, 200 + RECONNECT_GRACE_S - 0.1)
    assert looks(transports, 200, 10_000) == []


def test_a_keeper_that_stays_away_is_looked_for_until_it_connects_again(transports) -> None:
    transports.connected(JOB, TASK, 101.0)
    transports.lost(JOB, TASK, 200.0)
    assert looks(transports, 200, 210)[0] == (200 + RECONNECT_GRACE_S, JOB)
    assert transports.polls_storage(JOB, TASK, 210)
    transports.found(JOB, TASK, 210, has_new_data=True)
    assert transports.last_seen(JOB) == LastSeen(Transport.SHARED_STORAGE, 210)
    transports.connected(JOB, TASK, 211)
    assert not transports.polls_storage(JOB, TASK, 1e6)
    assert looks(transports, 211, 10_000) == []
    transports.found(JOB, TASK, 212, has_new_data=True)  # by a look that had begun before
    assert transports.last_seen(JOB).transport is Transport.GRPC


def test_a_job_has_one_look_at_a_time(transports) -> None:
    assert transports.next_poll(110) == JOB
    transports.connected(JOB, TASK, 111)
    transports.lost(JOB, TASK, 112)
    assert transports.next_poll(200) is None, "the first is not over"
    transports.polled(JOB, 200)
    assert transports.next_poll(200 + POLL_INTERVAL_S) == JOB


def test_a_job_that_is_gone_is_no_matter(transports) -> None:
    assert transports.next_poll(110) == JOB
    transports.forget(JOB)
    transports.polled(JOB, 111)
    transports.lost(JOB, TASK, 112)
    transports.received(JOB, TASK, 112)
    transports.found(JOB, TASK, 112, has_new_data=True)
    assert not transports.polls_storage(JOB, TASK, 1e6)
    assert transports.last_seen(JOB) == LastSeen()
    assert looks(transports, 112, 10_000) == []


def test_of_several_tasks_those_that_are_not_connected_are_looked_for() -> None:
    transports = TransportTracker(tasks=2)
    transports.connected(JOB, "worker-0", 100)
    assert not transports.is_all_grpc(JOB)
    assert looks(transports, 100, 106) == [(100 + RECONNECT_GRACE_S, JOB)]
    assert not transports.polls_storage(JOB, "worker-0", 110)
    assert transports.polls_storage(JOB, "worker-1", 110)
    transports.found(JOB, "worker-1", 110, has_new_data=True)
    transports.received(JOB, "worker-0", 150)
    assert transports.last_seen(JOB) == LastSeen(Transport.SHARED_STORAGE, 110), (
        "that of the task which is worst off"
    )
    transports.connected(JOB, "worker-1", 160)
    assert transports.is_all_grpc(JOB)
    assert transports.last_seen(JOB) == LastSeen(Transport.GRPC, 150)


def test_the_last_contact_is_the_last_news_and_not_the_last_look(transports) -> None:
    assert transports.last_seen(JOB) == LastSeen()
    transports.found(JOB, TASK, 110, has_new_data=True)
    transports.found(JOB, TASK, 120, has_new_data=False)
    assert transports.last_seen(JOB) == LastSeen(Transport.SHARED_STORAGE, 110)
    transports.connected(JOB, TASK, 130)
    transports.received(JOB, TASK, 140)
    assert transports.last_seen(JOB) == LastSeen(Transport.GRPC, 140)


def test_a_thousand_silent_jobs_get_no_more_looks_than_the_storage_can_bear_and_each_its_turn() -> None:
    transports = TransportTracker()
    for number in range(1000):
        transports.track(f"job{number}", 0.0)
    given = looks(transports, 0, 60)
    assert len(given) <= MAX_POLLS_PER_S * 55 + 1
    at_s = [at_s for at_s, _ in given]
    pauses = [later - earlier for earlier, later in pairwise(at_s)]
    assert min(pauses) == pytest.approx(1 / MAX_POLLS_PER_S)
    assert {job_id for _, job_id in given[:1000]} == {f"job{number}" for number in range(1000)}
    last: dict[str, float] = {}
    for when_s, job_id in given:
        assert when_s - last.get(job_id, when_s) < 1.1 * 1000 / MAX_POLLS_PER_S
        last[job_id] = when_s


EVENTS = st.tuples(
    st.floats(0, 10),
    st.sampled_from(["watch", "connected", "lost", "look", "forget"]),
    st.integers(0, 2),
    st.integers(0, 1),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_no_silent_job_is_forgotten_and_no_other_is_looked_at(steps) -> None:
    transports, now_s = TransportTracker(tasks=2), 0.0
    connected: dict[str, set[str]] = {}
    for passed_s, what, number, task_number in steps:
        now_s += passed_s
        job_id, task = f"job{number}", f"main-{task_number}"
        match what:
            case "watch":
                transports.track(job_id, now_s)
                connected.setdefault(job_id, set())
            case "connected":
                transports.connected(job_id, task, now_s)
                connected.setdefault(job_id, set()).add(task)
            case "lost" if task in connected.get(job_id, ()):
                transports.lost(job_id, task, now_s)
                connected[job_id].remove(task)
            case "forget":
                transports.forget(job_id)
                connected.pop(job_id, None)
            case "look" if (looked := transports.next_poll(now_s)) is not None:
                assert len(connected[looked]) < 2
                transports.polled(looked, now_s)
    silent = {job_id for job_id, tasks in connected.items() if len(tasks) < 2}
    soon_s = now_s + max(RECONNECT_GRACE_S, POLL_INTERVAL_S) + 1
    assert {job_id for _, job_id in looks(transports, now_s, soon_s)} == silent
    assert all(
        (road, event) in TRANSITIONS
        for road in Transport
        for event in (TransportEvent.CONNECTED, TransportEvent.FOUND)
    )
