"""The messages between keeper and manager, as the rest of the code sees them.

Each class has a twin of the same name in proto/trial_keeper/wire/v1/keeper.proto; `convert` is the only place that knows both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from trial_keeper.wire.reasons import ExitReason

# No file is larger, and no database holds a larger number.
LARGEST_SIZE = 2**63 - 1
# A cluster that starts a task anew every minute needs six weeks for so many.
MOST_ATTEMPTS = 2**16
# The year 5138: a later time is a mistake, and could not be shown.
LATEST_S = 1e11


class Stream(Enum):
    """An append-only file of an attempt. The value is the word that files, tables and command lines use."""

    METRICS = "metrics"
    STDOUT = "stdout"
    STDERR = "stderr"
    KEEPER = "keeper"


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One start of a trial's command in one task. Attempts count from 0."""

    trial_id: str
    attempt: int
    task: str

    def __str__(self) -> str:
        return f"{self.trial_id}/{self.attempt}/{self.task}"


Offsets = Mapping[Stream, int]


@dataclass(frozen=True, slots=True)
class Hello:
    """The keeper's first message: who it is and which attempts it still has to deliver.

    `is_probe`: it only asks whether it would be let in. The manager answers Welcome and ends the stream, and the session of
    the job's real keeper goes on. `returns_trials`: it knows `ReturnTrial`.
    """

    version: str
    experiment_id: str
    job_id: str
    task: str
    attempts: tuple[AttemptKey, ...] = ()
    is_probe: bool = False
    returns_trials: bool = False


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """The attempt's command runs. Time in seconds since the epoch, by the keeper's clock."""

    key: AttemptKey
    started_at_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for a moment that is none."""
        _check_moment("started_at_s", self.started_at_s)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stream, beginning at `offset`."""

    key: AttemptKey
    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """How an attempt ended. It is also what exit.json holds.

    `exit_code` is the command's, 128+n for signal n, or one of `trial_keeper.exit_codes` when it never ran. `final_sizes` has
    every replicated stream; bytes that a stray process appends later do not count. `message` holds the last lines of stderr,
    or the keeper's own words. `ended_at_s` is `started_at_s` and the time that the command ran by the monotonic clock.
    """

    key: AttemptKey
    reason: ExitReason
    exit_code: int
    started_at_s: float
    ended_at_s: float
    final_sizes: Offsets = field(default_factory=dict)
    message: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what no ended trial can say: it comes from other machines, and from files that anybody wrote."""
        if not -(2**31) <= self.exit_code < 2**31:
            raise ValueError(f"exit code {self.exit_code} is none")
        _check_moment("started_at_s", self.started_at_s)
        _check_moment("ended_at_s", self.ended_at_s)
        for stream, size in self.final_sizes.items():
            if not 0 <= size <= LARGEST_SIZE:
                raise ValueError(f"{size} is not the size of {stream.value}")


def _check_moment(name: str, at_s: float) -> None:
    if not (math.isfinite(at_s) and 0 <= at_s <= LATEST_S):
        raise ValueError(f"{name} {at_s} is no moment between 1970 and 5138")


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """What one GPU does at present, whoever makes it do so. `index` is the driver's."""

    index: int
    utilisation_percent: float
    memory_used_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What the trial's process tree uses at present. `cpu_percent` is of one core; `disk_bytes` is the attempt's folder."""

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
    """What the manager durably has of an attempt. `closed`: nothing about it needs to be sent again."""

    key: AttemptKey
    offsets: Offsets
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The manager's answer to Hello: from where to go on."""

    version: str
    attempts: tuple[AttemptOffsets, ...] = ()


@dataclass(frozen=True, slots=True)
class RunTrial:
    """Run this trial; everything about it is in the workspace."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class ReturnTrial:
    """Give this trial back, unless it has begun. Only for keepers that say that they know it."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class TrialReturned:
    """The answer to `ReturnTrial`: the keeper does not have the trial, and will not begin it."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class StopTrial:
    """Stop this trial; the reason is on record before any signal is sent."""

    trial_id: str
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Durable:
    """Everything before these offsets survives the manager's death."""

    attempt: AttemptOffsets


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing more to do here: the keeper ends."""

    reason: str


KeeperMessage = Hello | TrialStarted | Chunk | TrialEnded | Usage | Idle | TrialReturned
ManagerMessage = Welcome | RunTrial | ReturnTrial | StopTrial | Durable | Leave
