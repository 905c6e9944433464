"""The limits of each row, and of all rows together, when the tables of an untrusted database are copied."""

import sqlite3
from contextlib import closing

import pytest

from nni_manager.store import untrusted_store
from nni_manager.store.errors import StoreUnusable
from nni_manager.store.untrusted_store import StoreTooLarge, copy_tables
from nni_sdk.nesting import MAX_DOCUMENT_LEVELS

# SQLite calls the progress handler after so many steps of its virtual machine.
_FEW_STEPS = 1


@pytest.fixture
def database(tmp_path):
    """A function that stores these values as the only column of the table `job`, and returns the path of the database."""

    def make(*values, column="job_id"):
        path = tmp_path / "untrusted.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"CREATE TABLE job ({column} TEXT)")
            connection.executemany("INSERT INTO job VALUES (?)", [(value,) for value in values])
            connection.commit()
        return path

    return make


@pytest.fixture
def read(monkeypatch, tmp_path):
    """A function that copies a database with the given limits, and returns the number of rows in the copy."""

    def copied(path, *, is_bounded=True, **limits):
        for name, limit in limits.items():
            monkeypatch.setattr(untrusted_store, name, limit)
        copy = tmp_path / "copy.sqlite"
        copy.unlink(missing_ok=True)
        copy_tables(path, copy, is_bounded=is_bounded)
        with closing(sqlite3.connect(copy)) as connection:
            return connection.execute("SELECT count(*) FROM job").fetchone()[0]

    return copied


def test_the_rows_may_take_exactly_the_maximum_of_bytes_in_memory(database, read):
    path = database("abc", "defgh")  # 8 bytes for each value, and 1 byte for each character
    assert read(path, MAX_BYTES_IN_MEMORY=24) == 2
    with pytest.raises(StoreTooLarge, match="holds more than 0 MiB of trials"):
        read(path, MAX_BYTES_IN_MEMORY=23)


def test_the_json_elements_of_all_rows_count_towards_one_limit(database, read):
    document = '["' + "x" * MAX_DOCUMENT_LEVELS + '", 2]'  # one bracket and one comma
    path = database(document, document, column="config")
    assert read(path, MAX_JSON_ELEMENTS=4) == 2
    with pytest.raises(StoreTooLarge, match="holds JSON of more than 3 elements"):
        read(path, MAX_JSON_ELEMENTS=3)
    assert read(path, MAX_JSON_ELEMENTS=3, is_bounded=False) == 2


def test_a_field_may_have_exactly_the_maximum_length(database, read):
    path = database("x" * 200)
    assert read(path, MAX_FIELD=200) == 1
    with pytest.raises(StoreTooLarge, match="a job_id in its table job has 200 characters"):
        read(path, MAX_FIELD=199)


@pytest.mark.parametrize("levels", [MAX_DOCUMENT_LEVELS, MAX_DOCUMENT_LEVELS + 1])
def test_a_document_may_have_exactly_the_maximum_number_of_levels(database, read, levels):
    path = database("[" * levels + "]" * levels, column="config")
    if levels <= MAX_DOCUMENT_LEVELS:
        assert read(path) == 1
    else:
        with pytest.raises(StoreUnusable, match=f"is nested {levels} levels deep"):
            read(path)


def test_sqlite_does_not_read_a_row_above_the_limit(database, read):
    path = database("x" * 20_000)
    assert read(path, _MAX_ROW=30_000) == 1
    with pytest.raises(StoreUnusable, match="string or blob too big"):
        read(path, _MAX_ROW=10_000)


def test_a_database_may_have_exactly_the_maximum_number_of_tables(database, read):
    path = database("a")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE another (a TEXT)")
    assert read(path, _MAX_TABLES=2) == 1
    with pytest.raises(StoreUnusable, match="it has 2 tables; the limit is 1"):
        read(path, _MAX_TABLES=1)


def test_a_copied_table_has_the_primary_key_of_the_original(tmp_path):
    path, copy = tmp_path / "untrusted.sqlite", tmp_path / "copy.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE stream (task TEXT, trial_id TEXT, size INTEGER, PRIMARY KEY (trial_id, task))"
        )
    copy_tables(path, copy)
    with closing(sqlite3.connect(copy)) as connection:
        columns = connection.execute("PRAGMA table_info(stream)").fetchall()
    assert {name: place for _, name, _, _, _, place in columns} == {"trial_id": 1, "task": 2, "size": 0}


def test_each_row_counts_some_bytes_of_the_file_even_if_its_fields_are_empty(database, read):
    path = database("", "")
    assert read(path) == 2
    with pytest.raises(StoreUnusable, match="its tables hold more bytes than the file"):
        read(path, _MIN_BYTES_OF_ROW=path.stat().st_size)


@pytest.mark.parametrize("columns", [4, 5])
def test_a_table_with_more_than_the_maximum_number_of_columns_is_ignored(tmp_path, monkeypatch, columns):
    path = tmp_path / "untrusted.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE job ({' TEXT, '.join('abcde'[:columns])} TEXT)")
    monkeypatch.setattr(untrusted_store, "_MAX_COLUMNS", 4)
    with closing(untrusted_store._TableReader(path, 1000)) as reader:
        assert [table.name for table in reader.tables()] == (["job"] if columns == 4 else [])


def test_each_batch_of_rows_has_its_own_time_limit(database, monkeypatch):
    path = database(*"abcdef")
    monkeypatch.setattr(untrusted_store, "_STEPS_BETWEEN_CHECKS", _FEW_STEPS)
    monkeypatch.setattr(untrusted_store, "_ROWS_AT_ONCE", 2)
    with closing(untrusted_store._TableReader(path, 1000)) as reader:
        (table,) = reader.tables()
        rows = reader.rows_of(table)
        next(rows)
        monkeypatch.setattr(untrusted_store, "ROWS_TIMEOUT_S", -1.0)
        next(rows)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            next(rows)


@pytest.mark.parametrize("query", ["tables", "rows"])
def test_a_query_that_finds_no_row_in_time_is_interrupted(database, monkeypatch, query):
    path = database("a")
    monkeypatch.setattr(untrusted_store, "_STEPS_BETWEEN_CHECKS", _FEW_STEPS)
    with closing(untrusted_store._TableReader(path, 1000)) as reader:
        if query == "rows":
            (table,) = reader.tables()
        monkeypatch.setattr(untrusted_store, "ROWS_TIMEOUT_S", -1.0)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            next(reader.rows_of(table)) if query == "rows" else reader.tables()
