"""The keeper's decisions, with hours of faults in milliseconds: no test waits, and nothing is mocked."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from attempts import attempt_id
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trial_keeper.core.events import (
    CleanupFinished,
    Effect,
    EnvironmentFound,
    Event,
    ExitKeeper,
    ExitNotRecorded,
    LinkLost,
    LinkRefused,
    LogDecision,
    ManagerMoved,
    MeasureMetrics,
    MetricsMeasured,
    OpenLink,
    RecordExit,
    ReleaseAttempt,
    Send,
    SignalReceived,
    SignalTrial,
    SpawnFailed,
    SpawnTrial,
    StopNoticeWritten,
    StreamChanged,
    StreamsGrew,
    StreamTruncated,
    TimerFired,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
    WriteStopNotice,
)
from trial_keeper.core.keeper import Keeper
from trial_keeper.core.link import FIRST_RETRY_S, LinkState
from trial_keeper.core.replication import SendChunk
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Environment,
    Offsets,
    Shutdown,
    StopTrial,
    Stream,
    TrialEnded,
    TrialStarted,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason

KEY = AttemptKey("abcde", attempt_id(0), "main")
OTHER_KEY = AttemptKey("fghij", attempt_id(3), "main")
SETTINGS = KeeperSettings("exp", "job", "/mnt/exp", "token", "abcde", grace_s=10.0, linger_s=30.0)
REUSED = replace(SETTINGS, trial_id=None)
# Seconds since the epoch; the keeper's monotonic clock starts at 0.
STARTED_AT_S, ENDED_AT_S = 1000.0, 2000.0


class SimulatedKeeper:
    """A keeper and its clock. `at` passes an event and returns the effects, without log lines.

    It also answers each measurement of the metrics file, and each stop notice.
    """

    def __init__(self, settings: KeeperSettings = SETTINGS) -> None:
        self.keeper = Keeper(settings)
        self.log: list[str] = []
        self.released: list[AttemptKey] = []
        self.now_s = 0.0
        self.metrics_size = 0
        self.awaits_notice = False
        self.notices: list[ExitReason] = []

    def at(self, now_s: float, event: Event) -> list[Effect]:
        assert now_s >= self.now_s, "time never runs backwards"
        self.now_s = now_s
        effects = self.keeper.handle(event, now_s)
        self.log += [effect.text for effect in effects if isinstance(effect, LogDecision)]
        self.released += [effect.key for effect in effects if isinstance(effect, ReleaseAttempt)]
        seen: list[Effect] = []
        for position, effect in enumerate(effects):
            match effect:
                case MeasureMetrics(key=key):
                    assert isinstance(effects[position + 1], WriteStopNotice), "measured before the notice"
                    assert self.keeper.handle(MetricsMeasured(key, self.metrics_size), now_s) == []
                case WriteStopNotice(key=key, reason=reason):
                    self.notices.append(reason)
                    seen += self.at(now_s, StopNoticeWritten(key, self.awaits_notice))
                case LogDecision() | ReleaseAttempt():
                    pass
                case _:
                    seen.append(effect)
        return seen

    def running(self, *, linked: bool = True) -> "SimulatedKeeper":
        """A keeper whose trial has started, and that has connected unless `linked` is false."""
        self.at(0.0, TrialAssigned(KEY))
        self.at(0.0, TrialSpawned(KEY, STARTED_AT_S))
        if linked:
            self.at(0.0, welcome())
        return self


@pytest.fixture
def simulated() -> SimulatedKeeper:
    return SimulatedKeeper()


def welcome(offsets: Offsets | None = None, *, closed: bool = False, key: AttemptKey = KEY) -> Welcome:
    return Welcome("0.6.0", (AttemptOffsets(key, offsets or {}, closed),))


def exited(
    code: int | None = 0,
    signal: int | None = None,
    size: int = 0,
    stderr: str = "",
    out_of_memory: str = "",
) -> TrialExited:
    sizes = dict.fromkeys(Stream, size)
    return TrialExited(KEY, ENDED_AT_S - STARTED_AT_S, code, signal, sizes, stderr, out_of_memory)


def durable(offset: int = 0, *, closed: bool = False, key: AttemptKey = KEY) -> Ack:
    return Ack(AttemptOffsets(key, {Stream.METRICS: offset}, closed))


def grew(size: int) -> StreamsGrew:
    return StreamsGrew(KEY, {Stream.METRICS: size})


def ended(
    reason: ExitReason, code: int, size: int = 0, message: str = "", *changes: FileChange
) -> TrialEnded:
    warnings = tuple(file_warning(Stream.METRICS, change) for change in changes)
    sizes = {Stream.METRICS: size}
    return TrialEnded(KEY, reason, code, STARTED_AT_S, ENDED_AT_S, sizes, message, warnings=warnings)


def end_in(effects: Sequence[Effect]) -> TrialEnded:
    (record,) = [effect for effect in effects if isinstance(effect, RecordExit)]
    return record.ended


# ---- an ordinary trial


def test_an_ordinary_trial_is_started_replicated_and_ended(simulated: SimulatedKeeper) -> None:
    assert simulated.at(0, TrialAssigned(KEY)) == [SpawnTrial(KEY), OpenLink((KEY,))]
    assert simulated.at(0, TrialSpawned(KEY, STARTED_AT_S)) == []
    assert simulated.at(1, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]
    assert simulated.at(2, grew(100)) == [SendChunk(KEY, Stream.METRICS, 0, 100)]
    assert simulated.at(3, durable(100)) == []
    end = ended(ExitReason.SUCCEEDED, 0, 130)
    assert simulated.at(4, exited(0, size=130)) == [
        RecordExit(end),
        Send(end),
        SendChunk(KEY, Stream.METRICS, 100, 30),
    ]
    assert simulated.at(5, durable(130)) == []
    assert simulated.at(6, durable(130, closed=True)) == [ExitKeeper(0)]
    assert simulated.at(7, TimerFired()) == []


def test_the_trial_starts_without_waiting_for_a_manager(simulated: SimulatedKeeper) -> None:
    assert simulated.at(0, TrialAssigned(KEY))[0] == SpawnTrial(KEY)


def test_a_start_before_the_connection_is_reported_once_connected(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    simulated.at(0, grew(5))
    assert simulated.at(9, welcome({Stream.METRICS: 2})) == [
        Send(TrialStarted(KEY, STARTED_AT_S)),
        SendChunk(KEY, Stream.METRICS, 2, 3),
    ]


def test_the_interpreter_of_a_running_trial_is_reported_and_repeated_with_its_start_and_end(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    here = Environment("host", "node", "3.11.2", "ab" * 32)
    assert simulated.at(1, EnvironmentFound(KEY, here)) == [Send(TrialStarted(KEY, STARTED_AT_S, here))]
    simulated.at(2, LinkLost("refused"))
    simulated.at(98, TimerFired())
    assert Send(TrialStarted(KEY, STARTED_AT_S, here)) in simulated.at(99, welcome())
    assert end_in(simulated.at(100, replace(exited(), environment=here))).environment == here


def test_logs_are_collected_only_if_enabled() -> None:
    for collect_logs, streams in ((False, {Stream.METRICS}), (True, set(Stream))):
        simulated = SimulatedKeeper(
            KeeperSettings("exp", "job", "/mnt/exp", "token", "abcde", collect_logs=collect_logs)
        ).running()
        assert set(end_in(simulated.at(1, exited())).final_sizes) == streams


@pytest.mark.parametrize(
    ("event", "code", "reason"),
    [
        (exited(0), 0, ExitReason.SUCCEEDED),
        (exited(1, stderr="no GPU"), 1, ExitReason.NONZERO_EXIT),
        (exited(255), 255, ExitReason.NONZERO_EXIT),
        (exited(None, 9), 137, ExitReason.SIGNAL),
        (exited(None, 11), 139, ExitReason.SIGNAL),
        (exited(None, 15), 143, ExitReason.SIGNAL),
    ],
)
def test_the_keeper_exits_with_the_exit_code_of_its_trial(
    simulated: SimulatedKeeper, event: TrialExited, code: int, reason: ExitReason
) -> None:
    simulated.running()
    end = end_in(simulated.at(1, event))
    assert (end.exit_code, end.reason) == (code, reason)
    assert simulated.at(2, durable(closed=True)) == [ExitKeeper(code)]


def test_the_message_of_a_failed_trial_is_its_last_stderr_and_a_success_has_none(
    simulated: SimulatedKeeper,
) -> None:
    assert end_in(simulated.running().at(1, exited(3, stderr="Traceback"))).message == "Traceback"
    assert end_in(SimulatedKeeper().running().at(1, exited(0, stderr="a warning"))).message == ""


LIMIT = "the container's memory limit of 512 MiB was reached"


@pytest.mark.parametrize(("code", "signal", "expected"), [(None, 9, 137), (137, None, 137), (1, None, 1)])
def test_a_failure_while_memory_ran_out_has_the_reason_out_of_memory(
    simulated: SimulatedKeeper, code: int | None, signal: int | None, expected: int
) -> None:
    end = end_in(simulated.running().at(1, exited(code, signal, stderr="loading", out_of_memory=LIMIT)))
    assert (end.exit_code, end.reason) == (expected, ExitReason.OUT_OF_MEMORY)
    assert end.message == f"{LIMIT}\nloading"


def test_a_trial_that_exits_with_0_succeeds_although_memory_ran_out(simulated: SimulatedKeeper) -> None:
    end = end_in(simulated.running().at(1, exited(0, out_of_memory=LIMIT)))
    assert (end.reason, end.message) == (ExitReason.SUCCEEDED, "")


def test_a_stopping_trial_keeps_its_stop_reason_when_memory_runs_out(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, StopTrial(KEY.trial_id, ExitReason.EARLY_STOPPED))
    assert end_in(simulated.at(2, exited(None, 9, out_of_memory=LIMIT))).reason is ExitReason.EARLY_STOPPED


def test_processes_that_cannot_be_killed_are_named_in_the_log(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, CleanupFinished(KEY, ("71 (sleep 9)", "72 (python x.py)")))
    assert simulated.log[-2:] == [
        "cannot kill process 71 (sleep 9); kill it as its own user",
        "cannot kill process 72 (python x.py); kill it as its own user",
    ]


def test_a_command_that_could_not_start_has_an_end_without_a_start(simulated: SimulatedKeeper) -> None:
    simulated.at(0, TrialAssigned(KEY))
    end = TrialEnded(
        KEY, ExitReason.COULD_NOT_START, 104, 50.0, 50.0, {Stream.METRICS: 0}, "cannot start: no bash"
    )
    assert simulated.at(0, SpawnFailed(KEY, 50.0, 104, "cannot start: no bash")) == [RecordExit(end)]
    assert simulated.at(1, welcome()) == [Send(end)]
    assert simulated.at(2, durable(closed=True)) == [ExitKeeper(104)]


def test_the_end_is_recorded_before_it_is_reported(simulated: SimulatedKeeper) -> None:
    effects = simulated.running().at(1, exited())
    assert [type(effect) for effect in effects] == [RecordExit, Send]


def test_the_keeper_stays_until_the_manager_confirms_that_all_bytes_are_stored(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0, size=10))
    assert simulated.at(2, durable(10)) == []
    assert simulated.at(31, TimerFired()) == []
    assert simulated.at(31.5, durable(10, closed=True)) == [ExitKeeper(0)]


def test_a_connected_manager_that_acknowledges_nothing_is_waited_for_only_as_long_as_an_absent_one(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0, size=10))
    assert simulated.at(30.9, TimerFired()) == []
    assert simulated.at(31, TimerFired()) == [ExitKeeper(0)]


def test_the_keeper_stays_as_long_as_acknowledgements_arrive(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(0, size=1000))
    for step in range(1, 100):
        assert ExitKeeper(0) not in simulated.at(step * 29, durable(step))
    assert simulated.at(99 * 29 + 30, TimerFired()) == [ExitKeeper(0)]


def test_a_running_trial_that_the_manager_has_closed_is_stopped(simulated: SimulatedKeeper) -> None:
    simulated.running()
    assert SignalTrial(KEY, kill=False) in simulated.at(5, durable(closed=True))


def test_a_stop_of_another_trial_is_ignored(simulated: SimulatedKeeper) -> None:
    simulated.running()
    assert simulated.at(5, StopTrial("other", ExitReason.STOPPED_BY_USER)) == []


# ---- the connection


def test_the_retry_delays_double_up_to_a_minute(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    now_s, waits = 0.0, []
    for _ in range(11):
        assert simulated.at(now_s, LinkLost("refused")) == []
        deadline_s = simulated.keeper.next_deadline_s
        assert deadline_s is not None
        assert simulated.at(deadline_s - 0.01, TimerFired()) == []
        assert simulated.at(deadline_s, TimerFired()) == [OpenLink((KEY,))]
        waits.append(deadline_s - now_s)
        now_s = deadline_s
    own = waits[0] / FIRST_RETRY_S
    assert 0.5 <= own <= 1, "delays differ between keepers"
    longest = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert waits == pytest.approx([own * wait_s for wait_s in longest])


def test_an_outage_of_any_length_is_one_line_in_the_log(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    simulated.log.clear()
    for now_s in range(0, 3600 * 5, 60):
        simulated.at(now_s, LinkLost("nobody there"))
        simulated.at(now_s + 60, TimerFired())
    assert simulated.log == ["the link to the manager is down: nobody there"]


def test_a_lost_connection_is_reopened_and_sending_resumes_at_the_managers_offset(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, grew(100))
    assert simulated.at(10, LinkLost("reset")) == []
    assert simulated.at(10.1, grew(120)) == []
    assert simulated.at(10.2, TimerFired()) == [OpenLink((KEY,))]
    assert simulated.at(10.3, welcome({Stream.METRICS: 60})) == [
        Send(TrialStarted(KEY, STARTED_AT_S)),
        SendChunk(KEY, Stream.METRICS, 60, 60),
    ]


def test_a_manager_that_moved_is_tried_at_once(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    for now_s in range(0, 600, 60):
        simulated.at(now_s, LinkLost("nobody there"))
        simulated.at(now_s + 60, TimerFired())
    simulated.at(600, LinkLost("nobody there"))
    assert simulated.at(601, ManagerMoved()) == [OpenLink((KEY,))]
    simulated.at(601, LinkLost("not ready yet"))
    assert simulated.keeper.next_deadline_s is not None
    assert 601 < simulated.keeper.next_deadline_s <= 601 + FIRST_RETRY_S


def test_a_connection_attempt_to_the_old_address_is_replaced_when_the_manager_moves(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False)
    assert simulated.keeper.link.state is LinkState.CONNECTING
    assert simulated.at(1, ManagerMoved()) == [OpenLink((KEY,))]
    assert simulated.at(2, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]


def test_an_open_connection_survives_a_new_manager_json(simulated: SimulatedKeeper) -> None:
    assert simulated.running().at(1, ManagerMoved()) == []


def test_a_refused_keeper_lets_its_trial_run_and_does_not_reconnect(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    assert simulated.at(1, LinkRefused("wrong token")) == []
    assert simulated.log[-1] == "the manager refused: wrong token"
    assert simulated.keeper.next_deadline_s is None
    assert simulated.at(3600, grew(10)) == []
    assert simulated.at(7200, exited(0, size=10)) == [RecordExit(ended(ExitReason.SUCCEEDED, 0, 10))]
    assert simulated.at(7204.9, TimerFired()) == []
    assert simulated.at(7205, TimerFired()) == [ExitKeeper(0)], (
        "a manager that was never reached cannot acknowledge anything"
    )


def test_a_refusal_is_logged_after_an_outage_too(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    for now_s in (0, 60, 120):
        simulated.at(now_s, LinkLost("nobody there"))
        simulated.at(now_s + 60, TimerFired())
    simulated.at(190, LinkRefused("wrong token"))
    assert simulated.log[-1] == "the manager refused: wrong token"


def test_a_refused_keeper_connects_to_the_next_manager(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False).at(1, LinkRefused("wrong token"))
    assert simulated.at(2, ManagerMoved()) == [OpenLink((KEY,))]
    assert simulated.at(3, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]


# ---- stopping


def test_a_stop_sends_sigterm_first_and_sigkill_after_the_grace_period(simulated: SimulatedKeeper) -> None:
    simulated.running()
    assert simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED)) == [SignalTrial(KEY, kill=False)]
    assert simulated.keeper.next_deadline_s == 110
    assert simulated.at(109.9, TimerFired()) == []
    assert simulated.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]
    assert simulated.at(111, TimerFired()) == []
    end = end_in(simulated.at(112, exited(None, 9)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 137)


def test_a_task_that_is_stopped_because_its_trial_is_over_exits_with_0(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.TRIAL_OVER))
    end = end_in(simulated.at(101, exited(None, 15)))
    assert (end.reason, end.exit_code) == (ExitReason.TRIAL_OVER, 143)
    assert simulated.at(102, durable(closed=True)) == [ExitKeeper(0)]


@pytest.mark.parametrize("is_linked", [True, False])
@pytest.mark.parametrize(("succeeded", "code"), [(True, 0), (False, 143)])
def test_a_task_that_runs_when_its_trial_is_closed_exits_with_0_if_the_trial_has_succeeded(
    simulated: SimulatedKeeper, is_linked: bool, succeeded: bool, code: int
) -> None:
    closed = AttemptOffsets(KEY, {}, closed=True, trial_succeeded=succeeded)
    message = Ack(closed) if is_linked else Welcome("0.7.0", (closed,))
    assert SignalTrial(KEY, kill=False) in simulated.running(linked=is_linked).at(100, message)
    simulated.at(101, exited(None, 15))
    assert simulated.at(102, durable(closed=True)) == [ExitKeeper(code)]


def test_a_trial_that_exits_within_the_grace_period_is_not_killed(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.STOPPED_BY_USER))
    assert end_in(simulated.at(101, exited(None, 15))).reason is ExitReason.STOPPED_BY_USER
    assert simulated.at(120, TimerFired()) == []


def test_code_that_awaits_the_notice_gets_sigterm_after_half_of_the_grace_period(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().awaits_notice = True
    assert simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED)) == []
    assert simulated.notices == [ExitReason.EARLY_STOPPED]
    assert simulated.keeper.next_deadline_s == 105
    assert simulated.at(104.9, TimerFired()) == []
    assert simulated.at(105, TimerFired()) == [SignalTrial(KEY, kill=False)]
    assert simulated.keeper.next_deadline_s == 110
    assert simulated.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]


def test_code_that_ends_after_the_notice_gets_no_signal(simulated: SimulatedKeeper) -> None:
    simulated.running().awaits_notice = True
    simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    end = end_in(simulated.at(103, exited(0)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 0)
    assert simulated.at(105, TimerFired()) == []


def test_code_that_awaits_the_notice_is_killed_on_time_even_if_no_timer_fires(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().awaits_notice = True
    simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert SignalTrial(KEY, kill=True) in simulated.at(115, grew(1))


def test_a_second_signal_kills_code_that_awaits_the_notice(simulated: SimulatedKeeper) -> None:
    simulated.running().awaits_notice = True
    assert simulated.at(100, SignalReceived(15)) == []
    assert simulated.at(101, SignalReceived(15)) == [SignalTrial(KEY, kill=True)]
    assert simulated.at(105, TimerFired()) == []


def test_the_grace_period_ends_on_time_even_if_only_other_events_arrive(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.STOPPED_BY_USER))
    assert SignalTrial(KEY, kill=True) in simulated.at(115, grew(1))


def test_a_second_signal_ends_the_grace_period(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, SignalReceived(15))
    assert simulated.at(101, SignalReceived(2)) == [SignalTrial(KEY, kill=True)]
    assert simulated.at(102, SignalReceived(15)) == []
    assert simulated.at(110, TimerFired()) == []
    assert end_in(simulated.at(111, exited(None, 9))).reason is ExitReason.JOB_LOST


def test_a_signal_after_a_stop_message_counts_as_the_first_signal(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert simulated.at(101, SignalReceived(15)) == []
    assert simulated.at(102, SignalReceived(15)) == [SignalTrial(KEY, kill=True)]


def test_the_first_stop_reason_and_its_grace_period_stay(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert simulated.at(105, StopTrial("abcde", ExitReason.STOPPED_BY_USER)) == []
    assert simulated.at(106, SignalReceived(15)) == []
    assert simulated.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]
    assert end_in(simulated.at(111, exited(None, 9))).reason is ExitReason.EARLY_STOPPED


def test_a_command_that_exits_with_0_after_a_stop_keeps_the_stop_reason_and_its_exit_code(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    end = end_in(simulated.at(101, exited(0)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 0)
    assert simulated.at(102, durable(closed=True)) == [ExitKeeper(0)]


def test_a_stop_after_the_end_changes_nothing(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(1))
    assert simulated.at(2, StopTrial("abcde", ExitReason.STOPPED_BY_USER)) == []
    assert simulated.at(3, durable(closed=True)) == [ExitKeeper(1)]


def test_a_signal_to_the_keeper_ends_the_job_as_lost(simulated: SimulatedKeeper) -> None:
    assert simulated.running().at(1, SignalReceived(15)) == [SignalTrial(KEY, kill=False)]
    assert end_in(simulated.at(2, exited(None, 15))).reason is ExitReason.JOB_LOST


def test_a_preemption_is_the_reason_of_the_stop_and_the_clusters_signal_is_not_a_second_one(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().awaits_notice = True
    assert simulated.at(100, StopTrial("abcde", ExitReason.PREEMPTED)) == []
    assert simulated.at(101, SignalReceived(15)) == []
    assert end_in(simulated.at(102, exited(0))).reason is ExitReason.PREEMPTED


def test_a_preemption_of_another_trial_and_one_after_the_signal_change_nothing(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    assert simulated.at(99, StopTrial("other", ExitReason.PREEMPTED)) == []
    simulated.at(100, SignalReceived(15))
    assert simulated.at(101, StopTrial("abcde", ExitReason.PREEMPTED)) == []
    assert end_in(simulated.at(102, exited(0))).reason is ExitReason.JOB_LOST


def test_a_keeper_without_a_trial_exits_on_a_signal() -> None:
    assert ExitKeeper(0) in SimulatedKeeper(REUSED).at(0, SignalReceived(15))


def test_stopping_works_without_a_connection(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    assert simulated.at(1, SignalReceived(2)) == [SignalTrial(KEY, kill=False)]
    assert simulated.at(11, TimerFired()) == [SignalTrial(KEY, kill=True)]


# ---- reports of the end


def test_the_end_is_reported_again_on_every_new_connection(simulated: SimulatedKeeper) -> None:
    end = ended(ExitReason.SUCCEEDED, 0, 10)
    simulated.running().at(1, exited(0, size=10))
    for now_s in (2, 4, 6):
        simulated.at(now_s, LinkLost("manager killed"))
        assert simulated.at(now_s + 1, TimerFired()) == [OpenLink((KEY,))]
        assert simulated.at(now_s + 1, welcome({Stream.METRICS: 4})) == [
            Send(TrialStarted(KEY, STARTED_AT_S)),
            Send(end),
            SendChunk(KEY, Stream.METRICS, 4, 6),
        ]
    assert simulated.at(8, durable(10, closed=True)) == [ExitKeeper(0)]


def test_a_welcome_that_says_closed_ends_the_keeper_after_the_end_of_its_trial(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0, size=10))
    simulated.at(2, LinkLost("reset"))
    simulated.at(3, TimerFired())
    assert simulated.at(4, welcome({Stream.METRICS: 10}, closed=True)) == [ExitKeeper(0)]


def test_a_welcome_that_says_closed_stops_a_running_trial(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    effects = simulated.at(1, welcome(closed=True))
    assert effects == [SignalTrial(KEY, kill=False)]
    assert end_in(simulated.at(2, exited(None, 15))).reason is ExitReason.JOB_LOST
    assert simulated.at(3, durable(closed=True)) == [ExitKeeper(143)]


def test_a_welcome_without_offsets_of_the_attempt_restarts_the_streams_at_0(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False).at(0, grew(7))
    assert SendChunk(KEY, Stream.METRICS, 0, 7) in simulated.at(1, welcome({}, key=OTHER_KEY))


def test_an_ack_for_another_attempt_is_ignored(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(0, size=5))
    assert simulated.at(2, durable(5, closed=True, key=OTHER_KEY)) == []


def test_an_event_of_another_attempt_is_a_bug(simulated: SimulatedKeeper) -> None:
    simulated.running()
    with pytest.raises(KeyError):
        simulated.at(1, TrialSpawned(OTHER_KEY, STARTED_AT_S))


def test_a_keeper_lingers_for_an_absent_manager_and_then_exits(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, LinkLost("reset"))
    simulated.at(100, exited(3))
    for now_s in (110, 120, 129.9):
        assert not any(isinstance(effect, ExitKeeper) for effect in simulated.at(now_s, TimerFired()))
        if simulated.keeper.link.state is LinkState.CONNECTING:
            simulated.at(now_s, LinkLost("nobody there"))
    assert simulated.keeper.next_deadline_s is not None
    assert simulated.keeper.next_deadline_s <= 130
    assert simulated.at(130, TimerFired())[-1] == ExitKeeper(3)


def test_a_keeper_that_has_never_connected_lingers_only_briefly(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False).at(1, LinkLost("nobody there"))
    assert ExitKeeper(3) not in simulated.at(100, exited(3))
    simulated.at(100, LinkLost("nobody there"))
    assert ExitKeeper(3) not in simulated.at(104.9, TimerFired())
    assert simulated.at(105, TimerFired())[-1] == ExitKeeper(3)


def test_a_keeper_that_could_not_record_the_end_lingers_as_if_it_had_been_connected(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False).at(1, LinkLost("nobody there"))
    simulated.at(100, exited(3))
    simulated.at(100.5, ExitNotRecorded())
    assert "retrying, for 30 s without a manager" in simulated.log[-1]
    simulated.at(100.5, LinkLost("nobody there"))
    assert ExitKeeper(3) not in simulated.at(130.4, TimerFired())
    if simulated.keeper.link.state is LinkState.CONNECTING:
        simulated.at(130.4, LinkLost("nobody there"))
    assert simulated.at(130.5, TimerFired())[-1] == ExitKeeper(3)


def test_a_connection_lost_after_the_end_does_not_extend_the_linger_time(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(0))
    simulated.at(20, LinkLost("manager killed"))
    assert ExitKeeper(0) not in simulated.at(30.9, TimerFired())
    assert simulated.at(31, TimerFired()) == [ExitKeeper(0)]


def test_a_manager_that_reconnects_in_time_restarts_the_linger_time(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False).at(1, exited(0))
    simulated.at(25, welcome())
    assert simulated.at(54.9, TimerFired()) == []
    assert simulated.at(54.95, durable(closed=True)) == [ExitKeeper(0)]


def test_a_running_trial_continues_through_hours_without_a_manager(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, LinkLost("network down"))
    for hour in range(1, 49):
        simulated.at(hour * 3600, grew(hour * 100))
        if simulated.keeper.link.state is LinkState.CONNECTING:
            simulated.at(hour * 3600, LinkLost("network down"))
    effects = simulated.at(49 * 3600, ManagerMoved()) + simulated.at(49 * 3600, welcome({Stream.METRICS: 1}))
    assert effects[-1] == SendChunk(KEY, Stream.METRICS, 1, 4799)


def test_a_shutdown_stops_the_trial_and_then_ends_the_keeper(simulated: SimulatedKeeper) -> None:
    simulated.running()
    assert simulated.at(1, Shutdown("the experiment is over")) == [SignalTrial(KEY, kill=False)]
    assert "the manager sent Shutdown: the experiment is over" in simulated.log
    effects = simulated.at(2, exited(None, 15))
    assert end_in(effects).reason is ExitReason.JOB_LOST
    assert effects[-1] == ExitKeeper(143)


def test_a_shutdown_after_the_end_of_the_trial_ends_the_keeper_at_once(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(2))
    assert simulated.at(2, Shutdown("enough")) == [ExitKeeper(2)]


# ---- truncated files


def test_a_truncated_stream_ends_at_the_truncation_and_the_connection_stays(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    assert simulated.at(2, StreamTruncated(KEY, Stream.METRICS, 0, 30)) == [
        SendChunk(KEY, Stream.METRICS, 0, 30)
    ]
    assert "the metrics file was truncated to 30 bytes" in simulated.log[-1]
    assert simulated.at(3, grew(200)) == []
    end = ended(ExitReason.SUCCEEDED, 0, 30, "", FileChange.TRUNCATED)
    assert end_in(simulated.at(4, exited(0, size=200))) == end


def test_a_truncation_found_after_the_end_is_recorded_and_reported(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, exited(0, size=100))
    end = ended(ExitReason.SUCCEEDED, 0, 30, "", FileChange.TRUNCATED)
    assert simulated.at(2, StreamTruncated(KEY, Stream.METRICS, 0, 30)) == [
        RecordExit(end),
        Send(end),
        SendChunk(KEY, Stream.METRICS, 0, 30),
    ]


# ---- rewritten and replaced files


TRUNCATED = file_warning(Stream.METRICS, FileChange.TRUNCATED)
REWRITTEN = file_warning(Stream.METRICS, FileChange.REWRITTEN)


def test_a_file_that_becomes_shorter_causes_a_warning_in_the_end_report(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    simulated.at(2, grew(40))
    assert simulated.log[-1] == TRUNCATED
    simulated.at(3, grew(120))
    end = end_in(simulated.at(4, exited(0, size=130)))
    assert end == ended(ExitReason.SUCCEEDED, 0, 130, "", FileChange.TRUNCATED)
    assert simulated.log.count(TRUNCATED) == 1


def test_a_file_that_is_shorter_at_the_end_causes_a_warning_too(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    simulated.at(2, durable(100))
    assert end_in(simulated.at(4, exited(0, size=90))).warnings == (TRUNCATED,)


def test_files_that_only_grow_cause_no_warning(simulated: SimulatedKeeper) -> None:
    simulated.running()
    for size in (0, 10, 10, 11):
        simulated.at(1, grew(size))
    assert end_in(simulated.at(4, exited(0, size=11))).warnings == ()


def test_a_change_found_after_the_end_is_recorded_and_reported(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, exited(0, size=100))
    end = ended(ExitReason.SUCCEEDED, 0, 100, "", FileChange.REWRITTEN)
    change = StreamChanged(KEY, Stream.METRICS, FileChange.REWRITTEN)
    assert simulated.at(2, change) == [RecordExit(end), Send(end)]
    assert simulated.at(3, change) == []
    assert simulated.log.count(REWRITTEN) == 1


def test_only_the_first_change_of_a_stream_is_reported(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, StreamChanged(KEY, Stream.METRICS, FileChange.REWRITTEN))
    simulated.at(2, StreamChanged(KEY, Stream.METRICS, FileChange.REPLACED))
    assert end_in(simulated.at(4, exited(0))).warnings == (REWRITTEN,)


def test_a_change_of_an_uncollected_stream_or_a_closed_attempt_is_ignored(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, StreamChanged(KEY, Stream.STDOUT, FileChange.REPLACED))
    assert simulated.at(2, StreamChanged(OTHER_KEY, Stream.METRICS, FileChange.REPLACED)) == []
    assert end_in(simulated.at(4, exited(0))).warnings == ()


# ---- the metrics size at a stop


STOPS = [
    StopTrial("abcde", ExitReason.EARLY_STOPPED),
    SignalReceived(15),
    Shutdown("over"),
    durable(closed=True),
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
@pytest.mark.parametrize("code", [0, 143])
def test_the_end_report_contains_the_metrics_size_before_the_stop(
    simulated: SimulatedKeeper, stop: Event, code: int
) -> None:
    simulated.running()
    simulated.at(1, grew(80))
    simulated.metrics_size = 100
    simulated.at(2, stop)
    simulated.metrics_size = 200
    simulated.at(3, SignalReceived(15))
    simulated.at(3, grew(200))
    end = end_in(simulated.at(4, exited(code, size=210)))
    assert (end.metrics_size_at_stop, end.exit_code) == (100, code)


def test_a_trial_that_was_not_stopped_has_no_metrics_size_at_the_stop(simulated: SimulatedKeeper) -> None:
    simulated.running()
    end = end_in(simulated.at(1, exited(0, size=100)))
    assert end.metrics_size_at_stop is None


def test_a_file_truncated_before_the_stop_counts_with_its_largest_size(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    simulated.metrics_size = 10
    simulated.at(2, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert end_in(simulated.at(4, exited(0, size=10))).metrics_size_at_stop == 100


class KeeperLife(RuleBasedStateMachine):
    """Every order of events that a host can produce."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper(SETTINGS)
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.size = self.sent = 0
        self.end_of_stream = math.inf
        self.last_chunk: SendChunk | None = None
        """The chunk that the host reads next."""
        self.is_running = self.is_spawned = self.is_connecting = self.is_up = False
        self.manager_has_moved = self.is_truncating = False
        self.recorded: TrialEnded | None = None
        self.exits: list[int] = []
        self.stops: list[ExitReason] = []
        self.awaits_notice = False
        self.notified_s: float | None = None
        self.was_terminated = self.was_killed = False
        self.warnings: list[str] = []
        self._post(TrialAssigned(KEY))

    @property
    def counted(self) -> int:
        """The bytes of the file before any truncation."""
        return int(min(self.size, self.end_of_stream))

    def _post(self, event: Event) -> None:
        was_over = bool(self.exits)
        self.last_chunk = None
        effects = self.keeper.handle(event, self.now_s)
        assert not (was_over and effects), "no effect follows ExitKeeper"
        for position, effect in enumerate(effects):
            self._check(effect, is_last=position == len(effects) - 1)

    def _check(self, effect: Effect, *, is_last: bool) -> None:
        match effect:
            case SpawnTrial():
                assert not self.is_spawned, "a trial is started once"
                self.is_spawned = True
            case OpenLink():
                assert not self.is_up, "one connection at a time"
                assert not self.is_connecting or self.manager_has_moved, "one connection attempt at a time"
                self.is_connecting, self.manager_has_moved = True, False
            case SendChunk() as chunk:
                assert self.is_up
                assert chunk.offset == self.sent
                self.sent += chunk.size_bytes
                assert self.sent <= self.counted
                self.last_chunk = chunk
            case Send(message=message):
                assert self.is_up
                if isinstance(message, TrialEnded):
                    assert message == self.recorded, "an end is recorded before it is reported"
            case RecordExit(ended=end):
                assert self.recorded is None or self.is_truncating, "an end is recorded once"
                assert not self.is_running
                assert end.final_sizes[Stream.METRICS] <= self.end_of_stream
                self.recorded = end
            case MeasureMetrics(key=key):
                assert self.is_running
                self._post(MetricsMeasured(key, self.size))
            case WriteStopNotice(key=key, reason=reason):
                assert self.notified_s is None, "one notice for each stop"
                assert reason is self.stops[0]
                self.notified_s = self.now_s
                self._post(StopNoticeWritten(key, self.awaits_notice))
                assert self.was_terminated != self.awaits_notice
            case SignalTrial(kill=kill):
                assert self.is_running
                assert self.notified_s is not None, "no signal comes before the notice"
                assert kill or not (self.was_terminated or self.was_killed), "SIGTERM is sent once, first"
                self.was_terminated |= not kill
                self.was_killed |= kill
            case ExitKeeper(code=code):
                assert is_last
                assert self.recorded is not None
                assert code == self.recorded.exit_code
                self.exits.append(code)

    @precondition(lambda self: self.is_spawned and not self.is_running and self.recorded is None)
    @rule(succeeds=st.sampled_from([True, True, True, False]))
    def spawn(self, succeeds: bool) -> None:
        self.is_running = succeeds
        if succeeds:
            self._post(TrialSpawned(KEY, STARTED_AT_S))
        else:
            self._post(SpawnFailed(KEY, STARTED_AT_S, 104, "cannot start"))

    @precondition(lambda self: self.is_running)
    @rule(more=st.integers(1, 2_000_000))
    def grow(self, more: int) -> None:
        self.size += more
        self._post(grew(self.size))

    @precondition(lambda self: self.is_running and self.size)
    @rule(share=st.floats(0, 1, exclude_max=True))
    def truncate_and_rewrite(self, share: float) -> None:
        if self.end_of_stream == math.inf:
            self.warnings = [TRUNCATED]
        self._post(grew(int(self.size * share)))
        self._post(grew(self.size))

    @precondition(lambda self: self.last_chunk is not None)
    @rule(share=st.floats(0, 1, exclude_max=True))
    def find_truncated_file(self, share: float) -> None:
        chunk = self.last_chunk
        assert chunk is not None
        size = int((chunk.offset + chunk.size_bytes) * share)
        self.sent = chunk.offset
        self.end_of_stream = min(self.end_of_stream, max(chunk.offset, size))
        self.is_truncating = True
        self.warnings = [TRUNCATED]
        self._post(StreamTruncated(KEY, Stream.METRICS, chunk.offset, size))
        self.is_truncating = False

    @precondition(lambda self: self.is_running and self.notified_s is None)
    @rule()
    def await_notice(self) -> None:
        self.awaits_notice = True

    @precondition(lambda self: self.is_running)
    @rule(how=st.sampled_from([(0, None), (1, None), (None, 9), (None, 15)]), more=st.integers(0, 1000))
    def end(self, how: tuple[int | None, int | None], more: int) -> None:
        self.is_running = False
        self.size += more
        self._post(exited(*how, size=self.size))
        assert self.recorded is not None
        if self.stops:
            assert self.recorded.reason is self.stops[0], "the first reason stays"
        assert (self.recorded.metrics_size_at_stop is not None) == bool(self.stops)
        assert self.recorded.warnings == tuple(self.warnings)

    @precondition(lambda self: self.is_connecting and (self.is_running or self.recorded))
    @rule(share=st.floats(0, 1), closed=st.sampled_from([False, False, False, True]))
    def open_link(self, share: float, closed: bool) -> None:
        self.is_connecting, self.is_up = False, True
        self.sent = int(self.counted * share)
        if closed and self.is_running:
            self.stops.append(ExitReason.JOB_LOST)
        self._post(welcome({Stream.METRICS: self.sent}, closed=closed))

    @precondition(lambda self: self.is_up or self.is_connecting)
    @rule(is_refused=st.sampled_from([False, False, True]))
    def lose_link(self, is_refused: bool) -> None:
        self.is_connecting = self.is_up = False
        self._post(LinkRefused("no") if is_refused else LinkLost("gone"))

    @rule()
    def move_manager(self) -> None:
        self.manager_has_moved = True
        self._post(ManagerMoved())

    @precondition(lambda self: self.is_up)
    @rule(share=st.floats(0, 1), closed=st.booleans())
    def confirm(self, share: float, closed: bool) -> None:
        if closed and self.is_running:
            self.stops.append(ExitReason.JOB_LOST)
        self._post(durable(int(self.sent * share), closed=closed))

    @precondition(lambda self: self.is_up)
    @rule(reason=st.sampled_from([ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER]))
    def stop_trial(self, reason: ExitReason) -> None:
        if self.is_running:
            self.stops.append(reason)
        self._post(StopTrial("abcde", reason))

    @precondition(lambda self: self.is_running or self.recorded)
    @rule()
    def signal(self) -> None:
        if self.is_running:
            self.stops.append(ExitReason.JOB_LOST)
        self._post(SignalReceived(15))

    @precondition(lambda self: self.is_up)
    @rule()
    def shut_down(self) -> None:
        if self.is_running:
            self.stops.append(ExitReason.JOB_LOST)
        self._post(Shutdown("over"))

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._post(TimerFired())

    @invariant()
    def it_exits_once_and_after_its_trial(self) -> None:
        assert len(self.exits) <= 1
        assert not (self.exits and self.is_running)

    @invariant()
    def a_stop_reaches_its_trial_on_time(self) -> None:
        if self.is_running and self.notified_s is not None:
            waited_s = self.now_s - self.notified_s
            if waited_s >= SETTINGS.grace_s / 2:
                assert self.was_terminated or self.was_killed
            if waited_s >= SETTINGS.grace_s:
                assert self.was_killed

    @invariant()
    def no_deadline_stays_in_the_past(self) -> None:
        deadline_s = self.keeper.next_deadline_s
        if deadline_s is not None and not self.exits and deadline_s <= self.now_s:
            self._post(TimerFired())
            following_s = self.keeper.next_deadline_s
            assert self.exits or following_s is None or following_s > self.now_s

    def teardown(self) -> None:
        """A keeper exits once its trial has ended and no manager connects, after any history."""
        if not self.is_running and self.recorded is None:
            self.spawn(succeeds=True)
        if self.is_running:
            self.end((0, None), 0)
        for _ in range(3):
            if self.is_up or self.is_connecting:
                self.lose_link(is_refused=False)
            self.pass_time(SETTINGS.linger_s)
        assert len(self.exits) == 1


TestKeeperLife = KeeperLife.TestCase
TestKeeperLife.settings = hypothesis_settings(stateful_step_count=40)


@pytest.mark.parametrize("is_seen_while_it_runs", [True, False])
def test_a_stream_over_its_quota_is_reported_once(simulated, monkeypatch, is_seen_while_it_runs) -> None:
    monkeypatch.setitem(QUOTA_BYTES, Stream.METRICS, 12)
    simulated.running()
    if is_seen_while_it_runs:
        for size in (12, 13, 14):
            simulated.at(1, StreamsGrew(KEY, {Stream.METRICS: size}))
    simulated.at(2, exited(size=20))
    expected = [text for text in simulated.log if "metrics has reached its quota of 12 bytes" in text]
    assert len(expected) == 1


def test_the_first_acknowledgement_after_an_outage_resets_the_delay_of_the_next_reconnection(
    simulated,
) -> None:
    simulated.running(linked=False)
    for now_s in range(0, 600, 60):
        simulated.at(now_s, LinkLost("connection refused"))
        simulated.at(now_s + 60, TimerFired())
    simulated.at(600, welcome())
    simulated.at(601, grew(100))
    simulated.at(602, durable(100))
    simulated.at(603, LinkLost("reset"))
    assert simulated.keeper.next_deadline_s is not None
    assert 603 < simulated.keeper.next_deadline_s <= 603 + FIRST_RETRY_S
