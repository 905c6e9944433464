"""Jobs that run many trials in turn, and trials in many tasks: whole searches played in milliseconds."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from attempts import attempt_id
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nni_manager.domain.attempts import AttemptReport
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import (
    AskTuner,
    AttemptDelivered,
    AttemptEnded,
    AttemptLost,
    AttemptOrphaned,
    AttemptStarted,
    CancelQueuedTrial,
    CancelTrial,
    CloseAttempt,
    DispatchTrial,
    DrainAttempt,
    DrainJob,
    Effect,
    Event,
    ExperimentStopAsked,
    Finish,
    JobTerminated,
    KeeperConnected,
    KeeperDisconnected,
    KeeperIdle,
    LimitsChanged,
    ManagerReady,
    MetricsStored,
    ParametersSuggested,
    RevokePrefetched,
    SaveTrial,
    SubmitJob,
    TaskReported,
    TrialProposed,
    TrialReclaimed,
    TrialStopAsked,
)
from nni_manager.domain.experiment import Experiment, ExperimentState
from nni_manager.domain.jobs import JobState
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason


class Play:
    """An experiment whose tuner answers at once. Trials are named t0, t1, …"""

    keepers_return_trials = True

    def __init__(self, **options: Any) -> None:
        limits = Limits(
            options.pop("concurrency", 1),
            options.pop("max_trials", 3),
            None,
            max_retries=options.pop("max_retries", 0),
        )
        completion = options.pop("completion", Completion())
        self.experiment = Experiment("exp", limits, True, reuses_jobs=True, completion=completion, **options)
        self.experiment.jobs.tasks = completion.tasks
        self.did: list[Effect] = []
        self.handle(ManagerReady())

    def handle(self, event: Event) -> list[Effect]:
        effects = self.experiment.handle(event, 0.0)
        self.did += effects
        for effect in effects:
            if isinstance(effect, AskTuner):
                number = effect.sequence_id
                self.handle(ParametersSuggested(f"t{number}", number, {}, {}, 1.0))
        return effects

    def all_of(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.did if isinstance(effect, kind)]

    @property
    def submitted(self) -> list[str]:
        return [effect.job.job_id for effect in self.all_of(SubmitJob)]

    @property
    def given(self) -> list[tuple[str, str, str | None]]:
        return [
            (effect.job.job_id, effect.trial.trial_id, effect.task) for effect in self.all_of(DispatchTrial)
        ]

    @property
    def asked_back(self) -> list[tuple[str, str]]:
        return [(effect.job.job_id, effect.trial.trial_id) for effect in self.all_of(RevokePrefetched)]

    @property
    def dismissed(self) -> list[str]:
        return [effect.job.job_id for effect in self.all_of(DrainJob)]

    def trial(self, trial_id: str) -> Trial:
        return self.experiment.trials[trial_id]

    def idle(self, job_id: str = "env-0", task: str = "main-0") -> None:
        self.handle(KeeperConnected(job_id, supports_revoke=self.keepers_return_trials))
        self.handle(KeeperIdle(job_id, task))

    def start(self, trial_id: str, task: str = "main-0", attempt: int = 0) -> None:
        self.handle(AttemptStarted(AttemptKey(trial_id, attempt_id(attempt), task), 10.0))

    def due(self, trial_id: str, task: str = "main-0") -> AttemptKey:
        """The attempt that a keeper begins, or has begun, when nobody has lost more than is known."""
        trial = self.trial(trial_id)
        known = sum(each.key.task == task for each in trial.registered.registered)
        described = trial.attempts.get(task)
        return described.key if described else AttemptKey(trial_id, attempt_id(known), task)

    def report(self, trial_id: str, value: str, task: str = "main-0") -> None:
        key = self.due(trial_id, task)
        self.handle(TaskReported(key))
        self.handle(MetricsStored(key, ((True, value),)))

    def end(self, trial_id: str, task: str = "main-0", *, well: bool = True, at_s: float = 20.0) -> None:
        reason, code = (ExitReason.SUCCEEDED, 0) if well else (ExitReason.NONZERO_EXIT, 1)
        self.handle(AttemptEnded(TrialEnded(self.due(trial_id, task), reason, code, 10.0, at_s)))

    def deliver(self, trial_id: str, task: str = "main-0") -> None:
        self.handle(AttemptDelivered(self.due(trial_id, task)))

    def run(self, trial_id: str, *, well: bool = True) -> None:
        self.start(trial_id, attempt=int(self.due(trial_id).attempt_id))
        self.report(trial_id, "1")
        self.end(trial_id, well=well)
        self.deliver(trial_id)

    def lose(self, job_id: str, *untouched: str, is_clean: bool = False) -> None:
        reason, said = ExitReason.KEEPER_LOST, "its keeper is gone"
        self.handle(JobTerminated(job_id, reason, said, 30.0, is_clean, frozenset(untouched)))


# ---- changes while it runs


def test_jobs_that_are_too_many_when_fewer_trials_may_run_are_let_go_once_they_have_none() -> None:
    play = Play(concurrency=3, max_trials=None)
    for number in range(3):
        play.idle(f"env-{number}")
        play.start(f"t{number}")
    play.handle(LimitsChanged(Limits(1, None, None)))
    assert play.dismissed == [], "what runs is left to end"
    for number in range(2):
        play.end(f"t{number}")
        play.deliver(f"t{number}")
    assert play.dismissed == ["env-0", "env-1"]
    assert len(play.experiment.trials) == 3


def test_trials_that_wait_do_not_keep_jobs_that_are_too_many() -> None:
    play = Play(concurrency=2, max_trials=2)
    for number in range(2):
        play.idle(f"env-{number}")
        play.start(f"t{number}")
    for number in range(3):
        play.handle(TrialProposed(f"mine{number}", {}, 1.0))
    play.handle(LimitsChanged(Limits(1, 2, None)))
    play.end("t0")
    play.idle("env-0")  # as a keeper says before its last bytes are stored
    play.deliver("t0")
    assert [given[1] for given in play.given] == ["t0", "t1"], "t1 is the one that may run"
    assert play.dismissed == ["env-0"]
    play.run("t1")
    play.idle("env-1")
    assert play.given[-1] == ("env-1", "mine0", None)


def test_a_proposed_trial_waits_for_a_job_like_any_other() -> None:
    play = Play(concurrency=1, max_trials=2)
    play.idle()
    play.handle(TrialProposed("mine", {}, 1.0))
    assert play.submitted == ["env-0"]
    play.run("t0")
    play.idle()
    assert play.given[-1] == ("env-0", "mine", None)
    play.run("mine")
    assert play.experiment.state is ExperimentState.DONE
    play.handle(TrialProposed("late", {}, 1.0))
    assert play.submitted == ["env-0", "env-1"], "the first has been let go"


def test_a_trial_lost_with_its_job_is_the_first_that_another_job_is_given() -> None:
    play = Play(concurrency=2, max_trials=2, max_retries=1)
    for job_id, trial_id in (("env-0", "t0"), ("env-1", "t1")):
        play.idle(job_id)
        play.start(trial_id)
    play.lose("env-0")
    assert (play.trial("t0").state, play.submitted) == (TrialState.WAITING, ["env-0", "env-1", "env-2"])
    play.idle("env-2")
    assert play.given[-1] == ("env-2", "t0", None)
    play.start("t0")
    assert play.trial("t0").state is TrialState.WAITING, "that is the attempt that was lost"
    play.start("t0", attempt=1)
    play.lose("env-2")
    assert play.trial("t0").state is TrialState.FAILED


# ---- one job, many trials


def test_one_job_runs_all_trials_in_turn_and_is_let_go_after_the_last() -> None:
    play = Play(max_trials=3)
    assert (play.submitted, play.given) == (["env-0"], [])
    for number in range(3):
        play.idle()
        play.run(f"t{number}")
    assert play.submitted == ["env-0"]
    assert play.given == [("env-0", f"t{number}", None) for number in range(3)]
    assert play.experiment.state is ExperimentState.DONE
    assert play.dismissed == ["env-0"]
    assert len(play.all_of(Finish)) == 1


def test_a_keeper_that_is_idle_before_its_last_bytes_are_here_waits_for_nothing_else() -> None:
    play = Play()
    play.idle()
    play.start("t0")
    play.end("t0")
    play.idle()
    assert play.trial("t0").state is TrialState.CLOSING
    play.deliver("t0")
    assert play.given == [("env-0", "t0", None), ("env-0", "t1", None)]


def test_as_many_jobs_are_asked_for_as_trials_may_run() -> None:
    play = Play(concurrency=3, max_trials=10)
    assert play.submitted == ["env-0", "env-1", "env-2"]
    play.idle("env-1")
    play.run("t0")
    assert play.submitted == ["env-0", "env-1", "env-2"]


def test_jobs_that_have_not_begun_are_let_go_as_well_when_nothing_is_left_for_them() -> None:
    play = Play(concurrency=2, max_trials=2)
    for number in range(2):
        play.idle("env-0")
        play.run(f"t{number}")
    assert play.dismissed in (["env-1", "env-0"], ["env-0", "env-1"])


def test_the_end_and_the_duration_are_the_trials_own_and_not_the_jobs() -> None:
    play = Play()
    play.idle()
    play.start("t0")
    play.end("t0", at_s=25.0)
    play.deliver("t0")
    play.lose("env-0")
    assert (play.trial("t0").started_at_s, play.trial("t0").ended_at_s) == (10.0, 25.0)


# ---- stopping


def test_a_waiting_trial_is_cancelled_at_once_and_nobody_runs_it() -> None:
    play = Play(max_trials=2)
    play.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 15.0))
    assert (play.trial("t0").state, play.trial("t0").ended_at_s) == (TrialState.USER_CANCELED, 15.0)
    play.idle()
    assert play.given == [("env-0", "t1", None)]


def test_a_trial_that_was_given_and_has_not_begun_is_cancelled_through_its_keeper() -> None:
    play = Play()
    play.idle()
    play.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 15.0))
    assert [effect.trial.trial_id for effect in play.all_of(CancelTrial)] == ["t0"]
    assert play.trial("t0").state is TrialState.STOPPING


def test_stopping_the_experiment_stops_trials_and_lets_jobs_go() -> None:
    play = Play(concurrency=3, max_trials=None)
    play.idle("env-1")
    play.start("t0")
    play.handle(ExperimentStopAsked(16.0))
    assert [effect.trial.trial_id for effect in play.all_of(CancelTrial)] == ["t0"]
    assert sorted(play.dismissed) == ["env-0", "env-2"]
    play.end("t0", well=False)
    play.deliver("t0")
    assert play.experiment.state is ExperimentState.STOPPED
    assert sorted(play.dismissed) == ["env-0", "env-1", "env-2"]


# ---- jobs that go


def test_a_job_lost_in_the_middle_of_a_trial_fails_that_trial_only() -> None:
    play = Play()
    play.idle()
    play.start("t0")
    play.lose("env-0")
    assert (play.trial("t0").state, play.trial("t0").reason) == (TrialState.FAILED, ExitReason.KEEPER_LOST)
    assert play.submitted == ["env-0", "env-1"]
    play.idle("env-1")
    assert play.given[-1] == ("env-1", "t1", None)


def test_a_trial_on_its_way_to_a_job_that_had_left_is_given_to_the_next_one() -> None:
    play = Play()
    play.idle()
    play.lose("env-0", is_clean=True)
    assert play.trial("t0").state is TrialState.WAITING
    play.idle("env-1")
    assert play.given == [("env-0", "t0", None), ("env-1", "t0", None)]


def test_a_job_that_leaves_while_idle_costs_no_trial() -> None:
    play = Play()
    play.idle()
    play.run("t0")
    play.lose("env-0", is_clean=True)
    assert play.trial("t1").state is TrialState.WAITING
    assert play.submitted == ["env-0", "env-1"]


def test_a_job_that_dies_before_it_ever_spoke_takes_a_waiting_trial_along() -> None:
    play = Play(max_trials=2)
    play.lose("env-0")
    assert (play.trial("t0").state, play.trial("t0").message) == (TrialState.FAILED, "its keeper is gone")
    play.lose("env-1")
    assert play.experiment.state is ExperimentState.DONE


def test_a_job_that_dies_after_it_had_spoken_costs_no_trial() -> None:
    play = Play()
    play.idle()
    play.run("t0")
    play.lose("env-0")
    assert play.trial("t1").state is TrialState.WAITING


def test_a_word_that_was_lost_with_the_link_is_said_again() -> None:
    play = Play()
    play.idle()
    play.idle()
    assert play.given == [("env-0", "t0", None), ("env-0", "t0", "main-0")]
    play.start("t0")
    play.handle(KeeperConnected("env-0"))
    assert len(play.given) == 2


def test_a_trial_that_its_dying_job_never_began_is_given_to_one_more_job_and_then_fails() -> None:
    play = Play()
    play.idle("env-0")
    play.lose("env-0", "t0")
    assert play.trial("t0").state is TrialState.WAITING
    play.idle("env-1")
    assert play.given[-1] == ("env-1", "t0", None)
    play.lose("env-1", "t0")
    assert (play.trial("t0").state, play.trial("t0").reason) == (TrialState.FAILED, ExitReason.KEEPER_LOST)


def test_a_job_that_ends_well_and_was_never_heard_takes_a_waiting_trial_along_too() -> None:
    play = Play()
    play.lose("env-0", is_clean=True)
    assert play.trial("t0").state is TrialState.FAILED, "or jobs would be asked for without an end"


def test_a_job_of_whose_end_nobody_knows_costs_no_trial() -> None:
    play = Play()
    gone = JobTerminated(
        "env-0", ExitReason.JOB_LOST, "it ended while no manager was there", 50.0, True, was_supervised=False
    )
    play.handle(gone)
    assert play.trial("t0").state is TrialState.WAITING
    assert play.submitted == ["env-0", "env-1"]


def test_a_word_to_leave_that_was_lost_with_the_link_is_said_again() -> None:
    play = Play(max_trials=1)
    play.idle()
    play.run("t0")
    assert play.dismissed == ["env-0"]
    play.idle()
    assert play.dismissed == ["env-0", "env-0"]


# ---- prefetched trials


@pytest.fixture
def ahead() -> Play:
    """One job runs t1 and has t2 to follow."""
    play = Play(max_trials=6, may_prefetch=True)
    play.idle()
    play.run("t0")
    play.idle()
    play.start("t1")
    assert play.given[1:] == [("env-0", "t1", None), ("env-0", "t2", None)]
    return play


def test_nothing_is_asked_for_ahead_of_a_tuner_that_learns_or_of_trials_that_may_be_long() -> None:
    for play in (Play(may_prefetch=True), Play()):
        play.idle()
        play.start("t0")
        assert list(play.experiment.trials) == ["t0"]
    play.run("t0")
    play.idle()
    assert list(play.experiment.trials) == ["t0", "t1"]
    long = Play(may_prefetch=True)
    long.idle()
    long.start("t0")
    long.end("t0", at_s=100.0)
    long.deliver("t0")
    long.idle()
    assert list(long.experiment.trials) == ["t0", "t1"]


def test_a_trial_that_was_given_ahead_begins_while_the_last_bytes_of_the_one_before_are_on_their_way(
    ahead: Play,
) -> None:
    ahead.end("t1")
    ahead.start("t2")
    assert [ahead.trial(name).state.value for name in ("t1", "t2")] == ["CLOSING", "RUNNING"]
    ahead.deliver("t1")
    assert ahead.given[-1] == ("env-0", "t3", None)
    ahead.end("t2")
    ahead.deliver("t2")
    assert ahead.submitted == ["env-0"]


def test_all_trials_are_given_to_one_job_and_it_is_let_go_after_the_last(ahead: Play) -> None:
    for name in ("t1", "t2", "t3", "t4", "t5"):
        ahead.run(name)
    assert [given[1] for given in ahead.given] == [f"t{number}" for number in range(6)]
    assert (ahead.experiment.state, ahead.dismissed) == (ExperimentState.DONE, ["env-0"])


def test_a_trial_that_ends_before_the_bytes_of_the_one_before_are_here_is_over_all_the_same(
    ahead: Play,
) -> None:
    ahead.end("t1")
    ahead.run("t2")
    assert ahead.trial("t2").state is TrialState.SUCCEEDED
    ahead.deliver("t1")
    assert ahead.trial("t1").state is TrialState.SUCCEEDED
    assert ahead.given[3:] == [("env-0", "t3", None), ("env-0", "t4", None)]


def test_a_keeper_that_does_not_know_of_its_next_trial_is_told_again(ahead: Play) -> None:
    ahead.end("t1")
    ahead.idle()
    assert ahead.given[-1] == ("env-0", "t2", "main-0")
    ahead.start("t2")
    ahead.deliver("t1")
    ahead.run("t2")
    assert ahead.given[4:] == [("env-0", "t3", None), ("env-0", "t4", None)]


def test_a_trial_that_was_given_ahead_and_is_stopped_is_over_at_once_and_its_keeper_forgets_it(
    ahead: Play,
) -> None:
    ahead.handle(TrialStopAsked("t2", ExitReason.STOPPED_BY_USER, 15.0))
    assert (ahead.trial("t2").state, ahead.trial("t1").state) == (
        TrialState.USER_CANCELED,
        TrialState.RUNNING,
    )
    assert [effect.trial.trial_id for effect in ahead.all_of(CancelQueuedTrial)] == ["t2"]
    assert ahead.all_of(CancelTrial) == []
    late = AttemptKey("t2", attempt_id(0), "main-0")
    assert ahead.handle(AttemptStarted(late, 16.0)) == [CloseAttempt(late)], "had it begun in the meantime"
    assert ahead.given[-1] == ("env-0", "t3", None)


def test_a_trial_that_was_given_ahead_goes_to_another_job_when_its_own_is_gone(ahead: Play) -> None:
    ahead.lose("env-0", "t2")
    assert [ahead.trial(name).state.value for name in ("t1", "t2")] == ["FAILED", "WAITING"]
    assert ahead.submitted == ["env-0", "env-1"]
    ahead.idle("env-1")
    assert ahead.given[3:] == [("env-1", "t2", None), ("env-1", "t3", None)]


def test_both_trials_of_a_job_that_left_return_to_the_queue_in_their_order() -> None:
    play = Play(max_trials=6, may_prefetch=True)
    play.idle()
    play.run("t0")
    play.idle()
    play.lose("env-0", is_clean=True)
    assert list(play.experiment.jobs.queue) == ["t1", "t2"]


def test_stopping_the_experiment_ends_what_was_given_ahead(ahead: Play) -> None:
    ahead.handle(ExperimentStopAsked(16.0))
    ahead.end("t1", well=False)
    ahead.deliver("t1")
    assert ahead.experiment.state is ExperimentState.STOPPED
    assert ahead.trial("t2").state is TrialState.USER_CANCELED


def test_no_job_is_asked_for_to_run_what_was_asked_for_ahead() -> None:
    play = Play(concurrency=2, max_trials=9, may_prefetch=True)
    for job_id in ("env-0", "env-1"):
        play.idle(job_id)
    play.run("t0")
    play.idle("env-0")
    assert play.submitted == ["env-0", "env-1"]
    assert [len(job.prefetched_ids) for job in play.experiment.jobs.live.values()] == [1, 1]


def test_of_trials_that_are_very_short_a_job_is_given_some_ahead_and_begins_them_in_their_order() -> None:
    play = Play(max_trials=9, may_prefetch=True)
    play.idle()
    play.start("t0")
    play.end("t0", at_s=10.5)
    play.deliver("t0")
    play.idle()
    assert play.given == [("env-0", f"t{number}", None) for number in range(5)]
    for number in range(1, 5):
        play.start(f"t{number}")
        play.end(f"t{number}", at_s=10.5)
        play.deliver(f"t{number}")
    assert play.given == [("env-0", f"t{number}", None) for number in range(9)]
    assert play.submitted == ["env-0"]


def test_a_trial_that_fails_at_once_says_nothing_of_how_long_others_last() -> None:
    play = Play(max_trials=30, may_prefetch=True)
    play.idle()
    for number in range(2):
        play.start(f"t{number}")
        play.end(f"t{number}", at_s=10.02, well=False)
        play.deliver(f"t{number}")
        play.idle()
    assert [given[1] for given in play.given] == ["t0", "t1", "t2"]
    play.start("t2")
    play.end("t2", at_s=10.02)
    play.deliver("t2")
    play.idle()
    assert [given[1] for given in play.given] == [f"t{number}" for number in range(3 + 1 + 12)]


@pytest.mark.parametrize(("lasted_s", "follow"), [(0.05, 12), (0.5, 3), (5.0, 1), (90.0, 0)])
def test_the_shorter_trials_are_the_more_of_them_are_given_ahead(lasted_s: float, follow: int) -> None:
    play = Play(max_trials=30, may_prefetch=True)
    play.idle()
    play.start("t0")
    play.end("t0", at_s=10.0 + lasted_s)
    play.deliver("t0")
    play.idle()
    assert [given[1] for given in play.given] == [f"t{number}" for number in range(1 + 1 + follow)]


def test_what_was_given_ahead_goes_to_whoever_is_idle_when_its_job_is_gone_and_keeps_its_order() -> None:
    play = Play(max_trials=9, may_prefetch=True)
    play.idle()
    play.start("t0")
    play.end("t0", at_s=10.5)
    play.deliver("t0")
    play.idle()
    play.start("t1")
    play.lose("env-0", "t2", "t3", "t4")
    assert list(play.experiment.jobs.queue)[:3] == ["t2", "t3", "t4"]
    play.idle("env-1")
    assert [given[:2] for given in play.given[5:8]] == [("env-1", f"t{number}") for number in (2, 3, 4)]


@pytest.fixture
def full() -> Play:
    """One job has four trials, of which it has begun none."""
    play = Play(max_trials=9, may_prefetch=True)
    play.idle()
    play.start("t0")
    play.end("t0", at_s=10.5)
    play.deliver("t0")
    play.idle()
    assert [given[1] for given in play.given[1:]] == ["t1", "t2", "t3", "t4"]
    return play


def test_of_what_a_dying_job_never_began_only_the_next_trial_is_under_suspicion(full: Play) -> None:
    full.lose("env-0", "t1", "t2", "t3", "t4")
    assert [name for name in full.experiment.trials if full.trial(name).was_returned] == ["t1"]
    full.idle("env-1")
    assert [given[:2] for given in full.given[5:9]] == [("env-1", f"t{number}") for number in (1, 2, 3, 4)]
    full.lose("env-1", "t1", "t2", "t3", "t4")
    assert [full.trial(f"t{number}").state.value for number in (1, 2, 3, 4)] == ["FAILED"] + ["WAITING"] * 3
    full.idle("env-2")
    assert ("env-2", "t2", None) in full.given
    assert not full.trial("t2").was_returned


def test_a_job_that_dies_of_the_trial_it_runs_casts_suspicion_on_no_other(full: Play) -> None:
    full.start("t1")
    full.lose("env-0", "t2", "t3", "t4")
    assert full.trial("t1").state is TrialState.FAILED
    assert not any(trial.was_returned for trial in full.experiment.trials.values())


def test_a_job_that_leaves_by_itself_neither_casts_suspicion_nor_clears_of_it(full: Play) -> None:
    full.lose("env-0", "t1", "t2", "t3", "t4")
    full.idle("env-1")
    full.lose("env-1", "t1", "t2", "t3", "t4", is_clean=True)
    assert [name for name in full.experiment.trials if full.trial(name).was_returned] == ["t1"]
    full.idle("env-2")
    full.lose("env-2", "t1", "t2", "t3", "t4")
    assert full.trial("t1").state is TrialState.FAILED, "two jobs have died of it"


def test_after_a_restart_a_job_has_both_its_trials(ahead: Play) -> None:
    after = restored(ahead)
    after.handle(KeeperConnected("env-0"))
    after.start("t1")
    after.end("t1")
    after.start("t2")
    after.deliver("t1")
    after.end("t2")
    after.deliver("t2")
    assert [after.trial(name).state for name in ("t1", "t2")] == [TrialState.SUCCEEDED] * 2
    assert after.submitted == []


# ---- trials that are given back


@pytest.fixture
def shared() -> Play:
    """There are no more trials to come: env-0 runs t1 and has t2, t3 and t4 to follow, and env-1 has just run t5."""
    return share()


def share(**options: Any) -> Play:
    play = Play(concurrency=2, max_trials=6, may_prefetch=True, **options)
    play.idle("env-0")
    play.start("t0")
    play.end("t0", at_s=10.5)
    play.deliver("t0")
    play.idle("env-0")
    play.start("t1")
    play.idle("env-1")
    play.start("t5")
    play.end("t5", at_s=10.5)
    play.deliver("t5")
    assert play.experiment.jobs.live["env-0"].trial_ids == ("t1", "t2", "t3", "t4")
    assert play.asked_back == []
    return play


def test_of_twelve_that_turn_out_long_each_idle_job_has_one_after_a_word_and_its_answer() -> None:
    play = Play(concurrency=4, max_trials=1 + 1 + 12 + 3, may_prefetch=True)
    play.idle("env-0")
    play.start("t0")
    play.end("t0", at_s=10.01)
    play.deliver("t0")
    play.idle("env-0")
    long = play.experiment.jobs.live["env-0"]
    play.start("t1")
    assert long.trial_ids == tuple(f"t{number}" for number in range(1, 14))
    others = {"env-1": "t14", "env-2": "t15", "env-3": "t16"}
    for job_id in others:
        play.idle(job_id)
    for job_id, trial_id in others.items():
        play.run(trial_id)
        play.idle(job_id)
    assert play.asked_back == [("env-0", "t13"), ("env-0", "t12"), ("env-0", "t11")]
    assert play.dismissed == []
    for trial_id in ("t13", "t12", "t11"):
        give_back(play, trial_id)
    assert [given[:2] for given in play.given[-3:]] == [("env-1", "t13"), ("env-2", "t12"), ("env-3", "t11")]
    assert len(long.prefetched_ids) == 9


def give_back(play: Play, trial_id: str, job_id: str = "env-0") -> list[Effect]:
    return play.handle(TrialReclaimed(job_id, trial_id, 25.0))


def test_the_last_of_what_was_given_ahead_is_asked_back_for_a_job_that_is_idle_and_given_to_it(
    shared: Play,
) -> None:
    shared.idle("env-1")
    assert shared.asked_back == [("env-0", "t4")]
    trial = shared.trial("t4")
    assert trial.job_id == "env-0", "until it is given back"
    job = shared.experiment.jobs.live["env-1"]
    assert give_back(shared, "t4") == [SaveTrial(trial), SaveTrial(trial), DispatchTrial(job, trial)]
    assert (trial.job_id, trial.state, trial.attempt) == ("env-1", TrialState.WAITING, None)
    shared.run("t4")
    shared.idle("env-1")
    assert shared.asked_back == [("env-0", "t4"), ("env-0", "t3")]
    give_back(shared, "t3")
    for name in ("t1", "t2", "t3"):
        shared.run(name)
    assert shared.experiment.state is ExperimentState.DONE
    assert len(shared.given) == 6 + 2


def test_nothing_is_asked_back_twice_or_for_a_job_that_the_tuner_is_asked_for(shared: Play) -> None:
    shared.idle("env-1")
    shared.idle("env-1")
    assert len(shared.asked_back) == 1
    play = share()
    play.experiment.handle(LimitsChanged(Limits(2, 7, None)), 0.0)  # and the tuner takes its time
    play.idle("env-1")
    assert play.asked_back == []
    play.handle(ParametersSuggested("t6", 6, {}, {}, 1.0))
    assert play.given[-1] == ("env-1", "t6", None)


def test_what_begins_at_that_moment_stays_and_the_idle_job_is_let_go_when_nothing_is_left(
    shared: Play,
) -> None:
    shared.idle("env-1")
    for name in ("t1", "t2", "t3"):
        shared.run(name)
        assert shared.dismissed == []
    shared.start("t4")
    assert shared.dismissed == ["env-1"]
    assert give_back(shared, "t4") == [], "no keeper says so"
    assert shared.trial("t4").state is TrialState.RUNNING


def test_when_request_or_answer_may_be_lost_it_is_asked_again(shared: Play) -> None:
    shared.idle("env-1")
    shared.handle(KeeperDisconnected("env-0"))
    assert give_back(shared, "t4") == [], "an answer of before"
    assert shared.dismissed == [], "it may be back in a moment"
    shared.handle(KeeperConnected("env-0", supports_revoke=True))
    assert shared.asked_back == [("env-0", "t4")] * 2
    give_back(shared, "t4")
    assert shared.given[-1] == ("env-1", "t4", None)


def test_what_was_given_back_in_an_answer_that_was_lost_is_given_again_to_the_keeper_that_is_idle(
    shared: Play,
) -> None:
    shared.idle("env-1")
    shared.handle(KeeperDisconnected("env-0"))
    shared.lose("env-1", is_clean=True)
    for name in ("t1", "t2", "t3"):
        shared.run(name)
    shared.idle("env-0")
    assert shared.given[-1] == ("env-0", "t4", "main-0")


def test_a_keeper_that_says_that_it_is_idle_is_not_given_what_it_is_about_to_give_back(shared: Play) -> None:
    shared.idle("env-1")
    for name in ("t1", "t2", "t3"):
        shared.run(name)
    given = len(shared.given)
    shared.handle(KeeperIdle("env-0", "main-0"))
    assert len(shared.given) == given
    give_back(shared, "t4")
    assert shared.given[-1] == ("env-1", "t4", None)
    assert shared.dismissed == ["env-0"]


def test_an_answer_for_a_trial_that_is_over_or_another_jobs_by_now_is_nothing(shared: Play) -> None:
    shared.idle("env-1")
    shared.handle(TrialStopAsked("t4", ExitReason.STOPPED_BY_USER, 15.0))
    assert shared.trial("t4").state is TrialState.USER_CANCELED
    assert shared.asked_back == [("env-0", "t4"), ("env-0", "t3")]
    assert give_back(shared, "t4") == []
    give_back(shared, "t3")
    assert give_back(shared, "t3") == []
    assert give_back(shared, "t3", "env-1") == []
    assert give_back(shared, "nobody", "env-7") == []
    assert shared.trial("t3").job_id == "env-1"


def test_a_trial_that_is_stopped_between_question_and_answer_is_over_with_the_answer(shared: Play) -> None:
    shared.idle("env-1")
    for name in ("t1", "t2", "t3"):
        shared.run(name)
    shared.handle(TrialStopAsked("t4", ExitReason.STOPPED_BY_USER, 15.0))
    assert shared.trial("t4").state is TrialState.STOPPING
    give_back(shared, "t4")
    assert shared.trial("t4").state is TrialState.USER_CANCELED
    assert shared.experiment.state is ExperimentState.DONE


def test_what_was_asked_back_of_a_job_that_is_gone_is_given_with_the_rest(shared: Play) -> None:
    shared.idle("env-1")
    shared.lose("env-0", "t2", "t3", "t4")
    assert [given[:2] for given in shared.given[6:]] == [("env-1", name) for name in ("t2", "t3", "t4")]
    assert give_back(shared, "t4") == []


def test_a_keeper_that_does_not_know_how_is_asked_for_nothing() -> None:
    class Older(Play):
        keepers_return_trials = False

    play = Older(concurrency=2, max_trials=6, may_prefetch=True)
    play.idle("env-0")
    play.start("t0")
    play.end("t0", at_s=10.5)
    play.deliver("t0")
    play.idle("env-0")
    play.idle("env-1")
    play.run("t5")
    play.idle("env-1")
    assert (play.asked_back, play.dismissed[0]) == ([], "env-1")


def test_the_next_manager_asks_again(shared: Play) -> None:
    shared.idle("env-1")
    after = restored(shared)
    after.idle("env-1")
    assert after.asked_back == []
    after.handle(KeeperConnected("env-0", supports_revoke=True))
    assert after.asked_back == [("env-0", "t4")]


def test_a_job_is_given_no_more_ahead_than_it_may_run_also_after_a_restart() -> None:
    play = Play(max_trials=9, may_prefetch=True)
    play.experiment.jobs.max_trials = 4
    play.idle()
    play.start("t0")
    play.end("t0", at_s=10.5)
    play.deliver("t0")
    play.idle()
    assert [given[1] for given in play.given] == ["t0", "t1", "t2", "t3"]
    play.run("t1")
    after = restored(play)
    after.experiment.scheduler.may_prefetch = True
    after.start("t2")
    after.end("t2", at_s=10.5)
    after.deliver("t2")
    assert after.given == []
    after.run("t3")
    after.lose("env-0", is_clean=True)
    assert after.submitted == ["env-1"]
    after.idle("env-1")
    assert after.given[0] == ("env-1", "t4", None)


# ---- keepers that are replaced in a job that lives on

T0 = AttemptKey("t0", attempt_id(0), "main-0")


@pytest.fixture
def running() -> Play:
    play = Play()
    play.idle()
    play.start("t0")
    return play


def test_what_a_missing_attempt_had_to_tell_is_looked_for_and_without_an_end_it_begins_anew(
    running: Play,
) -> None:
    running.report("t0", "1")
    assert running.handle(AttemptOrphaned(T0)) == [DrainAttempt(T0)]
    running.idle()
    assert len(running.given) == 1, "not before it is known how the first attempt ended"
    running.handle(AttemptLost(T0, 15.0))
    assert running.given[-1] == ("env-0", "t0", "main-0")
    running.start("t0", attempt=1)
    trial = running.trial("t0")
    assert (trial.state, trial.attempt, trial.final) == (TrialState.RUNNING, 1, None)


def test_a_missing_attempt_whose_end_is_found_is_over_and_the_job_takes_the_next(running: Play) -> None:
    running.handle(AttemptOrphaned(T0))
    running.idle()
    running.end("t0")
    running.deliver("t0")
    assert running.trial("t0").state is TrialState.SUCCEEDED
    assert running.given[-1] == ("env-0", "t1", None)


def test_an_attempt_that_is_lost_while_it_was_to_stop_is_over(running: Play) -> None:
    running.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 12.0))
    running.handle(AttemptOrphaned(T0))
    running.handle(AttemptLost(T0, 15.0))
    assert running.trial("t0").state is TrialState.USER_CANCELED


@pytest.mark.parametrize("reuses_jobs", [True, False])
def test_nothing_is_looked_for_of_attempts_that_are_over_or_that_a_cluster_begins_anew(
    reuses_jobs: bool,
) -> None:
    play = Play()
    play.experiment.scheduler.reuses_jobs = reuses_jobs
    play.idle()
    if reuses_jobs:
        play.run("t0")
    assert play.handle(AttemptOrphaned(T0)) == []


# ---- several tasks

PAIR = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 2)))
TASKS = ("ps-0", "worker-0", "worker-1")


@pytest.fixture
def team() -> Play:
    play = Play(completion=PAIR)
    for task in TASKS:
        assert play.given == []
        play.idle(task=task)
    for task in TASKS:
        play.start("t0", task)
    return play


def test_a_trial_is_given_when_all_tasks_of_a_job_are_idle(team: Play) -> None:
    assert team.given == [("env-0", "t0", None)]


def test_the_task_that_reports_first_owns_the_metrics_and_the_other_is_warned_of(team: Play) -> None:
    team.report("t0", "0.5", "worker-1")
    team.report("t0", "0.9", "worker-0")
    trial = team.trial("t0")
    assert (trial.reporter, trial.final) == ("worker-1", "0.5")
    assert "worker-0" in trial.warning


def test_the_trial_ends_when_the_policy_says_so_and_the_rest_is_stopped(team: Play) -> None:
    for task in ("worker-0", "worker-1"):
        assert team.trial("t0").state is TrialState.RUNNING
        team.end("t0", task)
        team.deliver("t0", task)
    assert team.trial("t0").state is TrialState.CLOSING
    assert [effect.trial.trial_id for effect in team.all_of(CancelTrial)] == ["t0"]
    team.end("t0", "ps-0", well=False)
    team.deliver("t0", "ps-0")
    assert team.trial("t0").state is TrialState.SUCCEEDED


def test_every_task_is_told_when_its_own_bytes_are_here(team: Play) -> None:
    team.end("t0", "worker-0")
    team.deliver("t0", "worker-0")
    assert team.all_of(CloseAttempt) == [CloseAttempt(AttemptKey("t0", attempt_id(0), "worker-0"))]


def test_one_failure_ends_the_trial_for_all(team: Play) -> None:
    team.end("t0", "worker-1", well=False)
    team.deliver("t0", "worker-1")
    for task in ("ps-0", "worker-0"):
        team.end("t0", task, well=False)
        team.deliver("t0", task)
    assert (team.trial("t0").state, team.trial("t0").exit_code) == (TrialState.FAILED, 1)


def test_a_task_that_begins_after_the_end_is_stopped_too() -> None:
    play = Play(completion=PAIR)
    for task in TASKS:
        play.idle(task=task)
    play.start("t0", "worker-0")
    play.end("t0", "worker-0", well=False)
    play.start("t0", "ps-0")
    assert len(play.all_of(CancelTrial)) == 1


def test_a_trial_whose_end_is_known_is_not_lost_with_a_task_that_never_tells_its_own(team: Play) -> None:
    for task in ("worker-0", "worker-1"):
        team.end("t0", task)
        team.deliver("t0", task)
    team.lose("env-0")
    assert team.trial("t0").state is TrialState.SUCCEEDED


def test_a_task_that_begins_when_the_trial_is_over_is_let_go(team: Play) -> None:
    for task in TASKS:
        team.end("t0", task)
        team.deliver("t0", task)
    assert team.trial("t0").state is TrialState.SUCCEEDED
    late = AttemptKey("t0", attempt_id(1), "ps-0")
    assert team.handle(AttemptStarted(late, 40.0)) == [CloseAttempt(late)]


def test_a_trial_that_all_tasks_end_is_over_with_the_last_of_them() -> None:
    play = Play(completion=Completion((TaskRole("worker", 2, 1, -1),)))
    for task in ("worker-0", "worker-1"):
        play.idle(task=task)
    for task in ("worker-0", "worker-1"):
        play.start("t0", task)
    play.end("t0", "worker-0", at_s=20.0)
    play.deliver("t0", "worker-0")
    play.end("t0", "worker-1", at_s=120.0)
    assert play.trial("t0").state is TrialState.CLOSING
    play.deliver("t0", "worker-1")
    assert (play.trial("t0").state, play.trial("t0").ended_at_s) == (TrialState.SUCCEEDED, 120.0)


def test_one_task_that_begins_anew_takes_nothing_from_the_others(team: Play) -> None:
    team.report("t0", "0.5", "worker-0")
    team.end("t0", "worker-0")
    team.start("t0", "ps-0", attempt=1)
    trial = team.trial("t0")
    assert (trial.final, trial.attempt, trial.reporter, {ended.key.task for ended in trial.ends}) == (
        "0.5",
        0,
        "worker-0",
        {"worker-0"},
    )
    team.end("t0", "worker-1")
    assert trial.state is TrialState.CLOSING


def test_a_reporter_that_begins_anew_takes_its_results_along(team: Play) -> None:
    team.report("t0", "0.5", "worker-0")
    team.end("t0", "worker-1")
    team.start("t0", "worker-0", attempt=1)
    trial = team.trial("t0")
    assert (trial.final, trial.attempt, {ended.key.task for ended in trial.ends}) == (None, 1, {"worker-1"})


def test_a_lost_task_that_nobody_waits_for_any_more_holds_up_nothing(team: Play) -> None:
    for task in ("worker-0", "worker-1"):
        team.end("t0", task)
        team.deliver("t0", task)
    key = AttemptKey("t0", attempt_id(0), "ps-0")
    assert team.handle(AttemptOrphaned(key)) == [DrainAttempt(key)]
    team.handle(AttemptLost(key, 15.0))
    assert team.trial("t0").state is TrialState.SUCCEEDED


# ---- restarts


def restored(play: Play) -> Play:
    """The next manager: what was stored, and nothing else."""
    before = play.experiment
    after = Play.__new__(Play)
    after.experiment = Experiment("exp", before.budget.limits, True, reuses_jobs=True, state=before.state)
    after.did = []
    for trial in before.trials.values():
        trial.ended = None
        for attempt in trial.attempts.values():
            attempt.apply(AttemptReport.DISCARDED)
    jobs = [type(job)(job.job_id, ever_connected=job.ever_connected) for job in before.jobs.live.values()]
    after.experiment.jobs.max_trials = before.jobs.max_trials
    after.experiment.restore(before.trials.values())
    after.experiment.scheduler.restore(jobs, [])
    after.handle(ManagerReady())
    return after


def test_after_a_restart_jobs_and_queue_are_what_they_were() -> None:
    play = Play(concurrency=2, max_trials=4)
    play.idle("env-0")
    play.start("t0")
    after = restored(play)
    assert after.submitted == []
    after.handle(KeeperConnected("env-0"))
    after.start("t0")
    after.idle("env-1")
    assert after.given == [("env-1", "t1", None)]


def test_after_a_restart_the_ends_that_were_told_before_still_decide(team: Play) -> None:
    for task in ("worker-0", "worker-1"):
        team.end("t0", task)
    team.trial("t0").state = TrialState.RUNNING  # as stored before the second of them
    team.trial("t0").reason = None
    before = team.experiment
    after = Play.__new__(Play)
    after.did = []
    after.experiment = Experiment(
        "exp", before.budget.limits, True, reuses_jobs=True, completion=PAIR, state=before.state
    )
    trial = team.trial("t0")
    trial.ended = None
    trial.attempts["worker-0"].apply(AttemptReport.DELIVERED)
    trial.attempts["worker-1"].apply(AttemptReport.DELIVERED)
    after.experiment.restore([trial])
    after.experiment.scheduler.restore(
        [type(job)(job.job_id, ever_connected=True) for job in before.jobs.live.values()], []
    )
    after.handle(ManagerReady())
    assert trial.state is TrialState.CLOSING
    assert len(after.all_of(CancelTrial)) == 1, "the server that is left is stopped"
    after.end("t0", "ps-0", well=False)
    after.deliver("t0", "ps-0")
    assert trial.state is TrialState.SUCCEEDED


def test_after_a_restart_new_jobs_have_new_names() -> None:
    after = restored(Play())
    after.lose("env-0", is_clean=True)
    assert after.submitted == ["env-1"]


# ---- any order


RETRIES = 1


def lives_of(trial: Trial) -> int:
    """How many jobs may die of a trial before it is over, at most."""
    return 0 if trial.state.is_terminal else 2 * (1 + RETRIES - trial.retries) - trial.was_returned


class AnyReuse(RuleBasedStateMachine):
    """Whatever keepers, jobs and users do, no trial is on two jobs, and the search can come to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(concurrency=2, max_trials=6, max_retries=RETRIES)

    @initialize(may_prefetch=st.booleans())
    def choose_a_tuner(self, may_prefetch: bool) -> None:
        self.play.experiment.scheduler.may_prefetch = may_prefetch

    def live_jobs(self) -> list[str]:
        return list(self.play.experiment.jobs.live)

    def trials_where(self, is_wanted: Callable[[Trial], bool]) -> list[str]:
        return [trial.trial_id for trial in self.play.experiment.trials.values() if is_wanted(trial)]

    def pick(self, names: Iterable[str], number: int) -> str:
        known = list(names)
        return known[number % len(known)]

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9))
    def a_keeper_is_idle(self, number: int) -> None:
        self.play.idle(self.pick(self.live_jobs(), number))

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9), is_clean=st.booleans())
    def a_job_goes(self, number: int, is_clean: bool) -> None:
        self.lose(self.pick(self.live_jobs(), number), [], is_clean=is_clean)

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9), is_clean=st.booleans())
    def a_job_goes_that_had_begun_no_more_than_it_said(self, number: int, is_clean: bool) -> None:
        job_id = self.pick(self.live_jobs(), number)
        self.lose(job_id, self.untouched(job_id), is_clean=is_clean)

    def untouched(self, job_id: str) -> list[str]:
        trial_ids = self.play.experiment.jobs.live[job_id].trial_ids
        return [trial_id for trial_id in trial_ids if self.play.trial(trial_id).state is TrialState.WAITING]

    def lose(self, job_id: str, untouched: list[str], *, is_clean: bool) -> None:
        had_trials = bool(self.play.experiment.jobs.live[job_id].trial_ids)
        known = list(self.play.experiment.trials.values())
        before = sum(map(lives_of, known))
        marked = {trial.trial_id for trial in known if trial.was_returned}
        self.play.lose(job_id, *untouched, is_clean=is_clean)
        if had_trials and not is_clean:
            assert sum(map(lives_of, known)) < before, "or jobs could die without an end"
        newly_marked = {trial.trial_id for trial in known if trial.was_returned} - marked
        assert newly_marked <= set(untouched[:1])

    def on_a_job(self) -> list[str]:
        return self.trials_where(lambda trial: bool(trial.job_id) and not trial.state.is_terminal)

    @precondition(lambda self: self.on_a_job())
    @rule(number=st.integers(0, 9), well=st.booleans())
    def a_trial_runs(self, number: int, well: bool) -> None:
        self.play.run(self.pick(self.on_a_job(), number), well=well)

    @precondition(lambda self: self.on_a_job())
    @rule(number=st.integers(0, 9))
    def a_trial_starts(self, number: int) -> None:
        trial_id = self.pick(self.on_a_job(), number)
        self.play.start(trial_id, attempt=int(self.play.due(trial_id).attempt_id))

    def asked_back(self) -> list[tuple[str, str]]:
        jobs = self.play.experiment.jobs.live.values()
        return [(job.job_id, trial_id) for job in jobs for trial_id in sorted(job.revoking_ids)]

    @precondition(lambda self: self.asked_back())
    @rule(number=st.integers(0, 9))
    def a_trial_is_given_back(self, number: int) -> None:
        asked = self.asked_back()
        self.play.handle(TrialReclaimed(*asked[number % len(asked)], 25.0))

    @precondition(lambda self: self.live_jobs())
    @rule(number=st.integers(0, 9), is_up=st.booleans())
    def a_link_comes_or_goes(self, number: int, is_up: bool) -> None:
        job_id = self.pick(self.live_jobs(), number)
        self.play.handle(
            KeeperConnected(job_id, supports_revoke=True) if is_up else KeeperDisconnected(job_id)
        )

    @precondition(lambda self: self.play.experiment.trials)
    @rule(number=st.integers(0, 9))
    def a_trial_is_cancelled(self, number: int) -> None:
        trial_id = self.pick(self.play.experiment.trials, number)
        self.play.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0))

    @invariant()
    def a_trial_is_in_one_place(self) -> None:
        experiment = self.play.experiment
        places = list(experiment.jobs.queue)
        places += [trial_id for job in experiment.jobs.live.values() for trial_id in job.trial_ids]
        unfinished = self.trials_where(lambda trial: not trial.state.is_terminal)
        assert sorted(places) == sorted(unfinished)

    @invariant()
    def nothing_waits_beside_an_idle_job(self) -> None:
        jobs, concurrency = self.play.experiment.jobs, self.play.experiment.budget.limits.concurrency
        assert not (jobs.queue and jobs.next_idle() is not None)
        assert jobs.shortfall <= 0 or jobs.active == concurrency
        assert jobs.active <= concurrency

    @invariant()
    def nobody_is_asked_for_more_than_is_wanted(self) -> None:
        jobs = self.play.experiment.jobs.live.values()
        begun = [trial_id for _, trial_id in self.asked_back() if self.play.trial(trial_id).attempts]
        assert begun == []
        if any(job.state is JobState.IDLE for job in jobs) and not self.asked_back():
            assert not any(job.waiting_ids for job in jobs if job.is_linked)

    @invariant()
    def no_job_is_kept_for_nothing(self) -> None:
        if self.play.experiment.state.is_over:
            states = {job.state for job in self.play.experiment.jobs.live.values()}
            assert states <= {JobState.DRAINING}

    def teardown(self) -> None:
        for _ in range(100):
            if self.play.experiment.state.is_over:
                break
            for job_id in self.live_jobs():
                self.play.idle(job_id)
            for trial_id in self.on_a_job():
                self.play.run(trial_id)
        assert self.play.experiment.state is ExperimentState.DONE


TestAnyReuse = AnyReuse.TestCase
TestAnyReuse.settings = hypothesis_settings(stateful_step_count=30)
