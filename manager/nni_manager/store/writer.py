"""Writes the database. `Store` is the only writer, on one thread at a time."""

import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.usage import gpus_to_json
from nni_manager.errors import InternalError
from nni_manager.store import errors, rows
from nni_manager.store.database_files import OPEN_DATABASES
from nni_manager.store.lease import Lease, LeaseHolder, LeaseLost
from nni_manager.store.migrations import SCHEMA_VERSION, migrate
from nni_manager.store.owner_lock import opened
from nni_manager.store.queries import QUERIES, sql_text
from nni_manager.store.reader import BUSY_WAIT_MS
from nni_sdk.records import Record
from trial_keeper.wire.checkpoints import MAX_CHECKPOINTS
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.safe_open import safe_name

# SQLite checkpoints the write-ahead log (WAL) at 4 MB, but restarts it only while no reader is active. Above this size a
# checkpoint waits for readers: so briefly that reports are hardly delayed, and so often that the WAL cannot grow much.
MAX_LOG_BYTES = 64 << 20
_WAL_CHECKPOINT_WAIT_MS = 100
_WAL_CHECKPOINT_INTERVAL_S = 2.0
# A reader that never ends lets the WAL grow without limit. Warn long before the disk is full.
_WAL_ALARM_BYTES = 1 << 30
# More than the number of concurrent attempts.
_MAX_CACHED_NUMBERS = 10_000
# A multi-row INSERT takes half of the time, and less beside a busy thread: Python hands over its lock once per statement. The
# largest batch has fewer than 999 values, the limit of every SQLite. The smaller batches insert the remainder.
ROWS_AT_ONCE = (300, 60, 10, 1)
# What consecutive records of an attempt nearly always share, and what each row has of its own: to bind a value takes 0.1 µs.
_SHARED = itemgetter(*map(Record._fields.index, ("parameter_id", "type")))
_OWN = itemgetter(*map(Record._fields.index, ("offset", "sequence", "value")))


def _add_metrics(count: int) -> str:
    """The statement that inserts `count` records of one attempt and type."""
    all_before, values, row = QUERIES["add_metrics"].removesuffix(");").partition("VALUES ")
    return f"{all_before}{values}{', '.join([row] * count)})"


_ADD_METRICS = {count: _add_metrics(count) for count in ROWS_AT_ONCE}


class Store:
    """The writer. Every method runs on the caller's thread; calls must not overlap.

    Opening the database for writing increments its epoch. Writers with an earlier epoch can no longer commit.
    """

    def __init__(self, path: Path, logs: Path, lease: Lease | None = None) -> None:
        """Open an existing database; collected logs are under `logs`.

        `lease` is checked before each transaction, too. The epoch fences a writer that was frozen before its transaction started.
        The lease fences a writer on another machine, where SQLite does not see what this one writes.

        Raises:
            StoreUnusable: there is no database, or a newer version wrote it.
            StoreBusy: the database cannot be written now.
        """
        self._path = path
        self._logs = logs
        self._lease = lease
        if not path.is_file():
            raise errors.StoreUnusable(
                f"cannot open {path}: there is no such file; `nnictl experiment list --all` lists all experiments"
            )
        self._next_checkpoint_s = 0.0
        self._numbers: dict[AttemptKey, int] = {}
        """Cached numbers of the attempts that were written recently."""
        with ExitStack() as resources:
            errors.register_opening(path)
            resources.callback(OPEN_DATABASES.remove, path)
            self._connection = self._connect(path)
            resources.callback(self._connection.close)
            with errors.write_errors(path):
                migrate(path, self._connection)
                self._epoch = self._begin_epoch(lease.holder if lease else LeaseHolder.here())
            self._resources = resources.pop_all()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all statements of the block, or none."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _begin_epoch(self, holder: LeaseHolder) -> int:
        with self._transaction():
            self._execute("begin_epoch", {"holder": str(holder)})
            epoch, _ = self._execute("get_lease", {}).fetchone()
        return int(epoch)

    def _check_epoch(self) -> None:
        epoch, holder = self._execute("get_lease", {}).fetchone()
        if epoch != self._epoch:
            raise LeaseLost.to(holder, self._path)

    @classmethod
    def create(
        cls, path: Path, logs: Path, experiment_id: str, config: str, secret: bytes, created_at_s: float
    ) -> "Store":
        """Create the database of a new experiment. The folder must exist, the file must not."""
        path.touch(mode=0o600, exist_ok=False)  # the database contains the secret
        connection = cls._connect(path)
        schema = sql_text(__package__, "schema.sql")
        with errors.write_errors(path):
            connection.executescript(f"BEGIN; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            connection.execute(
                QUERIES["add_experiment"],
                {
                    "experiment_id": experiment_id,
                    "config": config,
                    "secret": secret,
                    "created_at_s": created_at_s,
                    "state": ExperimentState.INITIALIZED.value,
                },
            )
        connection.close()
        return cls(path, logs)

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        with errors.write_errors(path):
            # Writes are serialised, but do not always come from the same thread.
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # Durable includes a power cut: one sync per commit. A commit batches all writes that arrived meanwhile.
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
                connection.execute(f"PRAGMA busy_timeout = {BUSY_WAIT_MS}")
            except sqlite3.Error:
                connection.close()
                raise
            return connection

    def commit(self, writes: Sequence[rows.Write], now_s: float) -> rows.Stored:
        """Commit all writes in one transaction, or none. Log bytes are synced before the offsets that refer to them.

        Raises:
            StoreBusy: the disk is full or does not respond; nothing was written, and the same writes can be retried.
            LeaseLost: another manager has opened the database since; nothing was written.
        """
        if self._lease is not None:
            self._lease.check()
        logs = [write for write in writes if isinstance(write, StreamWrite) and write.data]
        if logs:
            with errors.write_errors(self._path):
                self._check_epoch()  # a later rollback does not undo writes to files
        sync_s = self._write_logs(logs)
        with errors.write_errors(self._path):
            with self._transaction():
                self._check_epoch()
                for write in writes:
                    self._apply(write, now_s)
                began_s = time.monotonic()
            sync_s += time.monotonic() - began_s
        return rows.Stored(sync_s, self._checkpoint_wal())

    def _checkpoint_wal(self) -> str:
        """Truncate the write-ahead log if it has grown in spite of checkpoints; return a message if that fails, else empty."""
        now_s, size_bytes = time.monotonic(), errors.wal_bytes(self._path)
        if size_bytes >= MAX_LOG_BYTES and now_s >= self._next_checkpoint_s:
            self._next_checkpoint_s = now_s + _WAL_CHECKPOINT_INTERVAL_S
            self._connection.execute(f"PRAGMA busy_timeout = {_WAL_CHECKPOINT_WAIT_MS}")
            # All data is durable already, so a failure is ignored. A lasting error fails the next commit.
            with suppress(sqlite3.OperationalError):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_WAIT_MS}")
            size_bytes = errors.wal_bytes(self._path)
        if size_bytes < _WAL_ALARM_BYTES:
            return ""
        return (
            f"cannot truncate {self._path}-wal ({size_bytes / 1e6:.0f} MB): a process has been reading the database for too "
            f"long; end that process, which `fuser {self._path}` names"
        )

    def close(self) -> None:
        """Close the database; SQLite checkpoints its write-ahead log. Idempotent."""
        self._resources.close()

    def _apply(self, write: rows.Write, now_s: float) -> None:
        match write:
            case StreamWrite():
                self._add_commit(write, now_s)
            case rows.RowWrite():
                self._execute(write.query, write.values)
            case rows.UsageRow(usage=usage):
                columns = rows.columns_of(
                    usage.key,
                    attempt=self._number_of(usage.key),
                    at_s=write.at_s,
                    cpu_percent=usage.cpu_percent,
                    rss_bytes=usage.rss_bytes,
                    disk_bytes=usage.disk_bytes,
                    gpus=gpus_to_json(usage.gpus),
                )
                self._execute("add_usage", columns)

    def _execute(self, query: str, values: Mapping[str, Any]) -> sqlite3.Cursor:
        try:
            return self._connection.execute(QUERIES[query], values)
        except UnicodeEncodeError:
            # A message may have half a surrogate pair: Python reads the name of a file that is not UTF-8 in this way.
            return self._connection.execute(
                QUERIES[query], {name: _storable(value) for name, value in values.items()}
            )

    def _add_commit(self, commit: StreamWrite, now_s: float) -> None:
        key = commit.key
        number = self._number_of(key)
        for (parameter_id, type_), records in groupby(commit.records, _SHARED):
            shared = (key.trial_id, number, key.task, now_s, type_ == "FINAL", json.dumps(parameter_id))
            own = list(map(_OWN, records))
            first = 0
            for count, statement in _ADD_METRICS.items():
                while len(own) - first >= count:
                    values = chain.from_iterable(own[first : first + count])
                    self._connection.execute(statement, (*shared, *values))
                    first += count
        for mark in commit.marks:
            self._execute("add_mark", rows.mark_columns(key, number, mark))
        if commit.marks:
            kept = rows.columns_of(key, attempt=number, kept=MAX_CHECKPOINTS)
            self._execute("remove_old_marks", kept)
        columns = rows.columns_of(
            key,
            attempt=number,
            stream=commit.stream.value,
            durable_offset=commit.new_offset,
            corrupt_bytes=sum(span.length for span in commit.garbage),
        )
        self._execute("move_offset", columns)

    def _number_of(self, key: AttemptKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            row = self._execute("get_number", rows.columns_of(key)).fetchone()
            if row is None:
                raise InternalError(
                    f"cannot store data of attempt {key}: the attempt is not registered; "
                    "this is a bug of trial-keeper, please report it"
                )
            number = self._numbers[key] = row[0]
            if len(self._numbers) > _MAX_CACHED_NUMBERS:
                del self._numbers[next(iter(self._numbers))]
        return number

    def _write_logs(self, commits: Sequence[StreamWrite]) -> float:
        """Write and sync log bytes; return the seconds that the syncs took."""
        sync_s = 0.0
        by_file: dict[tuple[AttemptKey, Stream], list[StreamWrite]] = {}
        for commit in commits:
            by_file.setdefault((commit.key, commit.stream), []).append(commit)
        for (key, stream), pieces in by_file.items():
            path = log_path(self._logs, key, stream)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
                    for piece in pieces:
                        # Each write has its offset, so a retry overwrites the bytes of a failed commit.
                        _write_all_at(descriptor, piece.data + piece.postscript, piece.offset)
                    began_s = time.monotonic()
                    os.fdatasync(descriptor)
                    sync_s += time.monotonic() - began_s
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise errors.StoreBusy(
                        errors.disk_full_message(self._path, f"{path}: {error.strerror}")
                    ) from error
                raise errors.StoreBusy(
                    f"cannot write {path}: {error.strerror}; free some space on its disk"
                ) from error
        return sync_s


def _write_all_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def log_path(logs: Path, key: AttemptKey, stream: Stream) -> Path:
    """Path of a collected log on the manager's machine.

    Raises:
        ValueError: an id could lead out of `logs`.
    """
    return logs / safe_name(key.trial_id) / safe_name(key.attempt_id) / safe_name(key.task) / stream.value


def _storable(value: Any) -> Any:
    """The value with escapes in place of what UTF-8 cannot encode."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
