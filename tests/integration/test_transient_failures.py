"""Failures of the database or of a thread that last for a moment, in the parts of the manager and of the keeper."""

import asyncio

import pytest
from real_experiment import values
from scripted_keeper import (
    Cluster,
    a_blocked_store,
    a_connected_keeper,
    a_submitted_trial,
    frames,
    play,
    states,
    until,
    write_attempt,
)
from void_service import an_engine

from nni_manager.engine import storage_poller
from nni_manager.engine.storage_poller import SharedStoragePoller
from nni_manager.store.errors import StoreBusy
from nni_manager.store.reader import StoreReader
from nni_manager.training_services.base import JobEnded
from nni_sdk.records import encode
from trial_keeper.core.events import LinkLost
from trial_keeper.host.link import ManagerLink
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import Chunk, Hello, Stream
from trial_keeper.wire.workspace import Workspace

ONE_TRIAL = {"trialConcurrency": 1, "maxTrialNum": 1}


def test_the_metrics_of_an_attempt_are_read_once_for_two_simultaneous_continuations(
    a_real_experiment, monkeypatch
):
    experiment = a_real_experiment("pass\n", **ONE_TRIAL)
    reads, may_end = [], asyncio.Event()

    async def drain_source(poller, trial, key):
        reads.append(key)
        await may_end.wait()

    monkeypatch.setattr(SharedStoragePoller, "drain_source", drain_source)

    async def scenario():
        engine, service = an_engine(experiment)
        _, key, _ = await a_connected_keeper(engine, service)
        engine.recovery.drain_source(key)
        engine.recovery.drain_source(key)
        may_end.set()
        await until(lambda: not engine.recovery._sources)
        assert reads == [key]
        engine.recovery.drain_source(key)  # a later continuation, after the first read has ended
        await until(lambda: not engine.recovery._sources)
        assert reads == [key] * 2
        await engine.close()

    play(scenario)


def test_the_metrics_of_an_attempt_are_read_up_to_their_quota(a_real_experiment, monkeypatch):
    metrics = frames(*[("PERIODICAL", 1)] * 40)
    monkeypatch.setitem(QUOTA_BYTES, Stream.METRICS, len(metrics) // 2)
    experiment = a_real_experiment("pass\n", **ONE_TRIAL)

    async def scenario():
        engine, service = an_engine(experiment)
        trial, key, _ = await a_connected_keeper(engine, service)
        write_attempt(experiment, trial, metrics, name=key.attempt_id)
        engine.recovery.drain_source(key)
        await until(lambda: not engine.recovery._sources)
        assert engine.ingest.received(key, Stream.METRICS) == len(metrics) // 2
        await engine.close()

    play(scenario)


def test_the_metrics_of_an_earlier_attempt_are_read_after_its_received_writes_are_stored(
    a_real_experiment, monkeypatch
):
    experiment = a_real_experiment("pass\n", **ONE_TRIAL)
    stored_before = []

    async def drain_source(poller, trial, key):
        stored_before.append(values(experiment.rows(key.trial_id)))

    monkeypatch.setattr(SharedStoragePoller, "drain_source", drain_source)

    async def scenario():
        engine, service = an_engine(experiment)
        _, key, keeper = await a_connected_keeper(engine, service)
        with a_blocked_store(experiment):
            keeper.send(Chunk(key, Stream.METRICS, 0, frames(("PERIODICAL", 1))))
            engine.recovery.drain_source(key)
            await asyncio.sleep(0)  # start the asyncio task that reads the metrics
        await until(lambda: stored_before)
        assert stored_before == [[1]]
        await engine.close()

    play(scenario)


def test_the_manager_ends_if_the_database_cannot_be_read_after_a_report_is_stored(
    a_real_experiment, monkeypatch, caplog
):
    experiment = a_real_experiment("pass\n", **ONE_TRIAL)

    def refuse(reader, trial_id):
        raise StoreBusy("the disk does not answer")

    async def scenario():
        engine, service = an_engine(experiment)
        _, key, keeper = await a_connected_keeper(engine, service)
        monkeypatch.setattr(StoreReader, "marks", refuse)
        keeper.send(Chunk(key, Stream.METRICS, 0, frames(("CHECKPOINT", "000001"))))
        await engine.runtime.failed.wait()
        assert "StoreBusy: the disk does not answer" in caplog.text
        await engine.close()

    play(scenario)


@pytest.mark.usefixtures("no_polls")
def test_the_files_of_an_attempt_are_read_even_if_the_database_is_busy_at_first(
    a_real_experiment, monkeypatch
):
    monkeypatch.setattr(storage_poller, "_FAILED_POLL_RETRY_DELAY_S", 0)
    experiment = a_real_experiment("pass\n", **ONE_TRIAL)
    read, refused = StoreReader.offsets, []

    def refuse_at_first(reader, key):
        if len(refused) < 2:
            refused.append(key)
            raise StoreBusy("another process uses it")
        return read(reader, key)

    async def scenario():
        engine, service = an_engine(experiment, kind=Cluster)
        trial = await a_submitted_trial(engine, service)
        key = write_attempt(experiment, trial, encode(0, trial.trial_id, "FINAL", 0, 0.5))
        monkeypatch.setattr(StoreReader, "offsets", refuse_at_first)
        service.on_job_ended(JobEnded(trial.job_id, 0, ""))
        await engine.finished.wait()
        assert refused == [key] * 2
        assert (states(engine), values(experiment.rows(trial.trial_id))) == (["SUCCEEDED"], [0.5])
        await engine.close()

    play(scenario)


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
