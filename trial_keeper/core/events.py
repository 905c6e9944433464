"""What happens to a keeper (events, past participles) and what it does about it (effects, imperatives)."""

from dataclasses import dataclass

from trial_keeper.core.replication import ChunkToSend
from trial_keeper.wire.messages import (
    AttemptKey,
    Durable,
    KeeperMessage,
    Leave,
    Offsets,
    ReturnTrial,
    RunTrial,
    StopTrial,
    Stream,
    TrialEnded,
    Welcome,
)

# ---- events


@dataclass(frozen=True, slots=True)
class TrialAssigned:
    """A trial is to be run as this attempt; its folder is ready."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class TrialUnprepared:
    """A trial that was to be run cannot be: what it needs is not there, or its folder cannot be made.

    `key` names the attempt that it would have been.
    """

    key: AttemptKey
    at_s: float
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class TrialSpawned:
    """The command runs. `at_s` is in seconds since the epoch; `how` it was started is for the log."""

    key: AttemptKey
    at_s: float
    how: str = "the command runs"


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The command never ran."""

    key: AttemptKey
    at_s: float
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """While a trial ran, the kernel killed something in its container for want of memory. None is what cannot be known."""

    limit_bytes: int | None = None
    """What the container may use; None when it has no limit of its own."""
    peak_bytes: int | None = None
    """The most that the container has ever used."""


@dataclass(frozen=True, slots=True)
class TrialCleared:
    """What is left of a trial that is about to be told as ended.

    `leftovers` are processes that nobody here can end, each as one line. `in_tmp` names what appeared in the temporary folder
    while it ran, and is still there.
    """

    key: AttemptKey
    leftovers: tuple[str, ...]
    in_tmp: str = ""


@dataclass(frozen=True, slots=True)
class TrialExited:
    """The command ended and everything it started is gone, but for what `TrialCleared` has told.

    `ran_s` is by the monotonic clock: the wall clock may have been set meanwhile. `exit_code` is 0–255, or None when `signal`
    ended it. `sizes` of the streams are taken after the end; `stderr_tail` is text.
    """

    key: AttemptKey
    ran_s: float
    exit_code: int | None
    signal: int | None
    sizes: Offsets
    stderr_tail: str
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True, slots=True)
class StreamsGrew:
    """A look at the attempt's files."""

    key: AttemptKey
    sizes: Offsets


@dataclass(frozen=True, slots=True)
class StreamCut:
    """The chunk at `offset` cannot be read, because somebody cut the file to `size` bytes."""

    key: AttemptKey
    stream: Stream
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A manager has said Welcome."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The stream to the manager ended, or could not be opened."""

    cause: str


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """The manager will not have this keeper; only another manager could change that."""

    cause: str


@dataclass(frozen=True, slots=True)
class ManagerMoved:
    """manager.json has changed."""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The keeper itself was asked to end by SIGTERM, SIGINT or SIGHUP."""

    number: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The deadline the keeper asked for is here."""


Event = (
    TrialAssigned
    | TrialUnprepared
    | TrialSpawned
    | SpawnFailed
    | TrialCleared
    | TrialExited
    | StreamsGrew
    | StreamCut
    | LinkOpened
    | LinkLost
    | LinkRefused
    | ManagerMoved
    | SignalReceived
    | TimePassed
    | Durable
    | RunTrial
    | ReturnTrial
    | StopTrial
    | Leave
)

# ---- effects


@dataclass(frozen=True, slots=True)
class PrepareTrial:
    """Make the folder of the next attempt of this trial."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class ForeseeTrial:
    """Get ready for this trial, without a trace in the workspace: it follows the one that runs, unless it is called back."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class ReleaseAttempt:
    """Let go of the attempt's files: nothing more of them is sent."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SpawnTrial:
    """Start the command of this attempt."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SignalTrial:
    """Send a signal to every process of the attempt."""

    key: AttemptKey
    kill: bool
    """SIGKILL rather than SIGTERM."""


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Connect to the manager that manager.json names and say Hello with these attempts."""

    attempts: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message over the link that is up."""

    message: KeeperMessage


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Read bytes of a file and send them over the link that is up."""

    key: AttemptKey
    chunk: ChunkToSend


@dataclass(frozen=True, slots=True)
class RecordExit:
    """Write exit.json."""

    ended: TrialEnded


@dataclass(frozen=True, slots=True)
class LogDecision:
    """Write one line to the keeper's log, and to the attempt's while it runs."""

    key: AttemptKey | None
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the keeper with this code."""

    code: int


Effect = (
    PrepareTrial
    | ForeseeTrial
    | SpawnTrial
    | SignalTrial
    | OpenLink
    | Send
    | SendChunk
    | RecordExit
    | ReleaseAttempt
    | LogDecision
    | Exit
)
