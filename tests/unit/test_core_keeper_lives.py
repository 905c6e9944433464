"""Properties of the keeper's decisions, over generated sequences of events."""

import math

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_keeper import (
    KEY,
    SETTINGS,
    STARTED_AT_S,
    TRUNCATED,
    durable,
    exited,
    grew,
    welcome,
)

from trial_keeper.core.events import (
    Effect,
    Event,
    ExitKeeper,
    LinkLost,
    LinkRefused,
    ManagerMoved,
    MeasureMetrics,
    MetricsMeasured,
    OpenLink,
    RecordExit,
    Send,
    SignalReceived,
    SignalTrial,
    SpawnFailed,
    SpawnTrial,
    StopNoticeWritten,
    StreamTruncated,
    TimerFired,
    TrialAssigned,
    TrialSpawned,
    WriteStopNotice,
)
from trial_keeper.core.keeper import Keeper
from trial_keeper.core.replication import SendChunk
from trial_keeper.wire.messages import (
    Shutdown,
    StopTrial,
    Stream,
    TrialEnded,
)
from trial_keeper.wire.reasons import ExitReason


class KeeperLife(RuleBasedStateMachine):
    """Generates every order of events that the keeper's host can produce."""

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

    @initialize(is_connected=st.booleans())
    def choose_start(self, is_connected: bool) -> None:
        # Some runs start with a connected keeper. If all runs started without a connection, few of them would reach one.
        if is_connected:
            self.spawn(succeeds=True)
            self.pass_time(0)
            self.open_link(0, closed=False)
            self.grow(100)

    @property
    def counted(self) -> int:
        """The number of bytes in the file, excluding bytes after its first truncation."""
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
        """After any sequence of events, a keeper exits once its trial has ended and no manager connects."""
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
