"""Property tests: a state machine of Hypothesis applies the events of one experiment in any order."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from attempts import attempt_id
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulated_search import SimulatedSearch

from nni_manager.domain.events import (
    ExperimentStopAsked,
    KeeperConnected,
    ManagerReady,
    SearchSpaceChanged,
    TimePassed,
    TrialStopAsked,
    TunerExhausted,
    TunerFailed,
    UsageReported,
)
from nni_manager.domain.experiment import ExperimentCore, ExperimentState
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import (
    TERMINAL_STATE,
    TrialState,
)
from trial_keeper.wire.messages import AttemptKey, Usage
from trial_keeper.wire.reasons import ExitReason

TRIALS = st.integers(0, 30)


class ExperimentLife(RuleBasedStateMachine):
    """Generates every order of events that tuner, cluster, keepers and user can produce."""

    def __init__(self) -> None:
        super().__init__()
        self.search = SimulatedSearch(
            ExperimentCore("exp", Limits(3, 8, 500.0), MAXIMIZE, reports_preemption=True)
        )
        self.late: list[tuple[str, int]] = []
        """Attempts whose keepers have reported, and may report again, even late."""
        self.most_at_once, self.most_trials = 3, 8
        """The highest limits so far."""
        self._do(lambda: self.search.handle(ManagerReady()))

    @property
    def experiment(self) -> ExperimentCore:
        return self.search.experiment

    def _do(self, action: Callable[[], Any]) -> None:
        before = {trial.trial_id for trial in self.search.live} | (
            {f"t{number}" for number in self.search.requests}
        )
        over = {
            trial_id: (trial.state, trial.run.reason, trial.run.value)
            for trial_id, trial in self.experiment.trials.items()
            if trial.state.is_terminal
        }
        results_before, observations_before = len(self.search.tuner_results), len(self.search.observations)
        action()
        for trial_id, was in over.items():
            trial = self.search.trial(trial_id)
            assert (trial.state, trial.run.reason, trial.run.value) == was, "a terminal trial never changes"
        settled = [
            trial_id
            for trial_id in before & self.experiment.trials.keys()
            if self.search.trial(trial_id).state.is_terminal
        ]
        proposed = [trial_id for trial_id in settled if self.search.trial(trial_id).is_customized]
        settled = [trial_id for trial_id in settled if trial_id not in proposed]
        rewards = [self.experiment.feedback.reward_of(self.search.trial(trial_id)) for trial_id in proposed]
        assert [each.value for each in self.search.observations[observations_before:]] == [
            reward for reward in rewards if reward is not None
        ]
        if not self.experiment.state.is_terminal:
            self.search.finishes = 0
        reported = [f"t{tell.sequence_id}" for tell in self.search.tuner_results[results_before:]]
        assert sorted(reported) == sorted(settled), "the tuner gets each terminal trial exactly once"

    def _pick(self, candidates: Sequence[str], index: int) -> str:
        return candidates[index % len(candidates)]

    def _ids(self, *states: TrialState) -> list[str]:
        return [trial.trial_id for trial in self.search.live if not states or trial.state in states]

    @property
    def with_jobs(self) -> list[str]:
        return [trial.trial_id for trial in self.search.live if trial.job_id]

    @precondition(lambda self: self.search.requests)
    @rule()
    def tuner_suggests(self) -> None:
        self._do(self.search.suggest)

    @precondition(lambda self: self.search.requests)
    @rule(index=TRIALS, fails=st.sampled_from([False, False, True]))
    def tuner_is_exhausted_or_fails(self, index: int, fails: bool) -> None:
        sequence_id = self.search.requests.pop(index % len(self.search.requests))
        event = TunerFailed("boom", was_asked=True) if fails else TunerExhausted(sequence_id)
        self._do(lambda: self.search.handle(event))

    @precondition(lambda self: self.search.requests)
    @rule(index=TRIALS)
    def tuner_is_not_ready(self, index: int) -> None:
        self._do(lambda: self.search.decline(index))

    @precondition(lambda self: self.search.tuner_results)
    @rule(happens=st.sampled_from([True, False, False, False]))
    def tuner_fails_on_a_result(self, happens: bool) -> None:
        if happens:
            self._do(lambda: self.search.handle(TunerFailed("no", was_asked=False)))

    @precondition(lambda self: self.with_jobs)
    @rule(index=TRIALS, attempt=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def attempt_starts(self, index: int, attempt: int) -> None:
        trial_id = self._pick(self.with_jobs, index)
        self.late.append((trial_id, attempt))
        self._do(lambda: self.search.start(trial_id, attempt))

    @precondition(lambda self: self.late)
    @rule(index=TRIALS, value=st.sampled_from(["0.5", "NaN", "2", '{"default": -1}']), final=st.booleans())
    def metrics_arrive(self, index: int, value: str, final: bool) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        trial = self.search.trial(trial_id)
        before = (trial.run.final, trial.run.intermediate_count)
        self._do(lambda: self.search.report(trial_id, value, final=final, attempt=attempt))
        if trial.run.attempt is not None and attempt < trial.run.attempt:
            assert (trial.run.final, trial.run.intermediate_count) == before, "an old attempt does not count"

    @precondition(lambda self: self.late)
    @rule(
        index=TRIALS,
        reason=st.sampled_from([ExitReason.SUCCEEDED, ExitReason.SUCCEEDED, *ExitReason]),
        size=st.sampled_from([None, 0, 1]),
    )
    def attempt_ends(self, index: int, reason: ExitReason, size: int | None) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        self._do(lambda: self.search.end(trial_id, reason, attempt, metrics_size_at_stop=size))

    @precondition(lambda self: self.late)
    @rule(index=TRIALS)
    def attempt_is_delivered(self, index: int) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        self._do(lambda: self.search.deliver(trial_id, attempt))

    @precondition(lambda self: self.with_jobs)
    @rule(
        index=TRIALS, reason=st.sampled_from([ExitReason.JOB_LOST, ExitReason.PREEMPTED, ExitReason.VERSION])
    )
    def job_is_lost(self, index: int, reason: ExitReason) -> None:
        trial_id = self._pick(self.with_jobs, index)
        trial = self.search.trial(trial_id)
        retries, was_stopped = trial.retries, trial.stop_reason is not None
        preemptions = trial.preemptions
        self._do(lambda: self.search.lose_job(trial_id, reason))
        if trial.retries > retries:
            assert reason is ExitReason.JOB_LOST
            assert not was_stopped
            assert trial.retries <= self.experiment.budget.limits.max_retries
        if trial.preemptions > preemptions:
            assert (reason, was_stopped, trial.state) == (ExitReason.PREEMPTED, False, TrialState.WAITING)
            assert trial.preemptions <= self.experiment.budget.limits.max_preemptions

    @rule(
        concurrency=st.integers(1, 4),
        max_trials=st.sampled_from([4, 8, 12]),
        max_duration_s=st.sampled_from([None, 50.0, 500.0]),
        max_trial_duration_s=st.sampled_from([None, 20.0, 60.0]),
        max_retries=st.integers(0, 2),
        max_preemptions=st.integers(0, 3),
    )
    def user_changes_limits(self, **limits: Any) -> None:
        self.most_at_once = max(self.most_at_once, limits["concurrency"])
        self.most_trials = max(self.most_trials, limits["max_trials"])
        self._do(lambda: self.search.limit(**limits))

    @rule()
    def search_space_changes(self) -> None:
        self._do(lambda: self.search.handle(SearchSpaceChanged()))

    @precondition(lambda self: self.experiment.accepts_trials and len(self.experiment.trials) < 40)
    @rule()
    def user_proposes_a_trial(self) -> None:
        self._do(lambda: self.search.propose(f"proposed{len(self.experiment.trials)}"))

    @precondition(lambda self: self.experiment.trials)
    @rule(index=TRIALS)
    def user_stops_a_trial(self, index: int) -> None:
        trial_id = self._pick(list(self.experiment.trials), index)
        self._do(lambda: self.search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0)))

    @rule(happens=st.sampled_from([True, False, False, False]))
    def user_stops_all(self, happens: bool) -> None:
        if happens:
            self._do(lambda: self.search.handle(ExperimentStopAsked(40.0)))
            assert not self._ids(TrialState.WAITING, TrialState.RUNNING), "every running trial is stopped"

    @precondition(lambda self: self.late)
    @rule(index=TRIALS, rss_bytes=st.integers(0, 100))
    def usage_is_reported(self, index: int, rss_bytes: int) -> None:
        trial_id, attempt = self.late[index % len(self.late)]
        usage = Usage(AttemptKey(trial_id, attempt_id(attempt), "main"), 1.0, rss_bytes)
        self._do(lambda: self.search.handle(UsageReported(usage)))

    @rule()
    def a_keeper_connects(self) -> None:
        self._do(lambda: self.search.handle(KeeperConnected("J")))

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.search.now_s += seconds
        self._do(lambda: self.search.handle(TimePassed()))

    @rule()
    def manager_is_resumed(self) -> None:
        before = self.search
        self.search = before.resumed()
        self.search.now_s = before.now_s
        for trial in self.search.live:
            # the store does not contain these two fields, so a resumed manager lacks them
            trial.run.ended = trial.run.latest_usage = None
        self._do(lambda: self.search.handle(ManagerReady()))

    @invariant()
    def counts_match_a_recount(self) -> None:
        recount = Counter(trial.state for trial in self.experiment.trials.values())
        assert +self.experiment.lifecycle.counts == recount

    @invariant()
    def limits_are_kept(self) -> None:
        assert len(self.with_jobs) + len(self.search.requests) <= self.most_at_once
        asked = [trial for trial in self.experiment.trials.values() if not trial.is_customized]
        assert len(asked) + len(self.search.requests) <= self.most_trials

    @invariant()
    def no_trial_runs_longer_than_its_limit(self) -> None:
        limit_s = self.experiment.budget.limits.max_trial_duration_s
        for trial in self.search.live:
            if (
                trial.state is TrialState.RUNNING
                and trial.run.start_received_at_s is not None
                and limit_s is not None
            ):
                assert self.search.now_s - trial.run.start_received_at_s < limit_s

    @invariant()
    def trials_without_a_job_are_queued(self) -> None:
        waiting = {trial.trial_id for trial in self.search.live if not trial.job_id}
        assert waiting == set(self.experiment.jobs.queue)

    @invariant()
    def the_reason_of_a_terminal_trial_matches_its_state(self) -> None:
        for trial in self.experiment.trials.values():
            if trial.state.is_terminal:
                assert trial.run.reason is not None
                assert trial.state is TERMINAL_STATE[trial.run.reason]

    @invariant()
    def finish_is_emitted_once_when_all_is_over(self) -> None:
        is_answered = not self.search.requests or self.experiment.ignores_answers
        is_terminal = self.experiment.state.is_terminal and not self.search.live and is_answered
        assert self.search.finishes == is_terminal

    @invariant()
    def the_leaderboard_has_the_best_results(self) -> None:
        results = [
            trial.run.value
            for trial in self.experiment.trials.values()
            if trial.state.is_terminal
            and trial.state is not TrialState.FAILED
            and trial.run.value is not None
        ]
        top = [trial.run.value for trial in self.experiment.leaderboard.top]
        assert top == sorted(results, reverse=True)[:10]

    @invariant()
    def a_running_experiment_has_a_live_trial_or_an_open_request(self) -> None:
        if not self.experiment.state.is_terminal and self.experiment.state is not ExperimentState.INITIALIZED:
            assert self.search.live or self.search.requests

    def teardown(self) -> None:
        """After any sequence of events, the experiment ends once all trials have ended."""
        for _ in range(60):
            while self.search.requests:
                self.tuner_suggests()
            for trial in [trial for trial in self.search.live if trial.job_id]:
                self._do(lambda trial=trial: self.search.start(trial.trial_id, 9))
                self._do(lambda trial=trial: self.search.end(trial.trial_id, attempt=9))
                self._do(lambda trial=trial: self.search.deliver(trial.trial_id, 9))
        assert self.experiment.state.is_terminal
        assert self.search.finishes == 1


TestExperimentLife = ExperimentLife.TestCase


TestExperimentLife.settings = hypothesis_settings(stateful_step_count=50)
