"""A keeper's core with a simulated clock. Tests send it the events that the keeper's loop would send."""

from collections.abc import Sequence
from dataclasses import replace

from attempts import attempt_id

from trial_keeper.core.events import (
    Effect,
    Event,
    LogDecision,
    MeasureMetrics,
    MetricsMeasured,
    RecordExit,
    ReleaseAttempt,
    StopNoticeWritten,
    StreamsGrew,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
    WriteStopNotice,
)
from trial_keeper.core.keeper import Keeper
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Offsets,
    Stream,
    TrialEnded,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason

KEY = AttemptKey("abcde", attempt_id(0), "main")


OTHER_KEY = AttemptKey("fghij", attempt_id(3), "main")


SETTINGS = KeeperSettings("exp", "job", "/mnt/exp", "token", "abcde", grace_s=10.0, linger_s=30.0)


REUSED = replace(SETTINGS, trial_id=None)


# These times of a trial are in seconds since the epoch. They cannot be compared with the times of `at`, which are on a monotonic
# clock that starts at 0.
STARTED_AT_S, ENDED_AT_S = 1000.0, 2000.0


class SimulatedKeeper:
    """A keeper's core and its clock.

    `at` sends an event and returns the effects, without log lines. `at` also simulates the answer to each measurement of the
    metrics file and to each stop notice.
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
        """Start the trial of the keeper. The keeper also connects, unless `linked` is false."""
        self.at(0.0, TrialAssigned(KEY))
        self.at(0.0, TrialSpawned(KEY, STARTED_AT_S))
        if linked:
            self.at(0.0, welcome())
        return self


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


TRUNCATED = file_warning(Stream.METRICS, FileChange.TRUNCATED)


REWRITTEN = file_warning(Stream.METRICS, FileChange.REWRITTEN)
