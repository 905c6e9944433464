"""The jobs of an experiment, and how trials are assigned to jobs."""

from itertools import product

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nni_manager.domain.jobs import MAX_PREFETCH, TRANSITIONS, Job, Jobs, JobState, JobTrigger


@pytest.mark.parametrize(("state", "event"), list(product(JobState, JobTrigger)))
def test_an_event_without_a_transition_raises_an_error(state, event) -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0", state))
    if (state, event) in TRANSITIONS:
        jobs._move(job, event)
        assert job.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            jobs._move(job, event)


def test_a_job_is_idle_once_the_keepers_of_all_its_tasks_are_idle() -> None:
    jobs = Jobs(tasks=2)
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "worker-0")
    jobs.note_idle(job, "worker-0")
    assert jobs.next_idle() is None
    jobs.note_idle(job, "worker-1")
    assert jobs.next_idle() is job


def test_the_job_that_has_been_idle_longest_gets_the_next_trial() -> None:
    jobs = Jobs()
    first, second = jobs.add(Job("env-0")), jobs.add(Job("env-1"))
    jobs.note_idle(second, "main-0")
    jobs.note_idle(first, "main-0")
    assert jobs.next_idle() is second
    jobs.give(second, "t0")
    assert jobs.next_idle() is first


def test_a_job_that_reports_idle_too_early_becomes_idle_when_its_trial_ends() -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    jobs.note_idle(job, "main-0")
    assert (job.state, jobs.next_idle()) == (JobState.BUSY, None)
    jobs.free("env-0", "t0")
    assert jobs.next_idle() is job


@pytest.mark.parametrize("assign", [Jobs.give, Jobs.prefetch], ids=["given", "prefetched"])
def test_a_job_counts_as_idle_after_its_trial_only_if_it_reports_idle_again(
    assign,
) -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    if assign is Jobs.prefetch:
        jobs.give(job, "t0")
        jobs.note_idle(job, "main-0")
    assign(jobs, job, "t1")
    for trial_id in job.trial_ids:
        jobs.free("env-0", trial_id)
    assert jobs.next_idle() is None
    jobs.note_idle(job, "main-0")
    assert jobs.next_idle() is job


def test_no_new_job_is_needed_for_a_queued_trial_while_a_pending_job_is_free() -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    jobs.queue.append("t1")
    assert jobs.shortfall == 1
    jobs.free("env-0", "t0")
    assert (job.state, jobs.shortfall) == (JobState.PENDING, 0)


def test_prefetched_trials_run_in_order() -> None:
    jobs = Jobs()
    job = jobs.add(Job("env-0"))
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    for number in range(1, MAX_PREFETCH + 1):
        assert jobs.next_for_prefetch(number) is job
        assert jobs.next_for_prefetch(number - 1) is None
        jobs.prefetch(job, f"t{number}")
    assert jobs.next_for_prefetch(MAX_PREFETCH) is None
    jobs.free("env-0", "t0")
    following = [f"t{number}" for number in range(1, MAX_PREFETCH + 1)]
    assert job.trial_ids == tuple(following)
    jobs.free("env-0", "t2")
    following.remove("t2")
    assert job.trial_ids == tuple(following)


def jobs_of_which_one_is_busy(tasks: int = 1, max_trials: int = 0) -> Jobs:
    """One job runs a trial and holds three prefetched trials; two other jobs are idle."""
    jobs = Jobs(tasks, max_trials)
    for number in range(3):
        job = jobs.add(Job(f"env-{number}"))
        jobs.note_link(job, is_up=True, supports_revoke=True)
        for task in range(tasks):
            jobs.note_idle(job, f"main-{task}")
    job = jobs.live["env-0"]
    jobs.give(job, "t0")
    for number in range(1, 4):
        jobs.prefetch(job, f"t{number}")
    return jobs


@pytest.fixture
def jobs() -> Jobs:
    return jobs_of_which_one_is_busy()


def test_one_prefetched_trial_is_revoked_per_idle_job_and_the_last_trial_is_revoked_first(jobs: Jobs) -> None:
    job = jobs.live["env-0"]
    assert jobs.revoke(0) == [(job, "t3"), (job, "t2")]
    assert jobs.revoke(0) == []
    assert job.trial_ids == ("t0", "t1", "t2", "t3"), "they stay assigned until they are reclaimed"


def test_no_trial_is_revoked_for_idle_jobs_that_can_run_a_queued_or_requested_trial(jobs: Jobs) -> None:
    job = jobs.live["env-0"]
    assert jobs.revoke(2) == []
    jobs.queue.append("t4")
    assert jobs.revoke(1) == []
    assert jobs.revoke(0) == [(job, "t3")]


def test_trials_are_revoked_first_from_the_job_with_the_most_prefetched_trials(jobs: Jobs) -> None:
    few, many = jobs.live["env-1"], jobs.live["env-0"]
    jobs.give(few, "t4")
    jobs.prefetch(few, "t5")
    jobs.prefetch(few, "t6")
    assert jobs.revoke(0) == [(many, "t3")]
    jobs.reclaim(many, "t3")
    jobs.give(jobs.live["env-2"], "t3")
    jobs.free("env-2", "t3")
    jobs.note_idle(jobs.live["env-2"], "main-0")
    jobs.note_started("env-0", "t1")
    assert jobs.revoke(0) == [(few, "t6")]


def test_the_start_of_a_trial_cancels_the_pending_revoke_of_the_trial(jobs: Jobs) -> None:
    job = jobs.live["env-0"]
    assert jobs.revoke(1) == [(job, "t3")]
    for trial_id in ("t0", "t1", "t2", "t3"):
        jobs.note_started("env-0", trial_id)
    assert (job.revoking_ids, jobs.revoke(0)) == (set(), [])


def test_a_job_that_starts_a_trial_despite_its_revoke_must_report_idle_again_after_the_trial(
    jobs: Jobs,
) -> None:
    job = jobs.live["env-0"]
    assert jobs.revoke(1) == [(job, "t3")]
    for trial_id in ("t0", "t1", "t2"):
        jobs.free("env-0", trial_id)
    jobs.note_idle(job, "main-0")
    jobs.note_started("env-0", "t3")
    jobs.free("env-0", "t3")
    assert job.state is JobState.PENDING
    jobs.note_idle(job, "main-0")
    assert job.state is JobState.IDLE


def test_trials_of_another_job_can_be_revoked_after_a_job_ended_with_a_pending_revoke(jobs: Jobs) -> None:
    assert jobs.revoke(1) == [(jobs.live["env-0"], "t3")]
    jobs.end("env-0")
    busy = jobs.live["env-1"]
    jobs.give(busy, "t4")
    jobs.prefetch(busy, "t5")
    assert jobs.revoke(0) == [(busy, "t5")]


def test_trials_that_a_keeper_has_not_received_are_revoked_in_reverse_order(jobs: Jobs) -> None:
    job = jobs.live["env-0"]
    for trial_id in ("t2", "t3"):
        jobs.note_started("env-0", trial_id)
    assert job.waiting_ids == ["t0", "t1"], "the keeper lacks them: it would have started them first"
    assert jobs.revoke(0) == [(job, "t1"), (job, "t0")]
    jobs.reclaim(job, "t0")
    assert (job.trial_ids, job.waiting_ids) == (("t1", "t2", "t3"), ["t1"])
    jobs.reclaim(job, "t1")
    assert (job.trial_ids, job.waiting_ids) == (("t2", "t3"), [])


def test_no_trial_is_revoked_for_an_idle_job_whose_keeper_is_disconnected(jobs: Jobs) -> None:
    job, cut_off = jobs.live["env-0"], jobs.live["env-1"]
    jobs.note_link(cut_off, is_up=False)
    assert len(jobs.revoke(0)) == 1, "of the two idle jobs, one is connected"
    assert jobs.next_idle() is jobs.live["env-2"]
    jobs.note_link(cut_off, is_up=True, supports_revoke=True)
    assert jobs.revoke(0) == [], "it may run a trial until it reports that it is idle"
    jobs.note_idle(cut_off, "main-0")
    assert jobs.revoke(0) == [(job, "t2")]


def test_a_revoke_is_sent_again_after_a_disconnected_keeper_reconnects(jobs: Jobs) -> None:
    job = jobs.live["env-0"]
    assert jobs.revoke(1) == [(job, "t3")]
    jobs.note_link(job, is_up=False)
    assert (job.revoking_ids, jobs.revoke(1)) == (set(), [])
    jobs.note_link(job, is_up=True, supports_revoke=True)
    assert jobs.revoke(1) == [(job, "t3")]


def test_no_trial_is_revoked_from_a_keeper_without_revoke_support(jobs: Jobs) -> None:
    jobs.note_link(jobs.live["env-0"], is_up=True, supports_revoke=False)
    assert jobs.revoke(0) == []


def test_the_surplus_of_jobs_is_the_number_of_idle_jobs_minus_revocable_trials(jobs: Jobs) -> None:
    assert jobs.surplus == 2 - 3
    jobs.revoke(0)
    assert jobs.surplus == 2 - 3, "trials with a revoke in progress still count"
    for trial_id in ("t0", "t1", "t2"):
        jobs.note_started("env-0", trial_id)
    assert jobs.surplus == 2 - 1
    jobs.note_link(jobs.live["env-0"], is_up=False)
    assert jobs.surplus == 2 - 1, "the keeper may reconnect"


def test_prefetch_respects_the_limit_of_trials_per_job() -> None:
    jobs = Jobs(max_trials=3)
    job = jobs.add(Job("env-0"))
    jobs.note_link(job, is_up=True, supports_revoke=True)
    jobs.note_idle(job, "main-0")
    jobs.give(job, "t0")
    jobs.prefetch(job, "t1")
    jobs.prefetch(job, "t2")
    assert jobs.next_for_prefetch(MAX_PREFETCH) is None
    idle = jobs.add(Job("env-1"))
    jobs.note_idle(idle, "main-0")
    assert jobs.revoke(0) == [(job, "t2")]
    jobs.reclaim(job, "t2")
    assert jobs.next_for_prefetch(MAX_PREFETCH) is job, "it may run one more trial"
    jobs.prefetch(job, "t2")
    jobs.free("env-0", "t0")
    assert jobs.next_for_prefetch(MAX_PREFETCH) is None


def test_no_trial_is_prefetched_for_a_job_that_may_run_only_one_trial() -> None:
    jobs = jobs_of_which_one_is_busy(max_trials=1)
    jobs.give(jobs.live["env-1"], "t4")
    assert jobs.next_for_prefetch(MAX_PREFETCH) is None


def test_job_ids_stay_unique_after_a_restart() -> None:
    jobs = Jobs()
    jobs.remember("env-6")
    # Without reuse, a job is named after its trial. Its name must not affect the numbers of reused jobs.
    jobs.remember("aBcDe")
    # This is the job of the ninth retry of that trial, not the reused job 9.
    jobs.remember("aBcDe-9")
    assert jobs.new_id() == "env-7"
    jobs.add(Job(jobs.new_id()))
    assert jobs.new_id() == "env-8"


MAX_TRIALS = 5


class AnyJobs(RuleBasedStateMachine):
    """Checks the incremental counts against a recount, in any order of events."""

    tasks = 1

    def __init__(self) -> None:
        super().__init__()
        # Start with jobs, one of which has a trial. In a run that starts without jobs, almost no job would get a trial.
        self.jobs = jobs_of_which_one_is_busy(self.tasks, MAX_TRIALS)
        self.trials = 4

    def new_trial(self) -> str:
        self.trials += 1
        return f"t{self.trials}"

    def picked(self, number: int) -> Job:
        return list(self.jobs.live.values())[number % len(self.jobs.live)]

    @rule()
    def add(self) -> None:
        self.jobs.add(Job(self.jobs.new_id()))

    @rule()
    def queue(self) -> None:
        self.jobs.queue.append(self.new_trial())

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5), task=st.sampled_from(["main-0", "main-1"]))
    def report_idle(self, number: int, task: str) -> None:
        self.jobs.note_idle(self.picked(number), task)

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5))
    def report_all_idle(self, number: int) -> None:
        for task in range(self.jobs.tasks):
            self.jobs.note_idle(self.picked(number), f"main-{task}")

    @precondition(lambda self: self.jobs.queue and self.jobs.next_idle() is not None)
    @rule()
    def give(self) -> None:
        job = self.jobs.next_idle()
        assert job is not None
        self.jobs.give(job, self.jobs.queue.popleft())

    @precondition(lambda self: self.jobs.queue and self.jobs.next_for_prefetch(MAX_PREFETCH) is not None)
    @rule(most_ahead=st.integers(0, MAX_PREFETCH))
    def prefetch(self, most_ahead: int) -> None:
        job = self.jobs.next_for_prefetch(most_ahead)
        busy = [job for job in self.jobs.live.values() if job.state is JobState.BUSY]
        ahead = [len(job.prefetched_ids) for job in busy if job.taken < MAX_TRIALS]
        assert (job is not None) == (min(ahead, default=MAX_PREFETCH) < most_ahead)
        if job is None:
            return
        assert len(job.prefetched_ids) == min(ahead)
        self.jobs.prefetch(job, self.jobs.queue.popleft())

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5), which=st.integers(0, 3))
    def free(self, number: int, which: int) -> None:
        job = self.picked(number)
        before = job.trial_ids
        freed = (*before, *["no trial"] * 4)[which]
        self.jobs.free(job.job_id, freed)
        assert job.trial_ids == tuple(trial_id for trial_id in before if trial_id != freed)

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5), which=st.integers(0, 3))
    def begin(self, number: int, which: int) -> None:
        job = self.picked(number)
        started = (*job.trial_ids, *["no trial"] * 4)[which]
        self.jobs.note_started(job.job_id, started)
        assert started not in job.waiting_ids

    @precondition(lambda self: self.jobs.live)
    @rule(number=st.integers(0, 5), is_up=st.booleans(), supports_revoke=st.booleans())
    def link(self, number: int, is_up: bool, supports_revoke: bool) -> None:
        job = self.picked(number)
        self.jobs.note_link(job, is_up=is_up, supports_revoke=supports_revoke)
        assert not job.revoking_ids

    @rule(coming=st.integers(0, 2))
    def revoke(self, coming: int) -> None:
        live = self.jobs.live.values()
        idle = sum(job.state is JobState.IDLE and bool(job.idle_tasks) for job in live)
        asked_before = sum(len(job.revoking_ids) for job in live)
        wanted = max(0, idle - coming - len(self.jobs.queue) - asked_before)
        revocable = [jobs for jobs in self.jobs._revocable.by_number[1:] if jobs]
        asked = self.jobs.revoke(coming)
        assert len(asked) <= wanted
        assert bool(asked) == bool(revocable and wanted)
        for job, trial_id in asked:
            assert trial_id in job.revoking_ids
            assert trial_id in job.prefetched_ids or not job.started_ids.isdisjoint(job.prefetched_ids)
            assert trial_id not in job.started_ids

    @precondition(lambda self: any(job.revoking_ids for job in self.jobs.live.values()))
    @rule(number=st.integers(0, 5))
    def reclaim(self, number: int) -> None:
        asked = [(job, each) for job in self.jobs.live.values() for each in sorted(job.revoking_ids)]
        job, trial_id = asked[number % len(asked)]
        before = job.trial_ids
        self.jobs.reclaim(job, trial_id)
        # Like the scheduler, put a reclaimed trial at the front of the queue.
        self.jobs.queue.appendleft(trial_id)
        assert job.trial_ids == tuple(each for each in before if each != trial_id)

    @precondition(lambda self: len(self.jobs.live) > 2)
    @rule(number=st.integers(0, 5))
    def dismiss(self, number: int) -> None:
        self.jobs.dismiss(self.picked(number))

    @precondition(lambda self: len(self.jobs.live) > 2)
    @rule(number=st.integers(0, 5))
    def end(self, number: int) -> None:
        job_id = self.picked(number).job_id
        assert self.jobs.end(job_id) is not None
        assert self.jobs.end(job_id) is None

    @invariant()
    def counts_match_a_recount(self) -> None:
        live = list(self.jobs.live.values())
        free = [job for job in live if job.state in (JobState.PENDING, JobState.IDLE)]
        assert self.jobs.unassigned == sorted(free, key=lambda job: job.state is JobState.IDLE)
        assert self.jobs.shortfall == len(self.jobs.queue) - len(free)
        idle = [job for job in live if job.state is JobState.IDLE]
        assert set(self.jobs._idle) == {job.job_id for job in idle if len(job.idle_tasks) >= self.jobs.tasks}
        # An IDLE job has enough idle tasks, with one exception: a job with one task stays IDLE after its keeper has disconnected.
        assert all(len(job.idle_tasks) >= self.jobs.tasks or self.jobs.tasks == 1 for job in idle)
        busy = [job for job in live if job.state is JobState.BUSY]
        assert all(job.trial_id is not None for job in busy)
        for ahead, jobs in enumerate(self.jobs._busy.by_number):
            having = {job.job_id for job in busy if len(job.prefetched_ids) == ahead}
            assert set(jobs) == having - {job.job_id for job in busy if job.taken >= MAX_TRIALS}
        assert all(job.trial_id is not None for job in live if job.prefetched_ids)
        assert (self.jobs.busy, self.jobs.active) == (len(busy), len(busy) + len(free))

    @invariant()
    def revocable_trials_match_a_recount(self) -> None:
        live = list(self.jobs.live.values())
        assert self.jobs._revoking_count == sum(len(job.revoking_ids) for job in live)
        assert all(job.revoking_ids <= set(job.trial_ids) for job in live)
        assert all(job.started_ids <= set(job.trial_ids) for job in live)
        assert not any(job.revoking_ids & job.started_ids for job in live)
        revocable = [job for job in live if job.state is JobState.BUSY and job.supports_revoke]
        free = sum(job.state in (JobState.PENDING, JobState.IDLE) for job in live)
        returnable = sum(len(set(job.waiting_ids) | job.revoking_ids) for job in revocable)
        assert self.jobs.surplus == free - (returnable if self.jobs.tasks == 1 else 0)
        for number, jobs in enumerate(self.jobs._revocable.by_number):
            having = {
                job.job_id
                for job in revocable
                if job.is_linked and len(set(job.waiting_ids) - job.revoking_ids) == number
            }
            assert set(jobs) == (having if self.jobs.tasks == 1 else set())


class AnyJobsWithTwoTasks(AnyJobs):
    """Jobs that are idle when both their keepers are."""

    tasks = 2


TestAnyJobs = AnyJobs.TestCase
TestAnyJobs.settings = hypothesis_settings(stateful_step_count=40)
TestAnyJobsWithTwoTasks = AnyJobsWithTwoTasks.TestCase
TestAnyJobsWithTwoTasks.settings = hypothesis_settings(stateful_step_count=40)
