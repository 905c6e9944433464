"""The life of one attempt inside its keeper."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from trial_keeper.core.replication import Replication
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded, TrialStarted
from trial_keeper.wire.reasons import ExitReason


class AttemptState(Enum):
    """Where an attempt is."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"  # its command is gone; the manager may not have everything yet
    CLOSED = "closed"  # the manager has everything, and has said so


class AttemptEvent(Enum):
    """What can happen to an attempt."""

    SPAWNED = "spawned"
    STOP_ASKED = "stop asked"
    EXITED = "exited"
    CLOSED = "closed"


NEXT: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.STARTING, AttemptEvent.SPAWNED): AttemptState.RUNNING,
    (AttemptState.STARTING, AttemptEvent.EXITED): AttemptState.ENDED,  # it could not be started
    (AttemptState.RUNNING, AttemptEvent.STOP_ASKED): AttemptState.STOPPING,
    (AttemptState.RUNNING, AttemptEvent.EXITED): AttemptState.ENDED,
    (AttemptState.STOPPING, AttemptEvent.STOP_ASKED): AttemptState.STOPPING,  # the first reason stands
    (AttemptState.STOPPING, AttemptEvent.EXITED): AttemptState.ENDED,
    (AttemptState.ENDED, AttemptEvent.STOP_ASKED): AttemptState.ENDED,  # it came too late
    (AttemptState.ENDED, AttemptEvent.CLOSED): AttemptState.CLOSED,
    (AttemptState.CLOSED, AttemptEvent.STOP_ASKED): AttemptState.CLOSED,
    (AttemptState.CLOSED, AttemptEvent.CLOSED): AttemptState.CLOSED,  # said again after a new Hello
}


@dataclass(slots=True)
class Attempt:
    """One attempt: its state, its streams, and what is on record about its end."""

    key: AttemptKey
    streams: Iterable[Stream]
    state: AttemptState = AttemptState.STARTING
    started_at_s: float = 0.0
    stop_reason: ExitReason | None = None
    kill_at_s: float | None = None
    """By the keeper's own clock: when the polite signal has had its time."""
    ended: TrialEnded | None = None
    replication: Replication = field(init=False)

    def __post_init__(self) -> None:
        self.replication = Replication(self.streams)

    def happened(self, event: AttemptEvent) -> None:
        """Move on by the table.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        self.state = NEXT[self.state, event]

    @property
    def started(self) -> TrialStarted | None:
        """What the manager is told of the start; None before it, or if it never came."""
        return TrialStarted(self.key, self.started_at_s) if self.started_at_s else None
