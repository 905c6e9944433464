import asyncio
import sqlite3
import threading

import pytest
from attempts import RegisteringStore, attempt_id

from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.domain.trial import Trial
from nni_manager.engine import commits
from nni_manager.store.errors import StoreBusy
from nni_manager.store.lease import LeaseLost
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import RowWrite, UsageRow, trial_row
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


class Counting:
    """A store that notes how many writes each transaction had."""

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
    return Counting(open_store(database, tmp_path))


def test_nothing_that_waits_is_stored_once_another_writer_has_begun_the_next_epoch(database, tmp_path):
    failures = []

    async def run():
        group = commits.GroupCommit(open_store(database, tmp_path), failures.append)
        await group.add([row(0)])
        Store(database, tmp_path).close()
        waiting = [group.add([row(number)]) for number in range(1, 100)]
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, LeaseLost)
        assert group.add([row(100)]) is not None  # and nothing more comes of it

    asyncio.run(run())
    assert [type(failure) for failure in failures] == [LeaseLost]
    with StoreReader(database) as reader:
        assert [trial.trial_id for trial in reader.trials()] == ["t0"]


def test_what_comes_while_a_transaction_is_written_shares_the_next_one(database, counting):
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
        (trial_row(Trial("t", 0, {}, {}, 0.0, "t", message="ä€" * 50_000)), 200_000),
        (trial_row(Trial("t", 0, {}, {}, 0.0, "t", final="1" * 100_000)), 100_000),
        (
            UsageRow(
                Usage(AttemptKey("t", attempt_id(0), "main-0"), 0, 0, 0, (GpuUsage(0, 0.5, 1),) * 1000), 0.0
            ),
            200_000,
        ),
    ],
    ids=["parameters", "message", "result", "gpus"],
)
def test_what_waits_is_counted_with_its_text(counting, write, held_bytes):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        done = group.add([write])
        assert held_bytes <= group.waiting_bytes < 2 * held_bytes
        await done
        assert group.waiting_bytes == 0
        await group.close()

    asyncio.run(run())


def test_what_nobody_waits_for_goes_along_with_what_somebody_does(counting):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        for number in range(10):
            group.add_deferred([row(number)])
        await group.add([row(10)])
        await group.close()

    asyncio.run(run())
    assert counting.batches == [11]


def test_what_nobody_waits_for_is_stored_soon_and_together(counting, monkeypatch):
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


def test_the_end_stores_also_what_nobody_waits_for(counting, monkeypatch):
    monkeypatch.setattr(commits, "MAX_DEFERRAL_S", 3600)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        group.add_deferred([row(1)])
        await group.close()

    asyncio.run(run())
    assert counting.batches == [1]


def test_a_full_disk_delays_and_loses_nothing(database, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "RETRY_S", 0.01)
    store = open_store(database, tmp_path)
    store._connection.execute("PRAGMA busy_timeout = 1")
    blocker = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")

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
    blocker.close()
    with StoreReader(database) as reader:
        assert len(reader.trials()) == 3


def test_a_bug_in_the_store_acknowledges_nothing_and_is_told(database, tmp_path):
    store = open_store(database, tmp_path)
    told = []

    async def run():
        group = commits.GroupCommit(store, told.append)
        clash = trial_row(Trial("other", 1, {}, {}, 0.0, "other"))  # the same sequence number twice
        done = group.add([row(1), clash])
        with pytest.raises(Exception, match="UNIQUE"):
            await done

    asyncio.run(run())
    store.close()
    assert len(told) == 1


def test_a_disk_that_stays_full_keeps_no_manager_from_its_end(database, tmp_path):
    store = open_store(database, tmp_path)
    store._connection.execute("PRAGMA busy_timeout = 1")
    blocker = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")

    async def run():
        group = commits.GroupCommit(store, pytest.fail)
        waiting = group.add([row(1)])
        while not group.problem:
            await asyncio.sleep(0)
        await asyncio.wait_for(group.close(), 90)
        with pytest.raises(StoreBusy):
            await waiting

    asyncio.run(run())
    blocker.close()
    with StoreReader(database) as reader:
        assert reader.trials() == []


FLOOD, QUIET, OTHER = (AttemptKey(name, attempt_id(0), "main-0") for name in ("flood", "quiet", "other"))


def metrics(key, count, *, after=0):
    """What a chunk of so many records becomes, in a file with so many before it."""
    record = encode(0, key.trial_id, "PERIODICAL", 0, 0.5)
    receiver = AttemptIngest.restored(key, {Stream.METRICS: after * len(record)})
    return receiver.take(Stream.METRICS, after * len(record), record * count)


class Gate:
    """A store that opens when the test says so, and remembers what each transaction brought."""

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
        """The number of the transaction with the first of a trial's records."""
        return next(
            number
            for number, batch in enumerate(self.batches)
            if any(isinstance(write, StreamWrite) and write.key == key for write in batch)
        )


def play(scenario, database, tmp_path):
    """Run a scenario with a group commit over a gate."""

    async def run():
        gate = Gate(open_store(database, tmp_path))
        group = commits.GroupCommit(gate, pytest.fail)
        try:
            await asyncio.wait_for(scenario(group, gate), 60)
        finally:
            gate.opened.set()
            await group.close()

    asyncio.run(run())


def test_a_flood_of_one_trial_delays_a_report_of_another_by_one_transaction(database, tmp_path):
    async def scenario(group, gate):
        flood = [group.add([commit]) for commit in metrics(FLOOD, 50_000)]
        await asyncio.sleep(0)  # the first transaction is taken, and held up
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


def test_a_flood_rests_for_a_neighbour_also_when_that_one_says_much_at_once(database, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "_COOLDOWN_FACTOR", 1e6)

    async def scenario(group, gate):
        flood = [group.add(metrics(FLOOD, 100, after=100 * number)) for number in range(40)]
        # More than goes along with every transaction: some of it takes its turn among the flood's, of which several go into one.
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


def test_floods_rest_for_no_flood_that_brings_something_small_as_well(database, tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "_COOLDOWN_FACTOR", 1e6)

    async def scenario(group, gate):
        gate.opened.set()
        for number in range(3):
            for length in (2000, 10):
                after = number * 2010 + (length == 10) * 2000
                both = [*metrics(FLOOD, length, after=after), *metrics(OTHER, length, after=after)]
                await asyncio.gather(*[group.add([each]) for each in both])

    play(scenario, database, tmp_path)


def test_who_waits_for_room_and_is_gone_is_forgotten(database, tmp_path):
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
        waiting[0].cancel()  # its keeper is gone, and nobody else notices
        gate.opened.set()
        await asyncio.wait_for(waiting[1], 60)
        await group.add([])
        assert looks[FLOOD] == 1
        assert group.has_capacity()

    play(scenario, database, tmp_path)


def test_a_trials_own_row_is_stored_no_later_than_what_it_says(database, tmp_path):
    async def scenario(group, gate):
        said = [group.add([commit]) for commit in metrics(FLOOD, 20_000)]
        gate.opened.set()
        await group.add([row(1)])
        assert any(isinstance(write, RowWrite) for batch in gate.batches[:2] for write in batch)
        await asyncio.gather(*said)

    play(scenario, database, tmp_path)


def test_of_a_row_that_changes_while_the_disk_hangs_only_the_newest_waits(database, tmp_path):
    async def scenario(group, gate):
        trial = Trial("t1", 1, {}, {}, 0.0, "t1", message="00000")
        first = group.add([trial_row(trial)])
        await asyncio.sleep(0)
        one_row_bytes = group.waiting_bytes
        waiting = []
        for number in range(10_000):
            trial.message = f"{number:05}"
            waiting.append(group.add([trial_row(trial)]))
        assert group.waiting_bytes == 2 * one_row_bytes
        gate.opened.set()
        await asyncio.gather(first, *waiting)

    play(scenario, database, tmp_path)
    with StoreReader(database) as reader:
        assert [trial.message for trial in reader.trials()] == ["09999"]


def test_who_has_brought_enough_waits_and_others_need_not(database, tmp_path):
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


def test_many_floods_leave_room_for_those_who_have_nothing_waiting(database, tmp_path):
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


def test_a_store_without_room_says_how_much_there_is_and_goes_on_when_there_is_more(
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
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert group.problem == ""
        await group.close()

    asyncio.run(run())
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM metric").fetchone() == (5000,)
    connection.close()


def test_a_bulk_writer_in_its_cooldown_delays_no_other_and_causes_no_empty_transaction(counting):
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
