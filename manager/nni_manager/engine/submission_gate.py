"""Paces the submission of jobs while the cluster rejects the login, or a quota is exceeded.

All jobs have the same login and the same size, so a single job tests whether the cluster accepts jobs again, and the others
wait in their order.
"""

import asyncio
from collections.abc import Awaitable, Callable

from nni_manager.training_services.errors import QuotaExceeded, Unauthenticated

# A new token, or the end of a job, is used within seconds, and few calls are refused.
RETRY_S = 5.0
# Before the first refusal is known, at most so many jobs are refused. Training services call clusters with fewer threads.
MOST_AT_ONCE = 32


class SubmissionGate:
    """Admits up to MOST_AT_ONCE jobs while the cluster accepts jobs, otherwise one job at a time."""

    def __init__(self) -> None:
        self.reason = ""
        """Why one job at a time is admitted; empty: the cluster accepts jobs."""
        self._is_quota = False
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._not_before_s = 0.0
        """When the next job may be tried, by the loop's clock."""

    async def submit(
        self,
        attempt: Callable[[], Awaitable[bool]],
        on_refused: Callable[[Unauthenticated | QuotaExceeded], None],
    ) -> None:
        """Run `attempt` until it submits the job. `attempt` returns False if the job is not wanted any more.

        Other errors of `attempt` are raised.
        """
        while True:
            if not self.reason:
                async with self._slots:
                    if not self.reason and await self._try(attempt, on_refused):
                        return
            self._waiting += 1
            try:
                await self._turn.acquire()
            finally:
                self._waiting -= 1
            try:
                while self.reason:
                    await asyncio.sleep(self._not_before_s - asyncio.get_running_loop().time())
                    if await self._try(attempt, on_refused):
                        return
            finally:
                self._turn.release()

    async def _try(
        self,
        attempt: Callable[[], Awaitable[bool]],
        on_refused: Callable[[Unauthenticated | QuotaExceeded], None],
    ) -> bool:
        """True unless the cluster refuses the job for the present."""
        try:
            is_accepted = await attempt()
        except (Unauthenticated, QuotaExceeded) as error:
            self.reason, self._is_quota = str(error), isinstance(error, QuotaExceeded)
            self._not_before_s = asyncio.get_running_loop().time() + RETRY_S
            on_refused(error)
            return False
        if is_accepted:
            self._not_before_s = 0.0
            # A quota with room for one job may have none for the next.
            if not (self._is_quota and self._waiting):
                self.reason, self._is_quota = "", False
        return True
