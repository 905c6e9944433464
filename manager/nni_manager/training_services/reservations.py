"""Jobs that wait for room on machines without a scheduler, first come, first served."""

import asyncio
from collections.abc import Awaitable, Callable

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.timeouts import set_within


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a job has to wait, and the seconds until the next attempt if no room is freed; None: until then."""

    reason: str
    retry_s: float | None


class ReservationQueue:
    """The jobs that wait. All need the same room, so only the first one tries to take it: no later job overtakes it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first in, first out
        self._was_freed = asyncio.Event()
        self._waiting: set[str] = set()
        self._reason = ""

    async def reserve(self, job_id: str, take: Callable[[], Awaitable[NoRoom | None]]) -> None:
        """Wait until it is the job's turn and `take`, which is called repeatedly, returns None."""
        self._waiting.add(job_id)
        try:
            async with self._turn:
                while True:
                    self._was_freed.clear()
                    refused = await take()
                    if refused is None:
                        break
                    self._reason = refused.reason
                    await set_within(self._was_freed, refused.retry_s)
        finally:
            self._waiting.discard(job_id)
            if not self._waiting:
                self._reason = ""

    def note_freed(self) -> None:
        """Try again now: room was freed, or a machine answers again."""
        self._was_freed.set()

    def pending_reason(self, job_id: str) -> str:
        """Why the first job waits, if this job waits; otherwise empty."""
        return self._reason if job_id in self._waiting else ""
