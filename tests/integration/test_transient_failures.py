"""Failures of the database or of a thread that last for a moment, in the parts of the manager and of the keeper."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

from nni_manager.engine import storage_poller
from nni_manager.engine.job_recovery import JobRecovery
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.storage_executor import StorageExecutor
from nni_manager.engine.storage_poller import SharedStoragePoller
from nni_manager.store.errors import StoreBusy
from nni_manager.store.rows import StreamWrite
from nni_manager.support.task_set import TaskSet
from trial_keeper.core.events import LinkLost
from trial_keeper.host.link import ManagerLink
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey, Hello, Stream
from trial_keeper.wire.workspace import Workspace

KEY = AttemptKey("aBcDe", "01M8JE616HFC3FME9NSBF6R8X3", "main-0")


class Runtime(MagicMock):
    """A runtime with real tasks. It records failures."""

    def __init__(self):
        super().__init__()
        self.failures = []
        self.tasks = TaskSet(self.failures.append)
        self.spawn, self.fail = self.tasks.spawn, self.failures.append

    def durable(self):
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def test_the_metrics_of_an_attempt_are_read_once_if_two_attempts_continue_from_it():
    reads, may_end = [], asyncio.Event()

    async def drain_source(trial, key):
        reads.append(key)
        await may_end.wait()

    runtime = Runtime()
    ingest = MagicMock(**{"is_awaited.return_value": False})
    poller = SimpleNamespace(drain_source=drain_source)
    recovery = JobRecovery(runtime, MagicMock(), MagicMock(), MagicMock(), ingest, poller)
    recovery.drain_source(KEY)
    recovery.drain_source(KEY)
    may_end.set()
    await runtime.tasks.join()
    assert runtime.failures == []
    assert reads == [KEY]
    recovery.drain_source(KEY)  # a later continuation
    await runtime.tasks.join()
    assert len(reads) == 2


async def test_the_metrics_of_an_earlier_attempt_are_read_after_its_received_writes_are_stored():
    order, is_stored = [], asyncio.Event()

    async def store():
        await is_stored.wait()
        order.append("stored")

    async def drain_source(trial, key):
        order.append("read")

    runtime = Runtime()
    runtime.durable = lambda: asyncio.ensure_future(store())
    ingest = MagicMock(**{"is_awaited.return_value": False})
    poller = SimpleNamespace(drain_source=drain_source)
    JobRecovery(runtime, MagicMock(), MagicMock(), MagicMock(), ingest, poller).drain_source(KEY)
    is_stored.set()
    await runtime.tasks.join()
    assert runtime.failures == []
    assert order[:2] == ["stored", "read"]


async def test_the_manager_ends_if_the_database_cannot_be_read_after_a_report_is_stored():
    runtime = Runtime()
    reader = MagicMock(**{"marks.side_effect": StoreBusy("the disk does not answer")})
    ingest = KeeperIngest(runtime, MagicMock(), MagicMock(), reader, MagicMock(), MagicMock(), MagicMock())
    commit = MagicMock(
        spec=StreamWrite, key=KEY, stream=Stream.METRICS, garbage=(), records=(), marks=("mark",)
    )
    stored = asyncio.get_running_loop().create_future()
    stored.add_done_callback(
        lambda done: ingest._note_committed(MagicMock(key=KEY, durable={}), commit, done)
    )
    stored.set_result(None)
    await asyncio.sleep(0)
    assert [type(each) for each in runtime.failures] == [StoreBusy]


async def test_the_files_of_an_attempt_are_read_although_the_database_is_busy_at_first(monkeypatch):
    monkeypatch.setattr(storage_poller, "_FAILED_POLL_RETRY_DELAY_S", 0)
    ingest = MagicMock(**{"received.side_effect": [StoreBusy("another process uses it"), 0, 0]})
    files = MagicMock(**{"see_attempt.return_value": MagicMock(pieces=[], key=KEY)})
    trial = MagicMock(job_id="aBcDe", state=MagicMock(is_terminal=False))
    ingest.commits.wait_for_capacity = AsyncMock()
    storage = StorageExecutor()
    poller = SharedStoragePoller(
        Runtime(), MagicMock(), files, storage, MagicMock(), ingest, (Stream.METRICS,), 0.0
    )
    await poller.drain(trial, MagicMock(key=KEY, ended=None))
    assert files.see_attempt.call_count == 1
    assert ingest.received.call_count == 3


async def test_the_keeper_connects_again_after_an_unexpected_error(tmp_path, monkeypatch):
    workspace, events = Workspace(tmp_path), asyncio.Queue()

    def raise_error(workspace):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Workspace, "read_manager_json", raise_error)
    link = ManagerLink(
        workspace, KeeperSettings("EXPERIMT", "aBcDe", str(tmp_path), "token", "aBcDe"), events.put_nowait
    )
    for _ in range(2):
        link.open(lambda: Hello("1.0", "EXPERIMT", "aBcDe", "main-0"))
        lost = await events.get()
        assert isinstance(lost, LinkLost)
        assert "can't start new thread" in lost.cause
    await link.close()
