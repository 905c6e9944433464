"""The keeper's inputs (events, named by past participles) and outputs (effects, named by imperatives)."""

from trial_keeper.core.replication import SendChunk
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire import messages as m
from trial_keeper.wire.file_changes import FileChange
from trial_keeper.wire.reasons import ExitReason

# ---- events


@dataclass(frozen=True, slots=True)
class TrialAssigned:
    """A trial was assigned to this keeper, to run as this attempt; its folder is ready."""

    key: m.AttemptKey


@dataclass(frozen=True, slots=True)
class TrialSpawned:
    """The command runs, since `at_s` (seconds since the epoch). `how` describes the kind of start, for the log."""

    key: m.AttemptKey
    at_s: float
    how: str = "the command runs"
    environment: m.Environment = m.NO_ENVIRONMENT


@dataclass(frozen=True, slots=True)
class EnvironmentFound:
    """The training code of a running attempt has reported its interpreter."""

    key: m.AttemptKey
    environment: m.Environment


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The command never ran."""

    key: m.AttemptKey
    at_s: float
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class PreparationFailed(SpawnFailed):
    """A trial could not be prepared: its files are missing, or its folder cannot be created.

    `key` is the attempt that was to run.
    """


@dataclass(frozen=True, slots=True)
class CleanupFinished:
    """The remains of a trial, reported just before its end.

    `leftovers` are processes that the keeper cannot kill, one line each. `in_tmp` lists entries of the temporary folder that were
    created during the trial and still exist.
    """

    key: m.AttemptKey
    leftovers: tuple[str, ...]
    in_tmp: str = ""


@dataclass(frozen=True, slots=True)
class TrialExited:
    """The command and everything it started have ended, except what `CleanupFinished` reported.

    `ran_s` is on the monotonic clock: the wall clock may have been set meanwhile. `exit_code` is 0–255, or None if `signal`
    ended the command. `sizes` of the streams are measured after the end; `stderr_tail` is text. `out_of_memory` describes the
    kernel's kill for lack of memory while the trial ran; empty without one.
    """

    key: m.AttemptKey
    ran_s: float
    exit_code: int | None
    signal: int | None
    sizes: m.Offsets
    stderr_tail: str
    out_of_memory: str = ""
    environment: m.Environment = m.NO_ENVIRONMENT


@dataclass(frozen=True, slots=True)
class StreamsGrew:
    """The attempt's files were polled and have these sizes."""

    key: m.AttemptKey
    sizes: m.Offsets


@dataclass(frozen=True, slots=True)
class StreamTruncated:
    """The chunk at `offset` cannot be read, because the file was truncated to `size` bytes."""

    key: m.AttemptKey
    stream: m.Stream
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class StreamChanged:
    """The file of a stream was changed other than by appending."""

    key: m.AttemptKey
    stream: m.Stream
    change: FileChange


@dataclass(frozen=True, slots=True)
class MetricsMeasured:
    """The result of `MeasureMetrics`: the size of the metrics file, in bytes."""

    key: m.AttemptKey
    size: int


@dataclass(frozen=True, slots=True)
class StopNoticeWritten:
    """The result of `WriteStopNotice`. `is_awaited`: the training code has asked for the notice, so it may end by itself."""

    key: m.AttemptKey
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class ExitNotRecorded:
    """An exit.json could not be written; the host retries."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The stream to the manager ended, or could not be opened."""

    cause: str


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """The manager refuses this keeper; only another manager could accept it."""

    cause: str


@dataclass(frozen=True, slots=True)
class ManagerMoved:
    """manager.json has changed."""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The keeper received SIGTERM, SIGINT or SIGHUP."""

    number: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The keeper's `next_deadline_s` has passed."""


Event = (
    TrialAssigned
    | PreparationFailed
    | TrialSpawned
    | EnvironmentFound
    | SpawnFailed
    | CleanupFinished
    | TrialExited
    | StreamsGrew
    | StreamTruncated
    | StreamChanged
    | MetricsMeasured
    | StopNoticeWritten
    | ExitNotRecorded
    | LinkLost
    | LinkRefused
    | ManagerMoved
    | SignalReceived
    | TimerFired
    | m.ManagerMessage
)

# ---- effects


@dataclass(frozen=True, slots=True)
class PrepareTrial:
    """Create the folder of this attempt of this trial."""

    trial_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class PrewarmTrial:
    """Prepare the next queued trial without a trace in the workspace: it may still be revoked."""

    trial_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class ReleaseAttempt:
    """Close the attempt's files: they are no longer sent."""

    key: m.AttemptKey


@dataclass(frozen=True, slots=True)
class SpawnTrial:
    """Start the command of this attempt."""

    key: m.AttemptKey


@dataclass(frozen=True, slots=True)
class MeasureMetrics:
    """Read the size of the attempt's metrics file now; `MetricsMeasured` reports it before the next effect is performed."""

    key: m.AttemptKey


@dataclass(frozen=True, slots=True)
class WriteStopNotice:
    """Write stop_notice.json; `StopNoticeWritten` reports the result before the next effect is performed."""

    key: m.AttemptKey
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class SignalTrial:
    """Send a signal to every process of the attempt."""

    key: m.AttemptKey
    kill: bool
    """SIGKILL rather than SIGTERM."""


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Connect to the manager that manager.json names, and send Hello with the attempts of that time."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message over the link that is up."""

    message: m.KeeperMessage


@dataclass(frozen=True, slots=True)
class RecordExit:
    """Write exit.json."""

    ended: m.TrialEnded


@dataclass(frozen=True, slots=True)
class LogDecision:
    """Write one line to the keeper's log, and to the log of the attempt `key` while it runs."""

    key: m.AttemptKey | None
    text: str


@dataclass(frozen=True, slots=True)
class ExitKeeper:
    """End the keeper with this code."""

    code: int


Effect = (
    PrepareTrial
    | PrewarmTrial
    | SpawnTrial
    | MeasureMetrics
    | WriteStopNotice
    | SignalTrial
    | OpenLink
    | Send
    | SendChunk
    | RecordExit
    | ReleaseAttempt
    | LogDecision
    | ExitKeeper
)
