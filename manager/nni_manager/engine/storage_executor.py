"""Runs all access to the shared storage in a few threads, so that a hanging server blocks nothing else."""

import asyncio
import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Answer = TypeVar("Answer")

# A hanging file leaves threads for the other files; a hanging server blocks only these threads.
THREADS = 4
# A slow server answers within this time.
STALL_TIMEOUT_S = 10.0


class StorageExecutor:
    """A few threads for one event loop. Hanging calls are abandoned, also at the end of the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._began_at_s: dict[int, float] = {}
        """The start time of each thread's current call, by the number of the thread."""

    async def call(self, function: Callable[..., Answer], *arguments: object, **options: object) -> Answer:
        """Run the function in one of the threads; return its result or raise its exception.

        Raises:
            OSError: this object was closed.
        """
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "the experiment was closed meanwhile")
        if not self._threads:
            # Daemon threads, unlike the threads of ThreadPoolExecutor, do not delay the end of the process.
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

    def stalled_s(self) -> float:
        """The seconds for which the storage has not answered, if at least STALL_TIMEOUT_S; otherwise 0."""
        longest_s = time.monotonic() - min(list(self._began_at_s.values()), default=float("inf"))
        return longest_s if longest_s >= STALL_TIMEOUT_S else 0.0

    def close(self) -> None:
        """End the threads that do not hang."""
        self._is_closed = True
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
    # A closed loop has no waiter.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: None if future.done() else settle())
