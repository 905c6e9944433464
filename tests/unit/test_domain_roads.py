"""Which road each task is on, who is looked at and when; hours of it in a millisecond."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.roads import (
    LOOK_EVERY_S,
    LOOKS_PER_S,
    NEXT,
    PATIENCE_S,
    Contact,
    Road,
    RoadEvent,
    Roads,
)

JOB, TASK = "job", "main-0"


@pytest.fixture
def roads() -> Roads:
    roads = Roads()
    roads.watch(JOB, 100.0)
    return roads


def looks(roads: Roads, from_s: float, to_s: float) -> list[tuple[float, str]]:
    """All looks that are given out in that time, each of them over at once."""
    found, now_s = [], from_s
    while now_s < to_s:
        job_id = roads.next_look(now_s)
        if job_id is not None:
            found.append((now_s, job_id))
            roads.looked(job_id, now_s)
        due_at_s = roads.next_look_at_s()
        if due_at_s is None:
            break
        now_s = max(due_at_s, now_s + 1e-6)
    return found


def test_the_table_is_the_one_on_which_people_agreed() -> None:
    words = [f"{road.value} {event.value} {after.value}" for (road, event), after in NEXT.items()]
    assert sorted(words) == [
        "mount connected stream",
        "mount found mount",
        "none connected stream",
        "none found mount",
        "stream connected stream",
        "stream found stream",
        "stream lost none",
    ]


def test_a_job_whose_keeper_never_connects_is_looked_at_after_some_patience_and_then_steadily(roads) -> None:
    assert roads.next_look_at_s() == 100 + PATIENCE_S
    assert [at_s for at_s, _ in looks(roads, 100, 100 + PATIENCE_S + 3 * LOOK_EVERY_S)] == pytest.approx(
        [100 + PATIENCE_S + count * LOOK_EVERY_S for count in range(3)]
    )


def test_a_job_whose_keepers_are_connected_costs_nothing(roads) -> None:
    for number in range(1000):
        roads.connected(f"job{number}", TASK, 100.0)
    roads.connected(JOB, TASK, 101.0)
    assert looks(roads, 100, 10_000) == []
    assert roads.next_look_at_s() is None


def test_a_keeper_that_is_gone_for_a_moment_is_not_looked_for(roads) -> None:
    roads.connected(JOB, TASK, 101.0)
    roads.lost(JOB, TASK, 200.0)
    assert roads.contact(JOB).road is Road.NONE
    assert not roads.uses_mount(JOB, TASK, 200 + PATIENCE_S - 0.1)
    roads.connected(JOB, TASK, 200 + PATIENCE_S - 0.1)
    assert looks(roads, 200, 10_000) == []


def test_a_keeper_that_stays_away_is_looked_for_until_it_connects_again(roads) -> None:
    roads.connected(JOB, TASK, 101.0)
    roads.lost(JOB, TASK, 200.0)
    assert looks(roads, 200, 210)[0] == (200 + PATIENCE_S, JOB)
    assert roads.uses_mount(JOB, TASK, 210)
    roads.found(JOB, TASK, 210, has_news=True)
    assert roads.contact(JOB) == Contact(Road.MOUNT, 210)
    roads.connected(JOB, TASK, 211)
    assert not roads.uses_mount(JOB, TASK, 1e6)
    assert looks(roads, 211, 10_000) == []
    roads.found(JOB, TASK, 212, has_news=True)  # by a look that had begun before
    assert roads.contact(JOB).road is Road.STREAM


def test_a_job_has_one_look_at_a_time(roads) -> None:
    assert roads.next_look(110) == JOB
    roads.connected(JOB, TASK, 111)
    roads.lost(JOB, TASK, 112)
    assert roads.next_look(200) is None, "the first is not over"
    roads.looked(JOB, 200)
    assert roads.next_look(200 + LOOK_EVERY_S) == JOB


def test_a_job_that_is_gone_is_no_matter(roads) -> None:
    assert roads.next_look(110) == JOB
    roads.forget(JOB)
    roads.looked(JOB, 111)
    roads.lost(JOB, TASK, 112)
    roads.heard(JOB, TASK, 112)
    roads.found(JOB, TASK, 112, has_news=True)
    assert not roads.uses_mount(JOB, TASK, 1e6)
    assert roads.contact(JOB) == Contact()
    assert looks(roads, 112, 10_000) == []


def test_of_several_tasks_those_that_are_not_connected_are_looked_for() -> None:
    roads = Roads(tasks=2)
    roads.connected(JOB, "worker-0", 100)
    assert not roads.is_all_stream(JOB)
    assert looks(roads, 100, 106) == [(100 + PATIENCE_S, JOB)]
    assert not roads.uses_mount(JOB, "worker-0", 110)
    assert roads.uses_mount(JOB, "worker-1", 110)
    roads.found(JOB, "worker-1", 110, has_news=True)
    roads.heard(JOB, "worker-0", 150)
    assert roads.contact(JOB) == Contact(Road.MOUNT, 110), "that of the task which is worst off"
    roads.connected(JOB, "worker-1", 160)
    assert roads.is_all_stream(JOB)
    assert roads.contact(JOB) == Contact(Road.STREAM, 150)


def test_the_last_contact_is_the_last_news_and_not_the_last_look(roads) -> None:
    assert roads.contact(JOB) == Contact()
    roads.found(JOB, TASK, 110, has_news=True)
    roads.found(JOB, TASK, 120, has_news=False)
    assert roads.contact(JOB) == Contact(Road.MOUNT, 110)
    roads.connected(JOB, TASK, 130)
    roads.heard(JOB, TASK, 140)
    assert roads.contact(JOB) == Contact(Road.STREAM, 140)


def test_a_thousand_silent_jobs_get_no_more_looks_than_the_storage_can_bear_and_each_its_turn() -> None:
    roads = Roads()
    for number in range(1000):
        roads.watch(f"job{number}", 0.0)
    given = looks(roads, 0, 60)
    assert len(given) <= LOOKS_PER_S * 55 + 1
    at_s = [at_s for at_s, _ in given]
    pauses = [later - earlier for earlier, later in pairwise(at_s)]
    assert min(pauses) == pytest.approx(1 / LOOKS_PER_S)
    assert {job_id for _, job_id in given[:1000]} == {f"job{number}" for number in range(1000)}
    last: dict[str, float] = {}
    for when_s, job_id in given:
        assert when_s - last.get(job_id, when_s) < 1.1 * 1000 / LOOKS_PER_S
        last[job_id] = when_s


EVENTS = st.tuples(
    st.floats(0, 10),
    st.sampled_from(["watch", "connected", "lost", "look", "forget"]),
    st.integers(0, 2),
    st.integers(0, 1),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_no_silent_job_is_forgotten_and_no_other_is_looked_at(steps) -> None:
    roads, now_s = Roads(tasks=2), 0.0
    connected: dict[str, set[str]] = {}
    for passed_s, what, number, task_number in steps:
        now_s += passed_s
        job_id, task = f"job{number}", f"main-{task_number}"
        match what:
            case "watch":
                roads.watch(job_id, now_s)
                connected.setdefault(job_id, set())
            case "connected":
                roads.connected(job_id, task, now_s)
                connected.setdefault(job_id, set()).add(task)
            case "lost" if task in connected.get(job_id, ()):
                roads.lost(job_id, task, now_s)
                connected[job_id].remove(task)
            case "forget":
                roads.forget(job_id)
                connected.pop(job_id, None)
            case "look" if (looked := roads.next_look(now_s)) is not None:
                assert len(connected[looked]) < 2
                roads.looked(looked, now_s)
    silent = {job_id for job_id, tasks in connected.items() if len(tasks) < 2}
    soon_s = now_s + max(PATIENCE_S, LOOK_EVERY_S) + 1
    assert {job_id for _, job_id in looks(roads, now_s, soon_s)} == silent
    assert all((road, event) in NEXT for road in Road for event in (RoadEvent.CONNECTED, RoadEvent.FOUND))
