"""Escalation of stop requests that have no effect: the next step, and its deadline. The test simulates processes and time."""

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
    AttemptLost,
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
    MetricsStored,
    ParametersSuggested,
    TaskReported,
    TimePassed,
    TrialReclaimed,
    TrialStopAsked,
    TunerExhausted,
)
from nni_manager.domain.experiment import ANSWER_TIMEOUT_S, ExperimentCore, ExperimentState
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.stop_escalation import (
    CLUSTER_REPORT_TIMEOUT_S,
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


class SimulatedStops:
    """An experiment whose keepers report only the events that a test passes. The test sets the clock."""

    def __init__(self, *, reuses_jobs: bool = False, concurrency: int = 1, **options: Any) -> None:
        limits = Limits(concurrency, 5, None, **options)
        self.experiment = ExperimentCore("exp", limits, MAXIMIZE, reuses_jobs=reuses_jobs)
        self.now_s = 0.0
        self.timed_effects: list[tuple[float, Effect]] = []
        self.handle(ManagerReady())
        for job_id in list(self.experiment.jobs.live):
            self.handle(KeeperConnected(job_id))
            self.handle(KeeperIdle(job_id, "main"))
        for trial_id in list(self.experiment.trials):
            self.handle(AttemptStarted(AttemptKey(trial_id, attempt_id(0), "main"), 1.0))

    def handle(self, event: Event) -> None:
        for effect in self.experiment.handle(event, self.now_s):
            self.timed_effects.append((self.now_s, effect))
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
        """The steps taken for the jobs, with the time of each step."""
        return [(at_s, _name_of(effect)) for at_s, effect in self.timed_effects if isinstance(effect, STEPS)]

    def state(self, trial_id: str = "t0") -> TrialState:
        return self.experiment.trials[trial_id].state


def test_a_job_that_ignores_a_stop_request_is_killed_and_later_abandoned() -> None:
    search = SimulatedStops()
    search.stop()
    assert [effect.ends_job for _, effect in search.timed_effects if isinstance(effect, CancelTrial)] == [
        True
    ]
    search.pass_time(100)
    gone_s = KILL_S + KILLED_TIMEOUT_S
    assert search.steps() == [(KILL_S, "KILLED"), (gone_s, "ABANDONED"), (gone_s, "Finish")]
    trial = search.experiment.trials["t0"]
    assert (trial.state, trial.run.message) == (TrialState.USER_CANCELED, "remove it with `x`")
    assert search.experiment.state is ExperimentState.STOPPED
    assert not search.experiment.scheduler.runs_jobs


@pytest.mark.parametrize("reason", [ExitReason.STOPPED_BY_USER, ExitReason.TIME_LIMIT])
def test_a_stopped_trial_ends_and_the_experiment_continues_if_the_keeper_is_silent(
    reason: ExitReason,
) -> None:
    search = SimulatedStops()
    search.handle(TrialStopAsked("t0", reason, 1.0))
    search.pass_time(KILL_S)
    assert search.steps() == [(KILL_S, "KILLED")]
    search.handle(JobProcessesEnded("t0"))
    search.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "its keeper is gone", 40.0))
    assert search.experiment.trials["t0"].run.reason is reason
    assert search.experiment.state is ExperimentState.RUNNING
    search.pass_time(300)
    assert search.steps() == [(KILL_S, "KILLED")]


def test_a_reused_job_is_ended_only_after_its_keeper_missed_the_deadline() -> None:
    search = SimulatedStops(reuses_jobs=True)
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    assert [effect.ends_job for _, effect in search.timed_effects if isinstance(effect, CancelTrial)] == [
        False
    ]
    search.pass_time(KILL_S + MARGIN_S)
    assert search.steps() == [(KILL_S, "ENDING"), (KILL_S + MARGIN_S, "KILLED")]


def test_a_reused_job_is_kept_if_its_keeper_stops_the_trial_in_time() -> None:
    search = SimulatedStops(reuses_jobs=True)
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    search.pass_time(KEEPER_GRACE_S)
    search.end()
    search.pass_time(300)
    assert search.steps() == []
    assert search.experiment.stops.next_deadline_s is None


def search_with_a_prefetched_trial() -> SimulatedStops:
    """A reused job runs t0 and holds the prefetched trial t9."""
    search = SimulatedStops(reuses_jobs=True)
    search.handle(ParametersSuggested("t9", 9, {}, {}, 1.0))
    search.experiment.jobs.queue.remove("t9")
    search.experiment.jobs.prefetch(search.experiment.jobs.live["env-0"], "t9")
    search.experiment.trials["t9"].job_id = "env-0"
    search.handle(KeeperConnected("env-0", supports_revoke=True))
    return search


def test_a_reused_job_with_a_prefetched_trial_is_kept_if_its_keeper_stops_the_running_trial_in_time() -> None:
    search = search_with_a_prefetched_trial()
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    search.pass_time(KEEPER_GRACE_S)
    search.end()
    search.pass_time(300)
    assert search.steps() == []


def test_a_reused_job_is_ended_if_its_keeper_stops_only_one_of_two_trials_in_time() -> None:
    search = search_with_a_prefetched_trial()
    search.handle(AttemptStarted(AttemptKey("t9", attempt_id(0), "main"), 1.0))
    for trial_id in ("t0", "t9"):
        search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 1.0))
    search.pass_time(KEEPER_GRACE_S)
    search.end("t0")
    search.pass_time(KILL_S)
    assert search.steps() == [(KILL_S, "ENDING")]


def test_a_reused_job_is_kept_if_its_keeper_has_restarted_and_lost_the_stopping_trial() -> None:
    search = SimulatedStops(reuses_jobs=True)
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    search.handle(AttemptLost(AttemptKey("t0", attempt_id(0), "main"), 2.0))
    assert search.state() is TrialState.USER_CANCELED
    search.pass_time(300)
    assert search.steps() == []
    assert search.experiment.stops.next_deadline_s is None


def test_the_stop_request_for_a_job_that_has_ended_is_removed_at_its_deadline() -> None:
    search = SimulatedStops()
    search.experiment.stops.stop_asked("ended", 0.0, ends_job=True)
    search.pass_time(100)
    assert search.steps() == []
    assert search.experiment.stops.stage("ended") is None


def test_the_deadline_of_a_stop_request_is_removed_when_the_job_ends() -> None:
    search = SimulatedStops()
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    assert search.experiment.time_runs_out_at_s == KILL_S
    search.handle(JobTerminated("t0", ExitReason.JOB_LOST, "gone", 2.0))
    assert search.experiment.time_runs_out_at_s is None


def test_stopping_the_experiment_ends_a_job_whose_keeper_does_not_exit_although_its_trial_has_ended() -> None:
    search = SimulatedStops()
    search.end()
    search.stop()
    search.pass_time(MARGIN_S)
    assert search.steps() == [(MARGIN_S, "DrainJob"), (MARGIN_S, "ENDING")]


def test_the_manager_waits_for_a_prefetched_trial_that_may_start_before_its_keeper_receives_the_stop_command() -> (
    None
):
    search = search_with_a_prefetched_trial()
    search.stop()
    search.pass_time(1.0)
    search.end("t0")
    search.pass_time(KILL_S - 1)
    assert search.steps() == []


def test_a_stopped_experiment_waits_30_s_for_the_tuner_even_if_remaining_data_cannot_be_stored() -> None:
    search = SimulatedStops()
    search.experiment.budget.limits = Limits(2, 5, None)
    # The concurrency becomes two, so the experiment requests a second trial. The tuner does not answer the request in time.
    search.experiment.handle(TimePassed(), 0.0)
    search.stop()
    search.handle(JobProcessesEnded("t0"))
    search.pass_time(60)
    assert search.experiment.stops.stalled == ["t0"]
    assert search.steps() == [(ANSWER_TIMEOUT_S, "Finish")]
    search.handle(TunerExhausted(1))
    assert search.steps() == [(ANSWER_TIMEOUT_S, "Finish")]


def test_arriving_results_extend_the_deadline_for_the_remaining_data_of_a_stopped_experiment() -> None:
    search = SimulatedStops()
    key = AttemptKey("t0", attempt_id(0), "main")
    search.handle(TaskReported(key))
    search.stop()
    search.handle(JobProcessesEnded("t0"))
    search.pass_time(DRAINED_TIMEOUT_S - 1)
    search.handle(MetricsStored(key, ((False, "0.5"),)))
    search.pass_time(2 * DRAINED_TIMEOUT_S - 2)
    assert search.steps() == []


def test_stopping_the_experiment_also_ends_jobs_whose_trials_are_already_stopping() -> None:
    search = SimulatedStops(reuses_jobs=True)
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 1.0))
    search.pass_time(20)
    search.stop()
    search.pass_time(100)
    assert search.steps()[:2] == [(20, "ENDING"), (20 + KILL_S, "KILLED")]


def test_a_keeper_gets_extra_time_to_exit_after_its_trial_ended() -> None:
    search = SimulatedStops()
    search.stop()
    search.pass_time(20)
    search.end()
    search.deliver()
    assert search.steps() == [(20, "Finish")]
    assert search.experiment.scheduler.runs_jobs, "the manager waits for the job"
    search.pass_time(20 + MARGIN_S)
    assert search.steps()[1:] == [(25, "DrainJob"), (25, "ENDING")]
    search.pass_time(100)
    assert search.steps()[3:] == [(30, "KILLED"), (40, "ABANDONED")]
    assert not search.experiment.scheduler.runs_jobs
    assert search.state() is TrialState.USER_CANCELED


def test_canceling_a_prefetched_trial_does_not_shorten_the_grace_period_of_a_running_trial() -> None:
    search = search_with_a_prefetched_trial()
    search.stop()
    search.handle(TrialReclaimed("env-0", "t9", 2.0))
    assert search.state("t9") is TrialState.USER_CANCELED
    search.pass_time(KILL_S - 1)
    assert search.steps() == []
    assert search.state() is TrialState.STOPPING


def test_a_manager_exits_even_if_the_last_bytes_of_a_stopped_experiment_cannot_be_stored() -> None:
    search = SimulatedStops()
    search.stop()
    search.handle(JobProcessesEnded("t0"))
    search.pass_time(DRAINED_TIMEOUT_S - 1)
    # The drain makes slow progress: this report restarts the timeout.
    search.handle(AttemptDrained("t0"))
    search.pass_time(2 * DRAINED_TIMEOUT_S - 2)
    assert search.steps() == []
    search.pass_time(60)
    assert [effect.is_recorded for _, effect in search.timed_effects if isinstance(effect, Finish)] == [False]
    assert not search.experiment.scheduler.runs_jobs
    assert not search.experiment.state.counts_time
    assert search.state() is TrialState.STOPPING, "the next manager drains the rest"
    # If the disk has free space again before the manager exits, the manager still handles the end of the job.
    search.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "its keeper is gone", 70.0))
    assert search.state() is TrialState.USER_CANCELED
    assert search.timed_effects[-1][1] == Finish()


def test_draining_has_no_deadline_before_the_experiment_is_stopped() -> None:
    search = SimulatedStops()
    search.handle(JobProcessesEnded("t0"))
    search.pass_time(600)
    assert search.steps() == []
    search.stop()
    search.pass_time(700)
    assert [effect.is_recorded for _, effect in search.timed_effects if isinstance(effect, Finish)] == [False]


def test_a_stopping_job_has_a_deadline_after_a_manager_restart() -> None:
    before = SimulatedStops()
    before.stop()
    search = SimulatedStops()
    search.experiment = ExperimentCore(
        "exp", before.experiment.budget.limits, MAXIMIZE, state=ExperimentState.STOPPING
    )
    search.experiment.restore(before.experiment.trials.values())
    search.experiment.scheduler.restore([before.experiment.jobs.live["t0"]], [])
    search.experiment.jobs.live["t0"].state = before.experiment.jobs.live["t0"].state
    search.timed_effects.clear()
    search.handle(ManagerReady())
    search.pass_time(KILL_S)
    assert (KILL_S, "KILLED") in search.steps()


def test_the_grace_period_of_the_cluster_postpones_the_kill_of_a_stopping_job() -> None:
    search = SimulatedStops()
    search.experiment.stops.cluster_grace_s = 45.0
    search.stop()
    search.pass_time(60)
    assert search.steps()[0] == (50, "KILLED")


@pytest.mark.parametrize("service", [KubernetesService, OpenPaiService])
def test_the_sum_of_all_stop_deadlines_is_below_the_maximum_stop_time(service: Any) -> None:
    longest_s = max(service.grace_s, KEEPER_GRACE_S) + MARGIN_S + KILLED_TIMEOUT_S
    assert longest_s + DRAINED_TIMEOUT_S + RECORDED_TIMEOUT_S < MAX_STOP_S
    (grace,) = (each for each in dataclasses.fields(KeeperSettings) if each.name == "grace_s")
    assert grace.default == KEEPER_GRACE_S


def test_the_transition_table_covers_every_possible_event_of_every_stage() -> None:
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
def test_every_stop_request_reaches_its_last_stage_within_the_maximum_stop_time(
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
    started_s = now_s
    while (deadline_s := stops.next_deadline_s) is not None:
        now_s = max(now_s, deadline_s)
        assert stops.overdue(now_s)
    assert stops.stage("job") in (StopStage.ABANDONED, StopStage.STALLED)
    assert now_s - started_s <= MAX_STOP_S - RECORDED_TIMEOUT_S


def test_reports_of_a_stopping_trial_do_not_change_the_deadline_of_the_stop_request() -> None:
    stops = StopEscalation()
    stops.stop_asked("job", 0.0, ends_job=False)
    stops.apply("job", StopEvent.PROGRESSED, 10.0)
    assert stops.next_deadline_s == KILL_S


def test_a_repeated_drain_request_does_not_renew_the_deadline() -> None:
    stops = StopEscalation()
    for now_s in (0.0, 3.0):
        stops.apply("job", StopEvent.DRAIN_ASKED, now_s)
    assert stops.next_deadline_s == MARGIN_S


def test_a_cluster_gets_its_whole_grace_period_for_a_job_that_does_not_drain() -> None:
    stops = StopEscalation(cluster_grace_s=40.0)
    stops.apply("job", StopEvent.DRAIN_ASKED, 0.0)
    assert stops.overdue(CLUSTER_REPORT_TIMEOUT_S) == [("job", StopStage.SHUTDOWN_SENT, StopStage.ENDING)]
    assert stops.next_deadline_s == CLUSTER_REPORT_TIMEOUT_S + 40.0 + MARGIN_S


def test_data_of_an_ended_job_is_collected_without_a_deadline_while_the_experiment_runs() -> None:
    stops = StopEscalation()
    stops.stop_asked("job", 0.0, ends_job=True)
    stops.apply("job", StopEvent.ENDED, 1.0)
    assert (stops.stage("job"), stops.next_deadline_s) == (StopStage.COLLECTING, None)
    stops.begin_stopping(100.0)
    assert stops.next_deadline_s == 100.0 + DRAINED_TIMEOUT_S
