"""When a manager may take over an experiment from a lock holder that does not renew its lease."""

import os
import sqlite3
import time

import pytest

from nni_manager.store.errors import StoreBusy
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.lease import LEASE_TTL_S, LeaseHolder, LeaseRecord, is_expired, write_record
from nni_manager.store.owner_lock import OwnerLock
from nni_manager.store.writer import Store

pytestmark = pytest.mark.slow

LONG_S = 20.0


@pytest.fixture
def folder(tmp_path):
    folder = ExperimentFolder(tmp_path / "EXPTEST1")
    folder.make()
    Store.create(folder.database, folder.collected_logs, "EXPTEST1", "{}", b"s", 0.0).close()
    return folder


@pytest.fixture
def frozen(folder):
    """The lock file of an experiment whose lock is held and whose lease is not renewed."""
    path = folder.path / "owner.lock"
    with OwnerLock(path).owned():
        renewed_s = time.monotonic() - 2 * LEASE_TTL_S
        write_record(path, LeaseRecord(LeaseHolder.here(), 1, renewed_s))
        yield path


def test_the_lease_of_a_local_holder_expires_when_its_last_renewal_is_too_old(tmp_path):
    path, holder = tmp_path / "owner.lock", LeaseHolder.here()
    path.touch()
    write_record(path, LeaseRecord(holder, 1, time.monotonic()))
    # `is_expired` decides by the renewal time alone. If it waited for a change of the file, the wait would last LONG_S.
    assert not is_expired(path, LONG_S)
    write_record(path, LeaseRecord(holder, 1, time.monotonic() - 2.0))
    assert is_expired(path, 1.0)
    assert not is_expired(path, LONG_S)


def test_a_renewal_time_in_the_future_is_ignored(tmp_path):
    # The renewal time can be in the future after a restart of the machine if its kernel provides no boot id.
    path = tmp_path / "owner.lock"
    path.touch()
    write_record(path, LeaseRecord(LeaseHolder.here(), 1, time.monotonic() + LONG_S))
    assert is_expired(path, 0.01)


def test_a_frozen_holder_is_replaced_if_it_does_not_lock_the_database(folder, frozen):
    with folder.owned() as lease:
        assert folder.lease_holder() == lease.holder


@pytest.mark.parametrize("content", [None, b""], ids=["a holder", "no holder"])
def test_only_the_holder_named_in_the_lease_is_reported_as_frozen_during_a_write(
    folder, frozen, content, monkeypatch
):
    monkeypatch.setattr("nni_manager.store.writer.BUSY_WAIT_MS", 1)
    if content is not None:
        monkeypatch.setattr("nni_manager.store.folders.ExperimentFolder.lease_is_expired", lambda _: True)
        frozen.write_bytes(content)
    database = sqlite3.connect(folder.database, isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy) as refused, folder.owned():
        pass
    assert ("is frozen in the middle of a write" in str(refused.value)) == (content is None)
    assert (f"`kill -9 {os.getpid()}`" in str(refused.value)) == (content is None)
    database.close()


def test_a_takeover_that_fails_because_the_database_is_read_only_does_not_report_a_frozen_process(
    folder, frozen
):
    folder.database.with_name(f"{folder.database.name}-shm").mkdir()
    with pytest.raises(StoreBusy, match="attempt to write a readonly database") as refused, folder.owned():
        pass
    assert "frozen" not in str(refused.value)
