"""Group commit: the writes that arrive during one transaction go into the next one, within bounds.

Theory of operation. Pending writes wait in queues. The manager's own rows (trials, jobs, the experiment) are few: only the newest
version of each waits, and all go into the next transaction, ahead of everything else. Data of trials waits in one queue (lane)
per attempt, in order. Each transaction takes a small write from every lane that starts with one. Every other transaction also
takes from the remaining lanes, round robin, until it reaches the target duration. So a bulk writer, a trial that reports without
pause, fills its own lane and delays the others by at most one short transaction. If bulk writers are few and share the store with
interactive writers, the store throttles them by a cooldown after each of these transactions.

Pending writes are bounded in bytes. A producer (a keeper's stream, a file on the shared storage) awaits `wait_for_capacity`
before each piece. Meanwhile the bytes stay in the trials' files.
"""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nni_manager.domain.ingest import StreamWrite
from nni_manager.engine.snapshot import StoreLoad
from nni_manager.errors import RetryableError
from nni_manager.store.rows import RowWrite, UsageRow, Write
from nni_manager.store.writer import Store
from nni_manager.support.clock import monotonic_epoch_s
from trial_keeper.timeouts import set_within
from trial_keeper.wire.messages import AttemptKey

log = logging.getLogger(__name__)

# The interval of retries on a full disk. Meanwhile keepers wait; trials are not affected.
RETRY_S = 1.0
# Pending bytes of all trials: a full window of metrics from each of 100 keepers, and a small part of the manager's 300 MB.
MAX_BYTES = 64 << 20
# Pending bytes of one keeper: more than a transaction takes, so transactions never wait for it, and few enough for a dozen bulk
# writers.
MAX_OF_ONE_BYTES = 4 << 20
# The delay of deferred writes: samples of 1,000 tasks, one every 5 s each, need one transaction a second instead of 200.
MAX_DEFERRAL_S = 1.0
# The high watermark: above it only producers without pending bytes may add more. Bulk writers leave half to the others.
_CROWDED_BYTES = MAX_BYTES // 2
# The memory of a record as Python objects and as a SQLite row, in addition to its bytes on the wire.
_RECORD_BYTES = 512
_ROW_BYTES = 512
# The memory of one GPU of a usage sample, as an object and as JSON.
_GPU_BYTES = 256
# The largest small write, which goes into the next transaction: some metric records or log lines.
_SMALL_BYTES = 32 << 10
# The target duration of bulk transactions is at least this, and three syncs of the disk, so that most of the time is work.
_TARGET_TRANSACTION_S = 0.005
_SYNCS = 3
# The target with bulk writers only. A transaction has the overhead of some hundred records and rewrites each lane's last page.
_TARGET_TRANSACTION_AMONG_BULK_WRITERS_S = 0.025
# The cooldown after a bulk transaction, as a multiple of its duration without the sync, which does not delay the others. The
# remaining quarter of the time suffices for 30,000 records a second.
_COOLDOWN_FACTOR = 3
# With this many bulk writers at once, bulk writes are the normal load and are not throttled.
_MANY_BULK_WRITERS = 4
# Throttle bulk writers only if an interactive writer was active within this window.
_INTERACTIVE_WINDOW_S = 1.0
# Beyond this number, ended attempts are removed from the writers; otherwise only after bulk writes.
_MANY_WRITERS = 1000
_MIN_BATCH_BYTES = 128 << 10
_MAX_BATCH_BYTES = 4 << 20


@dataclass(slots=True)
class _Waiting:
    write: Write
    size_bytes: int
    done: "asyncio.Future[None]"


class GroupCommit:
    """The only writer of the store. Writes of one trial become durable in the order in which they were added.

    After a transaction that is not repeated, nothing more is stored: later writes may refer to its rows.
    """

    def __init__(self, store: Store, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` is called after a bug in the store: nothing more is stored or acknowledged."""
        self._store = store
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._rows: dict[tuple[str, str], _Waiting] = {}
        self._lanes: dict[AttemptKey, deque[_Waiting]] = {}
        """The pending writes by attempt; the first lane has the next turn."""
        self._batch: list[_Waiting] = []
        """The writes of the current transaction."""
        self._batch_bytes = _MIN_BATCH_BYTES
        self._has_bulk = False
        """True if the current transaction includes bulk writes."""
        self._bulk_cooldown_until_s = 0.0
        self._small_at_s: dict[AttemptKey, float] = {}
        self._bulk_at_s: dict[AttemptKey, float] = {}
        """The time of an attempt's last small write, and of its last bulk write, within `_INTERACTIVE_WINDOW_S`."""
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiters: dict[asyncio.Future[None], Callable[[], int]] = {}
        """The waiting producers, each with a function that returns its pending bytes."""
        self._deferral: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._failure: Exception | None = None
        """Why nothing more is stored: a bug, a disk that rejected a transaction at close, or a closed store."""
        self.waiting_bytes = 0
        """An upper estimate of the memory held by pending writes."""
        self._bytes_of: dict[AttemptKey, int] = {}
        """`waiting_bytes` by attempt, for attempts with pending writes."""
        self.problem = ""
        """Why nothing can be stored at present; empty if it can."""
        self._transactions = 0
        self._transactions_s = 0.0

    @property
    def load(self) -> StoreLoad:
        """The work of the store since the manager's start."""
        return StoreLoad(self.waiting_bytes, self._transactions, self._transactions_s, self.problem)

    def add(self, writes: Sequence[Write]) -> "asyncio.Future[Any]":
        """Store the writes; the future is done when they are durable. It fails after a bug or close, or for a full disk at close.

        Without writes, the future is done when everything added before is durable, after the callbacks of those writes.
        """
        if self._failure is not None:
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(self._failure)
            _mark_retrieved(failed)
            return failed
        if len(writes) == 1:
            return self._put(writes[0])
        parts = [self._put(write) for write in writes] or [waiting.done for waiting in self._all()]
        if parts:
            self._start()
            stored: asyncio.Future[Any] = asyncio.gather(*parts)
        else:
            # The callbacks of a transaction that has just ended are scheduled, but have not run.
            stored = asyncio.gather(asyncio.sleep(0))
        stored.add_done_callback(_mark_retrieved)
        return stored

    def waiting_bytes_of(self, key: AttemptKey) -> int:
        """The pending bytes of one attempt."""
        return self._bytes_of.get(key, 0)

    def has_capacity(self, own_bytes: int = 0) -> bool:
        """True if a producer with `own_bytes` pending may add more."""
        if self.waiting_bytes < _CROWDED_BYTES:
            return own_bytes < MAX_OF_ONE_BYTES
        return own_bytes == 0 and self.waiting_bytes < MAX_BYTES

    async def wait_for_capacity(self, own_bytes: Callable[[], int] = int) -> None:
        """Wait for capacity: until `has_capacity` is True for the bytes that `own_bytes` returns."""
        while not self.has_capacity(own_bytes()):
            has_room = asyncio.get_running_loop().create_future()
            self._waiters[has_room] = own_bytes
            try:
                await has_room
            finally:
                self._waiters.pop(has_room, None)

    def add_deferred(self, writes: Sequence[Write]) -> None:
        """Store the writes with the next transaction, or after `MAX_DEFERRAL_S` at the latest."""
        if self._failure is not None:
            return
        for write in writes:
            self._hold(write)
        if self._deferral is None and self._task is None:
            self._deferral = asyncio.get_running_loop().call_later(MAX_DEFERRAL_S, self._start)

    async def close(self) -> None:
        """Wait until all writes are durable, and close the store.

        The first transaction that the disk rejects now is dropped with all later writes: they were not acknowledged, so keepers
        resend them. Writes that are added after the last transaction fail in the same way.
        """
        self._is_closing = True
        self._added.set()
        while self._all():
            self._start()
            if self._task is not None:
                await self._task
        if self._failure is None:
            self._failure = RetryableError("cannot store data: the manager is ending; resume the experiment")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    def _put(self, write: Write) -> "asyncio.Future[None]":
        waiting = self._hold(write)
        self._start()
        return waiting.done

    def _start(self) -> None:
        """Start to write the pending writes, unless a transaction loop is running."""
        if self._deferral is not None:
            self._deferral.cancel()
            self._deferral = None
        self._added.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _hold(self, write: Write) -> _Waiting:
        """Queue a write for its transaction."""
        waiting = _Waiting(write, _size_of(write), asyncio.get_running_loop().create_future())
        match write:
            case StreamWrite() | UsageRow():
                key = write.key
                self._lanes.setdefault(key, deque()).append(waiting)
                self._bytes_of[key] = self._bytes_of.get(key, 0) + waiting.size_bytes
            case RowWrite():
                # The newest version replaces the earlier ones and moves to the end of the order.
                identity = (write.query, write.identity)
                earlier = self._rows.pop(identity, None)
                if earlier is not None:
                    self.waiting_bytes -= earlier.size_bytes
                    waiting.done = earlier.done
                self._rows[identity] = waiting
        self.waiting_bytes += waiting.size_bytes
        return waiting

    def _all(self) -> list[_Waiting]:
        in_lanes = [waiting for lane in self._lanes.values() for waiting in lane]
        return [*self._batch, *self._rows.values(), *in_lanes]

    def _take(self, now_s: float) -> list[_Waiting]:
        """The writes of the next transaction; empty if only bulk writes are pending, in their cooldown."""
        had_bulk, self._has_bulk = self._has_bulk, False
        if len(self._small_at_s) > _MANY_WRITERS:
            self._forget_idle_writers(now_s)
        batch = list(self._rows.values())
        self._rows.clear()
        for key in [key for key, lane in self._lanes.items() if lane[0].size_bytes <= _SMALL_BYTES]:
            batch.append(self._pop(key))
            self._small_at_s[key] = now_s
        if self._is_closing or (now_s >= self._bulk_cooldown_until_s and not (batch and had_bulk)):
            room_bytes = self._batch_bytes - sum(waiting.size_bytes for waiting in batch)
            while self._lanes and (room_bytes > 0 or not batch):
                self._has_bulk = True
                key = next(iter(self._lanes))
                batch.append(self._pop(key))
                if batch[-1].size_bytes > _SMALL_BYTES:
                    self._bulk_at_s[key] = now_s
                room_bytes -= batch[-1].size_bytes
        return batch

    def _pop(self, key: AttemptKey) -> _Waiting:
        """Take the next write of a lane, and move the lane to the end of the round."""
        lane = self._lanes.pop(key)
        waiting = lane.popleft()
        if lane:
            self._lanes[key] = lane
        return waiting

    async def _run(self) -> None:
        while self._rows or self._lanes:
            self._added.clear()
            self._batch = self._take(time.monotonic())
            if not self._batch:
                rest_s = self._bulk_cooldown_until_s - time.monotonic()
                await set_within(self._added, max(rest_s, 0.0))
                continue
            try:
                await self._commit([waiting.write for waiting in self._batch])
            except Exception as error:  # noqa: BLE001 - passed on to the waiters and to the engine
                self._fail(error)
                break
            self._settle(None)
        self._task = None

    def _fail(self, error: Exception) -> None:
        """Drop all pending writes, and refuse later ones. The engine is notified, unless the disk rejected a write at close."""
        self._failure = error
        self._batch = self._all()
        self._rows.clear()
        self._lanes.clear()
        self._settle(error)
        if not isinstance(error, RetryableError):
            self._on_failure(error)

    def _settle(self, error: Exception | None) -> None:
        """Notify the waiters of the finished transaction of its outcome."""
        batch, self._batch = self._batch, []
        for waiting in batch:
            self._release(waiting)
            if waiting.done.done():
                continue  # the waiter has been cancelled
            if error is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(error)
                _mark_retrieved(waiting.done)
        # Wake only producers that have capacity: with many bulk writers most have none after a transaction.
        for has_room, own_bytes in list(self._waiters.items()):
            if self.has_capacity(own_bytes()) and not has_room.done():
                has_room.set_result(None)

    def _release(self, waiting: _Waiting) -> None:
        self.waiting_bytes -= waiting.size_bytes
        if isinstance(waiting.write, StreamWrite | UsageRow):
            key = waiting.write.key
            self._bytes_of[key] -= waiting.size_bytes
            if not self._bytes_of[key]:
                del self._bytes_of[key]

    async def _commit(self, batch: list[Write]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = time.monotonic()
            try:
                stored = await loop.run_in_executor(
                    self._thread, self._store.commit, batch, monotonic_epoch_s()
                )
            except RetryableError as error:
                if not self.problem:
                    log.warning("%s", error)
                self.problem = str(error)
                if self._is_closing:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                if self.problem:
                    log.info("the store works again; all waiting data is stored")
                self.problem = stored.problem
                took_s = time.monotonic() - began_s
                self._transactions += 1
                self._transactions_s += took_s
                self._pace(took_s, stored.sync_s)
                return

    def _pace(self, took_s: float, sync_s: float) -> None:
        """Adapt the size of the next bulk transaction to the target duration."""
        if not self._has_bulk:
            return
        now_s = time.monotonic()
        has_interactive_writers = self._has_interactive_writers(now_s)
        target_s = max(
            _TARGET_TRANSACTION_S if has_interactive_writers else _TARGET_TRANSACTION_AMONG_BULK_WRITERS_S,
            _SYNCS * sync_s,
        )
        ratio = target_s / max(took_s, 1e-4)
        if ratio < 1 or self._lanes:  # a batch of all pending writes is no evidence for a larger size
            following = self._batch_bytes * min(max(ratio, 0.5), 2.0)
            self._batch_bytes = int(min(max(following, _MIN_BATCH_BYTES), _MAX_BATCH_BYTES))
        if len(self._lanes) < _MANY_BULK_WRITERS and has_interactive_writers:
            self._bulk_cooldown_until_s = now_s + _COOLDOWN_FACTOR * (took_s - sync_s)

    def _has_interactive_writers(self, now_s: float) -> bool:
        """True if an interactive writer was active recently."""
        self._forget_idle_writers(now_s)
        return not self._small_at_s.keys() <= self._bulk_at_s.keys()

    def _forget_idle_writers(self, now_s: float) -> None:
        self._small_at_s, self._bulk_at_s = (
            {key: at_s for key, at_s in each.items() if at_s > now_s - _INTERACTIVE_WINDOW_S}
            for each in (self._small_at_s, self._bulk_at_s)
        )


def _size_of(write: Write) -> int:
    match write:
        case StreamWrite():
            spans = len(write.records) + len(write.garbage) + len(write.marks)
            return write.new_offset - write.offset + _RECORD_BYTES * spans + _ROW_BYTES
        case UsageRow():
            return _ROW_BYTES + _GPU_BYTES * len(write.usage.gpus)
        case RowWrite():
            # The parameters, the message and the result of a trial can have any length.
            texts = (value for value in write.values.values() if isinstance(value, str))
            return _ROW_BYTES + sum(map(sys.getsizeof, texts))


def _mark_retrieved(done: "asyncio.Future[Any]") -> None:
    """Mark the exception of a future as retrieved: there may be no waiter."""
    if not done.cancelled():
        done.exception()
