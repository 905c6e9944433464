"""Detects torn files of a SQLite database. SQLite treats an empty database as a new one, and a truncated log as a short one.

Commits of a killed writer are in the write-ahead log. The log's index, the `-shm` file, counts its frames. A frame is
counted only after it is on the disk, so a log with fewer frames than the index counts has lost some.

The files are only read while this process has no connection to them. Closing a descriptor of a file drops every POSIX lock
that the process holds on it, including SQLite's (sqlite.org/howtocorrupt.html, 2.2).

Source: sqlite.org/fileformat2.html (database header, WAL file format) and sqlite.org/walformat.html (WAL-index format).
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
# The index header has two copies, in machine byte order: flags, page size, frames, two numbers, checksum, salts.
_INDEX = struct.Struct("=12xBBHI4x8x8s")
_INDEX_COPY_AT = 48
_BACKFILLED_AT = 96
_INDEX_BYTES = 100
# A running writer may restart its log between two reads.
_TRIES = 5
_RETRY_DELAY_S = 0.05


class OpenDatabases:
    """Number of connections of this process to each database. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, path: Path, *, is_new: bool = False) -> str | None:
        """Register a connection before it is opened. Returns the damage if the files are torn (not registered then), else None.

        A database that this process has already open is not checked again. `is_new`: the database does not exist yet.
        """
        with self._lock:
            name = os.path.realpath(path)
            damage = None if is_new or self._counts[name] else find_damage(path)
            if damage is None:
                self._counts[name] += 1
            return damage

    def remove(self, path: Path) -> None:
        """Unregister a closed connection."""
        with self._lock:
            self._counts[os.path.realpath(path)] -= 1


OPEN_DATABASES = OpenDatabases()
"""The databases of this process."""


def find_damage(path: Path) -> str | None:
    """A description of the damage to a torn database file; None: there is no damage, or only SQLite can detect it.

    This process must have no open connection to the database. SQLite opens it, for reading, only if it is shorter than its
    header states.
    """
    try:
        with path.open("rb") as file:
            header, size_bytes = file.read(_HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError:
        return None  # opening the database reports the cause
    if not size_bytes:
        return f"{path} is empty"
    if len(header) < _HEADER_BYTES and _MAGIC.startswith(header[: len(_MAGIC)]):
        return f"{path} was truncated to {size_bytes} bytes"
    missing = _missing_frames(path)
    if missing is not None:
        return missing
    if header.startswith(_MAGIC):
        page_bytes = _page_bytes(int.from_bytes(header[16:18], "big"))
        pages = int.from_bytes(header[28:32], "big")
        tries = 0
        while size_bytes < pages * page_bytes and tries < _TRIES:  # a writer may be in a checkpoint
            time.sleep(_RETRY_DELAY_S)
            size_bytes, tries = _size_of(path), tries + 1
        # An interrupted checkpoint leaves such a file as well, but then the log has all the pages.
        if size_bytes < pages * page_bytes and not _reads_well(path):
            return f"{path} was truncated to {size_bytes} of {pages * page_bytes} bytes"
    return None


def _page_bytes(field: int) -> int:
    return 65536 if field == 1 else field


def _missing_frames(path: Path) -> str | None:
    wal, index = Path(f"{path}-wal"), Path(f"{path}-shm")
    for _ in range(_TRIES):
        before = _read(index, _INDEX_BYTES)
        if len(before) < _INDEX_BYTES or before[:_INDEX_COPY_AT] != before[_INDEX_COPY_AT:_BACKFILLED_AT]:
            return None  # SQLite rebuilds it
        head, wal_bytes = _read(wal, _WAL_HEADER_BYTES), _size_of(wal)
        is_initialized, _, page_field, frames, salts = _INDEX.unpack_from(before)
        if before == _read(index, _INDEX_BYTES):
            break
    else:
        return None
    page_bytes = _page_bytes(page_field)
    (backfilled,) = struct.unpack_from("=I", before, _BACKFILLED_AT)
    if not is_initialized or frames <= backfilled:
        return None  # the whole log is in the database
    if len(head) == _WAL_HEADER_BYTES and head[16:24] != salts:
        return None  # the index of another log: SQLite rebuilds it
    expected_bytes = _WAL_HEADER_BYTES + frames * (page_bytes + _FRAME_HEADER_BYTES)
    if wal_bytes >= expected_bytes:
        return None
    return f"{wal} was truncated to {wal_bytes} of {expected_bytes} bytes"


def _reads_well(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError:
        return False


def _read(path: Path, size_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size_bytes)
    except OSError:
        return b""


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
