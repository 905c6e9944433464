"""State files that were truncated by a crash or a full disk: detection, and then replacement or an error."""

import contextlib
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.store.database_files import OpenDatabases, find_damage
from nni_manager.store.errors import StoreUnusable
from nni_manager.store.reader import StoreReader
from nni_manager.store.torn_files import NOT_WHOLE, read_state
from nni_manager.store.writer import Store
from nni_manager.training_services.local.client import _parse_identity

# ---- documents


def test_a_complete_file_is_parsed_and_a_missing_file_yields_none(tmp_path):
    path = tmp_path / "state.json"
    assert read_state(path, json.loads) is None
    path.write_text('{"pid": 1}')
    assert read_state(path, json.loads) == {"pid": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_truncated_files_are_moved_aside_under_unique_names(tmp_path, caplog):
    path = tmp_path / "state.json"
    for content in (b"", b'{"pid"'):
        path.write_bytes(content)
        assert read_state(path, json.loads) is None
    assert sorted((each.name, each.read_bytes()) for each in tmp_path.iterdir()) == [
        ("state.json.torn-1", b""),
        ("state.json.torn-2", b'{"pid"'),
    ]
    assert f"{path} is torn" in caplog.text


def test_an_unreadable_file_is_not_treated_as_truncated(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_state(tmp_path, json.loads)
    assert tmp_path.exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["pid", "boot_id", "x"]), inner),
    max_leaves=10,
)


@given(st.binary() | json_values.map(json.dumps).map(str.encode))
def test_any_content_of_a_job_file_is_parsed_or_treated_as_truncated(content):
    with contextlib.suppress(*NOT_WHOLE):
        _parse_identity(content)


@given(st.integers(1, 10**6), st.integers(1, 10**9), st.lists(st.integers(0, 64)), st.integers(0, 200))
def test_a_truncated_job_file_is_never_a_valid_job_file(pid, ticks, gpus, cut):
    content = json.dumps({"pid": pid, "start_ticks": ticks, "boot_id": "b", "gpu_indices": gpus}).encode()
    identity, indices = _parse_identity(content)
    assert (identity.pid, identity.start_ticks, indices) == (pid, ticks, tuple(gpus))
    if cut < len(content):
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            _parse_identity(content[:cut])


# ---- the database


@pytest.fixture
def killed(tmp_path):
    """A database after its writer was killed: some pages are in the database file, all pages are in the write-ahead log."""
    whole = tmp_path / "whole" / "experiment.sqlite"
    whole.parent.mkdir()
    Store.create(whole, tmp_path, "EXPERIMT", "{}", b"s", 0.0).close()
    with contextlib.closing(sqlite3.connect(whole, isolation_level=None)) as writer:
        for number in range(300):
            writer.execute("UPDATE experiment SET error = ?", (f"{number}" * 2000,))
        shutil.copytree(whole.parent, tmp_path / "copy")
    return tmp_path / "copy" / "experiment.sqlite"


def cut(path, part):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    return path.stat().st_size, len(content)


def files_of(database):
    return {
        each.name: each.read_bytes() for each in database.parent.iterdir() if not each.name.endswith("-shm")
    }


@pytest.mark.parametrize("part", [0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("opens", [Store, StoreReader])
def test_a_truncated_write_ahead_log_is_refused_with_a_remedy_and_not_changed(killed, tmp_path, part, opens):
    log = killed.with_name("experiment.sqlite-wal")
    left, expected = cut(log, part)
    before = files_of(killed)
    # The second iteration opens the damaged database once more: the first must not hide the damage, for example by a new log.
    for _ in range(2):
        with pytest.raises(StoreUnusable) as refused:
            opens(killed) if opens is StoreReader else opens(killed, tmp_path)
        assert str(refused.value).startswith(
            f"cannot use the experiment's database: {log} was truncated to {left} of {expected} bytes; "
            "restore the file from a copy"
        )
        assert f"or remove {killed}-shm and resume" in str(refused.value)
    assert files_of(killed) == before
    # The message recommends to remove this file. After that, the database must be readable.
    killed.with_name("experiment.sqlite-shm").unlink()
    with StoreReader(killed) as reader:
        assert reader.experiment().experiment_id == "EXPERIMT"


@pytest.mark.parametrize("part", [0, 0.001])
def test_an_emptied_database_is_refused_and_its_write_ahead_log_is_kept(killed, tmp_path, part):
    cut(killed, part)
    before = files_of(killed)
    for opens in (lambda: Store(killed, tmp_path), lambda: StoreReader(killed)):
        with pytest.raises(
            StoreUnusable, match=r"experiment.sqlite (is empty|was truncated to \d+ bytes); restore the file"
        ):
            opens()
    assert files_of(killed) == before


@pytest.mark.slow
def test_a_truncated_database_is_readable_only_if_its_write_ahead_log_has_the_missing_pages(killed, tmp_path):
    whole = killed.read_bytes()
    folded = tmp_path / "folded.sqlite"
    shutil.copy(killed, folded)
    shutil.copy(f"{killed}-wal", f"{folded}-wal")
    with contextlib.closing(sqlite3.connect(folded)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert find_damage(folded) is None
    complete = folded.read_bytes()
    left, expected = cut(folded, 0.5)
    with pytest.raises(
        StoreUnusable, match=rf"folded.sqlite was truncated to {left} of {expected} bytes; restore"
    ):
        Store(folded, tmp_path)
    # After an interrupted checkpoint, a database file lacks pages, but its write-ahead log has all of them. This is no damage.
    killed.write_bytes(whole)
    assert find_damage(killed) is None
    # The file may even have a header that states more pages than it has, because the write-ahead log has the missing pages.
    assert len(whole) < len(complete)
    killed.write_bytes(complete[: len(whole)])
    assert find_damage(killed) is None


@pytest.mark.parametrize("part", [0, 0.5])
def test_a_truncated_index_of_the_write_ahead_log_is_rebuilt(killed, part):
    cut(killed.with_name("experiment.sqlite-shm"), part)
    with StoreReader(killed) as reader:
        assert reader.experiment().error == "299" * 2000


def test_a_database_is_not_checked_for_truncation_while_this_process_has_it_open(killed, tmp_path):
    databases = OpenDatabases()
    assert databases.add(killed) is None
    cut(killed, 0)
    assert databases.add(killed) is None
    databases.remove(killed)
    databases.remove(killed)
    assert databases.add(killed) == f"{killed} is empty"


def test_closing_a_reader_does_not_release_the_locks_of_a_writer_in_the_same_process(tmp_path):
    path = tmp_path / "experiment.sqlite"
    with contextlib.closing(Store.create(path, tmp_path, "EXPERIMT", "{}", b"s", 0.0)) as store:
        store._connection.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            with StoreReader(path) as reader:
                reader.experiment()
        index = path.with_name("experiment.sqlite-shm").stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
        held = [line for line in locks if f":{index} " in line and f" {os.getpid()} " in line]
        assert any("WRITE" in line for line in held), held
        store._connection.execute("ROLLBACK")
