"""Threads that touch the shared storage, so that nothing else hangs when its server does."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Answer = TypeVar("Answer")

# One file that hangs leaves the others theirs; a server that hangs does not get more than these from us.
THREADS = 4
# A server that is only slow has answered by then.
HANGS_AFTER_S = 10.0


class StorageThreads:
    """A few threads for one event loop. What hangs in them is left hanging, also at the end of the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._began_at_s: dict[int, float] = {}
        """When each thread began what it does, by its number."""

    async def call(self, function: Callable[..., Answer], *arguments: object, **options: object) -> Answer:
        """What the function returns or raises, run in one of the threads."""
        if not self._threads:
            # Daemons: the process ends without waiting for them, which an executor of the library would not.
            self._threads = [
                threading.Thread(target=self._work, args=(number,), name=f"storage-{number}", daemon=True)
                for number in range(THREADS)
            ]
            for thread in self._threads:
                thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._calls.put(partial(_answer, loop, future, partial(function, *arguments, **options)))
        return await future

    def hangs_for_s(self) -> float:
        """For how long the storage has not answered, when that is too long to be slowness; otherwise 0."""
        longest_s = time.monotonic() - min(list(self._began_at_s.values()), default=float("inf"))
        return longest_s if longest_s >= HANGS_AFTER_S else 0.0

    def close(self) -> None:
        """Let the threads end that can."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self, number: int) -> None:
        while (call := self._calls.get()) is not None:
            self._began_at_s[number] = time.monotonic()
            call()
            del self._began_at_s[number]


def _answer(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", function: Callable[[], Any]
) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(future.set_result, function())
    except Exception as error:  # noqa: BLE001 - raised again by `call`
        settle = partial(future.set_exception, error)
    # The loop may be closed, and nobody waits any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: None if future.done() else settle())
