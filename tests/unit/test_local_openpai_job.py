"""The states of a job of local OpenPAI: events in, effects out."""

from itertools import product

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from played_jobs import Played, a_plan, a_role

from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.job import (
    Allocated,
    Allocation,
    Change,
    ContainerEnded,
    ContainerStarted,
    LeaveQueue,
    RecordEvent,
    ReleaseAllocation,
    SaveAttempt,
    SaveTask,
    StartContainer,
    StopAsked,
    StopContainer,
    Submitted,
)
from nni_manager.local_openpai.core.policies import RetryCounts
from nni_manager.local_openpai.core.queue import Request
from nni_manager.local_openpai.core.states import (
    JOB_TRANSITIONS,
    TASK_TRANSITIONS,
    ExecutionType,
    State,
    SubState,
    TransitionEvent,
    state_of,
)


@pytest.mark.parametrize("table", [TASK_TRANSITIONS, JOB_TRANSITIONS], ids=["task", "job"])
def test_every_job_state_is_reachable_and_every_job_state_except_completed_has_a_transition(table):
    assert not [happening for state, happening in table if state is SubState.COMPLETED]
    reachable = {SubState.ATTEMPT_CREATION_PENDING}
    for _ in SubState:
        reachable |= {after for (state, _), after in table.items() if state in reachable}
    assert reachable == set(SubState)
    assert all(
        any((state, happening) in table for happening in TransitionEvent)
        for state in set(SubState) - {SubState.COMPLETED}
    )


@pytest.mark.parametrize(("sub_state", "code"), list(product(SubState, [None, 0, 255, -210, -220])))
def test_every_internal_job_state_maps_to_a_state_of_the_rest_api(sub_state, code):
    found = state_of(sub_state, code)
    is_terminal = sub_state is SubState.COMPLETED
    assert (found in (State.SUCCEEDED, State.FAILED, State.STOPPED)) == is_terminal
    assert (found in (State.STOPPED, State.STOPPING)) <= (code in (-210, -220))


def test_no_task_of_a_gang_starts_before_all_tasks_have_an_allocation():
    played = Played(a_plan(a_role(tasks=3)))
    played.happens(Submitted())
    (asked,) = played.of(Request)
    assert len(asked.needs) == 3
    played.place_all()
    for start in played.of(StartContainer):
        assert all(task.allocation is not None for task in start.tasks)
    assert len(played.of(StartContainer)) == 3


def test_a_task_without_gang_allocation_starts_before_other_tasks_have_an_allocation():
    played = Played(a_plan(is_gang=False))
    played.happens(Submitted())
    assert len(played.of(Request)) == 2
    played.happens(Allocated({played.container(0): Allocation("127.0.0.1", {}, ())}))
    (start,) = played.of(StartContainer)
    assert [task.allocation is None for task in start.tasks] == [False, True]
    played.place_all()
    assert len(played.of(StartContainer)) == 2


def test_a_job_reports_the_state_running_exactly_once_when_its_first_task_runs():
    played = Played(a_plan()).begin()
    assert played.job.attempt.state is State.RUNNING
    assert played.changes == [Change.RUNNING]


def test_a_job_succeeds_when_all_tasks_succeed():
    played = Played(a_plan()).begin()
    played.ends(0, 0)
    assert played.job.attempt.state is State.RUNNING
    played.ends(1, 0)
    assert (played.job.attempt.state, played.job.attempt.code) == (State.SUCCEEDED, 0)
    assert played.changes == [Change.RUNNING, Change.SUCCEEDED]
    assert len(played.of(ReleaseAllocation)) == 2


def test_the_end_time_of_a_job_is_never_before_its_launch_time_even_if_the_clock_is_set_back():
    played = Played(a_plan(a_role(tasks=1)))
    played.now_s = 86_400.0
    played.begin()
    played.now_s = 0.0
    played.ends(0, 0)
    assert played.job.is_terminal
    assert played.job.completed_at_s >= played.job.launched_at_s > 86_400


def test_the_first_failed_task_fails_the_job_after_the_remaining_tasks_have_stopped():
    played = Played(a_plan()).begin()
    new = played.ends(0, 255)
    assert [effect.container_id for effect in new if isinstance(effect, StopContainer)] == [
        played.container(1)
    ]
    assert (played.job.sub_state, played.job.attempt.state) == (
        SubState.ATTEMPT_DELETION_REQUESTED,
        State.RUNNING,
    )
    played.ends(1, 143)
    assert played.job.attempt.state is State.FAILED
    assert played.job.attempt.code == 255
    assert played.states() == [State.FAILED, State.STOPPED]


def test_a_task_is_reported_as_stopped_if_it_is_killed_after_the_job_has_succeeded():
    played = Played(a_plan(a_role("ps", 1), a_role("worker", 1, min_succeeded=1))).begin()
    played.ends(0, 0)
    played.ends(0, 137, "ps")
    assert played.job.attempt.state is State.SUCCEEDED
    assert played.states() == [State.STOPPED, State.SUCCEEDED]


def test_a_stopped_job_is_never_reported_as_failed():
    played = Played(a_plan(job_retries=3)).begin()
    played.happens(StopAsked())
    assert (played.job.attempt.state, played.job.execution_type) == (State.STOPPING, ExecutionType.STOP)
    played.ends(0, 1)
    played.ends(1, 0)
    assert (played.job.attempt.state, played.job.attempt.code) == (State.STOPPED, -210)
    assert played.states() == [State.STOPPED, State.STOPPED]
    assert played.changes[-1] is Change.STOPPED


def test_a_queued_job_leaves_the_queue_when_it_is_stopped():
    played = Played(a_plan())
    played.happens(Submitted())
    new = played.happens(StopAsked())
    assert played.job.attempt.state is State.STOPPED
    (left,) = [effect for effect in new if isinstance(effect, LeaveQueue)]
    assert len(left.container_ids) == 2
    assert not played.of(StopContainer)


def test_a_failed_job_stays_failed_if_it_is_stopped_afterwards():
    played = Played(a_plan()).begin()
    played.ends(0, 255)
    played.happens(StopAsked())
    played.ends(1, 143)
    assert (played.job.attempt.state, played.job.attempt.code) == (State.FAILED, 255)


def test_a_failed_job_is_not_retried_if_it_is_stopped_afterwards():
    played = Played(a_plan(job_retries=5)).begin()
    played.ends(0, 255)
    played.happens(StopAsked())
    played.ends(1, 143)
    assert played.job.attempt.attempt_id == 0


def test_a_retried_job_runs_in_new_containers():
    played = Played(a_plan(job_retries=1)).begin()
    before = {task.container_id for task in played.job.tasks.values()}
    played.ends(0, 255)
    played.ends(1, 143)
    assert (played.job.attempt.state, played.job.attempt.attempt_id, played.job.retries) == (
        State.WAITING,
        1,
        RetryCounts(user=1),
    )
    assert before.isdisjoint(task.container_id for task in played.job.tasks.values())
    (first,) = [
        effect.attempt
        for effect in played.of(SaveAttempt)
        if effect.attempt.attempt_id == 0 and effect.attempt.completed_at_s is not None
    ]
    assert (first.sub_state, first.exit.code) == (SubState.COMPLETED, 255)
    played.place_all()
    played.start_all()
    played.ends(0, 0)
    played.ends(1, 0)
    assert played.job.attempt.state is State.SUCCEEDED
    assert played.changes == [Change.RUNNING, Change.RETRIED, Change.RUNNING, Change.SUCCEEDED]


def test_a_failed_task_without_gang_allocation_is_retried_while_the_job_runs():
    played = Played(a_plan(is_gang=False, task_retries=1)).begin()
    first = played.container(0)
    played.ends(0, 255)
    task = played.job.tasks["worker", 0]
    assert (task.attempt_id, task.retries) == (1, RetryCounts(user=1))
    assert task.container_id != first
    assert played.job.attempt.state is State.RUNNING
    assert not played.of(StopContainer)
    played.place_all()
    played.start_all()
    played.ends(0, 0)
    played.ends(1, 0)
    assert played.job.attempt.state is State.SUCCEEDED


def test_the_exit_of_a_replaced_container_is_ignored():
    played = Played(a_plan(is_gang=False, task_retries=1)).begin()
    first = played.container(0)
    played.ends(0, 255)
    new = played.happens(ContainerEnded(first, TaskExit(0)))
    assert [type(effect) for effect in new] == [SaveAttempt]
    assert played.job.tasks["worker", 0].sub_state is SubState.ATTEMPT_CREATION_PENDING


def test_a_job_fails_when_its_platform_retries_are_exhausted():
    played = Played(a_plan(a_role(tasks=1)), most_platform_retries=2).begin()
    for _ in range(2):
        played.ends(0, 137)
        played.place_all()
        played.start_all()
    played.ends(0, 137)
    assert (played.job.attempt.state, played.job.retries) == (State.FAILED, RetryCounts(platform=2))
    assert [note.reason for note in played.of(RecordEvent)][-1] == "RetriesExhausted"


def test_a_gang_is_retried_if_it_exits_with_code_253_for_lack_of_ports():
    played = Played(a_plan())
    played.happens(Submitted())
    waiting = tuple(task.container_id for task in played.job.tasks.values())
    for container_id in waiting:
        played.happens(ContainerEnded(container_id, TaskExit(253)))
    assert (played.job.attempt.attempt_id, played.job.retries) == (1, RetryCounts(platform=1))
    kept = [effect.task for effect in played.of(SaveTask) if effect.task.exit is not None]
    assert kept[0].exit.code == 253
    # The failed attempt has released its allocations.
    assert {effect.container_id for effect in played.of(ReleaseAllocation)} == set(waiting)


class AnyJob(RuleBasedStateMachine):
    """After any events in any order, a job that receives no more commands ends and releases its allocations."""

    @initialize(
        is_gang=st.booleans(),
        job_retries=st.integers(0, 2),
        task_retries=st.integers(0, 2),
        min_failed=st.sampled_from([-1, 1, 2]),
        min_succeeded=st.sampled_from([-1, 1, 3]),
    )
    def submit(self, is_gang, job_retries, task_retries, min_failed, min_succeeded):
        roles = (a_role("ps", 1, -1, -1), a_role("worker", 3, min_failed, min_succeeded))
        plan = a_plan(*roles, is_gang=is_gang, job_retries=job_retries, task_retries=task_retries)
        self.played = Played(plan, most_platform_retries=2)
        self.waiting, self.placed, self.running, self.verdicts = {}, set(), set(), {}
        self.was_stopped = False
        self.send(Submitted())

    def send(self, event):
        for effect in self.played.happens(event):
            match effect:
                case Request():
                    self.waiting[next(iter(effect.needs))] = tuple(effect.needs)
                case LeaveQueue():
                    gone = set(effect.container_ids)
                    self.waiting = {key: ids for key, ids in self.waiting.items() if gone.isdisjoint(ids)}
                case StartContainer():
                    assert effect.task.container_id not in self.running
                    self.running.add(effect.task.container_id)
                case ReleaseAllocation():
                    self.placed.discard(effect.container_id)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 9), is_missing=st.sampled_from([False, False, False, True]))
    def place(self, number, is_missing):
        key = sorted(self.waiting)[number % len(self.waiting)]
        ids = self.waiting.pop(key)
        self.placed.update(ids)
        if is_missing:
            for container_id in ids:
                self.send(ContainerEnded(container_id, TaskExit(253)))
        else:
            self.send(Allocated({each: Allocation("127.0.0.1", {}, ()) for each in ids}))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9))
    def start(self, number):
        container_id = sorted(self.running)[number % len(self.running)]
        task = next(
            (task for task in self.played.job.tasks.values() if task.container_id == container_id), None
        )
        if task is not None and task.attempt_launched_at_s is None:
            self.send(ContainerStarted(container_id))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 9), code=st.sampled_from([0, 0, 255, 137, 232]))
    def end(self, number, code):
        container_id = sorted(self.running)[number % len(self.running)]
        self.running.discard(container_id)
        self.send(ContainerEnded(container_id, TaskExit(code)))

    @precondition(lambda self: not self.was_stopped and not self.played.job.is_terminal)
    @rule(happens=st.sampled_from([False, False, False, False, True]))
    def stop(self, happens):
        if happens:
            self.was_stopped = True
            self.send(StopAsked())

    @precondition(lambda self: self.played.job.is_terminal)
    @rule()
    def report_an_unknown_container(self):
        self.send(ContainerEnded("unknown", TaskExit(0)))

    @invariant()
    def a_verdict_stays(self):
        job = self.played.job
        if job.attempt.exit is not None:
            verdict = (job.attempt.exit, job.attempt.trigger)
            assert self.verdicts.setdefault(job.attempt.attempt_id, verdict) == verdict

    @invariant()
    def allocations_belong_to_live_tasks(self):
        job = self.played.job
        holders = {
            task.container_id
            for task in job.tasks.values()
            if task.sub_state
            in (SubState.ATTEMPT_PREPARING, SubState.ATTEMPT_RUNNING, SubState.ATTEMPT_DELETION_REQUESTED)
        }
        assert self.placed == holders
        waiting = {each for ids in self.waiting.values() for each in ids}
        assert waiting == {
            task.container_id
            for task in job.tasks.values()
            if task.sub_state is SubState.ATTEMPT_CREATION_PENDING
        }

    @invariant()
    def a_job_that_is_over_has_no_resources(self):
        job = self.played.job
        if job.is_terminal:
            assert not self.placed
            assert not self.waiting
            assert not self.running
            assert self.played.changes[-1].value == job.attempt.state.value.lower()
        else:
            assert self.placed or self.waiting

    def teardown(self):
        """Start and end all remaining containers: the job must end."""
        if not hasattr(self, "played"):
            return
        for _ in range(200):
            if self.played.job.is_terminal:
                break
            if self.waiting:
                self.place(0, False)
            for container_id in sorted(self.running):
                self.running.discard(container_id)
                self.send(ContainerEnded(container_id, TaskExit(0)))
        assert self.played.job.is_terminal
        self.a_job_that_is_over_has_no_resources()
        if self.was_stopped and self.played.job.attempt.code in (-210,):
            assert self.played.job.attempt.state is State.STOPPED


TestAnyJob = AnyJob.TestCase
TestAnyJob.settings = hypothesis_settings(stateful_step_count=40)
