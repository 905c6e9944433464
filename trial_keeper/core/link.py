"""The times of connection attempts: with back-off after failures, and at once when the manager moves.

All keepers of a manager lose it at the same moment. To spread their reconnects, each keeper shortens its delays by its own
jitter.
"""

from enum import Enum
from zlib import crc32

# Too short for a person to notice when a manager restarts.
FIRST_RETRY_S = 0.2
# One minute keeps 1,000 keepers below 25 reconnects a second on an unhealthy manager. manager.json reveals one that restarts
# elsewhere much earlier.
MAX_RETRY_S = 60.0
# The maximum fraction by which the jitter shortens a delay.
_SPREAD = 0.5


class LinkState(Enum):
    """State of the link."""

    WAITING = "waiting"
    """No connection; the next try is due after a delay."""
    CONNECTING = "connecting"
    """A try is in progress."""
    UP = "up"
    """The stream is open, and the manager has welcomed this keeper."""
    REFUSED = "refused"
    """The manager has refused this keeper for good, for example because of its version."""


class LinkEvent(Enum):
    """Events of a link."""

    DUE = "due"
    OPENED = "opened"
    LOST = "lost"
    REFUSED = "refused"
    MANAGER_MOVED = "manager moved"


CHANGES: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.WAITING, LinkEvent.DUE): LinkState.CONNECTING,
    (LinkState.CONNECTING, LinkEvent.OPENED): LinkState.UP,
    (LinkState.CONNECTING, LinkEvent.LOST): LinkState.WAITING,
    (LinkState.CONNECTING, LinkEvent.REFUSED): LinkState.REFUSED,
    (LinkState.CONNECTING, LinkEvent.MANAGER_MOVED): LinkState.WAITING,  # the attempt may use the old address
    (LinkState.UP, LinkEvent.LOST): LinkState.WAITING,
    (LinkState.UP, LinkEvent.REFUSED): LinkState.REFUSED,
    (LinkState.REFUSED, LinkEvent.MANAGER_MOVED): LinkState.WAITING,  # another manager may accept this keeper
}
# Events that leave the state as it is.
IGNORED: frozenset[tuple[LinkState, LinkEvent]] = frozenset(
    {
        (LinkState.WAITING, LinkEvent.MANAGER_MOVED),  # the next attempt is then due at once
        (LinkState.UP, LinkEvent.MANAGER_MOVED),
    }
)
TRANSITIONS: dict[tuple[LinkState, LinkEvent], LinkState] = CHANGES | {
    (state, event): state for state, event in IGNORED
}


def jitter(job_id: str) -> float:
    """Return a number from 0 to 1 that is constant for one job, and differs between most jobs."""
    return crc32(job_id.encode()) / 2**32


class Link:
    """The link's state and the time of the next attempt to connect (on the keeper's own clock, seconds).

    `share` is the keeper's jitter: from 0, for the longest delays, to 1.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self.state = LinkState.WAITING
        self.failures = 0
        self.retry_at_s = 0.0

    @property
    def is_up(self) -> bool:
        """True if messages can be sent."""
        return self.state is LinkState.UP

    def apply(self, event: LinkEvent, now_s: float) -> None:
        """Apply an event by the table, and set the time of the next attempt.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        self.state = TRANSITIONS[self.state, event]
        match event:
            case LinkEvent.LOST:
                longest_s = min(FIRST_RETRY_S * 2**self.failures, MAX_RETRY_S)
                self.retry_at_s = now_s + longest_s * (1 - _SPREAD * self._share)
                # 2**9 times the first delay exceeds the longest delay, so the count stops there.
                self.failures = min(self.failures + 1, 9)
            case LinkEvent.MANAGER_MOVED:
                self.failures = 0
                self.retry_at_s = now_s

    def reset_backoff(self) -> None:
        """Reset the back-off: the manager has done more than answer Welcome."""
        self.failures = 0

    def is_due(self, now_s: float) -> bool:
        """True if it is time to connect."""
        return self.state is LinkState.WAITING and now_s >= self.retry_at_s
