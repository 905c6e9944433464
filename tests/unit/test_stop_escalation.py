"""Stops that nobody heeds: what is done next, and by when it is over. Played without a process and without waiting."""

import dataclasses
from typing import Any

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.events import (
    AskTuner,
    AttemptDelivered,
    AttemptDrained,
    AttemptEnded,
    AttemptStarted,
    CancelTrial,
    DrainJob,
    Effect,
    EscalateStop,
    Event,
    ExperimentStopAsked,
    Finish,
    JobProcessesEnded,
    JobTerminated,
    KeeperConnected,
    KeeperIdle,
    ManagerReady,
    ParametersSuggested,
    TimePassed,
    TrialStopAsked,
)
from nni_manager.domain.experiment import Experiment, ExperimentState
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.stop_escalation import (
    DRAINED_TIMEOUT_S,
    FIRST,
    KEEPER_GRACE_S,
    KILLED_TIMEOUT_S,
    MARGIN_S,
    MAX_STOP_S,
    RECORDED_TIMEOUT_S,
    TRANSITIONS,
    StopEscalation,
    StopEvent,
    StopStage,
)
from nni_manager.domain.trial import TrialState
from nni_manager.training_services.kubernetes.backend import KubernetesService
from nni_manager.training_services.openpai.client import OpenPaiService
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason

KILL_S = KEEPER_GRACE_S + MARGIN_S
STEPS = (EscalateStop, DrainJob, Finish)


def _name_of(effect: Effect) -> str:
    return effect.stage.name if isinstance(effect, EscalateStop) else type(effect).__name__


class Play:
    """An experiment whose keepers are silent unless a test speaks for them. Its clock is the test's."""

    def __init__(self, *, reuses_jobs: bool = False, concurrency: int = 1, **options: Any) -> None:
        limits = Limits(concurrency, 5, None, **options)
        self.experiment = Experiment("exp", limits, True, reuses_jobs=reuses_jobs)
        self.now_s = 0.0
        self.did: list[tuple[float, Effect]] = []
        self.handle(ManagerReady())
        for job_id in list(self.experiment.jobs.live):
            self.handle(KeeperConnected(job_id))
            self.handle(KeeperIdle(job_id, "main"))
        for trial_id in list(self.experiment.trials):
            self.handle(AttemptStarted(AttemptKey(trial_id, attempt_id(0), "main"), 1.0))

    def handle(self, event: Event) -> None:
        for effect in self.experiment.handle(event, self.now_s):
            self.did.append((self.now_s, effect))
            match effect:
                case AskTuner(number):
                    self.handle(ParametersSuggested(f"t{number}", number, {}, {}, 1.0))
                case EscalateStop(job, StopStage.ABANDONED):
                    self.handle(JobTerminated(job.job_id, ExitReason.JOB_LOST, "remove it with `x`", 2.0))

    def stop(self) -> None:
        self.handle(ExperimentStopAsked(1.0))

    def pass_time(self, to_s: float) -> None:
        while self.now_s < to_s:
            self.now_s = min(to_s, self.now_s + 0.5)
            self.handle(TimePassed())

    def end(self, trial_id: str = "t0") -> None:
        key = AttemptKey(trial_id, attempt_id(0), "main")
        self.handle(AttemptEnded(TrialEnded(key, ExitReason.STOPPED_BY_USER, 143, 1.0, 2.0, {})))

    def deliver(self, trial_id: str = "t0") -> None:
        self.handle(AttemptDelivered(AttemptKey(trial_id, attempt_id(0), "main")))

    def steps(self) -> list[tuple[float, str]]:
        """What was done about the jobs, and when."""
        return [(at_s, _name_of(effect)) for at_s, effect in self.did if isinstance(effect, STEPS)]

    def state(self, trial_id: str = "t0") -> TrialState:
        return self.experiment.trials[trial_id].state


def test_a_job_that_heeds_nothing_is_killed_and_then_no_longer_waited_for() -> None:
    play = Play()
    play.stop()
    assert [effect.ends_job for _, effect in play.did if isinstance(effect, CancelTrial)] == [True]
    play.pass_time(100)
    gone_s = KILL_S + KILLED_TIMEOUT_S
    assert play.steps() == [(KILL_S, "KILLED"), (gone_s, "ABANDONED"), (gone_s, "Finish")]
    trial = play.experiment.trials["t0"]
    assert (trial.state, trial.message) == (TrialState.USER_CANCELED, "remove it with `x`")
    assert play.experiment.state is ExperimentState.STOPPED
    assert not play.experiment.scheduler.runs_jobs


@pytest.mark.parametrize("reason", [ExitReason.STOPPED_BY_USER, ExitReason.TIME_LIMIT])
def test_one_trial_whose_keeper_is_silent_ends_too_and_the_experiment_goes_on(reason: ExitReason) -> None:
    play = Play()
    play.handle(TrialStopAsked("t0", reason, 1.0))
    play.pass_time(KILL_S)
    assert play.steps() == [(KILL_S, "KILLED")]
    play.handle(JobProcessesEnded("t0"))
    play.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "its keeper is gone", 40.0))
    assert play.experiment.trials["t0"].reason is reason
    assert play.experiment.state is ExperimentState.RUNNING
    play.pass_time(300)
    assert play.steps() == [(KILL_S, "KILLED")]


def test_with_reuse_the_training_service_is_asked_only_once_the_keeper_has_missed_its_deadline() -> None:
    play = Play(reuses_jobs=True)
    play.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    assert [effect.ends_job for _, effect in play.did if isinstance(effect, CancelTrial)] == [False]
    play.pass_time(KILL_S + MARGIN_S)
    assert play.steps() == [(KILL_S, "ENDING"), (KILL_S + MARGIN_S, "KILLED")]


def test_with_reuse_a_keeper_that_stops_its_trial_keeps_its_job() -> None:
    play = Play(reuses_jobs=True)
    play.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    play.pass_time(KEEPER_GRACE_S)
    play.end()
    play.pass_time(300)
    assert play.steps() == []
    assert play.experiment.stops.next_deadline_s is None


def test_a_stop_of_the_experiment_ends_also_a_job_whose_keeper_was_told_before() -> None:
    play = Play(reuses_jobs=True)
    play.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    play.pass_time(20)
    play.stop()
    play.pass_time(100)
    assert play.steps()[:2] == [(20, "ENDING"), (20 + KILL_S, "KILLED")]


def test_a_trial_that_ends_in_time_is_left_alone_and_its_keeper_gets_a_moment_to_leave() -> None:
    play = Play()
    play.stop()
    play.pass_time(20)
    play.end()
    play.deliver()
    assert play.steps() == [(20, "Finish")]
    assert play.experiment.scheduler.runs_jobs, "the job is waited for"
    play.pass_time(20 + MARGIN_S)
    assert play.steps()[1:] == [(25, "DrainJob"), (25, "ENDING")]
    play.pass_time(100)
    assert play.steps()[3:] == [(30, "KILLED"), (40, "ABANDONED")]
    assert not play.experiment.scheduler.runs_jobs
    assert play.state() is TrialState.USER_CANCELED


def test_a_recalled_trial_takes_nothing_of_the_grace_of_the_one_that_runs() -> None:
    play = Play(reuses_jobs=True)
    job = play.experiment.jobs.live["env-0"]
    play.handle(ParametersSuggested("t9", 9, {}, {}, 1.0))
    play.experiment.jobs.queue.remove("t9")
    play.experiment.jobs.prefetch(job, "t9")
    play.experiment.trials["t9"].job_id = "env-0"
    play.stop()
    assert play.state("t9") is TrialState.USER_CANCELED
    play.pass_time(KILL_S - 1)
    assert play.steps() == []
    assert play.state() is TrialState.STOPPING


def test_what_can_be_neither_read_nor_stored_does_not_keep_the_experiment_from_its_end_and_is_not_made_up() -> (
    None
):
    play = Play()
    play.stop()
    play.handle(JobProcessesEnded("t0"))
    play.pass_time(DRAINED_TIMEOUT_S - 1)
    play.handle(AttemptDrained("t0"))  # it goes on, slowly
    play.pass_time(2 * DRAINED_TIMEOUT_S - 2)
    assert play.steps() == []
    play.pass_time(60)
    assert [effect.is_recorded for _, effect in play.did if isinstance(effect, Finish)] == [False]
    assert not play.experiment.scheduler.runs_jobs
    assert play.experiment.is_finished
    assert play.state() is TrialState.STOPPING, "the next manager reads the rest"
    # The disk is free again before the manager has ended.
    play.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "its keeper is gone", 70.0))
    assert play.state() is TrialState.USER_CANCELED
    assert play.did[-1][1] == Finish()


def test_without_a_stop_nothing_hurries_who_reads_what_a_job_has_left() -> None:
    play = Play()
    play.handle(JobProcessesEnded("t0"))
    play.pass_time(600)
    assert play.steps() == []
    play.stop()
    play.pass_time(700)
    assert [effect.is_recorded for _, effect in play.did if isinstance(effect, Finish)] == [False]


def test_a_job_of_an_earlier_manager_that_was_to_stop_has_its_deadline_too() -> None:
    before = Play()
    before.stop()
    play = Play()
    play.experiment = Experiment("exp", before.experiment.budget.limits, True, state=ExperimentState.STOPPING)
    play.experiment.restore(before.experiment.trials.values())
    play.experiment.scheduler.restore([before.experiment.jobs.live["t0"]], [])
    play.experiment.jobs.live["t0"].state = before.experiment.jobs.live["t0"].state
    play.did.clear()
    play.handle(ManagerReady())
    play.pass_time(KILL_S)
    assert (KILL_S, "KILLED") in play.steps()


def test_a_cluster_has_its_own_grace() -> None:
    play = Play()
    play.experiment.stops.cluster_grace_s = 45.0
    play.stop()
    play.pass_time(60)
    assert play.steps()[0] == (50, "KILLED")


@pytest.mark.parametrize("service", [KubernetesService, OpenPaiService])
def test_all_deadlines_together_are_within_the_longest_stop(service: Any) -> None:
    longest_s = max(service.grace_s, KEEPER_GRACE_S) + MARGIN_S + KILLED_TIMEOUT_S
    assert longest_s + DRAINED_TIMEOUT_S + RECORDED_TIMEOUT_S < MAX_STOP_S
    (grace,) = (each for each in dataclasses.fields(KeeperSettings) if each.name == "grace_s")
    assert grace.default == KEEPER_GRACE_S


def test_the_table_knows_every_event_of_every_stage_that_can_meet_it() -> None:
    without_deadline = {StopStage.ABANDONED, StopStage.STALLED}
    expected = {
        (stage, event)
        for stage in StopStage
        for event in StopEvent
        if not (event is StopEvent.OVERDUE and stage in without_deadline)
    }
    assert TRANSITIONS.keys() == expected
    assert set(FIRST.values()) | set(TRANSITIONS.values()) | {StopStage.STOP_SENT} == set(StopStage)


EVENTS = st.sampled_from([event for event in StopEvent if event is not StopEvent.OVERDUE])


@given(
    st.lists(st.tuples(st.floats(0, 40), st.one_of(EVENTS, st.booleans()))),
    st.sampled_from([0.0, 40.0, 45.0]),
)
def test_whatever_happened_before_a_stop_ends_when_nothing_more_happens(
    history: list[tuple[float, StopEvent | bool]], cluster_grace_s: float
) -> None:
    stops, now_s = StopEscalation(cluster_grace_s), 0.0
    for pause_s, what in history:
        now_s += pause_s
        stops.overdue(now_s)
        if isinstance(what, bool):
            stops.stop_asked("job", now_s, ends_job=what)
        else:
            stops.apply("job", what, now_s)
    stops.begin_stopping(now_s)
    stops.stop_asked("job", now_s, ends_job=True)
    began_s = now_s
    while (deadline_s := stops.next_deadline_s) is not None:
        now_s = max(now_s, deadline_s)
        assert stops.overdue(now_s)
    assert stops.stage("job") in (StopStage.ABANDONED, StopStage.STALLED)
    assert now_s - began_s <= MAX_STOP_S - RECORDED_TIMEOUT_S


def test_while_an_experiment_runs_the_data_of_an_ended_job_is_collected_without_a_deadline() -> None:
    stops = StopEscalation()
    stops.stop_asked("job", 0.0, ends_job=True)
    stops.apply("job", StopEvent.ENDED, 1.0)
    assert (stops.stage("job"), stops.next_deadline_s) == (StopStage.COLLECTING, None)
    stops.begin_stopping(100.0)
    assert stops.next_deadline_s == 100.0 + DRAINED_TIMEOUT_S
