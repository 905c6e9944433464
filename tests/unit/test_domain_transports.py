"""The transport of each task, and the schedule of storage polls, with a simulated clock."""

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


def polls(transports: TransportTracker, from_s: float, to_s: float) -> list[tuple[float, str]]:
    """All polls that become due in this period. Every poll finishes immediately."""
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


def test_the_transport_transition_table_has_exactly_the_expected_rows() -> None:
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


def test_a_job_that_never_connected_is_polled_regularly_after_the_reconnect_grace_period(
    transports,
) -> None:
    assert transports.next_poll_at_s() == 100 + RECONNECT_GRACE_S
    assert not transports.polls_storage(JOB, TASK, 100 + RECONNECT_GRACE_S - 0.1)
    assert transports.polls_storage(JOB, TASK, 100 + RECONNECT_GRACE_S)
    assert [
        at_s for at_s, _ in polls(transports, 100, 100 + RECONNECT_GRACE_S + 3 * POLL_INTERVAL_S)
    ] == pytest.approx([100 + RECONNECT_GRACE_S + count * POLL_INTERVAL_S for count in range(3)])


def test_jobs_with_connected_keepers_are_never_polled(transports) -> None:
    for number in range(1000):
        transports.connected(f"job{number}", TASK, 100.0)
    transports.connected(JOB, TASK, 101.0)
    assert polls(transports, 100, 10_000) == []
    assert transports.next_poll_at_s() is None


def test_a_keeper_that_reconnects_within_the_grace_period_is_not_polled(transports) -> None:
    transports.connected(JOB, TASK, 101.0)
    transports.lost(JOB, TASK, 200.0)
    assert transports.last_seen(JOB).transport is Transport.NONE
    assert not transports.polls_storage(JOB, TASK, 200 + RECONNECT_GRACE_S - 0.1)
    transports.connected(JOB, TASK, 200 + RECONNECT_GRACE_S - 0.1)
    assert polls(transports, 200, 10_000) == []


def test_a_keeper_that_stays_disconnected_is_polled_until_it_reconnects(transports) -> None:
    transports.connected(JOB, TASK, 101.0)
    transports.lost(JOB, TASK, 200.0)
    assert polls(transports, 200, 210)[0] == (200 + RECONNECT_GRACE_S, JOB)
    assert transports.polls_storage(JOB, TASK, 200 + RECONNECT_GRACE_S)
    transports.found(JOB, TASK, 210, has_new_data=True)
    assert transports.last_seen(JOB) == LastSeen(Transport.SHARED_STORAGE, 210)
    transports.connected(JOB, TASK, 211)
    assert not transports.polls_storage(JOB, TASK, 1e6)
    assert polls(transports, 211, 10_000) == []
    # This poll started before the keeper connected, so its result must not replace the newer connection.
    transports.found(JOB, TASK, 212, has_new_data=True)
    assert transports.last_seen(JOB).transport is Transport.GRPC


def test_each_job_has_at_most_one_poll_in_progress(transports) -> None:
    assert transports.next_poll(110) == JOB
    transports.connected(JOB, TASK, 111)
    transports.lost(JOB, TASK, 112)
    assert transports.next_poll(200) is None, "the first poll is in progress"
    transports.polled(JOB, 200)
    assert transports.next_poll(200 + POLL_INTERVAL_S) == JOB


def test_reports_of_a_removed_job_are_ignored(transports) -> None:
    assert transports.next_poll(110) == JOB
    transports.forget(JOB)
    transports.polled(JOB, 111)
    transports.lost(JOB, TASK, 112)
    transports.received(JOB, TASK, 112)
    transports.found(JOB, TASK, 112, has_new_data=True)
    assert not transports.polls_storage(JOB, TASK, 1e6)
    assert transports.last_seen(JOB) == LastSeen()
    assert polls(transports, 112, 10_000) == []


def test_only_the_disconnected_tasks_of_a_job_are_polled() -> None:
    transports = TransportTracker(tasks=2)
    transports.connected(JOB, "worker-0", 100)
    assert not transports.is_all_grpc(JOB)
    assert polls(transports, 100, 106) == [(100 + RECONNECT_GRACE_S, JOB)]
    assert not transports.polls_storage(JOB, "worker-0", 110)
    assert transports.polls_storage(JOB, "worker-1", 110)
    transports.found(JOB, "worker-1", 110, has_new_data=True)
    transports.received(JOB, "worker-0", 150)
    assert transports.last_seen(JOB) == LastSeen(Transport.SHARED_STORAGE, 110), (
        "the value of the task that has the worst transport"
    )
    transports.connected(JOB, "worker-1", 160)
    assert transports.is_all_grpc(JOB)
    assert transports.last_seen(JOB) == LastSeen(Transport.GRPC, 150)


def test_the_last_seen_time_of_a_job_is_the_arrival_time_of_its_latest_new_data(transports) -> None:
    assert transports.last_seen(JOB) == LastSeen()
    transports.found(JOB, TASK, 110, has_new_data=True)
    transports.found(JOB, TASK, 120, has_new_data=False)
    assert transports.last_seen(JOB) == LastSeen(Transport.SHARED_STORAGE, 110)
    transports.connected(JOB, TASK, 130)
    transports.received(JOB, TASK, 140)
    assert transports.last_seen(JOB) == LastSeen(Transport.GRPC, 140)


def test_a_thousand_silent_jobs_are_polled_in_turn_within_the_rate_limit() -> None:
    transports = TransportTracker()
    for number in range(1000):
        transports.track(f"job{number}", 0.0)
    due = polls(transports, 0, 60)
    assert len(due) <= MAX_POLLS_PER_S * 55 + 1
    at_s = [at_s for at_s, _ in due]
    pauses = [later - earlier for earlier, later in pairwise(at_s)]
    assert min(pauses) == pytest.approx(1 / MAX_POLLS_PER_S)
    assert {job_id for _, job_id in due[:1000]} == {f"job{number}" for number in range(1000)}
    last: dict[str, float] = {}
    for when_s, job_id in due:
        assert when_s - last.get(job_id, when_s) < 1.1 * 1000 / MAX_POLLS_PER_S
        last[job_id] = when_s


EVENTS = st.tuples(
    st.floats(0, 10),
    st.sampled_from(["watch", "connected", "lost", "look", "forget"]),
    st.integers(0, 2),
    st.integers(0, 1),
)


@given(st.lists(EVENTS, max_size=60))
def test_only_silent_jobs_are_polled(steps) -> None:
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
            case "look" if (polled := transports.next_poll(now_s)) is not None:
                assert len(connected[polled]) < 2
                transports.polled(polled, now_s)
    silent = {job_id for job_id, tasks in connected.items() if len(tasks) < 2}
    soon_s = now_s + max(RECONNECT_GRACE_S, POLL_INTERVAL_S) + 1
    assert {job_id for _, job_id in polls(transports, now_s, soon_s)} == silent
    assert all(
        (transport, event) in TRANSITIONS
        for transport in Transport
        for event in (TransportEvent.CONNECTED, TransportEvent.FOUND)
    )
