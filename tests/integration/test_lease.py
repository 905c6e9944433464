"""The lease on an experiment. Managers on other machines can read it, heartbeats renew it, and a suspended owner loses it."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_experiment import wait_until

from nni_manager.store.errors import StoreBusy
from nni_manager.store.folders import ExperimentFolder, ExperimentLocked, ManagerProcess
from nni_manager.store.lease import (
    LEASE_TTL_S,
    Lease,
    LeaseHolder,
    LeaseLost,
    LeaseRecord,
    find_remote_holder,
    read_record,
    write_record,
)
from nni_manager.store.writer import Store


@pytest.fixture
def folder(tmp_path):
    folder = ExperimentFolder(tmp_path / "EXPTEST1")
    folder.make()
    return folder


def lock_of(folder):
    return folder.path / "owner.lock"


def written_elsewhere(folder, beat, pid=7):
    """Write the lease record of a manager on another machine. The kernel of this machine cannot see that manager's file lock."""
    owner = {"pid": pid, "host": "node7", "machine": "another start of another machine", "since_s": 1e9}
    lock_of(folder).write_text(json.dumps({"owner": owner, "beat": beat}))


def test_the_lock_file_contains_the_owner_and_is_empty_after_the_release_of_the_lease(folder):
    with folder.owned() as held:
        found = read_record(lock_of(folder))
        assert found is not None
        assert (found.holder.pid, found.holder.host) == (os.getpid(), os.uname().nodename)
        assert found.holder == held.holder
    assert read_record(lock_of(folder)) is None


def test_a_second_owner_is_refused_with_the_pid_of_the_first_owner_and_the_remedy(folder):
    with folder.owned(), pytest.raises(ExperimentLocked) as refused, folder.owned():
        pass
    assert str(refused.value).startswith(
        f"cannot own experiment EXPTEST1: manager process {os.getpid()} on {os.uname().nodename}, since 2"
    )
    assert str(refused.value).endswith("; stop it first with `nnictl stop EXPTEST1`")


OWN_UNTIL_KILLED = """
import pathlib, sys, threading
from nni_manager.store.folders import ExperimentFolder
with ExperimentFolder(pathlib.Path(sys.argv[1])).owned() as lease:
    lost = threading.Event()
    lease.call_when_lost(lambda error: (print(error, flush=True), lost.set()))
    print("owns", flush=True)
    lost.wait()
"""


def test_the_next_owner_takes_the_lease_of_a_killed_local_owner_immediately(folder):
    command = [sys.executable, "-c", OWN_UNTIL_KILLED, folder.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"owns\n"
        owner.kill()
    assert read_record(lock_of(folder)).holder.pid == owner.pid  # the killed owner has not cleared the record
    began_s = time.monotonic()
    with folder.owned() as held:
        assert held.holder.pid == os.getpid()
        assert time.monotonic() - began_s < LEASE_TTL_S / 2


def test_a_remote_owner_that_writes_heartbeats_is_not_replaced(folder):
    written_elsewhere(folder, 0)
    stop = threading.Event()

    def count():
        beat = 0
        while not stop.wait(0.05):
            written_elsewhere(folder, beat := beat + 1)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        with pytest.raises(ExperimentLocked) as refused, folder.owned():
            pass
    finally:
        stop.set()
        counting.join()
    assert str(refused.value).startswith("cannot own experiment EXPTEST1: manager process 7 on node7, since ")
    assert "stop it there with `nnictl stop EXPTEST1`" in str(refused.value)


def test_a_remote_owner_that_writes_no_heartbeats_is_replaced(folder):
    written_elsewhere(folder, 3)
    assert find_remote_holder(lock_of(folder), ttl_s=1.0) is None
    assert find_remote_holder(lock_of(folder), ttl_s=0.0) is None


@contextlib.contextmanager
def a_suspended_holder(folder, script=OWN_UNTIL_KILLED):
    """A suspended process that holds the lock. Its last heartbeat is older than the duration of the lease."""
    command = [sys.executable, "-c", script, folder.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as frozen:
        try:
            assert frozen.stdout.readline() == "owns\n"
            frozen.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)
            record = read_record(lock_of(folder))
            write_record(
                lock_of(folder), dataclasses.replace(record, renewed_s=record.renewed_s - LEASE_TTL_S - 1)
            )
            yield frozen
        finally:
            frozen.kill()


def test_a_suspended_owner_is_replaced_and_detects_the_lost_lease_when_it_continues(folder):
    with a_suspended_holder(folder) as frozen:
        with folder.owned() as lease:
            assert read_record(lock_of(folder)).holder == lease.holder
            with pytest.raises(ExperimentLocked), folder.owned():
                pass
            frozen.send_signal(signal.SIGCONT)
            assert frozen.stdout.readline() == (
                f"cannot write {folder.path}: this manager did not renew its lease for 15 s, and {lease.holder} holds it now; "
                "this manager ends without storing more; `nnictl experiment list` shows the other one\n"
            )
            assert frozen.wait() == 0
            # The suspended owner has continued and ended, and has not changed the lock file.
            assert read_record(lock_of(folder)).holder == lease.holder
        assert read_record(lock_of(folder)) is None


def test_an_owner_that_renews_its_lease_is_never_replaced(folder):
    with folder.owned():
        assert not folder.lease_is_expired()
        for _ in range(3):
            with pytest.raises(ExperimentLocked), folder.owned():
                pass


def test_only_one_of_many_concurrent_managers_replaces_a_suspended_owner(folder):
    outcomes, may_release = [], threading.Event()
    starts = threading.Barrier(8)

    def take_over():
        starts.wait()
        try:
            with folder.owned() as lease:
                outcomes.append(lease.holder)
                may_release.wait()
        except ExperimentLocked:
            outcomes.append(None)

    with a_suspended_holder(folder):
        threads = [threading.Thread(target=take_over) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(outcomes) == 8, "all threads have tried")
        may_release.set()
        for thread in threads:
            thread.join()
    assert outcomes.count(None) == 7


SUSPENDED_IN_A_WRITE = """
import pathlib, sqlite3, sys, threading
from nni_manager.store.folders import ExperimentFolder
folder = ExperimentFolder(pathlib.Path(sys.argv[1]))
with folder.owned():
    database = sqlite3.connect(folder.database, isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    print("owns", flush=True)
    threading.Event().wait()
"""


def test_an_owner_that_is_suspended_during_a_write_is_not_replaced_and_the_error_has_a_kill_command(folder):
    Store.create(folder.database, folder.collected_logs, "EXPTEST1", "{}", b"s", 0.0).close()
    with a_suspended_holder(folder, SUSPENDED_IN_A_WRITE) as frozen:
        before = read_record(lock_of(folder))
        with pytest.raises(StoreBusy) as refused, folder.owned():
            pass
        assert f"its manager, {before.holder}, is frozen in the middle of a write" in str(refused.value)
        assert f"`kill -9 {frozen.pid}` (nothing stored is lost), then resume again" in str(refused.value)
        assert read_record(lock_of(folder)) == before
        frozen.kill()
        frozen.wait()
        with folder.owned():
            pass


def test_a_new_owner_keeps_the_lease_after_the_lock_file_was_replaced(folder):
    with a_suspended_holder(folder) as frozen, folder.owned():
        frozen.kill()
        frozen.wait()
        # The killed process has released its kernel lock on the replaced lock file. This lock does not matter, because the path
        # refers to the new lock file.
        with pytest.raises(ExperimentLocked), folder.owned():
            pass


def test_the_lock_file_is_read_again_before_a_write_if_the_heartbeat_is_late(folder, monkeypatch):
    lock_of(folder).touch()
    lease = Lease(lock_of(folder), heartbeat_interval_s=3600)
    lease.check()
    written_elsewhere(folder, 9)
    lease.check()  # the last heartbeat is recent, so the file is not read
    wakes_at_s = time.monotonic() + LEASE_TTL_S + 1
    monkeypatch.setattr("nni_manager.store.lease.time.monotonic", lambda: wakes_at_s)
    with pytest.raises(LeaseLost, match=r"process 7 on node7, since .* holds it now; this manager ends"):
        lease.check()
    lease.release()
    assert read_record(lock_of(folder)).holder.host == "node7"


def test_a_manager_that_lost_its_lease_stores_nothing_even_if_no_other_process_opened_the_database(folder):
    Store.create(folder.database, folder.collected_logs, "EXPTEST1", "{}", b"s", 0.0).close()
    lock_of(folder).touch()
    lease, is_lost = Lease(lock_of(folder), heartbeat_interval_s=0.05), threading.Event()
    lease.call_when_lost(lambda _: is_lost.set())
    with contextlib.closing(Store(folder.database, folder.collected_logs, lease)) as store:
        store.commit([], 1.0)
        wait_until(lambda: written_elsewhere(folder, 9) or is_lost.is_set(), "the loss is detected")
        with pytest.raises(LeaseLost, match="process 7 on node7"):
            store.commit([], 2.0)
    lease.release()


@given(st.binary() | st.text().map(str.encode) | st.from_type(LeaseRecord).map(LeaseRecord.to_bytes))
def test_the_lease_record_parser_accepts_arbitrary_bytes_without_an_error(content):
    LeaseRecord.from_bytes(content)
    LeaseRecord.from_bytes(content[: len(content) // 2])


@given(
    st.builds(
        LeaseRecord,
        st.builds(LeaseHolder, st.integers(), st.text(max_size=20), st.text(max_size=20), st.floats(0, 1e10)),
        st.integers(0, 2**40),
        st.none() | st.floats(0, 1e10),
    )
)
def test_a_lease_record_is_unchanged_after_writing_and_reading(record):
    assert LeaseRecord.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"owner": {}, "beat": 1}', b"\0" * 512])
def test_a_manager_can_own_an_experiment_with_an_invalid_lock_file(folder, content):
    lock_of(folder).write_bytes(content)
    assert find_remote_holder(lock_of(folder)) is None
    with folder.owned():
        pass


def test_a_replaced_owner_detects_the_lost_lease_and_leaves_the_lock_file_unchanged(folder):
    lock_of(folder).touch()
    held, loss_detected = Lease(lock_of(folder), heartbeat_interval_s=0.05), threading.Event()
    held.call_when_lost(lambda _: loss_detected.set())
    wait_until(lambda: read_record(lock_of(folder)).heartbeat > 0, "a heartbeat is written")
    # Repeat the write, because a heartbeat of the owner may overwrite the file at the same moment.
    wait_until(lambda: written_elsewhere(folder, 9) or loss_detected.is_set(), "the loss is detected")
    held.release()
    assert read_record(lock_of(folder)).holder.host == "node7"
    late = threading.Event()
    held.call_when_lost(lambda _: late.set())
    assert late.is_set()


def test_an_owner_keeps_the_lease_after_the_experiment_folder_was_deleted(folder):
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(folder.owned())
        folder.remove()
    assert not held.is_lost


def test_a_new_manager_ignores_the_process_record_of_the_previous_manager(folder):
    with folder.owned():
        folder.write_process(ManagerProcess(1, "127.0.0.1", 9000, "0.6.0", "token"))
        assert folder.running_process().port == 9000
    assert folder.process().port == 9000, "the last manager must stay on record"
    with folder.owned():
        assert folder.running_process() is None


def test_a_view_removes_its_process_record_when_it_ends(folder):
    with folder.viewed():
        folder.write_process(ManagerProcess(1, "127.0.0.1", 9000, "0.6.0", "token"), is_view=True)
        assert folder.running_view().port == 9000
    note = folder.path / "view-process.json"
    assert not note.exists()
    note.write_bytes(b"of one that was killed")
    with folder.viewed():
        assert folder.running_view() is None
