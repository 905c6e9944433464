"""The jobs of an experiment, and who is given what."""

from itertools import product

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nni_manager.domain.jobs import MOST_AHEAD, NEXT, Job, JobEvent, Jobs, JobState


@pytest.mark.parametrize(("state", "event"), list(product(JobState, JobEvent)))
def test_what_the_table_does_not_hold_cannot_happen(state, event) -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0", state))
    if (state, event) in NEXT:
        jobs._move(job, event)
        assert job.state is NEXT[state, event]
    else:
        with pytest.raises(KeyError):
            jobs._move(job, event)


def test_a_job_is_idle_once_the_keepers_of_all_its_tasks_are() -> None:
    jobs = Jobs(tasks=2)
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "worker-0")
    jobs.note_idle(job, "worker-0")
    assert jobs.next_idle() is None
    jobs.note_idle(job, "worker-1")
    assert jobs.next_idle() is job


def test_the_job_that_has_been_idle_longest_is_next() -> None:
    jobs = Jobs()
    first, second = jobs.add(Job("env-0")), jobs.add(Job("env-1"))
    jobs.note_idle(second, "main-0")
    jobs.note_idle(first, "main-0")
    assert jobs.next_idle() is second
    jobs.give(second, "t0")
    assert jobs.next_idle() is first


def test_keepers_that_are_idle_before_the_trial_is_over_make_the_job_idle_when_it_is() -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    jobs.note_idle(job, "main-0")
    assert (job.state, jobs.next_idle()) == (JobState.BUSY, None)
    jobs.free("env-0", "t0")
    assert jobs.next_idle() is job


def test_no_job_is_missing_for_a_trial_whose_job_will_be_idle_soon() -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    jobs.queue.append("t1")
    assert jobs.missing == 1
    jobs.free("env-0", "t0")
    assert (job.state, jobs.missing) == (JobState.READYING, 0)


def test_what_was_given_ahead_follows_in_its_order() -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    for number in range(1, MOST_AHEAD + 1):
        assert jobs.next_with_room(number) is job
        assert jobs.next_with_room(number - 1) is None
        jobs.give_ahead(job, f"t{number}")
    assert jobs.next_with_room(MOST_AHEAD) is None
    jobs.free("env-0", "t0")
    assert job.trial_ids == ("t1", "t2", "t3")
    jobs.free("env-0", "t2")
    assert job.trial_ids == ("t1", "t3")


def test_an_id_is_never_used_twice_also_after_a_restart() -> None:
    jobs = Jobs()
    jobs.remember("env-6")
    jobs.remember("aBcDe")  # a job of an experiment without reuse is named after its trial
    assert jobs.new_id() == "env-7"
    jobs.add(Job(jobs.new_id()))
    assert jobs.new_id() == "env-8"


class AnyJobs(RuleBasedStateMachine):
    """Whatever happens to jobs, what is counted on the way is what a look at all of them says."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Jobs(tasks=2)
        self.trials = 0

    def picked(self, number: int) -> Job:
        return list(self.jobs.live.values())[number % len(self.jobs.live)]

    @rule()
    def add(self) -> None:
        self.jobs.add(Job(self.jobs.new_id()))

    @rule()
    def queue(self) -> None:
        self.jobs.queue.append(f"t{self.trials}")
        self.trials += 1

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5), task=st.sampled_from(["worker-0", "worker-1"]))
    def say_idle(self, number: int, task: str) -> None:
        self.jobs.note_idle(self.picked(number), task)

    @precondition(lambda self: self.jobs.queue and self.jobs.next_idle() is not None)
    @rule()
    def give(self) -> None:
        job = self.jobs.next_idle()
        assert job is not None
        self.jobs.give(job, self.jobs.queue.popleft())

    @precondition(lambda self: self.jobs.queue and self.jobs.next_with_room(MOST_AHEAD) is not None)
    @rule(most_ahead=st.integers(0, MOST_AHEAD))
    def give_ahead(self, most_ahead: int) -> None:
        job = self.jobs.next_with_room(most_ahead)
        ahead = [len(job.next_ids) for job in self.jobs.live.values() if job.state is JobState.BUSY]
        assert (job is not None) == (min(ahead) < most_ahead)
        if job is None:
            return
        assert len(job.next_ids) == min(ahead)
        self.jobs.give_ahead(job, self.jobs.queue.popleft())

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5), which=st.integers(0, 3))
    def free(self, number: int, which: int) -> None:
        job = self.picked(number)
        before = job.trial_ids
        freed = (*before, *["no trial"] * 4)[which]
        self.jobs.free(job.job_id, freed)
        assert job.trial_ids == tuple(trial_id for trial_id in before if trial_id != freed)

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5))
    def dismiss(self, number: int) -> None:
        self.jobs.dismiss(self.picked(number))

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5))
    def end(self, number: int) -> None:
        job_id = self.picked(number).job_id
        assert self.jobs.end(job_id) is not None
        assert self.jobs.end(job_id) is None

    @invariant()
    def counts_are_true(self) -> None:
        live = list(self.jobs.live.values())
        free = [job for job in live if job.state in (JobState.READYING, JobState.IDLE)]
        assert self.jobs.spare == free
        assert self.jobs.missing == len(self.jobs.queue) - len(free)
        idle = {job.job_id for job in live if job.state is JobState.IDLE}
        assert set(self.jobs._idle) == idle
        assert all(len(job.idle_tasks) == 2 for job in live if job.state is JobState.IDLE)
        busy = [job for job in live if job.state is JobState.BUSY]
        assert all(job.trial_id is not None for job in busy)
        for ahead, jobs in enumerate(self.jobs._busy):
            assert set(jobs) == {job.job_id for job in busy if len(job.next_ids) == ahead}
        assert all(job.trial_id is not None for job in live if job.next_ids)
        assert (self.jobs.busy, self.jobs.staying) == (len(busy), len(busy) + len(free))


TestAnyJobs = AnyJobs.TestCase
TestAnyJobs.settings = hypothesis_settings(max_examples=100, stateful_step_count=40)
