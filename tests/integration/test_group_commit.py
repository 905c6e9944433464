import asyncio
import sqlite3
import threading

import pytest

from nni_manager.domain.trial import Trial
from nni_manager.engine import commits
from nni_manager.store.store import Store, StoreBusy, StoreReader, TrialRow


def row(number):
    return TrialRow.of(Trial(f"t{number}", number, {}, {}, 0.0, f"t{number}"))


@pytest.fixture
def database(tmp_path):
    return tmp_path / "experiment.sqlite"


def open_store(database, tmp_path):
    return Store.create(database, tmp_path, "EXPERIMT", "{}", b"secret", 0.0)


class Counting:
    """A store that notes how many writes each transaction had."""

    def __init__(self, store):
        self.store = store
        self.batches = []
        self.committed = threading.Event()

    def commit(self, writes, now_s):
        self.store.commit(writes, now_s)
        self.batches.append(len(writes))
        self.committed.set()

    def close(self):
        self.store.close()


@pytest.fixture
def counting(database, tmp_path):
    return Counting(open_store(database, tmp_path))


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


def test_what_nobody_waits_for_goes_along_with_what_somebody_does(counting):
    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        for number in range(10):
            group.add_unhurried([row(number)])
        await group.add([row(10)])
        await group.close()

    asyncio.run(run())
    assert counting.batches == [11]


def test_what_nobody_waits_for_is_stored_soon_and_together(counting, monkeypatch):
    monkeypatch.setattr(commits, "LONGEST_REST_S", 0.05)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        for number in range(10):
            group.add_unhurried([row(number)])
        assert counting.batches == []
        await asyncio.to_thread(counting.committed.wait, 20)
        await group.close()

    asyncio.run(run())
    assert counting.batches == [10]


def test_the_end_stores_also_what_nobody_waits_for(counting, monkeypatch):
    monkeypatch.setattr(commits, "LONGEST_REST_S", 3600)

    async def run():
        group = commits.GroupCommit(counting, pytest.fail)
        group.add_unhurried([row(1)])
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
        clash = TrialRow.of(Trial("other", 1, {}, {}, 0.0, "other"))  # the same sequence number twice
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
        await asyncio.wait_for(group.close(), 20)
        with pytest.raises(StoreBusy):
            await waiting

    asyncio.run(run())
    blocker.close()
    with StoreReader(database) as reader:
        assert reader.trials() == []
