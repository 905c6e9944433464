"""Property tests: a state machine of Hypothesis applies the events of an experiment with reused jobs in any order."""

from collections.abc import Callable, Iterable

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_search import SimulatedReuse, search_with_revocable_trials

from nni_manager.domain.events import (
    KeeperConnected,
    KeeperDisconnected,
    TrialReclaimed,
    TrialStopAsked,
)
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.jobs import JobState
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import ExitReason

RETRIES = 1


def crashes_left(trial: Trial) -> int:
    """The maximum number of further job crashes until the trial is terminal."""
    return 0 if trial.state.is_terminal else 2 * (1 + RETRIES - trial.retries) - trial.was_returned


class AnyReuse(RuleBasedStateMachine):
    """Checks, for any order of events, that no trial is assigned to two jobs and that every search can end."""

    def __init__(self) -> None:
        super().__init__()
        self.search = SimulatedReuse(concurrency=2, max_trials=6, max_retries=RETRIES)

    @initialize(may_prefetch=st.booleans(), has_prefetched=st.booleans())
    def choose_prefetching(self, may_prefetch: bool, has_prefetched: bool) -> None:
        self.search.experiment.scheduler.may_prefetch = may_prefetch
        if may_prefetch and has_prefetched:
            # Start with jobs that have prefetched trials. A run that starts without jobs would almost never revoke a trial.
            self.search = search_with_revocable_trials(max_retries=RETRIES)

    def live_jobs(self) -> list[str]:
        return list(self.search.experiment.jobs.live)

    def trials_where(self, is_wanted: Callable[[Trial], bool]) -> list[str]:
        return [trial.trial_id for trial in self.search.experiment.trials.values() if is_wanted(trial)]

    def pick(self, names: Iterable[str], number: int) -> str:
        known = list(names)
        return known[number % len(known)]

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9))
    def a_keeper_is_idle(self, number: int) -> None:
        self.search.idle(self.pick(self.live_jobs(), number))

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9), is_clean=st.booleans())
    def a_job_ends(self, number: int, is_clean: bool) -> None:
        self.lose(self.pick(self.live_jobs(), number), [], is_clean=is_clean)

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9), is_clean=st.booleans())
    def a_job_ends_with_unstarted_trials(self, number: int, is_clean: bool) -> None:
        job_id = self.pick(self.live_jobs(), number)
        self.lose(job_id, self.unstarted(job_id), is_clean=is_clean)

    def unstarted(self, job_id: str) -> list[str]:
        trial_ids = self.search.experiment.jobs.live[job_id].trial_ids
        return [trial_id for trial_id in trial_ids if self.search.trial(trial_id).state is TrialState.WAITING]

    def lose(self, job_id: str, unstarted: list[str], *, is_clean: bool) -> None:
        had_trials = bool(self.search.experiment.jobs.live[job_id].trial_ids)
        known = list(self.search.experiment.trials.values())
        before = sum(map(crashes_left, known))
        marked = {trial.trial_id for trial in known if trial.was_returned}
        self.search.lose(job_id, *unstarted, is_clean=is_clean)
        if had_trials and not is_clean:
            assert sum(map(crashes_left, known)) < before, "the number of job crashes is bounded"
        newly_marked = {trial.trial_id for trial in known if trial.was_returned} - marked
        assert newly_marked <= set(unstarted[:1])

    def on_a_job(self) -> list[str]:
        return self.trials_where(lambda trial: bool(trial.job_id) and not trial.state.is_terminal)

    @precondition(lambda self: self.on_a_job())
    @rule(number=st.integers(0, 9), succeeds=st.booleans())
    def a_trial_runs(self, number: int, succeeds: bool) -> None:
        self.search.run(self.pick(self.on_a_job(), number), succeeds=succeeds)

    @precondition(lambda self: self.on_a_job())
    @rule(number=st.integers(0, 9))
    def a_trial_starts(self, number: int) -> None:
        trial_id = self.pick(self.on_a_job(), number)
        self.search.start(trial_id, attempt=int(self.search.next_attempt(trial_id).attempt_id))

    def revoking(self) -> list[tuple[str, str]]:
        jobs = self.search.experiment.jobs.live.values()
        return [(job.job_id, trial_id) for job in jobs for trial_id in sorted(job.revoking_ids)]

    @precondition(lambda self: self.revoking())
    @rule(number=st.integers(0, 9))
    def a_trial_is_reclaimed(self, number: int) -> None:
        asked = self.revoking()
        self.search.handle(TrialReclaimed(*asked[number % len(asked)], 25.0))

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9), is_up=st.booleans())
    def a_keeper_connects_or_disconnects(self, number: int, is_up: bool) -> None:
        job_id = self.pick(self.live_jobs(), number)
        self.search.handle(
            KeeperConnected(job_id, supports_revoke=True) if is_up else KeeperDisconnected(job_id)
        )

    @precondition(lambda self: self.search.experiment.trials)
    @rule(number=st.integers(0, 9))
    def a_trial_is_cancelled(self, number: int) -> None:
        trial_id = self.pick(self.search.experiment.trials, number)
        self.search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0))

    @invariant()
    def each_trial_is_in_the_queue_or_on_one_job(self) -> None:
        experiment = self.search.experiment
        places = list(experiment.jobs.queue)
        places += [trial_id for job in experiment.jobs.live.values() for trial_id in job.trial_ids]
        unfinished = self.trials_where(lambda trial: not trial.state.is_terminal)
        assert sorted(places) == sorted(unfinished)

    @invariant()
    def no_trial_is_queued_while_a_job_is_idle(self) -> None:
        jobs, concurrency = self.search.experiment.jobs, self.search.experiment.budget.limits.concurrency
        assert not (jobs.queue and jobs.next_idle() is not None)
        assert jobs.shortfall <= 0 or jobs.active == concurrency
        assert jobs.active <= concurrency

    @invariant()
    def no_started_trial_is_revoked(self) -> None:
        jobs = self.search.experiment.jobs.live.values()
        started = [trial_id for _, trial_id in self.revoking() if self.search.trial(trial_id).attempts]
        assert started == []
        if any(job.state is JobState.IDLE for job in jobs) and not self.revoking():
            assert not any(job.waiting_ids for job in jobs if job.is_linked)

    @invariant()
    def all_jobs_drain_when_the_experiment_is_over(self) -> None:
        if self.search.experiment.state.is_terminal:
            states = {job.state for job in self.search.experiment.jobs.live.values()}
            assert states <= {JobState.DRAINING}

    def teardown(self) -> None:
        for _ in range(100):
            if self.search.experiment.state.is_terminal:
                break
            for job_id in self.live_jobs():
                self.search.idle(job_id)
            for trial_id in self.on_a_job():
                self.search.run(trial_id)
        assert self.search.experiment.state is ExperimentState.DONE


TestAnyReuse = AnyReuse.TestCase


TestAnyReuse.settings = hypothesis_settings(stateful_step_count=30)
