import asyncio
import contextlib
import sqlite3
import tempfile
import threading
from itertools import islice
from pathlib import Path

import pytest
from attempts import RegisteringStore, attempt_id
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.domain.trial import Trial
from nni_manager.domain.trial_run import TrialRun
from nni_manager.engine import commits
from nni_manager.errors import RetryableError
from nni_manager.store.errors import StoreBusy
from nni_manager.store.lease import LeaseLost
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import RowWrite, UsageRow, attempt_row, trial_row
from nni_manager.store.writer import Store
from nni_sdk.records import encode
from trial_keeper.wire.messages import AttemptKey, GpuUsage, Stream, Usage


def row(number):
    return trial_row(Trial(f"t{number}", number, {}, {}, 0.0, f"t{number}"))


@pytest.fixture
def database(tmp_path):
    return tmp_path / "experiment.sqlite"


def open_store(database, tmp_path):
    return RegisteringStore.create(database, tmp_path, "EXPERIMT", "{}", b"secret", 0.0)


class CountingStore:
    """A store that records the number of writes of each transaction."""

    def __init__(self, store):
        self.store = store
        self.batches = []
        self.committed = threading.Event()

    def commit(self, writes, now_s):
        stored = self.store.commit(writes, now_s)
        self.batches.append(len(writes))
        self.committed.set()
        return stored

    def close(self):
        self.store.close()


@pytest.fixture
def counting(database, tmp_path):
    return CountingStore(open_store(database, tmp_path))


def test_queued_writes_are_dropped_after_another_writer_has_started_a_new_epoch(database, tmp_path):
    failures = []

    async def run():
        group = commits.GroupCommit(open_store(database, tmp_path), failures.append)
        await group.add([row(0)])
        Store(database, tmp_path).close()
        waiting = [group.add([row(number)]) for number in range(1, 100)]
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, LeaseLost)
        # A write after the failure is accepted, but the group never stores it.
        assert group.add([row(100)]) is not None

    asyncio.run(run())
    assert [type(failure) for failure in failures] == [LeaseLost]
    with StoreReader(database) as reader:
        assert [trial.trial_id for trial in reader.trials()] == ["t0"]


def test_writes_added_during_a_transaction_share_the_next_transaction(database, counting):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        await asyncio.gather(*[group.add([row(number)]) for number in range(100)])
        await group.close()

    asyncio.run(run())
    assert sum(counting.batches) == 100
    assert len(counting.batches) <= 2
    with StoreReader(database) as reader:
        assert [trial.sequence_id for trial in reader.trials()] == [*range(100)]


@pytest.mark.parametrize(
    ("write", "held_bytes"),
    [
        (trial_row(Trial("t", 0, {"x": "p" * 100_000}, {}, 0.0, "t")), 100_000),
        (trial_row(Trial("t", 0, {}, {}, 0.0, "t", run=TrialRun(message="ä€" * 50_000))), 200_000),
        (trial_row(Trial("t", 0, {}, {}, 0.0, "t", run=TrialRun(final="1" * 100_000))), 100_000),
        (
            UsageRow(
                Usage(AttemptKey("t", attempt_id(0), "main-0"), 0, 0, 0, (GpuUsage(0, 0.5, 1),) * 1000), 0.0
            ),
            200_000,
        ),
    ],
    ids=["parameters", "message", "result", "gpus"],
)
def test_the_number_of_waiting_bytes_includes_the_text_of_queued_writes(counting, write, held_bytes):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        done = group.add([write])
        assert held_bytes <= group.waiting_bytes < 2 * held_bytes
        await done
        assert group.waiting_bytes == 0
        await group.close()

    asyncio.run(run())


def test_an_awaited_empty_write_returns_only_after_the_callbacks_of_earlier_writes(counting):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        called = []
        group.add([row(0)]).add_done_callback(called.append)
        while group.waiting_bytes:
            await asyncio.sleep(0)
        assert not called
        await group.add([])
        assert called
        await group.close()

    asyncio.run(run())


def test_the_number_of_remembered_write_times_stays_bounded_over_many_attempts(counting, monkeypatch):
    monkeypatch.setattr(commits, "_MANY_WRITERS", 10)
    monkeypatch.setattr(commits, "_INTERACTIVE_WINDOW_S", 0.0)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        for number in range(30):
            key = AttemptKey("t", attempt_id(number), "main-0")
            await group.add([StreamWrite(key, Stream.STDOUT, 0, 1, data=b"x")])
        assert len(group._small_at_s) <= 11
        await group.close()

    asyncio.run(run())


def test_deferred_writes_are_stored_together_with_the_next_awaited_write(counting):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        for number in range(10):
            group.add_deferred([row(number)])
        await group.add([row(10)])
        await group.close()

    asyncio.run(run())
    assert counting.batches == [11]


def test_deferred_writes_are_stored_in_one_transaction_after_the_maximum_deferral_time(counting, monkeypatch):
    monkeypatch.setattr(commits, "MAX_DEFERRAL_S", 0.05)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        for number in range(10):
            group.add_deferred([row(number)])
        assert counting.batches == []
        await asyncio.to_thread(counting.committed.wait, 20)
        await group.close()

    asyncio.run(run())
    assert counting.batches == [10]


def test_deferred_writes_are_stored_by_close(counting, monkeypatch):
    monkeypatch.setattr(commits, "MAX_DEFERRAL_S", 3600)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        group.add_deferred([row(1)])
        await group.close()

    asyncio.run(run())
    assert counting.batches == [1]


def test_writes_wait_while_another_process_locks_the_database_and_none_is_lost(
    database, tmp_path, monkeypatch
):
    monkeypatch.setattr(commits, "RETRY_S", 0.01)
    store = open_store(database, tmp_path)
    store._connection.execute("PRAGMA busy_timeout = 1")
    blocker = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    sleep, pauses = asyncio.sleep, set()

    async def recorded_sleep(delay_s):
        pauses.add(delay_s)
        await sleep(delay_s)

    monkeypatch.setattr(asyncio, "sleep", recorded_sleep)

    async def run():
        group = commits.GroupCommit(store, pytest.fail)
        waiting = [group.add([row(number)]) for number in range(3)]
        while not group.problem:
            await asyncio.sleep(0)
        assert not any(future.done() for future in waiting)
        assert "free some space" in group.problem
        blocker.execute("ROLLBACK")
        await asyncio.gather(*waiting)
        assert group.problem == ""
        await group.close()

    asyncio.run(run())
    assert 0.01 in pauses, "a refused transaction is tried again after a pause"
    blocker.close()
    with StoreReader(database) as reader:
        assert len(reader.trials()) == 3


def test_writes_are_not_acknowledged_if_the_store_raises_an_unexpected_exception(database, tmp_path):
    store = open_store(database, tmp_path)
    told = []

    async def run():
        group = commits.GroupCommit(store, told.append)
        # Two trials must not have the same sequence id. The store raises an error for this trial, because row(1) has the id 1
        # too.
        clash = trial_row(Trial("other", 1, {}, {}, 0.0, "other"))
        done = group.add([row(1), clash])
        with pytest.raises(Exception, match="UNIQUE"):
            await done

    asyncio.run(run())
    store.close()
    assert len(told) == 1


def test_close_is_not_blocked_by_a_disk_that_stays_full(database, tmp_path):
    store = open_store(database, tmp_path)
    store._connection.execute("PRAGMA busy_timeout = 1")
    blocker = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")

    async def run():
        group = commits.GroupCommit(store, pytest.fail)
        waiting = group.add([row(1)])
        while not group.problem:
            await asyncio.sleep(0)
        await asyncio.wait_for(group.close(), DEADLINE_S)
        with pytest.raises(StoreBusy):
            await waiting

    asyncio.run(run())
    blocker.close()
    with StoreReader(database) as reader:
        assert reader.trials() == []


def test_close_stores_writes_that_are_added_during_its_last_transaction_and_refuses_later_writes(
    database, tmp_path
):
    store = open_store(database, tmp_path)

    async def run():
        group = commits.GroupCommit(store, pytest.fail)
        group.add([row(1)]).add_done_callback(lambda _: group.add([row(2)]))
        await group.close()
        with pytest.raises(RetryableError, match="the manager is ending"):
            await group.add([row(3)])
        group.add_deferred([row(4)])
        assert group.waiting_bytes == 0

    asyncio.run(run())
    with StoreReader(database) as reader:
        assert [trial.sequence_id for trial in reader.trials()] == [1, 2]


FLOOD, QUIET, OTHER = (AttemptKey(name, attempt_id(0), "main-0") for name in ("flood", "quiet", "other"))


def metrics(key, count, *, after=0):
    """The store writes of a chunk of `count` records. In the file, `after` records precede the chunk."""
    record = encode(0, key.trial_id, "PERIODICAL", 0, 0.5)
    receiver = AttemptIngest.restored(key, {Stream.METRICS: after * len(record)})
    return receiver.take(Stream.METRICS, after * len(record), record * count)


class GatedStore:
    """A store that blocks until the test opens it, and records the writes of each transaction."""

    def __init__(self, store):
        self.store = store
        self.batches = []
        self.opened = threading.Event()

    def commit(self, writes, now_s):
        self.opened.wait()
        self.batches.append(writes)
        return self.store.commit(writes, now_s)

    def close(self):
        self.store.close()

    def batch_of(self, key):
        """The number of the transaction that stores the first records of a trial."""
        return next(
            number
            for number, batch in enumerate(self.batches)
            if any(isinstance(write, StreamWrite) and write.key == key for write in batch)
        )


def play(scenario, database, tmp_path):
    """Run a scenario with a group commit and a gated store."""

    async def run():
        gate = GatedStore(open_store(database, tmp_path))
        group = commits.GroupCommit(gate, pytest.fail)
        try:
            await asyncio.wait_for(scenario(group, gate), DEADLINE_S)
        finally:
            gate.opened.set()
            await group.close()

    asyncio.run(run())


def test_a_bulk_writer_delays_the_report_of_another_trial_by_at_most_one_transaction(database, tmp_path):
    async def scenario(group, gate):
        flood = [group.add([commit]) for commit in metrics(FLOOD, 50_000)]
        # This lets the first transaction start. The gate blocks it, so all later writes are queued.
        await asyncio.sleep(0)
        report = group.add(metrics(QUIET, 1))
        gate.opened.set()
        await report
        assert gate.batch_of(QUIET) == 1
        assert sum(not each.done() for each in flood) > len(flood) // 2
        await asyncio.gather(*flood)
        assert len(gate.batches) > 3

    play(scenario, database, tmp_path)
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM metric").fetchone() == (50_001,)
    connection.close()


def test_the_transactions_of_a_bulk_writer_grow_until_one_takes_the_target_time(
    database, tmp_path, monkeypatch
):
    # A transaction of this test takes milliseconds.
    monkeypatch.setattr(commits, "_TARGET_TRANSACTION_AMONG_BULK_WRITERS_S", 0.9)
    flood = metrics(FLOOD, 50_000)

    async def scenario(group, gate):
        gate.opened.set()
        await asyncio.gather(*[group.add([commit]) for commit in flood])
        records = [sum(len(write.records) for write in batch) for batch in gate.batches]
        assert max(records) > 10 * records[0]

    play(scenario, database, tmp_path)


def test_a_bulk_writer_is_throttled_while_another_trial_reports_in_bursts(database, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "_COOLDOWN_FACTOR", 1e6)

    async def scenario(group, gate):
        flood = [group.add(metrics(FLOOD, 100, after=100 * number)) for number in range(40)]
        # Five reports are queued behind the chunks of the bulk writer, and 35 more follow one at a time. Meanwhile, the group
        # must hold back the chunks.
        reports = [group.add(metrics(QUIET, 1, after=number)) for number in range(5)]
        gate.opened.set()
        await asyncio.gather(*reports)
        for number in range(5, 40):
            await group.add(metrics(QUIET, 1, after=number))
        assert not all(each.done() for each in flood)

    play(scenario, database, tmp_path)
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM metric").fetchone() == (4040,)
    connection.close()


def test_small_writes_of_a_bulk_writer_do_not_throttle_other_bulk_writers(database, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "_COOLDOWN_FACTOR", 1e6)

    async def scenario(group, gate):
        gate.opened.set()
        for number in range(3):
            for length in (2000, 10):
                after = number * 2010 + (length == 10) * 2000
                both = [*metrics(FLOOD, length, after=after), *metrics(OTHER, length, after=after)]
                await asyncio.gather(*[group.add([each]) for each in both])

    play(scenario, database, tmp_path)


def test_the_capacity_for_a_producer_is_not_checked_after_the_producer_has_cancelled_its_wait(
    database, tmp_path
):
    async def scenario(group, gate):
        looks = dict.fromkeys((FLOOD, QUIET), 0)

        async def come_again(key):
            def own_bytes():
                looks[key] += 1
                return group.waiting_bytes_of(key)

            await group.wait_for_capacity(own_bytes)

        for key in (FLOOD, QUIET):
            number = 0
            while group.has_capacity(group.waiting_bytes_of(key)):
                group.add(
                    [StreamWrite(key, Stream.STDOUT, number << 18, (number + 1) << 18, data=bytes(2**18))]
                )
                number += 1
        waiting = [asyncio.ensure_future(come_again(key)) for key in (FLOOD, QUIET)]
        await asyncio.sleep(0)
        # Cancel the wait of the bulk writer, as if its keeper had disconnected.
        waiting[0].cancel()
        gate.opened.set()
        await asyncio.wait_for(waiting[1], DEADLINE_S)
        await group.add([])
        assert looks[FLOOD] == 1
        assert group.has_capacity()

    play(scenario, database, tmp_path)


def test_many_queued_metrics_do_not_delay_the_write_of_a_trial_row(database, tmp_path):
    async def scenario(group, gate):
        said = [group.add([commit]) for commit in metrics(FLOOD, 20_000)]
        gate.opened.set()
        await group.add([row(1)])
        assert any(isinstance(write, RowWrite) for batch in gate.batches[:2] for write in batch)
        await asyncio.gather(*said)

    play(scenario, database, tmp_path)


def test_only_the_newest_version_of_a_row_is_queued_while_the_disk_hangs(database, tmp_path):
    async def scenario(group, gate):
        trial = Trial("t1", 1, {}, {}, 0.0, "t1", run=TrialRun(message="00000"))
        first = group.add([trial_row(trial)])
        await asyncio.sleep(0)
        one_row_bytes = group.waiting_bytes
        waiting = []
        for number in range(10_000):
            trial.run.message = f"{number:05}"
            waiting.append(group.add([trial_row(trial)]))
        assert group.waiting_bytes == 2 * one_row_bytes
        gate.opened.set()
        await asyncio.gather(first, *waiting)

    play(scenario, database, tmp_path)
    with StoreReader(database) as reader:
        assert [trial.run.message for trial in reader.trials()] == ["09999"]


def test_a_producer_above_its_limit_waits_and_other_producers_can_still_write(database, tmp_path):
    async def scenario(group, gate):
        offset = 0
        while group.has_capacity(group.waiting_bytes_of(FLOOD)):
            group.add([StreamWrite(FLOOD, Stream.STDOUT, offset, offset + 2**18, data=bytes(2**18))])
            offset += 2**18
        assert offset <= commits.MAX_OF_ONE_BYTES
        assert group.has_capacity(group.waiting_bytes_of(QUIET))
        waiting = asyncio.ensure_future(group.wait_for_capacity(lambda: group.waiting_bytes_of(FLOOD)))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.opened.set()
        await waiting
        await group.add([])
        assert group.waiting_bytes == group.waiting_bytes_of(FLOOD) == 0

    play(scenario, database, tmp_path)


def test_many_bulk_writers_leave_capacity_for_a_producer_that_has_no_queued_writes(database, tmp_path):
    async def scenario(group, gate):
        for number in range(1000):
            key = AttemptKey(f"flood{number}", attempt_id(0), "main-0")
            if group.has_capacity(1):
                group.add([StreamWrite(key, Stream.STDOUT, 0, 2**18, data=bytes(2**18))])
        assert not group.has_capacity(1)
        assert group.has_capacity(0)
        assert group.waiting_bytes < commits.MAX_BYTES
        gate.opened.set()

    play(scenario, database, tmp_path)


def test_the_problem_of_a_full_disk_shows_the_database_size_and_disappears_when_space_is_freed(
    database, tmp_path, monkeypatch
):
    monkeypatch.setattr(commits, "RETRY_S", 0.01)
    store = open_store(database, tmp_path)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")

    async def run():
        group = commits.GroupCommit(store, pytest.fail)
        waiting = [group.add([commit]) for commit in metrics(FLOOD, 5000)]
        while not group.problem:
            await asyncio.sleep(0)
        assert "database or disk is full; the file has 0 MB, and" in group.problem
        assert "MB free: free some disk space" in group.problem
        assert not all(each.done() for each in waiting)
        store._connection.execute("PRAGMA max_page_count = 100000")
        await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_S)
        assert group.problem == ""
        await group.close()

    asyncio.run(run())
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM metric").fetchone() == (5000,)
    connection.close()


class RefusingStore:
    """A store that refuses the transaction with the number `refused`. During each transaction, the event loop calls
    `next_step`.
    """

    def __init__(self, store, refused, next_step):
        self.store = store
        self.refused = refused
        self.next_step = next_step
        self.transactions = 0
        self.loop = asyncio.get_running_loop()

    def commit(self, writes, now_s):
        number, self.transactions = self.transactions, self.transactions + 1
        asyncio.run_coroutine_threadsafe(self._step(number), self.loop).result()
        if number == self.refused:
            raise StoreBusy("cannot write: the disk is full; free some space")
        return self.store.commit(writes, now_s)

    async def _step(self, number):
        self.next_step(number)

    def close(self):
        self.store.close()


def decided_writes(reports):
    """The writes of these reports in the order of the engine: the rows of a trial, then the data that refers to these rows."""
    size_of = {}
    for trial_id, size_bytes in reports:
        key = AttemptKey(trial_id, attempt_id(0), "main-0")
        if trial_id not in size_of:
            size_of[trial_id] = 0
            yield trial_row(Trial(trial_id, len(size_of), {}, {}, 0.0, trial_id))
            yield attempt_row(key, 0)
        offset = size_of[trial_id]
        size_of[trial_id] += size_bytes
        yield StreamWrite(key, Stream.STDOUT, offset, offset + size_bytes, data=b"x" * size_bytes)


# These are reports of the trials a, b and c. The number is the size of the report in bytes: small or bulk.
REPORTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1, 200_000])), min_size=1, max_size=12)


@given(
    reports=REPORTS,
    writes_per_step=st.integers(1, 5),
    closes_at=st.integers(0, 3),
    refused_later=st.integers(0, 5),
)
def test_close_drops_all_writes_after_a_transaction_that_the_disk_rejects(
    reports, writes_per_step, closes_at, refused_later
):
    added, closing = [], []
    pending = decided_writes(reports)

    async def close(database, logs):
        def next_step(transaction):
            added.extend((write, group.add([write])) for write in islice(pending, writes_per_step))
            if transaction == closes_at:
                closing.append(asyncio.ensure_future(group.close()))

        created = Store.create(database, logs, "EXPERIMT", "{}", b"secret", 0.0)
        store = RefusingStore(created, closes_at + refused_later, next_step)
        group = commits.GroupCommit(store, pytest.fail)
        next_step(-1)
        await asyncio.wait([done for _, done in added])
        # If the group made fewer transactions than `closes_at`, no step has called close() so far. So this loop runs the step
        # that calls it.
        while not closing:
            next_step(closes_at)
        await asyncio.wait_for(closing[0], DEADLINE_S)
        if store.transactions > store.refused:
            next_step(-1)
            assert store.transactions == store.refused + 1
            with pytest.raises(StoreBusy):
                await group.add([])

    with tempfile.TemporaryDirectory() as folder:
        database, logs = Path(folder, "experiment.sqlite"), Path(folder)
        asyncio.run(close(database, logs))
        # Like a next manager, store the writes that the group has refused, and the writes that were never added.
        with contextlib.closing(Store(database, logs)) as store:
            store.commit([write for write, done in added if done.exception() is not None], 0.0)
            store.commit([*pending], 0.0)
        with StoreReader(database) as reader:
            stored = {
                trial.trial_id: sum(
                    reader.offsets(AttemptKey(trial.trial_id, attempt_id(0), "main-0")).values()
                )
                for trial in reader.trials()
            }
    expected = {}
    for trial_id, size_bytes in reports:
        expected[trial_id] = expected.get(trial_id, 0) + size_bytes
    assert stored == expected


def test_a_throttled_bulk_writer_neither_delays_other_writers_nor_causes_empty_transactions(counting):
    key = AttemptKey("t0", attempt_id(0), "main-0")
    bulk = StreamWrite(key, Stream.STDOUT, 0, 100_000, data=b"x" * 100_000)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        await group.add([row(0)])
        group._bulk_cooldown_until_s = float("inf")
        waiting = group.add([bulk])
        await group.add([row(1)])
        await group.add([row(2)])
        assert not waiting.done()
        await group.close()
        assert waiting.done()

    asyncio.run(run())
    assert counting.batches == [1, 1, 1, 1]
