"""The stored state of a local OpenPAI job equals its state in memory after every event."""

import contextlib
import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_jobs import Played, a_plan, a_role

from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.job import (
    Allocated,
    Allocation,
    ContainerEnded,
    ContainerStarted,
    RecordEvent,
    SaveAttempt,
    SaveTask,
    StopAsked,
    Submitted,
)
from nni_manager.local_openpai.core.states import State, SubState
from nni_manager.local_openpai.errors import ApiError, StateDirUnusable
from nni_manager.local_openpai.store import SCHEMA_VERSION, JobStore, effect_write, job_write


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "db")
    yield store
    store.close()


def keep(store, played, effects):
    """Write the effects of a job to the store, like the cluster does."""
    job, writes = played.job, []
    for effect in effects:
        if isinstance(effect, SaveTask | SaveAttempt | RecordEvent):
            writes.append(effect_write(job, effect, played.now_s))
    store.commit([*writes, job_write(job)])


def known(job):
    """All fields of a job that a restarted cluster needs."""
    return {
        **{
            name: getattr(job, name)
            for name in ("execution_type", "retries", "attempt", "plan", "ends", "launched_at_s")
        },
        "tasks": job.tasks,
    }


ACTIONS = st.sampled_from(["place", "start", "end 0", "end 255", "end 137", "stop"])


@given(st.booleans(), st.integers(0, 1), st.lists(st.tuples(ACTIONS, st.integers(0, 2)), max_size=25))
def test_a_job_is_restored_unchanged_after_any_sequence_of_events(is_gang, retries, actions):
    store = JobStore.__new__(JobStore)
    store._path, store._resources = None, contextlib.ExitStack()
    store._connection = sqlite3.connect(":memory:", isolation_level=None)
    store._connection.row_factory = sqlite3.Row
    store._make_or_check()
    roles = (a_role("ps", 1, 1, -1), a_role("worker", 2, 2, -1))
    played = Played(a_plan(*roles, is_gang=is_gang, job_retries=retries, task_retries=retries))
    played.job.job_id = store.add_job(played.job.plan, "masked", 0.5)
    keep(store, played, played.happens(Submitted()))
    for action, number in actions:
        job = played.job
        tasks = list(job.tasks.values())
        task = tasks[number % len(tasks)]
        waiting = [each for each in tasks if each.sub_state is SubState.ATTEMPT_CREATION_PENDING]
        event = None
        match action.split():
            case ["place"] if waiting:
                chosen = waiting if is_gang else waiting[:1]
                event = Allocated(
                    {each.container_id: Allocation("h", {"http": (1, 2)}, (3,)) for each in chosen}
                )
            case ["start"] if task.sub_state is SubState.ATTEMPT_PREPARING:
                event = ContainerStarted(task.container_id)
            case ["end", code] if task.allocation is not None and not task.is_terminal:
                event = ContainerEnded(task.container_id, TaskExit(int(code), 1, 2, "said", "x"))
            case ["stop"] if number == 2:
                event = StopAsked()
        if event is None or job.is_terminal:
            continue
        keep(store, played, played.happens(event))
        found = store.unfinished(str, 3)
        summary = store.summary("alice", "job")
        assert (summary.state, summary.sub_state, summary.retries) == (
            job.attempt.state,
            job.sub_state,
            job.retries,
        )
        detail = store.detail("alice", "job", None)
        assert [task.state for tasks in detail.tasks.values() for task in tasks] == played.states()
        if job.is_terminal:
            assert found == []
            assert summary.exit_code == job.attempt.code
        else:
            (restored,) = found
            assert known(restored) == known(job)
            assert [each.total for each in restored.requests()] == [each.total for each in job.requests()]
    store.close()


def test_the_secrets_of_an_ended_job_are_erased_from_the_database(tmp_path):
    # The script is so large that it fills database pages of its own. SQLite erases such pages only with the setting
    # `secure_delete`.
    played, path = Played(a_plan(replace(a_role(tasks=1), user="echo line\n" * 2000))), tmp_path / "db"
    store = JobStore(path)
    played.job.job_id = store.add_job(played.job.plan, "masked", 0.5)
    played.begin()
    keep(store, played, played.effects)
    assert b"hunter22" in path.read_bytes() + (tmp_path / "db-wal").read_bytes()
    keep(store, played, played.ends(0, 0))
    assert played.job.attempt.state is State.SUCCEEDED
    store.close()
    assert b"hunter22" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0


def test_a_stored_plan_is_read_back_unchanged(store):
    plan = a_plan(a_role("ps"), a_role(), is_gang=False, task_retries=2)
    store.add_job(plan, "masked", 0.5)
    assert [job.plan for job in store.unfinished(str, 3)] == [plan]


def test_a_job_name_is_unique_for_each_user(store):
    store.add_job(a_plan(), "masked", 0.5)
    with pytest.raises(ApiError, match="alice~job"):
        store.add_job(a_plan(), "masked", 0.6)
    with pytest.raises(ApiError, match="bob~job is not found"):
        store.summary("bob", "job")


def test_a_newly_submitted_job_is_waiting_and_has_no_tasks(store):
    store.add_job(a_plan(), "masked", 0.5)
    detail = store.detail("alice", "job", None)
    assert (detail.job.state, detail.attempt.state, detail.tasks) == (State.WAITING, State.WAITING, {})
    assert (detail.attempt.created_at_s, detail.job.attempt_id) == (0.5, 0)


def test_a_database_of_a_newer_version_is_refused_with_a_remedy(tmp_path):
    with sqlite3.connect(tmp_path / "db") as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StateDirUnusable, match="use the version of trial-keeper that created it"):
        JobStore(tmp_path / "db")


def test_a_file_that_is_not_a_database_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "db").write_bytes(b"no database" * 100)
    with pytest.raises(StateDirUnusable, match="choose another state directory"):
        JobStore(tmp_path / "db")
