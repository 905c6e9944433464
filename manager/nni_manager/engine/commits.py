"""Group commit: whatever has come while the last transaction was written goes into the next one, within bounds.

Theory of operation. What is to be stored waits in lanes. Rows of the manager's own (trials, jobs, the experiment) are few: of
each only the newest waits, and all go into the next transaction, ahead of everything else. What trials say waits in one lane per
attempt, in its order. A transaction takes something small from every lane that begins so; every other one takes turn by turn from
the rest, too, until it has as much as fits into a short time. So a trial that reports without end fills its own lane, and delays
nobody else's by more than one short transaction; and when it is the only one of its kind, and has neighbours, the store rests
after each of those.

What waits is bounded in bytes. Whoever brings more (a keeper's stream, a file on the shared storage) waits for `room` before it
takes the next piece: the bytes wait in the trials' files.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nni_manager.clock import steady_s
from nni_manager.domain.receiving import Commit
from nni_manager.errors import TryAgain
from nni_manager.store.store import (
    ConfigRow,
    ExperimentRow,
    ImportedRows,
    JobRow,
    Store,
    TrialRow,
    UsageRow,
    Write,
)
from trial_keeper.wire.messages import AttemptKey

log = logging.getLogger(__name__)

# A full disk is looked at this often; keepers wait meanwhile, and trials do not notice.
RETRY_S = 1.0
# What may wait for the disk, of all trials together: 100 keepers with a window full of metrics each, and a small part of the
# manager's 300 MB.
MOST_BYTES = 64 << 20
# Of one keeper: more than a transaction takes, so that it never has to wait for a keeper, and small enough for a dozen floods.
MOST_OF_ONE_BYTES = 4 << 20
# The samples of 1,000 tasks, one every 5 s from each, so make one transaction a second instead of 200.
LONGEST_REST_S = 1.0
# From here on only who has nothing waiting may bring more: floods leave half of the room to everybody else.
_CROWDED_BYTES = MOST_BYTES // 2
# A record as Python objects and a row of SQLite, beside its bytes on the wire.
_RECORD_BYTES = 512
_ROW_BYTES = 512
# One of a sample, as an object and as JSON.
_GPU_BYTES = 256
# What every lane may put into every transaction: some reports, or some lines of a log.
_SMALL_BYTES = 32 << 10
# A flood is stored in transactions of this length, or of three times what the disk takes to sync: then most of the time is work.
_AIM_S = 0.005
_SYNCS = 3
# Where nobody waits but floods. A transaction costs as much as some hundred records, and a piece of each lane's last page anew.
_AIM_AMONG_FLOODS_S = 0.025
# How much longer than it worked the store rests from a flood that is the only one. A quarter of its time is 30,000 records a
# second; what the disk takes to sync costs the others nothing.
_REST = 3
# So many floods at once are what the experiment is made of: none of them rests.
_MANY_FLOODS = 4
# Nor does one rest for nobody: who has brought something small within this time may do so again.
_NEIGHBOUR_S = 1.0
_SMALLEST_BATCH_BYTES = 128 << 10
_LARGEST_BATCH_BYTES = 4 << 20


@dataclass(slots=True)
class _Waiting:
    write: Write
    size_bytes: int
    done: "asyncio.Future[None]"


class GroupCommit:
    """The only writer of the store. What is said of one trial becomes durable in the order in which it was added."""

    def __init__(self, store: Store, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` hears of a bug in the store: nothing more is stored after it, and nothing acknowledged."""
        self._store = store
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._rows: dict[tuple[type[Write], str], _Waiting] = {}
        self._lanes: dict[AttemptKey, deque[_Waiting]] = {}
        """Whose turn it is comes first."""
        self._batch: list[_Waiting] = []
        """What is being written."""
        self._batch_bytes = _SMALLEST_BATCH_BYTES
        self._has_flood = False
        """Whether anything but small things is being written."""
        self._floods_rest_until_s = 0.0
        self._small_at_s: dict[AttemptKey, float] = {}
        self._flood_at_s: dict[AttemptKey, float] = {}
        """When an attempt has last brought something small, or more than that, within `_NEIGHBOUR_S`."""
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._without_room: dict[asyncio.Future[None], Callable[[], int]] = {}
        """Who waits for room, and how much of theirs waits to be stored."""
        self._rest: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.waiting_bytes = 0
        """What is held in memory until it is durable, as an estimate from above."""
        self._bytes_of: dict[AttemptKey, int] = {}
        """The same, of each attempt of which there is any."""
        self.problem = ""
        """Why nothing can be stored at present; empty while all is well."""

    def add(self, writes: Sequence[Write]) -> "asyncio.Future[None]":
        """Store these; the future is done when they are durable. It fails only for a bug, or when the disk is full at the end.

        Without any writes: done when all that was added before is durable.
        """
        if len(writes) == 1:
            return self._put(writes[0])
        parts = [self._put(write) for write in writes] or [waiting.done for waiting in self._all()]
        if parts:
            self._start()
        return _when_all(parts)

    def waiting_bytes_of(self, key: AttemptKey) -> int:
        """What is held in memory of one attempt."""
        return self._bytes_of.get(key, 0)

    def has_room(self, own_bytes: int = 0) -> bool:
        """Whether somebody of whom so many bytes wait may bring more."""
        if self.waiting_bytes < _CROWDED_BYTES:
            return own_bytes < MOST_OF_ONE_BYTES
        return own_bytes == 0 and self.waiting_bytes < MOST_BYTES

    async def room(self, own_bytes: Callable[[], int] = int) -> None:
        """Wait until `has_room` for what `own_bytes` tells."""
        while not self.has_room(own_bytes()):
            there_is_room = asyncio.get_running_loop().create_future()
            self._without_room[there_is_room] = own_bytes
            try:
                await there_is_room
            finally:
                self._without_room.pop(there_is_room, None)

    def add_unhurried(self, writes: Sequence[Write]) -> None:
        """Store these with what is stored next, `LONGEST_REST_S` from now at the latest: nobody waits for them."""
        for write in writes:
            self._hold(write)
        if self._rest is None and self._task is None:
            self._rest = asyncio.get_running_loop().call_later(LONGEST_REST_S, self._start)

    async def close(self) -> None:
        """Wait until all is durable, and close the store.

        What the disk does not take now is left out: no keeper was told that it is durable, so it comes again.
        """
        self._is_closing = True
        self._added.set()
        if self._all():
            self._start()
        if self._task is not None:
            await self._task
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    def _put(self, write: Write) -> "asyncio.Future[None]":
        waiting = self._hold(write)
        self._start()
        return waiting.done

    def _start(self) -> None:
        """Begin to write what waits, unless that is under way."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self._added.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _hold(self, write: Write) -> _Waiting:
        """Put it where it waits for its transaction."""
        waiting = _Waiting(write, _size_of(write), asyncio.get_running_loop().create_future())
        match write:
            case Commit() | UsageRow():
                key = _attempt_of(write)
                self._lanes.setdefault(key, deque()).append(waiting)
                self._bytes_of[key] = self._bytes_of.get(key, 0) + waiting.size_bytes
            case TrialRow() | JobRow() | ExperimentRow() | ConfigRow() | ImportedRows():
                # The newest says all, at its own place in the order.
                identity = (type(write), _id_of(write))
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
        """What goes into the next transaction; nothing when only floods wait, and rest."""
        had_flood, self._has_flood = self._has_flood, False
        batch = list(self._rows.values())
        self._rows.clear()
        for key in [key for key, lane in self._lanes.items() if lane[0].size_bytes <= _SMALL_BYTES]:
            batch.append(self._pop(key))
            self._small_at_s[key] = now_s
        if self._is_closing or (now_s >= self._floods_rest_until_s and not (batch and had_flood)):
            room_bytes = self._batch_bytes - sum(waiting.size_bytes for waiting in batch)
            while self._lanes and (room_bytes > 0 or not batch):
                self._has_flood = True
                key = next(iter(self._lanes))
                batch.append(self._pop(key))
                if batch[-1].size_bytes > _SMALL_BYTES:
                    self._flood_at_s[key] = now_s
                room_bytes -= batch[-1].size_bytes
        return batch

    def _pop(self, key: AttemptKey) -> _Waiting:
        """The next of a lane, whose turn comes again when all others had theirs."""
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
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    rest_s = self._floods_rest_until_s - time.monotonic()
                    await asyncio.wait_for(self._added.wait(), max(rest_s, 0.0))
                continue
            try:
                await self._commit([waiting.write for waiting in self._batch])
            except TryAgain as error:
                self._settle(error)
                continue
            except Exception as error:  # noqa: BLE001 - passed on, to those who wait and to the engine
                self._settle(error)
                self._on_failure(error)
                return
            self._settle(None)
        self._task = None

    def _settle(self, error: Exception | None) -> None:
        """Tell those who wait for the transaction that is over how it ended."""
        batch, self._batch = self._batch, []
        for waiting in batch:
            self._release(waiting)
            if waiting.done.done():
                continue  # who waited was cancelled
            if error is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(error)
                waiting.done.exception()  # heard: nobody may be waiting
        # Only who can go on is woken: with many floods most cannot, after any transaction.
        for there_is_room, own_bytes in list(self._without_room.items()):
            if self.has_room(own_bytes()) and not there_is_room.done():
                there_is_room.set_result(None)

    def _release(self, waiting: _Waiting) -> None:
        self.waiting_bytes -= waiting.size_bytes
        if isinstance(waiting.write, Commit | UsageRow):
            key = _attempt_of(waiting.write)
            self._bytes_of[key] -= waiting.size_bytes
            if not self._bytes_of[key]:
                del self._bytes_of[key]

    async def _commit(self, batch: list[Write]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = time.monotonic()
            try:
                stored = await loop.run_in_executor(self._thread, self._store.commit, batch, steady_s())
            except TryAgain as error:
                if not self.problem:
                    log.warning("%s", error)
                self.problem = str(error)
                if self._is_closing:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                if self.problem:
                    log.info("what could not be stored is stored now")
                self.problem = stored.problem
                self._pace(time.monotonic() - began_s, stored.sync_s)
                return

    def _pace(self, took_s: float, sync_s: float) -> None:
        """Make the next transaction of a flood longer or shorter, so that it is as long as it should be."""
        if not self._has_flood:
            return
        now_s = time.monotonic()
        has_neighbours = self._has_neighbours(now_s)
        aim_s = max(_AIM_S if has_neighbours else _AIM_AMONG_FLOODS_S, _SYNCS * sync_s)
        ratio = aim_s / max(took_s, 1e-4)
        if ratio < 1 or self._lanes:  # one that took all there was says nothing of a longer one
            following = self._batch_bytes * min(max(ratio, 0.5), 2.0)
            self._batch_bytes = int(min(max(following, _SMALLEST_BATCH_BYTES), _LARGEST_BATCH_BYTES))
        if len(self._lanes) < _MANY_FLOODS and has_neighbours:
            self._floods_rest_until_s = now_s + _REST * (took_s - sync_s)

    def _has_neighbours(self, now_s: float) -> bool:
        """Whether anybody but floods may have something to store soon."""
        self._small_at_s, self._flood_at_s = (
            {key: at_s for key, at_s in each.items() if at_s > now_s - _NEIGHBOUR_S}
            for each in (self._small_at_s, self._flood_at_s)
        )
        return not self._small_at_s.keys() <= self._flood_at_s.keys()


def _attempt_of(write: Commit | UsageRow) -> AttemptKey:
    return write.key if isinstance(write, Commit) else write.usage.key


def _id_of(write: TrialRow | JobRow | ExperimentRow | ConfigRow | ImportedRows) -> str:
    match write:
        case TrialRow():
            return str(write.values["trial_id"])
        case JobRow():
            return write.job_id
        case ImportedRows():
            return str(write.position)
        case ExperimentRow() | ConfigRow():
            return ""


def _size_of(write: Write) -> int:
    match write:
        case Commit():
            spans = len(write.records) + len(write.garbage)
            return write.new_offset - write.offset + _RECORD_BYTES * spans + _ROW_BYTES
        case TrialRow():
            # Its parameters, its message and its result are as long as a trial likes.
            texts = (value for value in write.values.values() if isinstance(value, str))
            return _ROW_BYTES + sum(map(sys.getsizeof, texts))
        case UsageRow():
            return _ROW_BYTES + _GPU_BYTES * len(write.usage.gpus)
        case ConfigRow():
            return _ROW_BYTES + sys.getsizeof(write.config)
        case ImportedRows():
            return (_ROW_BYTES + _RECORD_BYTES) * len(write.results)
        case JobRow() | ExperimentRow():
            return _ROW_BYTES


def _when_all(parts: Sequence["asyncio.Future[None]"]) -> "asyncio.Future[None]":
    """Done when all parts are; it fails when one has failed."""
    done = asyncio.get_running_loop().create_future()
    left = len(set(parts))

    def count(part: "asyncio.Future[None]") -> None:
        nonlocal left
        left -= 1
        error = None if part.cancelled() else part.exception()
        if error is not None and not done.done():
            done.set_exception(error)
            done.exception()  # heard: nobody may be waiting
        elif left == 0 and not done.done():
            done.set_result(None)

    for part in set(parts):
        part.add_done_callback(count)
    if not parts:
        done.set_result(None)
    return done
