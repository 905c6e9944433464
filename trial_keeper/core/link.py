"""When to connect to the manager: back-off after failures, at once when the manager moves."""

from enum import Enum

# The first retry is below what a person notices, for a manager that restarts.
FIRST_RETRY_S = 0.2
# One minute keeps 1,000 keepers below 17 reconnects a second on a manager that is up but sick. A manager that comes back
# elsewhere is noticed through manager.json long before.
LONGEST_RETRY_S = 60.0


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


class Link:
    """The link's state and the time of the next try (by the keeper's own clock, seconds)."""

    def __init__(self) -> None:
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
                self.retry_at_s = now_s + min(FIRST_RETRY_S * 2**self.failures, LONGEST_RETRY_S)
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
