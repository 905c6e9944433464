"""The messages between keeper and manager, as plain dataclasses.

Each class has a counterpart of the same name in proto/trial_keeper/wire/v1/keeper.proto; only `convert` uses both.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.reasons import ExitReason

# No file is larger, and SQLite stores no larger integer.
MAX_SIZE = 2**63 - 1
# One for each stream, with spare room for streams of later keepers.
MAX_WARNINGS = 16
MAX_CHARACTERS_OF_WARNING = 1000
# A host name has at most 253 characters. Source: RFC 1035.
MAX_CHARACTERS_OF_ENVIRONMENT = 253
# The year 5138: a later time is an error, and cannot be displayed.
LATEST_S = 1e11


class Stream(Enum):
    """An append-only file of an attempt. The value is its name in files, tables and command lines."""

    METRICS = "metrics"
    STDOUT = "stdout"
    STDERR = "stderr"
    KEEPER = "keeper"


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One start of a trial's command in one task. `attempt_id` is never used twice: see `wire.attempt_ids`."""

    trial_id: str
    attempt_id: str
    task: str

    def __str__(self) -> str:
        return f"{self.trial_id}/{self.attempt_id}/{self.task}"


Offsets = Mapping[Stream, int]


@dataclass(frozen=True, slots=True)
class Hello:
    """The keeper's first message: its identity and the attempts that are not delivered yet.

    `is_probe`: only tests whether the manager would accept the keeper. The manager replies with Welcome and ends the stream; the
    session of the job's real keeper continues. `supports_revoke`: the keeper supports `RevokeTrial`.
    """

    version: str
    experiment_id: str
    job_id: str
    task: str
    attempts: tuple[AttemptKey, ...] = ()
    is_probe: bool = False
    supports_revoke: bool = False


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and with what an attempt runs; a text is empty if unknown.

    `node`: the cluster's name of the machine. `python`: the version of the interpreter that runs the training code. `packages`:
    the SHA-256, in hex, of the list of installed packages in the workspace's `packages` folder.
    """

    host: str = ""
    node: str = ""
    python: str = ""
    packages: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for texts that no keeper sends: they come from other machines."""
        for text in (self.host, self.node, self.python, self.packages):
            if len(text) > MAX_CHARACTERS_OF_ENVIRONMENT or not text.isprintable():
                raise ValueError(
                    f"{text[:MAX_CHARACTERS_OF_ENVIRONMENT]!r} is not a name or a version of an environment"
                )
        if self.packages and not is_digest(self.packages):
            raise ValueError(f"{self.packages!r} is not a SHA-256 digest")


NO_ENVIRONMENT = Environment()


def is_digest(text: str) -> bool:
    """True for a SHA-256 digest in lower-case hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """The attempt's command runs. `started_at_s` is in seconds since the epoch, on the keeper's clock.

    Sent again with the Python environment once the training code has reported it.
    """

    key: AttemptKey
    started_at_s: float
    environment: Environment = NO_ENVIRONMENT

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid time."""
        _check_moment("started_at_s", self.started_at_s)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stream, starting at `offset`."""

    key: AttemptKey
    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """The end of an attempt; also the content of exit.json.

    `exit_code` is the command's, 128+n for signal n, or one of `trial_keeper.exit_codes` if the command never ran. `final_sizes`
    has every replicated stream; bytes that a stray process appends later do not count. `message` has the last lines of stderr, or
    the keeper's own message. `ended_at_s` is `started_at_s` plus the command's run time on the monotonic clock.
    `metrics_size_at_stop` is the size of the metrics file, in bytes, when the keeper received the stop; None without a stop, or
    from a keeper of an earlier version. `warnings` describe changes to the attempt's files, one line each.
    """

    key: AttemptKey
    reason: ExitReason
    exit_code: int
    started_at_s: float
    ended_at_s: float
    final_sizes: Offsets = field(default_factory=dict)
    message: str = ""
    metrics_size_at_stop: int | None = None
    warnings: tuple[str, ...] = ()
    environment: Environment = NO_ENVIRONMENT

    def __post_init__(self) -> None:
        """Raises ValueError for impossible values: the data come from other machines, and from files that anyone could write."""
        _check_moment("started_at_s", self.started_at_s)
        _check_moment("ended_at_s", self.ended_at_s)
        for stream, size in self.final_sizes.items():
            if not 0 <= size <= MAX_SIZE:
                raise ValueError(f"{size} is not the size of {stream.value}")
        if not 0 <= (self.metrics_size_at_stop or 0) <= MAX_SIZE:
            raise ValueError(
                f"{self.metrics_size_at_stop} is not the size of {Stream.METRICS.value} at a stop"
            )
        if len(self.warnings) > MAX_WARNINGS:
            raise ValueError(f"{len(self.warnings)} warnings exceed the maximum of {MAX_WARNINGS}")
        longest = max(map(len, self.warnings), default=0)
        if longest > MAX_CHARACTERS_OF_WARNING:
            raise ValueError(
                f"a warning of {longest} characters exceeds the maximum of {MAX_CHARACTERS_OF_WARNING}"
            )


def _check_moment(name: str, at_s: float) -> None:
    if not (math.isfinite(at_s) and 0 <= at_s <= LATEST_S):
        raise ValueError(f"{name} {at_s} is not a time between 1970 and 5138")


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The current load of one GPU, by all processes. `index` is the driver's."""

    index: int
    utilisation_percent: float
    memory_used_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The current usage of the trial's process tree. `cpu_percent` is of one core; `disk_bytes` is the attempt's folder."""

    key: AttemptKey
    cpu_percent: float
    rss_bytes: int
    disk_bytes: int = 0
    gpus: tuple[GpuUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """The keeper has no trial to run."""


@dataclass(frozen=True, slots=True)
class AttemptOffsets:
    """The offsets of an attempt that the manager has stored durably.

    `closed`: nothing needs to be sent again, and an attempt that runs is stopped. `trial_succeeded`: its trial has succeeded.
    """

    key: AttemptKey
    offsets: Offsets
    closed: bool = False
    trial_succeeded: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The manager's reply to Hello: the offsets to continue from."""

    version: str
    attempts: tuple[AttemptOffsets, ...] = ()


@dataclass(frozen=True, slots=True)
class RunTrial:
    """Run this trial as this attempt; its data is in the workspace. The manager makes a new attempt id for each dispatch."""

    trial_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class RevokeTrial:
    """Drop this trial unless it has started. Only for keepers with `supports_revoke`."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class TrialRevoked:
    """Acknowledges `RevokeTrial`: the keeper does not have the trial, and never starts it."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class StopTrial:
    """Stop this trial; the reason is recorded before any signal is sent."""

    trial_id: str
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything before these offsets is durable: it survives the manager's death."""

    attempt: AttemptOffsets


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Drain: the keeper has nothing more to do and ends."""

    reason: str


KeeperMessage = Hello | TrialStarted | Chunk | TrialEnded | Usage | Idle | TrialRevoked
ManagerMessage = Welcome | RunTrial | RevokeTrial | StopTrial | Ack | Shutdown
