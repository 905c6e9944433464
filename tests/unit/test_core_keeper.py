"""The keeper, with hours of faults played in milliseconds: nothing here waits, and nothing is mocked."""

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
    Event,
    ExitKeeper,
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
    StreamChanged,
    StreamsGrew,
    StreamTruncated,
    TimerFired,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
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
# On the clock of the epoch; the keeper's own clock begins at 0.
STARTED_AT_S, ENDED_AT_S = 1000.0, 2000.0


class Play:
    """A keeper and its clock. `at` hands over an event and returns what the keeper does, without its log lines.

    It answers a keeper that measures the metrics file.
    """

    def __init__(self, settings: KeeperSettings = SETTINGS) -> None:
        self.keeper = Keeper(settings)
        self.log: list[str] = []
        self.released: list[AttemptKey] = []
        self.now_s = 0.0
        self.metrics_size = 0

    def at(self, now_s: float, event: Event) -> list[Effect]:
        assert now_s >= self.now_s, "time does not run backwards"
        self.now_s = now_s
        effects = self.keeper.handle(event, now_s)
        self.log += [effect.text for effect in effects if isinstance(effect, LogDecision)]
        self.released += [effect.key for effect in effects if isinstance(effect, ReleaseAttempt)]
        for position, effect in enumerate(effects):
            if isinstance(effect, MeasureMetrics):
                assert effects[position + 1] == SignalTrial(effect.key, kill=False), (
                    "measured before the signal"
                )
                assert self.keeper.handle(MetricsMeasured(effect.key, self.metrics_size), now_s) == []
        unseen = LogDecision | ReleaseAttempt | MeasureMetrics
        return [effect for effect in effects if not isinstance(effect, unseen)]

    def running(self, *, linked: bool = True) -> "Play":
        """As after an ordinary start."""
        self.at(0.0, TrialAssigned(KEY))
        self.at(0.0, TrialSpawned(KEY, STARTED_AT_S))
        if linked:
            self.at(0.0, welcome())
        return self


@pytest.fixture
def play() -> Play:
    return Play()


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


# ---- the ordinary life


def test_an_ordinary_life(play: Play) -> None:
    assert play.at(0, TrialAssigned(KEY)) == [SpawnTrial(KEY), OpenLink((KEY,))]
    assert play.at(0, TrialSpawned(KEY, STARTED_AT_S)) == []
    assert play.at(1, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]
    assert play.at(2, grew(100)) == [SendChunk(KEY, Stream.METRICS, 0, 100)]
    assert play.at(3, durable(100)) == []
    end = ended(ExitReason.SUCCEEDED, 0, 130)
    assert play.at(4, exited(0, size=130)) == [
        RecordExit(end),
        Send(end),
        SendChunk(KEY, Stream.METRICS, 100, 30),
    ]
    assert play.at(5, durable(130)) == []
    assert play.at(6, durable(130, closed=True)) == [ExitKeeper(0)]
    assert play.at(7, TimerFired()) == []


def test_the_trial_starts_without_waiting_for_any_manager(play: Play) -> None:
    assert play.at(0, TrialAssigned(KEY))[0] == SpawnTrial(KEY)


def test_a_start_before_the_link_is_told_when_the_link_is_there(play: Play) -> None:
    play.running(linked=False)
    play.at(0, grew(5))
    assert play.at(9, welcome({Stream.METRICS: 2})) == [
        Send(TrialStarted(KEY, STARTED_AT_S)),
        SendChunk(KEY, Stream.METRICS, 2, 3),
    ]


def test_logs_are_collected_only_when_asked_for() -> None:
    for collect_logs, streams in ((False, {Stream.METRICS}), (True, set(Stream))):
        play = Play(
            KeeperSettings("exp", "job", "/mnt/exp", "token", "abcde", collect_logs=collect_logs)
        ).running()
        assert set(end_in(play.at(1, exited())).final_sizes) == streams


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
def test_the_keeper_ends_with_its_trials_exit_code(
    play: Play, event: TrialExited, code: int, reason: ExitReason
) -> None:
    play.running()
    end = end_in(play.at(1, event))
    assert (end.exit_code, end.reason) == (code, reason)
    assert play.at(2, durable(closed=True)) == [ExitKeeper(code)]


def test_the_last_words_of_a_failed_trial_are_told_and_of_a_good_one_not(play: Play) -> None:
    assert end_in(play.running().at(1, exited(3, stderr="Traceback"))).message == "Traceback"
    assert end_in(Play().running().at(1, exited(0, stderr="a warning"))).message == ""


LIMIT = "the container's memory limit of 512 MiB was reached"


@pytest.mark.parametrize(("code", "signal", "told"), [(None, 9, 137), (137, None, 137), (1, None, 1)])
def test_a_failure_while_memory_ran_out_is_for_want_of_memory(
    play: Play, code: int | None, signal: int | None, told: int
) -> None:
    end = end_in(play.running().at(1, exited(code, signal, stderr="loading", out_of_memory=LIMIT)))
    assert (end.exit_code, end.reason) == (told, ExitReason.OUT_OF_MEMORY)
    assert end.message == f"{LIMIT}\nloading"


def test_a_trial_that_succeeds_although_memory_ran_out_has_succeeded(play: Play) -> None:
    end = end_in(play.running().at(1, exited(0, out_of_memory=LIMIT)))
    assert (end.reason, end.message) == (ExitReason.SUCCEEDED, "")


def test_a_trial_that_was_being_stopped_keeps_that_reason_when_memory_runs_out(play: Play) -> None:
    play.running().at(1, StopTrial(KEY.trial_id, ExitReason.EARLY_STOPPED))
    assert end_in(play.at(2, exited(None, 9, out_of_memory=LIMIT))).reason is ExitReason.EARLY_STOPPED


def test_what_cannot_be_ended_is_named_in_the_log(play: Play) -> None:
    play.running().at(1, CleanupFinished(KEY, ("71 (sleep 9)", "72 (python x.py)")))
    assert play.log[-2:] == [
        "cannot kill process 71 (sleep 9); kill it as its own user",
        "cannot kill process 72 (python x.py); kill it as its own user",
    ]


def test_a_command_that_could_not_be_started_is_an_end_without_a_start(play: Play) -> None:
    play.at(0, TrialAssigned(KEY))
    end = TrialEnded(
        KEY, ExitReason.COULD_NOT_START, 104, 50.0, 50.0, {Stream.METRICS: 0}, "cannot start: no bash"
    )
    assert play.at(0, SpawnFailed(KEY, 50.0, 104, "cannot start: no bash")) == [RecordExit(end)]
    assert play.at(1, welcome()) == [Send(end)]
    assert play.at(2, durable(closed=True)) == [ExitKeeper(104)]


def test_the_end_is_recorded_before_it_is_told(play: Play) -> None:
    effects = play.running().at(1, exited())
    assert [type(effect) for effect in effects] == [RecordExit, Send]


def test_the_keeper_stays_until_it_is_told_that_all_is_recorded(play: Play) -> None:
    play.running().at(1, exited(0, size=10))
    assert play.at(2, durable(10)) == []
    assert play.at(31, TimerFired()) == []
    assert play.at(31.5, durable(10, closed=True)) == [ExitKeeper(0)]


def test_a_manager_that_listens_and_takes_nothing_is_waited_for_no_longer_than_one_that_is_away(
    play: Play,
) -> None:
    play.running().at(1, exited(0, size=10))
    assert play.at(30.9, TimerFired()) == []
    assert play.at(31, TimerFired()) == [ExitKeeper(0)]


def test_as_long_as_the_manager_takes_more_the_keeper_stays(play: Play) -> None:
    play.running().at(1, exited(0, size=1000))
    for step in range(1, 100):
        assert ExitKeeper(0) not in play.at(step * 29, durable(step))
    assert play.at(99 * 29 + 30, TimerFired()) == [ExitKeeper(0)]


def test_a_running_trial_that_the_manager_has_closed_is_stopped(play: Play) -> None:
    play.running()
    assert SignalTrial(KEY, kill=False) in play.at(5, durable(closed=True))


def test_a_stop_of_another_trial_is_not_for_this_one(play: Play) -> None:
    play.running()
    assert play.at(5, StopTrial("other", ExitReason.STOPPED_BY_USER)) == []


# ---- the link


def test_the_waits_between_tries_are_these(play: Play) -> None:
    play.running(linked=False)
    now_s, waits = 0.0, []
    for _ in range(11):
        assert play.at(now_s, LinkLost("refused")) == []
        deadline_s = play.keeper.next_deadline_s
        assert deadline_s is not None
        assert play.at(deadline_s - 0.01, TimerFired()) == []
        assert play.at(deadline_s, TimerFired()) == [OpenLink((KEY,))]
        waits.append(deadline_s - now_s)
        now_s = deadline_s
    own = waits[0] / FIRST_RETRY_S
    assert 0.5 <= own <= 1, "keepers do not wait equally long"
    longest = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert waits == pytest.approx([own * wait_s for wait_s in longest])


def test_an_outage_is_one_line_in_the_log_however_long_it_is(play: Play) -> None:
    play.running(linked=False)
    play.log.clear()
    for now_s in range(0, 3600 * 5, 60):
        play.at(now_s, LinkLost("nobody there"))
        play.at(now_s + 60, TimerFired())
    assert play.log == ["the link to the manager is down: nobody there"]


def test_a_link_that_is_lost_is_opened_again_and_goes_on_where_the_manager_is(play: Play) -> None:
    play.running().at(1, grew(100))
    assert play.at(10, LinkLost("reset")) == []
    assert play.at(10.1, grew(120)) == []
    assert play.at(10.2, TimerFired()) == [OpenLink((KEY,))]
    assert play.at(10.3, welcome({Stream.METRICS: 60})) == [
        Send(TrialStarted(KEY, STARTED_AT_S)),
        SendChunk(KEY, Stream.METRICS, 60, 60),
    ]


def test_a_manager_that_moved_is_tried_at_once(play: Play) -> None:
    play.running(linked=False)
    for now_s in range(0, 600, 60):
        play.at(now_s, LinkLost("nobody there"))
        play.at(now_s + 60, TimerFired())
    play.at(600, LinkLost("nobody there"))
    assert play.at(601, ManagerMoved()) == [OpenLink((KEY,))]
    play.at(601, LinkLost("not ready yet"))
    assert play.keeper.next_deadline_s is not None
    assert 601 < play.keeper.next_deadline_s <= 601 + FIRST_RETRY_S


def test_a_try_at_an_address_the_manager_has_left_is_given_up_for_the_new_one(play: Play) -> None:
    play.running(linked=False)
    assert play.keeper.link.state is LinkState.CONNECTING
    assert play.at(1, ManagerMoved()) == [OpenLink((KEY,))]
    assert play.at(2, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]


def test_a_link_that_is_up_is_not_given_up_for_a_new_manager_json(play: Play) -> None:
    assert play.running().at(1, ManagerMoved()) == []


def test_a_refused_keeper_lets_its_trial_run_and_tries_no_more(play: Play) -> None:
    play.running(linked=False)
    assert play.at(1, LinkRefused("wrong token")) == []
    assert play.log[-1] == "the manager refused: wrong token"
    assert play.keeper.next_deadline_s is None
    assert play.at(3600, grew(10)) == []
    assert play.at(7200, exited(0, size=10)) == [RecordExit(ended(ExitReason.SUCCEEDED, 0, 10))]
    assert play.at(7204.9, TimerFired()) == []
    assert play.at(7205, TimerFired()) == [ExitKeeper(0)], (
        "nothing more can come of a manager that was never reached"
    )


def test_a_refusal_is_logged_also_after_an_outage(play: Play) -> None:
    play.running(linked=False)
    for now_s in (0, 60, 120):
        play.at(now_s, LinkLost("nobody there"))
        play.at(now_s + 60, TimerFired())
    play.at(190, LinkRefused("wrong token"))
    assert play.log[-1] == "the manager refused: wrong token"


def test_a_refused_keeper_tries_the_manager_that_comes_after(play: Play) -> None:
    play.running(linked=False).at(1, LinkRefused("wrong token"))
    assert play.at(2, ManagerMoved()) == [OpenLink((KEY,))]
    assert play.at(3, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]


# ---- stopping


def test_a_stop_is_polite_first_and_firm_after_the_grace(play: Play) -> None:
    play.running()
    assert play.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED)) == [SignalTrial(KEY, kill=False)]
    assert play.keeper.next_deadline_s == 110
    assert play.at(109.9, TimerFired()) == []
    assert play.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]
    assert play.at(111, TimerFired()) == []
    end = end_in(play.at(112, exited(None, 9)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 137)


def test_a_task_that_is_stopped_because_its_trial_is_over_exits_with_0(play: Play) -> None:
    play.running().at(100, StopTrial("abcde", ExitReason.TRIAL_OVER))
    end = end_in(play.at(101, exited(None, 15)))
    assert (end.reason, end.exit_code) == (ExitReason.TRIAL_OVER, 143)
    assert play.at(102, durable(closed=True)) == [ExitKeeper(0)]


def test_a_trial_that_goes_within_the_grace_is_not_killed(play: Play) -> None:
    play.running().at(100, StopTrial("abcde", ExitReason.STOPPED_BY_USER))
    assert end_in(play.at(101, exited(None, 15))).reason is ExitReason.STOPPED_BY_USER
    assert play.at(120, TimerFired()) == []


def test_the_grace_is_over_in_time_even_when_other_things_happen(play: Play) -> None:
    play.running().at(100, StopTrial("abcde", ExitReason.STOPPED_BY_USER))
    assert SignalTrial(KEY, kill=True) in play.at(115, grew(1))


def test_a_second_signal_ends_the_grace(play: Play) -> None:
    play.running().at(100, SignalReceived(15))
    assert play.at(101, SignalReceived(2)) == [SignalTrial(KEY, kill=True)]
    assert play.at(102, SignalReceived(15)) == []
    assert play.at(110, TimerFired()) == []
    assert end_in(play.at(111, exited(None, 9))).reason is ExitReason.JOB_LOST


def test_a_signal_after_a_stop_over_the_stream_is_the_first(play: Play) -> None:
    play.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert play.at(101, SignalReceived(15)) == []
    assert play.at(102, SignalReceived(15)) == [SignalTrial(KEY, kill=True)]


def test_the_first_reason_stands_and_its_grace_too(play: Play) -> None:
    play.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert play.at(105, StopTrial("abcde", ExitReason.STOPPED_BY_USER)) == []
    assert play.at(106, SignalReceived(15)) == []
    assert play.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]
    assert end_in(play.at(111, exited(None, 9))).reason is ExitReason.EARLY_STOPPED


def test_a_command_that_ends_well_after_a_stop_has_the_stops_reason_and_its_own_code(play: Play) -> None:
    play.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    end = end_in(play.at(101, exited(0)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 0)
    assert play.at(102, durable(closed=True)) == [ExitKeeper(0)]


def test_a_stop_after_the_end_changes_nothing(play: Play) -> None:
    play.running().at(1, exited(1))
    assert play.at(2, StopTrial("abcde", ExitReason.STOPPED_BY_USER)) == []
    assert play.at(3, durable(closed=True)) == [ExitKeeper(1)]


def test_whoever_signals_the_keeper_ends_the_job(play: Play) -> None:
    assert play.running().at(1, SignalReceived(15)) == [SignalTrial(KEY, kill=False)]
    assert end_in(play.at(2, exited(None, 15))).reason is ExitReason.JOB_LOST


def test_a_keeper_without_a_trial_that_is_signalled_just_ends() -> None:
    assert ExitKeeper(0) in Play(REUSED).at(0, SignalReceived(15))


def test_stopping_needs_no_link(play: Play) -> None:
    play.running(linked=False)
    assert play.at(1, SignalReceived(2)) == [SignalTrial(KEY, kill=False)]
    assert play.at(11, TimerFired()) == [SignalTrial(KEY, kill=True)]


# ---- the end, told and heard


def test_the_end_is_told_again_to_every_manager_that_comes(play: Play) -> None:
    end = ended(ExitReason.SUCCEEDED, 0, 10)
    play.running().at(1, exited(0, size=10))
    for now_s in (2, 4, 6):
        play.at(now_s, LinkLost("manager killed"))
        assert play.at(now_s + 1, TimerFired()) == [OpenLink((KEY,))]
        assert play.at(now_s + 1, welcome({Stream.METRICS: 4})) == [
            Send(TrialStarted(KEY, STARTED_AT_S)),
            Send(end),
            SendChunk(KEY, Stream.METRICS, 4, 6),
        ]
    assert play.at(8, durable(10, closed=True)) == [ExitKeeper(0)]


def test_a_manager_that_has_recorded_everything_says_so_in_its_welcome(play: Play) -> None:
    play.running().at(1, exited(0, size=10))
    play.at(2, LinkLost("reset"))
    play.at(3, TimerFired())
    assert play.at(4, welcome({Stream.METRICS: 10}, closed=True)) == [ExitKeeper(0)]


def test_a_trial_that_was_given_up_while_it_runs_is_stopped(play: Play) -> None:
    play.running(linked=False)
    effects = play.at(1, welcome(closed=True))
    assert effects == [SignalTrial(KEY, kill=False)]
    assert end_in(play.at(2, exited(None, 15))).reason is ExitReason.JOB_LOST
    assert play.at(3, durable(closed=True)) == [ExitKeeper(143)]


def test_a_welcome_that_does_not_know_the_attempt_gets_everything(play: Play) -> None:
    play.running(linked=False).at(0, grew(7))
    assert SendChunk(KEY, Stream.METRICS, 0, 7) in play.at(1, welcome({}, key=OTHER_KEY))


def test_a_word_about_another_attempt_is_not_ours(play: Play) -> None:
    play.running().at(1, exited(0, size=5))
    assert play.at(2, durable(5, closed=True, key=OTHER_KEY)) == []


def test_an_event_of_another_attempt_is_a_bug(play: Play) -> None:
    play.running()
    with pytest.raises(KeyError):
        play.at(1, TrialSpawned(OTHER_KEY, STARTED_AT_S))


def test_a_keeper_lingers_for_a_manager_that_is_away_and_then_ends(play: Play) -> None:
    play.running().at(1, LinkLost("reset"))
    play.at(100, exited(3))
    for now_s in (110, 120, 129.9):
        assert not any(isinstance(effect, ExitKeeper) for effect in play.at(now_s, TimerFired()))
        if play.keeper.link.state is LinkState.CONNECTING:
            play.at(now_s, LinkLost("nobody there"))
    assert play.keeper.next_deadline_s is not None
    assert play.keeper.next_deadline_s <= 130
    assert play.at(130, TimerFired())[-1] == ExitKeeper(3)


def test_a_keeper_that_has_never_reached_a_manager_does_not_linger_for_one(play: Play) -> None:
    play.running(linked=False).at(1, LinkLost("nobody there"))
    assert ExitKeeper(3) not in play.at(100, exited(3))
    play.at(100, LinkLost("nobody there"))
    assert ExitKeeper(3) not in play.at(104.9, TimerFired())
    assert play.at(105, TimerFired())[-1] == ExitKeeper(3)


def test_a_link_that_is_lost_after_the_end_does_not_lengthen_the_wait(play: Play) -> None:
    play.running().at(1, exited(0))
    play.at(20, LinkLost("manager killed"))
    assert ExitKeeper(0) not in play.at(30.9, TimerFired())
    assert play.at(31, TimerFired()) == [ExitKeeper(0)]


def test_a_manager_that_comes_back_in_time_begins_the_wait_anew(play: Play) -> None:
    play.running(linked=False).at(1, exited(0))
    play.at(25, welcome())
    assert play.at(54.9, TimerFired()) == []
    assert play.at(54.95, durable(closed=True)) == [ExitKeeper(0)]


def test_hours_without_a_manager_cost_a_running_trial_nothing(play: Play) -> None:
    play.running().at(1, LinkLost("network down"))
    for hour in range(1, 49):
        play.at(hour * 3600, grew(hour * 100))
        if play.keeper.link.state is LinkState.CONNECTING:
            play.at(hour * 3600, LinkLost("network down"))
    effects = play.at(49 * 3600, ManagerMoved()) + play.at(49 * 3600, welcome({Stream.METRICS: 1}))
    assert effects[-1] == SendChunk(KEY, Stream.METRICS, 1, 4799)


def test_leave_ends_the_trial_and_then_the_keeper(play: Play) -> None:
    play.running()
    assert play.at(1, Shutdown("the experiment is over")) == [SignalTrial(KEY, kill=False)]
    assert "the manager sent Shutdown: the experiment is over" in play.log
    effects = play.at(2, exited(None, 15))
    assert end_in(effects).reason is ExitReason.JOB_LOST
    assert effects[-1] == ExitKeeper(143)


def test_leave_after_the_end_ends_the_keeper_at_once(play: Play) -> None:
    play.running().at(1, exited(2))
    assert play.at(2, Shutdown("enough")) == [ExitKeeper(2)]


# ---- everything at once


# ---- a file that somebody cuts


def test_a_stream_that_was_cut_ends_there_and_the_link_stays(play: Play) -> None:
    play.running()
    play.at(1, grew(100))
    assert play.at(2, StreamTruncated(KEY, Stream.METRICS, 0, 30)) == [SendChunk(KEY, Stream.METRICS, 0, 30)]
    assert "the metrics file was truncated to 30 bytes" in play.log[-1]
    assert play.at(3, grew(200)) == []
    end = ended(ExitReason.SUCCEEDED, 0, 30, "", FileChange.TRUNCATED)
    assert end_in(play.at(4, exited(0, size=200))) == end


def test_a_cut_that_is_found_after_the_end_is_recorded_and_told(play: Play) -> None:
    play.running()
    play.at(1, exited(0, size=100))
    end = ended(ExitReason.SUCCEEDED, 0, 30, "", FileChange.TRUNCATED)
    assert play.at(2, StreamTruncated(KEY, Stream.METRICS, 0, 30)) == [
        RecordExit(end),
        Send(end),
        SendChunk(KEY, Stream.METRICS, 0, 30),
    ]


# ---- a file that is not only appended to


TRUNCATED = file_warning(Stream.METRICS, FileChange.TRUNCATED)
REWRITTEN = file_warning(Stream.METRICS, FileChange.REWRITTEN)


def test_a_file_that_is_shorter_than_it_was_is_a_warning_of_the_end(play: Play) -> None:
    play.running()
    play.at(1, grew(100))
    play.at(2, grew(40))
    assert play.log[-1] == TRUNCATED
    play.at(3, grew(120))
    end = end_in(play.at(4, exited(0, size=130)))
    assert end == ended(ExitReason.SUCCEEDED, 0, 130, "", FileChange.TRUNCATED)
    assert play.log.count(TRUNCATED) == 1


def test_a_file_that_is_shorter_at_the_end_is_a_warning_as_well(play: Play) -> None:
    play.running()
    play.at(1, grew(100))
    play.at(2, durable(100))
    assert end_in(play.at(4, exited(0, size=90))).warnings == (TRUNCATED,)


def test_files_that_only_grow_are_no_warning(play: Play) -> None:
    play.running()
    for size in (0, 10, 10, 11):
        play.at(1, grew(size))
    assert end_in(play.at(4, exited(0, size=11))).warnings == ()


def test_a_change_that_is_found_after_the_end_is_recorded_and_told(play: Play) -> None:
    play.running()
    play.at(1, exited(0, size=100))
    end = ended(ExitReason.SUCCEEDED, 0, 100, "", FileChange.REWRITTEN)
    change = StreamChanged(KEY, Stream.METRICS, FileChange.REWRITTEN)
    assert play.at(2, change) == [RecordExit(end), Send(end)]
    assert play.at(3, change) == []
    assert play.log.count(REWRITTEN) == 1


def test_of_one_stream_the_first_change_is_reported(play: Play) -> None:
    play.running()
    play.at(1, StreamChanged(KEY, Stream.METRICS, FileChange.REWRITTEN))
    play.at(2, StreamChanged(KEY, Stream.METRICS, FileChange.REPLACED))
    assert end_in(play.at(4, exited(0))).warnings == (REWRITTEN,)


def test_a_change_of_what_is_not_replicated_or_of_a_closed_attempt_is_nothing(play: Play) -> None:
    play.running()
    play.at(1, StreamChanged(KEY, Stream.STDOUT, FileChange.REPLACED))
    assert play.at(2, StreamChanged(OTHER_KEY, Stream.METRICS, FileChange.REPLACED)) == []
    assert end_in(play.at(4, exited(0))).warnings == ()


# ---- what was written before a stop


STOPS = [
    StopTrial("abcde", ExitReason.EARLY_STOPPED),
    SignalReceived(15),
    Shutdown("over"),
    durable(closed=True),
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
@pytest.mark.parametrize("code", [0, 143])
def test_the_end_reports_how_much_was_written_before_the_stop(play: Play, stop: Event, code: int) -> None:
    play.running()
    play.at(1, grew(80))
    play.metrics_size = 100
    play.at(2, stop)
    play.metrics_size = 200
    play.at(3, SignalReceived(15))
    play.at(3, grew(200))
    end = end_in(play.at(4, exited(code, size=210)))
    assert (end.metrics_size_at_stop, end.exit_code) == (100, code)


def test_a_trial_that_nobody_stopped_has_no_size_at_the_stop(play: Play) -> None:
    play.running()
    end = end_in(play.at(1, exited(0, size=100)))
    assert end.metrics_size_at_stop is None


def test_a_file_that_was_truncated_before_the_stop_counts_as_long_as_it_was(play: Play) -> None:
    play.running()
    play.at(1, grew(100))
    play.metrics_size = 10
    play.at(2, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert end_in(play.at(4, exited(0, size=10))).metrics_size_at_stop == 100


class KeeperLife(RuleBasedStateMachine):
    """Every order of events a host can produce."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper(SETTINGS)
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.size = self.sent = 0
        self.end_of_stream = math.inf
        self.last_chunk: SendChunk | None = None
        """What the host is about to read."""
        self.is_running = self.is_spawned = self.is_connecting = self.is_up = False
        self.manager_has_moved = self.is_cutting = False
        self.recorded: TrialEnded | None = None
        self.exits: list[int] = []
        self.stops: list[ExitReason] = []
        self.warnings: list[str] = []
        self._post(TrialAssigned(KEY))

    @property
    def counted(self) -> int:
        """The bytes that are in the file, and before any cut."""
        return int(min(self.size, self.end_of_stream))

    def _post(self, event: Event) -> None:
        was_over = bool(self.exits)
        self.last_chunk = None
        effects = self.keeper.handle(event, self.now_s)
        assert not (was_over and effects), "nothing comes after ExitKeeper"
        for position, effect in enumerate(effects):
            self._check(effect, is_last=position == len(effects) - 1)

    def _check(self, effect: Effect, *, is_last: bool) -> None:
        match effect:
            case SpawnTrial():
                assert not self.is_spawned, "a trial is started once"
                self.is_spawned = True
            case OpenLink():
                assert not self.is_up, "one link at a time"
                assert not self.is_connecting or self.manager_has_moved, "one try at a time"
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
                    assert message == self.recorded, "an end is recorded before it is told"
            case RecordExit(ended=end):
                assert self.recorded is None or self.is_cutting, "an end is recorded once"
                assert not self.is_running
                assert end.final_sizes[Stream.METRICS] <= self.end_of_stream
                self.recorded = end
            case MeasureMetrics(key=key):
                assert self.is_running
                self._post(MetricsMeasured(key, self.size))
            case SignalTrial():
                assert self.is_running
            case ExitKeeper(code=code):
                assert is_last
                assert self.recorded is not None
                assert code == self.recorded.exit_code
                self.exits.append(code)

    @precondition(lambda self: self.is_spawned and not self.is_running and self.recorded is None)
    @rule(works=st.sampled_from([True, True, True, False]))
    def spawn(self, works: bool) -> None:
        self.is_running = works
        if works:
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
    def find_file_cut(self, share: float) -> None:
        chunk = self.last_chunk
        assert chunk is not None
        size = int((chunk.offset + chunk.size_bytes) * share)
        self.sent = chunk.offset
        self.end_of_stream = min(self.end_of_stream, max(chunk.offset, size))
        self.is_cutting = True
        self.warnings = [TRUNCATED]
        self._post(StreamTruncated(KEY, Stream.METRICS, chunk.offset, size))
        self.is_cutting = False

    @precondition(lambda self: self.is_running)
    @rule(how=st.sampled_from([(0, None), (1, None), (None, 9), (None, 15)]), more=st.integers(0, 1000))
    def end(self, how: tuple[int | None, int | None], more: int) -> None:
        self.is_running = False
        self.size += more
        self._post(exited(*how, size=self.size))
        assert self.recorded is not None
        if self.stops:
            assert self.recorded.reason is self.stops[0], "the first reason stands"
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
    def ask_to_stop(self, reason: ExitReason) -> None:
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
    def ask_to_leave(self) -> None:
        if self.is_running:
            self.stops.append(ExitReason.JOB_LOST)
        self._post(Shutdown("over"))

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._post(TimerFired())

    @invariant()
    def it_ends_once_and_not_before_its_trial(self) -> None:
        assert len(self.exits) <= 1
        assert not (self.exits and self.is_running)

    @invariant()
    def no_deadline_is_in_the_past_once_it_was_kept(self) -> None:
        deadline_s = self.keeper.next_deadline_s
        if deadline_s is not None and not self.exits and deadline_s <= self.now_s:
            self._post(TimerFired())
            following_s = self.keeper.next_deadline_s
            assert self.exits or following_s is None or following_s > self.now_s

    def teardown(self) -> None:
        """However it was: once its trial is over and no manager comes, a keeper ends."""
        if not self.is_running and self.recorded is None:
            self.spawn(works=True)
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
def test_a_stream_beyond_its_limit_is_told_once(play, monkeypatch, is_seen_while_it_runs) -> None:
    monkeypatch.setitem(QUOTA_BYTES, Stream.METRICS, 12)
    play.running()
    if is_seen_while_it_runs:
        for size in (12, 13, 14):
            play.at(1, StreamsGrew(KEY, {Stream.METRICS: size}))
    play.at(2, exited(size=20))
    told = [text for text in play.log if "metrics has reached its quota of 12 bytes" in text]
    assert len(told) == 1


def test_after_an_outage_the_first_acknowledgement_makes_the_next_reconnection_quick_again(
    play: Play,
) -> None:
    play.running(linked=False)
    for now_s in range(0, 600, 60):
        play.at(now_s, LinkLost("nobody there"))
        play.at(now_s + 60, TimerFired())
    play.at(600, welcome())
    play.at(601, grew(100))
    play.at(602, durable(100))
    play.at(603, LinkLost("reset"))
    assert play.keeper.next_deadline_s is not None
    assert 603 < play.keeper.next_deadline_s <= 603 + FIRST_RETRY_S
