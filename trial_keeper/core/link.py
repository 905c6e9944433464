"""When to connect to the manager: back-off after failures, at once when the manager moves.

All keepers lose a manager that dies at the same moment. So that they do not come back as a herd, the waits of each are shorter
by a share of its own.
"""

from enum import Enum
from zlib import crc32

# The first retry is below what a person notices, for a manager that restarts.
FIRST_RETRY_S = 0.2
# One minute keeps 1,000 keepers below 25 reconnects a second on a manager that is up but sick. A manager that comes back
# elsewhere is noticed through manager.json long before.
LONGEST_RETRY_S = 60.0
# As much of a wait is left out at most.
_SPREAD = 0.5


class LinkState(Enum):
    """Where the link is."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    UP = "up"
    REFUSED = "refused"


class LinkEvent(Enum):
    """What can happen to a link."""

    DUE = "due"
    OPENED = "opened"
    LOST = "lost"
    REFUSED = "refused"
    MANAGER_MOVED = "manager moved"


NEXT: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.WAITING, LinkEvent.DUE): LinkState.CONNECTING,
    (LinkState.WAITING, LinkEvent.MANAGER_MOVED): LinkState.WAITING,  # due at once
    (LinkState.CONNECTING, LinkEvent.OPENED): LinkState.UP,
    (LinkState.CONNECTING, LinkEvent.LOST): LinkState.WAITING,
    (LinkState.CONNECTING, LinkEvent.REFUSED): LinkState.REFUSED,
    (LinkState.CONNECTING, LinkEvent.MANAGER_MOVED): LinkState.WAITING,  # it may be trying the old address
    (LinkState.UP, LinkEvent.LOST): LinkState.WAITING,
    (LinkState.UP, LinkEvent.REFUSED): LinkState.REFUSED,
    (LinkState.UP, LinkEvent.MANAGER_MOVED): LinkState.UP,
    (LinkState.REFUSED, LinkEvent.MANAGER_MOVED): LinkState.WAITING,  # another manager may think otherwise
}


def share_of(job_id: str) -> float:
    """A number from 0 to 1 that is always the same for one job, and another for most others."""
    return crc32(job_id.encode()) / 2**32


class Link:
    """The link's state and the time of the next try (by the keeper's own clock, seconds).

    `share` is from 0, for a keeper that waits longest, to 1.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self.state = LinkState.WAITING
        self.failures = 0
        self.retry_at_s = 0.0

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent."""
        return self.state is LinkState.UP

    def happened(self, event: LinkEvent, now_s: float) -> None:
        """Move on by the table, and choose the time of the next try.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        self.state = NEXT[self.state, event]
        match event:
            case LinkEvent.LOST:
                longest_s = min(FIRST_RETRY_S * 2**self.failures, LONGEST_RETRY_S)
                self.retry_at_s = now_s + longest_s * (1 - _SPREAD * self._share)
                # 2**9 seconds is past the longest wait; no need to count on for years.
                self.failures = min(self.failures + 1, 9)
            case LinkEvent.MANAGER_MOVED:
                self.failures = 0
                self.retry_at_s = now_s

    def proved_useful(self) -> None:
        """The manager did more than say Welcome: the next loss is the first one again."""
        self.failures = 0

    def is_due(self, now_s: float) -> bool:
        """Whether to connect now."""
        return self.state is LinkState.WAITING and now_s >= self.retry_at_s
