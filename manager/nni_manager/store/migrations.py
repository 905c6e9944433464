"""The version of the schema, and the migration of older databases to it."""

import re
import sqlite3
from pathlib import Path

from nni_manager.store.errors import StoreUnusable
from nni_manager.store.queries import sql_text

# Incremented with every change of schema.sql; migrations.sql has the step from the previous version.
SCHEMA_VERSION = 9
_MIGRATION = re.compile(r"^-- to: (\d+) -- .+\n((?:(?!^-- to:).*\n?)*)", re.MULTILINE)


def version_of(path: Path, connection: sqlite3.Connection) -> int:
    """The version of a database's schema.

    Raises:
        StoreUnusable: a newer version wrote it.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= SCHEMA_VERSION:
        raise StoreUnusable(
            f"cannot open {path}: its schema version is {version}, and this trial-keeper reads 1 to {SCHEMA_VERSION}; "
            "use the version of trial-keeper that wrote it"
        )
    return int(version)


def migrate(path: Path, connection: sqlite3.Connection) -> None:
    """Migrate a database to the current schema, each step in one transaction.

    Raises:
        StoreUnusable: a newer version wrote it.
    """
    version = version_of(path, connection)
    for number, statements in _MIGRATION.findall(sql_text(__package__, "migrations.sql")):
        if int(number) > version:
            connection.executescript(f"BEGIN IMMEDIATE; {statements} PRAGMA user_version = {number}; COMMIT;")


def migrated_copy(path: Path, earlier: sqlite3.Connection) -> sqlite3.Connection:
    """A copy of an older database in the current schema, in a private temporary database of SQLite."""
    copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    try:
        earlier.backup(copy)
        migrate(path, copy)
    except BaseException:
        copy.close()
        raise
    return copy
