"""Paces the submission of jobs while the cluster rejects the login, or a quota is exceeded.

All jobs have the same login and the same size, so a single job tests whether the cluster accepts jobs again, and the others
wait in their order.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from nni_manager.training_services.errors import QuotaExceeded, Unauthenticated

# A new token, or the end of a job, is used within seconds, and few calls are refused.
RETRY_S = 5.0
# Before the first refusal is known, at most so many jobs are refused. Training services call clusters with fewer threads.
MOST_AT_ONCE = 32

Slot = AbstractAsyncContextManager[None]
Attempt = Callable[[Slot], Awaitable[bool]]
"""Submits a job, with the call of the cluster within the slot. Returns False if the job is not wanted any more."""
OnRefused = Callable[[Unauthenticated | QuotaExceeded], None]


class _Closed(Exception):
    """The cluster has refused another job while this one waited for a slot."""


class SubmissionGate:
    """Admits up to MOST_AT_ONCE calls while the cluster accepts jobs, otherwise one job at a time."""

    def __init__(self) -> None:
        self._refusal: Unauthenticated | QuotaExceeded | None = None
        """The last refusal. None: the cluster accepts jobs."""
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._not_before_s = 0.0
        """When the next job may be tried, by the loop's clock."""

    @property
    def reason(self) -> str:
        """Why one job at a time is admitted; empty: the cluster accepts jobs."""
        return "" if self._refusal is None else str(self._refusal)

    async def submit(self, attempt: Attempt, on_refused: OnRefused) -> None:
        """Run `attempt` until the cluster accepts the job, or the job is not wanted any more.

        Errors of `attempt` other than a refusal are raised.
        """
        while True:
            if self._refusal is None:
                with contextlib.suppress(_Closed):
                    if await self._try(attempt, self._slot(), on_refused):
                        return
            self._waiting += 1
            try:
                await self._turn.acquire()
            finally:
                self._waiting -= 1
            try:
                while self._refusal is not None:
                    await asyncio.sleep(self._not_before_s - asyncio.get_running_loop().time())
                    if await self._try(attempt, contextlib.nullcontext(), on_refused):
                        return
            finally:
                self._turn.release()

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        async with self._slots:
            if self._refusal is not None:
                raise _Closed
            yield

    async def _try(self, attempt: Attempt, slot: Slot, on_refused: OnRefused) -> bool:
        """True unless the cluster refuses the job for the present."""
        try:
            is_accepted = await attempt(slot)
        except (Unauthenticated, QuotaExceeded) as error:
            self._refusal = error
            self._not_before_s = asyncio.get_running_loop().time() + RETRY_S
            on_refused(error)
            return False
        if is_accepted:
            self._not_before_s = 0.0
            # A quota with room for one job may have none for the next.
            if not (isinstance(self._refusal, QuotaExceeded) and self._waiting):
                self._refusal = None
        return True
