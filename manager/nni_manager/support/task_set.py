"""Asyncio tasks that are referenced until they end, and cancelled together."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class TaskSet:
    """The running tasks of one owner, on one event loop."""

    def __init__(self, on_failure: Callable[[BaseException], None] = lambda error: None) -> None:
        """`on_failure` is called with the exception of a task."""
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run the work as a task; after `cancel`, it is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        if self._is_closing:
            task.cancel()
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, also those that are spawned from now on, and wait for their ends."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await self.join()

    async def join(self) -> None:
        """Wait until all tasks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
