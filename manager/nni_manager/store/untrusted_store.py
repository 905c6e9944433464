"""Copies the tables of an untrusted database into our own database, which current code can read.

Only rows of real tables are read. Views, triggers, virtual tables, generated columns and indexes of the file are never
evaluated: SQLite's authorizer denies them, whatever the file's schema defines. Sizes are counted while rows are read. A
crafted file can use a page many times over, so all rows together must fit into the file.
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nni_manager.errors import UserError
from nni_manager.store.errors import FULL, StoreBusy, StoreUnusable
from nni_manager.support.plain_text import escaped
from nni_sdk.nesting import MAX_DOCUMENT_LEVELS

# Limit of each column outside `_DOCUMENTS`. The longest holds the value of a metric, whose record has at most 999,999 bytes.
MAX_FIELD = 1_000_000
# Limit of a column that holds one answer of a user's tuner, or one change of the search space.
MAX_DOCUMENT = 16 * 2**20
_DOCUMENTS = ("config", "metadata", "parameters", "metric")
# Columns with what training code reported. Their readers check the depth.
_REPORTED = ("final", "value")
# For the tables that are read into memory at once: 100,000 trials of 2.5 kB.
MAX_BYTES_IN_MEMORY = 256 * 2**20
# A parsed element takes up to 80 bytes of memory: 800 MB for all trials.
MAX_JSON_ELEMENTS = 10_000_000
# Tables that are read row by row and never held in memory.
_STREAMED = ("metric", "usage", "mark")
# A real table returns 1,000 rows within milliseconds, also on a slow disk.
ROWS_TIMEOUT_S = 10.0
_ROWS_AT_ONCE = 1_000
# The cell pointer, the payload length, the header length, and one header byte for the only column.
_MIN_BYTES_OF_ROW = 5
# The current schema has 13 tables with at most 24 columns each.
_MAX_TABLES = 100
_MAX_COLUMNS = 100
_STEPS_BETWEEN_CHECKS = 100_000
_TYPES = ("INTEGER", "INT", "REAL", "TEXT", "BLOB")
_NAME = re.compile("[a-z_]{1,64}")
# SQLITE_LIMIT_LENGTH. Before Python 3.11 a longer field is refused only after it is read.
_LIMIT_LENGTH = 0
# A trial has two documents and twelve small fields.
_MAX_ROW = 4 * MAX_DOCUMENT
_READ_PRAGMAS = ("user_version", "table_xinfo")


class StoreTooLarge(UserError):
    """cannot use the database: it exceeds the limits for untrusted databases"""


def copy_tables(source: Path, target: Path, *, is_bounded: bool = True) -> None:
    """Create `target`: a database with the rows of the tables of `source`, in the schema version (`user_version`) of `source`.

    `is_bounded`: refuse more than `MAX_BYTES_IN_MEMORY` of trials. Lengths of fields and depths of JSON are always bounded.

    Raises:
        StoreUnusable: `source` is not an experiment's database.
        StoreTooLarge: `source` exceeds the limits of an untrusted database.
        StoreBusy: the disk of `target` is full.
    """
    with closing(_TableReader(source, MAX_BYTES_IN_MEMORY if is_bounded else math.inf)) as reader:
        try:
            with closing(sqlite3.connect(target, isolation_level=None)) as writer:
                # The copy is temporary, so it need not survive a crash.
                writer.execute("PRAGMA journal_mode = OFF")
                writer.execute("PRAGMA synchronous = OFF")
                writer.execute("BEGIN")
                for table in reader.tables():
                    writer.execute(table.definition)
                    writer.executemany(table.insertion, reader.rows_of(table))
                writer.execute("COMMIT")
                writer.execute(f"PRAGMA user_version = {reader.version()}")
        except (sqlite3.Error, ValueError, OverflowError) as error:
            if str(error) == FULL:
                raise StoreBusy(
                    f"cannot copy {source.name} to {target}: {error}; free some disk space there"
                ) from error
            why = reader.interruption or escaped(str(error))
            raise StoreUnusable(
                f"cannot use {source.name}: it is not the database of an experiment ({why}); save the experiment again"
            ) from error


class _Table:
    """A table with the column types of our schema. A column is (name, type, position in the primary key or 0)."""

    def __init__(self, name: str, columns: Sequence[tuple[str, str, int]]) -> None:
        self.name = name
        self.columns = [column for column, _, _ in columns]
        quoted = {column: f'"{column}"' for column in self.columns}
        definitions = [f"{quoted[column]} {kind}" for column, kind, _ in columns]
        key = sorted((place, quoted[column]) for column, _, place in columns if place)
        if key:
            definitions.append(f"PRIMARY KEY ({', '.join(column for _, column in key)})")
        # STRICT refuses a value of the wrong type here, before a reader finds it.
        self.definition = f'CREATE TABLE "{name}" ({", ".join(definitions)}) STRICT'
        self.insertion = f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns))})'
        # An index in an untrusted file may differ from its table.
        self.selection = f'SELECT {", ".join(quoted.values())} FROM main."{name}" NOT INDEXED'


class _TableReader:
    """The untrusted file, opened so that nothing in it is executed."""

    def __init__(self, path: Path, most_bytes_in_memory: float) -> None:
        self._most_bytes = most_bytes_in_memory
        self._bytes = self._elements = 0
        self._unread_bytes = path.stat().st_size
        """Upper bound of the bytes in the file for rows that are not read yet."""
        self._deadline_s = math.inf
        self._name = path.name
        self._readable: set[str] = {"sqlite_master"}
        self.interruption = ""
        """The reason why a query was interrupted; empty: none was."""
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        set_limit = getattr(self._connection, "setlimit", None)  # Python 3.11
        if set_limit is not None:
            set_limit(_LIMIT_LENGTH, _MAX_ROW)
        # SQLite has not read the file yet, so none of these can fail.
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON", "mmap_size = 0"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.set_authorizer(self._authorize)
        self._connection.set_progress_handler(self._is_late, _STEPS_BETWEEN_CHECKS)

    def close(self) -> None:
        self._connection.close()

    def version(self) -> int:
        """The schema version that the file states."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    def tables(self) -> list[_Table]:
        """The real tables that could be a manager's. Everything else in the file is ignored."""
        found = self._fetched(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND sql LIKE 'CREATE TABLE %'"
        )
        names = [name for (name,) in found if isinstance(name, str) and _NAME.fullmatch(name)]
        if len(names) > _MAX_TABLES:
            raise ValueError(f"it has {len(names)} tables; the limit is {_MAX_TABLES}")
        tables = []
        for name in names:
            if name.startswith("sqlite_"):
                continue
            columns = self._fetched(f'PRAGMA table_xinfo("{name}")')
            is_ours = len(columns) <= _MAX_COLUMNS and all(
                isinstance(column, str) and _NAME.fullmatch(column) and kind in _TYPES and not hidden
                for _, column, kind, _, _, _, hidden in columns
            )
            if is_ours and columns:
                tables.append(
                    _Table(name, [(column, kind, place) for _, column, kind, _, _, place, _ in columns])
                )
                self._readable.add(name)
        return tables

    def rows_of(self, table: _Table) -> Iterator[Sequence[object]]:
        """Yield every row of a table, each with fields of bounded length.

        Raises:
            StoreTooLarge: there are too many rows, or a field is too long.
        """
        cursor = self._connection.cursor()
        self._deadline_s = time.monotonic() + ROWS_TIMEOUT_S
        cursor.execute(table.selection)
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            for row in rows:
                self._check(table, row)
            yield from rows
            self._deadline_s = time.monotonic() + ROWS_TIMEOUT_S

    def _fetched(self, query: str) -> list[tuple[Any, ...]]:
        self._deadline_s = time.monotonic() + ROWS_TIMEOUT_S
        return self._connection.execute(query).fetchmany(_ROWS_AT_ONCE)

    def _check(self, table: _Table, row: Sequence[object]) -> None:
        size = 0
        for value in row:
            # Comparing classes is faster than isinstance: a database of twenty million rows has ten times as many fields.
            if value.__class__ is str or value.__class__ is bytes:
                length = len(value)
                size += length
                if length > MAX_DOCUMENT_LEVELS:
                    self._check_long(table, table.columns[row.index(value)], value)
        self._unread_bytes -= size + _MIN_BYTES_OF_ROW
        if self._unread_bytes < 0:
            raise ValueError("its tables hold more bytes than the file")
        size += 8 * len(row)
        if table.name not in _STREAMED:
            self._bytes += size
            if self._bytes > self._most_bytes:
                raise self._too_large(f"more than {self._most_bytes / 2**20:.0f} MiB of trials")

    def _check_long(self, table: _Table, column: str, value: object) -> None:
        assert isinstance(value, str | bytes)  # checked by the caller
        longest = MAX_DOCUMENT if column in _DOCUMENTS else MAX_FIELD
        if len(value) > longest:
            raise StoreTooLarge(
                f"cannot use {self._name}: a {column} in its table {table.name} has {len(value)} characters; a manager "
                f"writes at most {longest}; save the experiment again, with the version that ran it"
            )
        if isinstance(value, bytes) or value.lstrip()[:1] not in ("[", "{"):
            return
        depth, elements = shape_of_json(value)
        if depth > MAX_DOCUMENT_LEVELS and column not in _REPORTED:
            raise ValueError(
                f"a {column} in its table {table.name} is nested {depth} levels deep; the limit is {MAX_DOCUMENT_LEVELS}"
            )
        if table.name not in _STREAMED:
            self._elements += elements
            if self._elements > MAX_JSON_ELEMENTS and self._most_bytes < math.inf:
                raise self._too_large(f"JSON of more than {MAX_JSON_ELEMENTS} elements")

    def _too_large(self, what: str) -> StoreTooLarge:
        return StoreTooLarge(
            f"cannot use {self._name}: it holds {what}; if you trust its author, load it with --no-limits"
        )

    def _authorize(
        self, action: int, first: str | None, second: str | None, database: str | None, source: str | None
    ) -> int:
        is_read = action == sqlite3.SQLITE_READ and first in self._readable and database == "main"
        is_pragma = action == sqlite3.SQLITE_PRAGMA and first in _READ_PRAGMAS
        is_like = action == sqlite3.SQLITE_FUNCTION and second == "like"
        # `source` is the name of the view or trigger that requests the access.
        is_allowed = source is None and (action == sqlite3.SQLITE_SELECT or is_read or is_pragma or is_like)
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    def _is_late(self) -> bool:
        if time.monotonic() < self._deadline_s:
            return False
        self.interruption = f"no row was read within {ROWS_TIMEOUT_S:.0f} s"
        return True


def shape_of_json(text: str) -> tuple[int, int]:
    """Nesting depth of arrays and objects, and approximate number of elements. Linear, and without recursion.

    For text that is not JSON the numbers are meaningless.
    """
    # With escaped quotes removed, every second piece between quotes is outside of strings.
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    depth = deepest = 0
    for run in re.findall(r"[\[{]+|[\]}]+", outside):
        depth += len(run) if run[0] in "[{" else -len(run)
        deepest = max(deepest, depth)
    return deepest, outside.count(",") + outside.count("[") + outside.count("{")
