"""Suspends the submission of jobs while the cluster rejects the login.

All jobs use one login, so a single job tests whether the login is valid again, while the other jobs wait.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

# A new token is used within seconds, and few calls are rejected.
LOGIN_RETRY_S = 5.0


class SubmissionGate:
    """Admits all jobs while the login is valid, otherwise one job at a time."""

    def __init__(self) -> None:
        self._is_suspended = False
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait for admission. While submission is suspended, the next job is admitted at the end of the block."""
        if self._is_suspended:
            async with self._turn:
                if self._is_suspended:
                    yield
                    return
        yield

    async def suspend(self) -> None:
        """Suspend submission after a rejected login. Returns when the admitted job may try again."""
        self._is_suspended = True
        await asyncio.sleep(LOGIN_RETRY_S)

    def resume(self) -> None:
        """Admit all jobs: the cluster has accepted the login."""
        self._is_suspended = False
