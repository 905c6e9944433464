"""What a keeper is still to be told."""

import asyncio
from collections.abc import Hashable

from trial_keeper.wire.messages import Durable, ManagerMessage, Welcome


class Outgoing(asyncio.Queue[ManagerMessage | None]):
    """A queue that a keeper which does not listen cannot make grow: of what says the same, only the newest waits.

    So no more waits than one word about the offsets of each of its attempts, one to run, one to return and one to stop each of
    its trials, one to leave, and the end.
    """

    def _init(self, maxsize: int) -> None:
        self._queue: dict[Hashable, ManagerMessage | None] = {}

    def _put(self, item: ManagerMessage | None) -> None:
        match item:
            case Durable(attempt=attempt):
                earlier = self._queue.get(attempt.key)
                if isinstance(earlier, Durable) and earlier.attempt.closed:
                    return  # nothing more is to be said of it
                self._queue[attempt.key] = item
            case Welcome():
                self._queue[Welcome] = item
            case _:
                self._queue[item] = item

    def _get(self) -> ManagerMessage | None:
        return self._queue.pop(next(iter(self._queue)))
