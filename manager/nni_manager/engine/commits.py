"""Group commit: whatever has come while the last transaction was written goes into the next one."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from nni_manager.errors import TryAgain
from nni_manager.store.store import Store, Write

log = logging.getLogger(__name__)

# A full disk is looked at this often; keepers wait meanwhile, and trials do not notice.
RETRY_S = 1.0
# The samples of 1,000 tasks, one every 5 s from each, so make one transaction a second instead of 200.
LONGEST_REST_S = 1.0


class GroupCommit:
    """The only writer of the store. Writes become durable in the order they were added."""

    def __init__(self, store: Store, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` hears of a bug in the store: nothing more is stored after it, and nothing acknowledged."""
        self._store = store
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._writes: list[Write] = []
        self._done: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.problem = ""
        """Why nothing can be stored at present; empty while all is well."""

    def add(self, writes: Sequence[Write]) -> "asyncio.Future[None]":
        """Store these; the future is done when they are durable. It fails only for a bug."""
        loop = asyncio.get_running_loop()
        if self._done is None:
            self._done = loop.create_future()
        self._writes.extend(writes)
        if self._task is None:
            self._task = loop.create_task(self._run())
        return self._done

    def add_unhurried(self, writes: Sequence[Write]) -> None:
        """Store these with what is stored next, `LONGEST_REST_S` from now at the latest: nobody waits for them."""
        self._writes.extend(writes)
        if self._rest is None:
            self._rest = asyncio.get_running_loop().call_later(LONGEST_REST_S, self._end_rest)

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._writes:
            self.add(())

    async def close(self) -> None:
        """Wait until all is durable, and close the store.

        What the disk does not take now is left out: no keeper was told that it is durable, so it comes again.
        """
        self._is_closing = True
        self._end_rest()
        if self._task is not None:
            await self._task
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    async def _run(self) -> None:
        while self._done is not None:
            batch, self._writes = self._writes, []
            done, self._done = self._done, None
            try:
                await self._commit(batch)
            except TryAgain as error:
                done.set_exception(error)
                done.exception()  # heard: nobody may be waiting
                continue
            except Exception as error:  # noqa: BLE001 - passed on, to those who wait and to the engine
                done.set_exception(error)
                done.exception()  # heard: nobody may be waiting
                self._on_failure(error)
                return
            done.set_result(None)
        self._task = None

    async def _commit(self, batch: list[Write]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._thread, self._store.commit, batch, time.time())
            except TryAgain as error:
                if not self.problem:
                    log.warning("%s", error)
                self.problem = str(error)
                if self._is_closing:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self.problem = ""
                return
