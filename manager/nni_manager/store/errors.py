"""Errors of the database, and their mapping from SQLite's."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nni_manager.errors import InternalError, RetryableError, UserError
from nni_manager.store.database_files import OPEN_DATABASES

# sqlite3_errstr() of SQLITE_FULL, SQLITE_READONLY, SQLITE_CANTOPEN and SQLITE_BUSY; Python has error codes only from 3.11 on.
FULL = "database or disk is full"
_READ_ONLY = "attempt to write a readonly database"
_CANNOT_OPEN = "unable to open database file"
_LOCKED = "database is locked"


class StoreUnusable(UserError):
    """cannot use the experiment's database; check the file and its disk"""


class StoreBusy(RetryableError):
    """cannot use the experiment's database now; free some disk space or wait, then try again"""


def disk_full_message(path: Path, what: str) -> str:
    """Message for a full disk: the operation, the sizes and the remedy."""
    used = free = 0
    with suppress(OSError):
        used, free = wal_bytes(path) + path.stat().st_size, shutil.disk_usage(path.parent).free
    return (
        f"cannot write to {path}: {what}; the file has {used / 1e6:.0f} MB, and its disk has {free / 1e6:.0f} MB free: free some "
        "disk space. Reports of running trials are stored when there is space"
    )


def wal_bytes(path: Path) -> int:
    """Size of the write-ahead log in bytes; 0 if there is none."""
    with suppress(OSError):
        return os.stat(f"{path}-wal").st_size
    return 0


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Map SQLite's errors to ours, for the writer."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise InternalError(
            f"cannot store a row in {path}: {error}; this is a bug of trial-keeper, please report it"
        ) from error
    except sqlite3.OperationalError as error:
        if str(error) == FULL:
            raise StoreBusy(disk_full_message(path, str(error))) from error
        remedy = (
            "give this user write permission for the file and its folder"
            if str(error) == _READ_ONLY
            else "free some space on its disk, or wait and try again"
        )
        raise StoreBusy(f"cannot write {path}: {error}; {remedy}") from error
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error


class TableMissing(StoreUnusable):
    """cannot use the database: a table or a column is missing; restore it from a copy, or start a new experiment"""


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Map SQLite's errors to ours, for readers: they need no disk space of their own and lose no data."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error).startswith(("no such table", "no such column")):
            raise TableMissing(str(_unusable(path, error))) from error
        if str(error) in (_READ_ONLY, _CANNOT_OPEN):
            raise StoreUnusable(
                f"cannot read {path}: {error}; SQLite readers need write permission in the folder (for the -shm file): run as "
                "a user who has it, or copy the folder and read the copy"
            ) from error
        remedy = (
            "an older version of trial-keeper wrote it, and there is no space for a migrated copy: free some space in the folder "
            "of temporary files, or set TMPDIR to another folder"
            if str(error) == FULL
            else "wait and try again"
        )
        raise StoreBusy(f"cannot read {path}: {error}; {remedy}") from error
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: sqlite3.DatabaseError) -> StoreUnusable:
    return StoreUnusable(f"cannot use {path}: {error}; restore it from a copy, or start a new experiment")


def register_opening(path: Path) -> None:
    """Register a connection before it is opened. Torn files stay unchanged: SQLite would silently drop the missing part.

    Raises:
        StoreUnusable: a file is torn; the message names it and the remedy.
    """
    damage = OPEN_DATABASES.add(path)
    if damage is None:
        return
    remedy = "restore the file from a copy, or start a new experiment"
    if damage.startswith(f"{path}-wal "):
        remedy = (
            f"restore the file from a copy; or remove {path}-shm and resume without the missing transactions: reports of "
            "known trials are read again from the workspace"
        )
    raise StoreUnusable(f"cannot use the experiment's database: {damage}; {remedy}")


def is_locked(error: StoreBusy) -> bool:
    """True if another process is inside a write transaction."""
    return str(error.__cause__) == _LOCKED
