"""The event loop of all SSH connections of a process, on a thread of its own.

Encryption and tunnels keep it busy, and threads that wait for files may not wait for the manager's own loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from nni_manager.errors import RetryableError

_CLOSED = "cannot reach any machine: the manager is closing; start it again with nnictl resume"
Result = TypeVar("Result")


class SshThread:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="ssh", daemon=True)
        self._thread.start()
        self._is_closing = False

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for the result. For threads without a loop.

        Raises:
            RetryableError: the thread has ended.
        """
        try:
            return self._submit(work).result()
        except concurrent.futures.CancelledError as error:
            raise RetryableError(_CLOSED) from error

    async def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await the result on another loop. Cancellation cancels the work.

        Raises:
            RetryableError: the thread has ended.
        """
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        if self._is_closing:
            work.close()
            raise RetryableError(_CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End the loop, and its tasks. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            asyncio.run_coroutine_threadsafe(_end_tasks(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
