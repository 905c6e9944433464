"""The state of one attempt inside its keeper."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from trial_keeper.core.events import TrialExited
from trial_keeper.core.replication import Replication
from trial_keeper.exit_codes import known, of_signal
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import (
    NO_ENVIRONMENT,
    AttemptKey,
    Environment,
    Stream,
    TrialEnded,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason


class AttemptState(Enum):
    """State of an attempt."""

    STARTING = "starting"
    """Its command is about to start."""
    RUNNING = "running"
    """Its command runs."""
    STOPPING = "stopping"
    """It was asked to stop, and is killed at the end of the grace period."""
    ENDED = "ended"
    """Its command has ended; the manager may still lack some of its data."""
    CLOSED = "closed"
    """The manager has acknowledged all its data."""


class AttemptEvent(Enum):
    """Events of an attempt."""

    SPAWNED = "spawned"
    STOP_ASKED = "stop asked"
    EXITED = "exited"
    CLOSED = "closed"


CHANGES: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.STARTING, AttemptEvent.SPAWNED): AttemptState.RUNNING,
    (AttemptState.STARTING, AttemptEvent.EXITED): AttemptState.ENDED,  # the command could not be started
    (AttemptState.RUNNING, AttemptEvent.STOP_ASKED): AttemptState.STOPPING,
    (AttemptState.RUNNING, AttemptEvent.EXITED): AttemptState.ENDED,
    (AttemptState.STOPPING, AttemptEvent.EXITED): AttemptState.ENDED,
    (AttemptState.ENDED, AttemptEvent.CLOSED): AttemptState.CLOSED,
}
# Events that leave the state as it is.
IGNORED: frozenset[tuple[AttemptState, AttemptEvent]] = frozenset(
    {
        (AttemptState.STOPPING, AttemptEvent.STOP_ASKED),  # the first reason is kept
        (AttemptState.ENDED, AttemptEvent.STOP_ASKED),  # too late
        (AttemptState.CLOSED, AttemptEvent.STOP_ASKED),
        (AttemptState.CLOSED, AttemptEvent.CLOSED),  # repeated after a new Hello
    }
)
TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = CHANGES | {
    (state, event): state for state, event in IGNORED
}


@dataclass(slots=True)
class Attempt:
    """One attempt: its state, its streams, and the record of its end."""

    key: AttemptKey
    replication: Replication
    state: AttemptState = AttemptState.STARTING
    started_at_s: float = 0.0
    stop_reason: ExitReason | None = None
    terminate_at_s: float | None = None
    """When SIGTERM follows the stop notice, on the keeper's own clock; None if no SIGTERM is due."""
    kill_at_s: float | None = None
    """When the grace period ends, on the keeper's own clock; None if no kill is due."""
    metrics_size_at_stop: int | None = None
    """Bytes of metrics that were written before the stop; None without a stop."""
    warnings: dict[Stream, str] = field(default_factory=dict)
    """Changes to the attempt's files. Of each stream the first report is kept."""
    environment: Environment = NO_ENVIRONMENT
    over_quota: set[Stream] = field(default_factory=set)
    """The streams whose quota was reported as reached."""
    ended: TrialEnded | None = None

    def apply(self, event: AttemptEvent) -> None:
        """Apply an event by the table.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        self.state = TRANSITIONS[self.state, event]

    @property
    def started(self) -> TrialStarted | None:
        """The message that reports the start to the manager; None if the command has not started."""
        return TrialStarted(self.key, self.started_at_s, self.environment) if self.started_at_s else None

    def end_of(self, event: TrialExited) -> TrialEnded:
        """The record of the end of the command."""
        if event.signal is not None:
            exit_code, reason = of_signal(event.signal), ExitReason.SIGNAL
        else:
            exit_code = event.exit_code or 0
            reason = ExitReason.NONZERO_EXIT if exit_code else ExitReason.SUCCEEDED
        message = event.stderr_tail
        if event.out_of_memory and exit_code:
            # A shell or a parent process passes the failure of a killed process on as its own exit code.
            reason = ExitReason.OUT_OF_MEMORY
            message = f"{event.out_of_memory}\n{message}".strip()
        return TrialEnded(
            event.key,
            # A command that exits with 0 after a stop request has not failed: the stop reason says why it ended.
            self.stop_reason or reason,
            exit_code,
            self.started_at_s,
            self.started_at_s + event.ran_s,
            self.replication.final_sizes(event.sizes),
            message if exit_code else "",
            self.metrics_size_at_stop,
            tuple(self.warnings.values()),
            event.environment,
        )

    def amend(self, ended: TrialEnded) -> TrialEnded:
        """Change the record of the end after a change to the attempt's files. Returns the new record."""
        sizes = self.replication.final_sizes(ended.final_sizes)
        self.ended = replace(ended, final_sizes=sizes, warnings=tuple(self.warnings.values()))
        return self.ended

    def new_limits(self) -> list[str]:
        """A sentence about each stream that has reached its quota since the last call."""
        new = [stream for stream in self.replication.over_quota if stream not in self.over_quota]
        self.over_quota.update(new)
        return [
            f"{stream.value} has reached its quota of {QUOTA_BYTES[stream]} bytes; "
            "later bytes stay in the file and are not sent"
            for stream in new
        ]


def never_started(
    key: AttemptKey,
    streams: Iterable[Stream],
    exit_code: int,
    at_s: float,
    message: str,
    otherwise: ExitReason = ExitReason.COULD_NOT_START,
) -> TrialEnded:
    """Build the end of an attempt whose command never ran. `otherwise`: the reason, if the exit code is not a keeper's own."""
    own = known(exit_code)
    reason = otherwise if own is None else own.reason
    return TrialEnded(key, reason, exit_code, at_s, at_s, dict.fromkeys(streams, 0), message)
