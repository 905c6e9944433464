"""The send queue of a keeper's stream."""

import asyncio
from collections.abc import Hashable

from trial_keeper.wire.messages import Ack, ManagerMessage, Welcome


class CoalescingQueue(asyncio.Queue[ManagerMessage | None]):
    """A queue of bounded size even if the keeper does not read: among equivalent messages only the newest waits.

    At most it holds one ack for each attempt of the keeper, one run, one revoke and one stop for each of its trials, one
    shutdown, and the end of the stream.
    """

    def _init(self, maxsize: int) -> None:
        self._queue: dict[Hashable, ManagerMessage | None] = {}

    def _put(self, item: ManagerMessage | None) -> None:
        match item:
            case Ack(attempt=attempt):
                earlier = self._queue.get(attempt.key)
                if isinstance(earlier, Ack) and earlier.attempt.closed:
                    return  # no ack may follow the closing one
                self._queue[attempt.key] = item
            case Welcome():
                self._queue[Welcome] = item
            case _:
                self._queue[item] = item

    def _get(self) -> ManagerMessage | None:
        return self._queue.pop(next(iter(self._queue)))
