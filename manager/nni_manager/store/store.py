"""The experiment's database: `Store` writes, from one thread; `StoreReader` reads, beside it."""

import errno
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from nni_manager.config.known_results import KnownResult
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.jobs import Job
from nni_manager.domain.metrics import newest_shown, reward
from nni_manager.domain.receiving import Commit
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.usage import PeakUsage, gpus_from_json, gpus_to_json
from nni_manager.errors import Bug, TryAgain, UserMistake
from trial_keeper.wire.messages import AttemptKey, Stream, Usage
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import safe_name

# The write-ahead log is folded into the database at 4 MB, but begun anew only when nobody reads. From this size on readers are
# waited for, so short that reports hardly notice, and so often that the log cannot grow much meanwhile.
LARGEST_LOG_BYTES = 64 << 20
_FOLD_WAIT_MS = 100
_FOLD_EVERY_S = 2.0
# Somebody reads without end: the log can only grow, and that is worth a word long before the disk is full.
_HOPELESS_LOG_BYTES = 1 << 30
# SQLite's own way of waiting for another writer.
_BUSY_WAIT_MS = 5000
# Counts up with every change to schema.sql; migrations.sql has the way from the number before.
SCHEMA_VERSION = 4
_QUERY = re.compile(r"^-- name: (\w+) -- .+\n((?:(?!^-- name:).*\n?)*)", re.MULTILINE)
_MIGRATION = re.compile(r"^-- to: (\d+) -- .+\n((?:(?!^-- to:).*\n?)*)", re.MULTILINE)


class StoreUnusable(UserMistake):
    """cannot use the experiment's database; see what the message says of the disk"""


class StoreBusy(TryAgain):
    """cannot use the experiment's database now; free some disk space or wait, then try again"""


@dataclass(frozen=True, slots=True)
class StoredExperiment:
    """The experiment's own row. Times in seconds since the epoch."""

    experiment_id: str
    config: str
    secret: bytes
    created_at_s: float
    ended_at_s: float | None
    state: ExperimentState
    error: str
    active_s: float
    keeper_has_matched: bool


@dataclass(frozen=True, slots=True)
class ExperimentRow:
    """Write: what changes of the experiment's own row."""

    state: ExperimentState
    error: str
    active_s: float
    ended_at_s: float | None
    keeper_has_matched: bool


@dataclass(frozen=True, slots=True)
class TrialRow:
    """Write: a trial as it was when this was made. The trial itself may have changed since."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, trial: Trial) -> "TrialRow":
        """A picture of the trial now."""
        return cls(
            {
                "trial_id": trial.trial_id,
                "sequence_id": trial.sequence_id,
                "parameters": _json_of(trial.parameters),
                "memo": _json_of(trial.memo),
                "job_id": trial.job_id,
                "created_at_s": trial.created_at_s,
                "started_at_s": trial.started_at_s,
                "ended_at_s": trial.ended_at_s,
                "state": trial.state.value,
                "attempt": trial.attempt,
                "stop_reason": trial.stop_reason and trial.stop_reason.value,
                "reason": trial.reason and trial.reason.value,
                "exit_code": trial.exit_code,
                "message": trial.message,
                "final": trial.final,
                "value": trial.value,
                "peak_usage": trial.peak_usage and trial.peak_usage.to_json(),
                "reporter": trial.reporter,
                "warning": trial.warning,
                "is_customized": trial.is_customized,
                "retries": trial.retries,
                "first_attempts": _json_of(trial.first_attempts),
            }
        )


def _json_of(document: object) -> str:
    # Most of them are empty, and each trial is stored five times.
    return json.dumps(document) if document else "{}"


@dataclass(frozen=True, slots=True)
class JobRow:
    """Write: a job as it was when this was made. `ended_at_s` None: it may run."""

    job_id: str
    was_heard: bool
    ended_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A job as it is stored, for who looks at jobs. `ended_at_s` None: it may run."""

    job_id: str
    created_at_s: float
    ended_at_s: float | None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Write: what a task of a trial used at a moment, in seconds since the epoch. Read back, too."""

    usage: Usage
    at_s: float


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """Write: the experiment's configuration from now on, as JSON."""

    config: str


@dataclass(frozen=True, slots=True)
class ImportedRows:
    """Write: results from elsewhere, all or none; `position` counts those that came before."""

    position: int
    results: tuple[KnownResult, ...]


Write = Commit | TrialRow | ExperimentRow | JobRow | UsageRow | ConfigRow | ImportedRows


@dataclass(frozen=True, slots=True)
class Stored:
    """What a transaction has cost. `sync_s`: seconds that the disk took to make it durable. `problem`: what needs a person."""

    sync_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One record that counts. `parameter_id` and `value` are JSON text."""

    trial_id: str
    attempt: int
    task: str
    record_offset: int
    is_final: bool
    parameter_id: str
    sequence: int
    value: str
    stored_at_s: float


def _text_of(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# One statement for many rows needs half of the time, and less beside a busy thread: Python's lock is handed over for each
# statement. The largest has as many values as any SQLite takes, 999 or a few less; smaller ones are for the rest.
ROWS_AT_ONCE = (195, 39, 8, 1)
# What is read at once: 100 MB of the longest records there can be, and 20 KB of numbers.
ROWS_OF_A_PAGE = 100
QUERIES = {name: statement.strip() for name, statement in _QUERY.findall(_text_of("queries.sql"))}


def _add_metrics(rows: int) -> str:
    """The statement that adds so many records of one attempt."""
    all_before, values, row = QUERIES["add_metrics"].removesuffix(");").partition("VALUES ")
    return f"{all_before}{values}{', '.join([row] * rows)})"


_ADD_METRICS = {rows: _add_metrics(rows) for rows in ROWS_AT_ONCE}
# sqlite3_errstr() of SQLITE_FULL, SQLITE_READONLY and SQLITE_CANTOPEN; Python tells the number from 3.11 on only.
_FULL = "database or disk is full"
_READ_ONLY = "attempt to write a readonly database"
_CANNOT_OPEN = "unable to open database file"


def _told_full(path: Path, what: str) -> str:
    """What, how much, and the way out."""
    used = free = 0
    with suppress(OSError):
        used, free = _size_of_log(path) + path.stat().st_size, shutil.disk_usage(path.parent).free
    return (
        f"cannot store anything in {path}: {what}; it has {used / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free on its disk: "
        "free some space there. Trials go on meanwhile, nothing is lost, and what they report is stored when there is room"
    )


def _size_of_log(path: Path) -> int:
    """The write-ahead log's; 0 when there is none."""
    with suppress(OSError):
        return os.stat(f"{path}-wal").st_size
    return 0


@contextmanager
def _own_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise Bug(
            f"cannot store a row in {path}: {error}; this is a bug of trial-keeper, please report it"
        ) from error
    except sqlite3.OperationalError as error:
        if str(error) == _FULL:
            raise StoreBusy(_told_full(path, str(error))) from error
        way_out = (
            "let this user write it, and in its folder, again"
            if str(error) == _READ_ONLY
            else "free some space on its disk, or wait and try again"
        )
        raise StoreBusy(f"cannot write {path}: {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error


@contextmanager
def _readers_errors(path: Path) -> Iterator[None]:
    """The same for who only reads: no space of his is missing, and nothing of it gets lost."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) in (_READ_ONLY, _CANNOT_OPEN):
            raise StoreUnusable(
                f"cannot read {path}: {error}; become a user who may write in its folder, where SQLite keeps what readers share, "
                "or copy the folder and read the copy"
            ) from error
        way_out = (
            "an older version of trial-keeper wrote it, and there is no room to read it in today's format: free some space where "
            "temporary files go, or set TMPDIR to another place"
            if str(error) == _FULL
            else "wait and try again"
        )
        raise StoreBusy(f"cannot read {path}: {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: sqlite3.DatabaseError) -> StoreUnusable:
    return StoreUnusable(f"cannot use {path}: {error}; restore it from a copy, or start a new experiment")


class Store:
    """The writer. Every method runs on the thread that calls it; calls must not overlap."""

    def __init__(self, path: Path, logs: Path) -> None:
        """Open the database, which exists; collected logs lie under `logs`.

        Raises:
            StoreUnusable: no database, or one that a newer version wrote.
        """
        self._path = path
        self._logs = logs
        if not path.is_file():
            raise StoreUnusable(
                f"cannot open {path}: there is no such file; `nnictl experiment list --all` shows what there is"
            )
        self._connection = self._connect(path)
        self._next_fold_s = 0.0
        try:
            with _own_errors(path):
                _migrate(path, self._connection)
        except BaseException:
            self._connection.close()
            raise

    @classmethod
    def create(
        cls, path: Path, logs: Path, experiment_id: str, config: str, secret: bytes, created_at_s: float
    ) -> "Store":
        """Make the database of a new experiment. The folder exists, the file does not."""
        path.touch(mode=0o600, exist_ok=False)  # it holds the secret
        connection = cls._connect(path)
        schema = _text_of("schema.sql")
        with _own_errors(path):
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
        with _own_errors(path):
            # Writes come from one thread at a time, but not always from the same one.
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # Durable means after a power cut, too: one sync per commit, and a commit carries whatever has come
                # meanwhile.
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA journal_size_limit = {LARGEST_LOG_BYTES}")
                connection.execute(f"PRAGMA busy_timeout = {_BUSY_WAIT_MS}")
            except sqlite3.Error:
                connection.close()
                raise
            return connection

    def commit(self, writes: Sequence[Write], now_s: float) -> Stored:
        """Make all of this durable, or none of it. Log bytes are on disk before the offsets that speak of them.

        Raises:
            StoreBusy: the disk is full or does not answer; nothing was written, the same writes may be tried again.
        """
        sync_s = self._write_logs([write for write in writes if isinstance(write, Commit) and write.data])
        with _own_errors(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for write in writes:
                    self._apply(write, now_s)
                began_s = time.monotonic()
                self._connection.execute("COMMIT")
                sync_s += time.monotonic() - began_s
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        return Stored(sync_s, self._fold_log())

    def _fold_log(self) -> str:
        """Begin the write-ahead log anew when it has grown although it was folded in; what to say if that cannot be done."""
        now_s, size_bytes = time.monotonic(), _size_of_log(self._path)
        if size_bytes >= LARGEST_LOG_BYTES and now_s >= self._next_fold_s:
            self._next_fold_s = now_s + _FOLD_EVERY_S
            self._connection.execute(f"PRAGMA busy_timeout = {_FOLD_WAIT_MS}")
            # All is durable already: whatever fails here is told by the next transaction, or tried again.
            with suppress(sqlite3.OperationalError):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_WAIT_MS}")
            size_bytes = _size_of_log(self._path)
        if size_bytes < _HOPELESS_LOG_BYTES:
            return ""
        return (
            f"cannot shorten {self._path}-wal, which has {size_bytes / 1e6:.0f} MB: a process has been reading the database "
            f"for too long; end it, `fuser {self._path}` names it"
        )

    def close(self) -> None:
        """Let go of the file; its write-ahead log is folded in."""
        self._connection.close()

    def _apply(self, write: Write, now_s: float) -> None:
        match write:
            case Commit():
                self._add_commit(write, now_s)
            case TrialRow():
                self._connection.execute(QUERIES["save_trial"], write.values)
            case ConfigRow():
                self._connection.execute(QUERIES["save_config"], {"config": write.config})
            case ImportedRows():
                self._connection.executemany(
                    QUERIES["add_imported"],
                    [
                        (position, json.dumps(result.parameters), result.metric)
                        for position, result in enumerate(write.results, write.position)
                    ],
                )
            case JobRow():
                self._connection.execute(
                    QUERIES["save_job"],
                    {
                        "job_id": write.job_id,
                        "now_s": now_s,
                        "ended_at_s": write.ended_at_s,
                        "was_heard": write.was_heard,
                    },
                )
            case UsageRow(usage=usage):
                self._connection.execute(
                    QUERIES["add_usage"],
                    {
                        "trial_id": usage.key.trial_id,
                        "attempt": usage.key.attempt,
                        "task": usage.key.task,
                        "at_s": write.at_s,
                        "cpu_percent": usage.cpu_percent,
                        "rss_bytes": usage.rss_bytes,
                        "disk_bytes": usage.disk_bytes,
                        "gpus": gpus_to_json(usage.gpus),
                    },
                )
            case ExperimentRow():
                self._connection.execute(
                    QUERIES["save_experiment"],
                    {
                        "state": write.state.value,
                        "error": write.error,
                        "active_s": write.active_s,
                        "ended_at_s": write.ended_at_s,
                        "keeper_has_matched": write.keeper_has_matched,
                    },
                )

    def _add_commit(self, commit: Commit, now_s: float) -> None:
        key = commit.key
        shared = (key.trial_id, key.attempt, key.task, now_s)
        first = 0
        for rows, statement in _ADD_METRICS.items():
            while len(commit.records) - first >= rows:
                own = [
                    (offset, type_ == "FINAL", _parameter_id_text(parameter_id), sequence, value)
                    for offset, parameter_id, _, type_, sequence, value, _ in commit.records[
                        first : first + rows
                    ]
                ]
                self._connection.execute(statement, (*shared, *chain.from_iterable(own)))
                first += rows
        self._connection.execute(
            QUERIES["move_offset"],
            {
                "trial_id": key.trial_id,
                "attempt": key.attempt,
                "task": key.task,
                "stream": commit.stream.value,
                "durable_offset": commit.new_offset,
                "garbage_bytes": sum(span.length for span in commit.garbage),
            },
        )

    def _write_logs(self, commits: Sequence[Commit]) -> float:
        """Seconds that the disk took to make them durable."""
        sync_s = 0.0
        by_file: dict[tuple[AttemptKey, Stream], list[Commit]] = {}
        for commit in commits:
            by_file.setdefault((commit.key, commit.stream), []).append(commit)
        for (key, stream), pieces in by_file.items():
            path = log_path(self._logs, key, stream)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    for piece in pieces:
                        # At its own place: a piece that an unfinished commit wrote before is simply written again.
                        _write_all_at(descriptor, piece.data + piece.postscript, piece.offset)
                    began_s = time.monotonic()
                    os.fdatasync(descriptor)
                    sync_s += time.monotonic() - began_s
                finally:
                    os.close(descriptor)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreBusy(_told_full(self._path, f"{path}: {error.strerror}")) from error
                raise StoreBusy(
                    f"cannot write {path}: {error.strerror}; free some space on its disk"
                ) from error
        return sync_s


def _version_of(path: Path, connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= SCHEMA_VERSION:
        raise StoreUnusable(
            f"cannot open {path}: it has format {version} and this version reads 1 to {SCHEMA_VERSION}; "
            "use the version of trial-keeper that made it"
        )
    return int(version)


def _migrate(path: Path, connection: sqlite3.Connection) -> None:
    """Turn what an older version wrote into today's format, each step in one transaction.

    Raises:
        StoreUnusable: a newer version wrote it.
    """
    version = _version_of(path, connection)
    for number, statements in _MIGRATION.findall(_text_of("migrations.sql")):
        if int(number) > version:
            connection.executescript(f"BEGIN IMMEDIATE; {statements} PRAGMA user_version = {number}; COMMIT;")


def _todays_copy(path: Path, earlier: sqlite3.Connection) -> sqlite3.Connection:
    """What an older version wrote, in today's format: in a temporary database of SQLite's own, which nobody else sees."""
    copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    try:
        earlier.backup(copy)
        _migrate(path, copy)
    except BaseException:
        copy.close()
        raise
    return copy


# One trial's records share one id; writing its JSON anew for each takes a tenth of all the time a record takes.
@lru_cache(maxsize=1024)
def _parameter_id_text(parameter_id: int | str) -> str:
    return json.dumps(parameter_id)


def _write_all_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def log_path(logs: Path, key: AttemptKey, stream: Stream) -> Path:
    """Where the manager keeps what it collected of a log.

    Raises:
        ValueError: an id could lead out of there.
    """
    return logs / safe_name(key.trial_id) / str(key.attempt) / safe_name(key.task) / stream.value


class StoreReader:
    """Reads the database beside the writer, also while no manager runs. One per thread, closed after use.

    Changes nothing, for its owner may be a manager of an older version, which knows only its own format. What such a one wrote is
    shown as of the opening.
    """

    def __init__(self, path: Path) -> None:
        """Open for reading.

        Raises:
            StoreUnusable: there is no such database, or a newer version wrote it.
        """
        self._path = path
        try:
            self._file = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False
            )
        except sqlite3.OperationalError as error:
            raise StoreUnusable(
                f"cannot open {path}: {error}; `nnictl experiment list --all` shows what there is"
            ) from error
        try:
            with _readers_errors(path):
                is_todays = _version_of(path, self._file) == SCHEMA_VERSION
                self._connection = self._file if is_todays else _todays_copy(path, self._file)
        except BaseException:
            self._file.close()
            raise
        self._connection.row_factory = sqlite3.Row

    def __enter__(self) -> "StoreReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()
        self._file.close()

    def data_version(self) -> int:
        """Another number when somebody has written since this was last asked."""
        with _readers_errors(self._path):
            (version,) = self._file.execute("PRAGMA data_version").fetchone()
        return int(version)

    def experiment(self) -> StoredExperiment:
        """The experiment's own row."""
        (row,) = self._rows("get_experiment")
        return StoredExperiment(
            row["experiment_id"],
            row["config"],
            row["secret"],
            row["created_at_s"],
            row["ended_at_s"],
            ExperimentState(row["state"]),
            row["error"],
            row["active_s"],
            bool(row["keeper_has_matched"]),
        )

    def trials(self) -> list[Trial]:
        """All trials, in the order they were made."""
        return self._trials("get_trials", "get_progress_of_trials", {})

    def trial_list(self) -> Sequence[Mapping[str, Any]]:
        """The rows of all trials in the order they were made, without what a list has no room for. `parameters` is JSON text."""
        return [dict(row) for row in self._rows("get_trial_list")]

    def trial_ids(self, beginning: str, most: int) -> list[str]:
        """The one trial of this id; or some whose ids begin so, in the order they were made."""
        values = {"beginning": beginning, "most": most}
        found = [row["trial_id"] for row in self._rows("get_trial_ids", values)]
        return found[:1] if found and found[0] == beginning else found

    def results(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Id, parameters and result (JSON text) of each trial that succeeded with one, in the order they were made."""
        for row in self._rows("get_results", {"state": TrialState.SUCCEEDED.value}):
            yield row["trial_id"], json.loads(row["parameters"]), row["final"]

    def trial(self, trial_id: str) -> Trial | None:
        """One trial; None when there is none of that id."""
        found = self._trials("get_trial", "get_progress_of_trial", {"trial_id": trial_id})
        return found[0] if found else None

    def _trials(self, query: str, progress_query: str, values: Mapping[str, Any]) -> list[Trial]:
        progress = {
            row["trial_id"]: (
                newest_shown(row["value"]),
                row["count"],
            )
            for row in self._rows(progress_query, values)
        }
        return [
            Trial(
                row["trial_id"],
                row["sequence_id"],
                json.loads(row["parameters"]),
                json.loads(row["memo"]),
                row["created_at_s"],
                row["job_id"],
                TrialState(row["state"]),
                row["attempt"],
                row["started_at_s"],
                row["ended_at_s"],
                row["stop_reason"] and ExitReason(row["stop_reason"]),
                row["reason"] and ExitReason(row["reason"]),
                row["exit_code"],
                row["message"],
                row["final"],
                row["value"],
                *progress.get(row["trial_id"], (None, 0)),
                row["peak_usage"] and PeakUsage.from_json(row["peak_usage"]),
                row["reporter"],
                row["warning"],
                bool(row["is_customized"]),
                row["retries"],
                json.loads(row["first_attempts"]),
            )
            for row in self._rows(query, values)
        ]

    def jobs(self) -> tuple[list[Job], list[str]]:
        """The jobs that had not ended when this was last written, and the ids of those that had."""
        live, ended = [], []
        for row in self._rows("get_jobs"):
            if row["ended_at_s"] is None:
                live.append(Job(row["job_id"], was_heard=bool(row["was_heard"])))
            else:
                ended.append(row["job_id"])
        return live, ended

    def newest_jobs(self, most_ended: int) -> list[SeenJob]:
        """The jobs that have not ended, and of the others so many, newest first."""
        return [
            SeenJob(row["job_id"], row["created_at_s"], row["ended_at_s"])
            for row in self._rows("get_newest_jobs", {"most": most_ended})
        ]

    def imported(self) -> list[KnownResult]:
        """The results from elsewhere, in the order in which they came."""
        return [
            KnownResult(json.loads(row["parameters"]), reward(row["metric"]), row["metric"])
            for row in self._rows("get_imported")
        ]

    def streams(self) -> list[tuple[str, str, str]]:
        """Trial, task and stream of everything that was replicated."""
        return [(row["trial_id"], row["task"], row["stream"]) for row in self._rows("get_streams")]

    def rows_of(self, table: str, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Every row of one of the schema's tables, one after another."""
        # Names of the schema's own; quoted, for some are words of SQL.
        named = ", ".join(f'"{column}"' for column in columns)
        with _readers_errors(self._path):
            yield from map(tuple, self._connection.execute(f'SELECT {named} FROM "{table}"'))

    def usage_of(self, trial_id: str) -> list[UsageRow]:
        """What the tasks of a trial used, in all its attempts, oldest first."""
        return [
            UsageRow(
                Usage(
                    AttemptKey(row["trial_id"], row["attempt"], row["task"]),
                    row["cpu_percent"],
                    row["rss_bytes"],
                    row["disk_bytes"],
                    gpus_from_json(row["gpus"]),
                ),
                row["at_s"],
            )
            for row in self._rows("get_usage_of_trial", {"trial_id": trial_id})
        ]

    def offsets(self, key: AttemptKey) -> dict[Stream, int]:
        """How far each stream of an attempt is durable; a stream that nothing was stored of is absent."""
        values = {"trial_id": key.trial_id, "attempt": key.attempt, "task": key.task}
        return {Stream(row["stream"]): row["durable_offset"] for row in self._rows("get_offsets", values)}

    def garbage_bytes(self) -> dict[str, int]:
        """How many bytes of a trial's metrics files were no record, by trial; those without any are absent."""
        return {row["trial_id"]: row["garbage_bytes"] for row in self._rows("get_garbage")}

    def metrics_of(self, trial_id: str, is_final: bool | None = None) -> list[MetricRow]:
        """The records of a trial that count, in the order they were written."""
        return list(chain.from_iterable(self.metric_pages(is_final, *self.place_of(trial_id))))

    def metrics(
        self, is_final: bool | None = None, first_sequence_id: int = 0, last_sequence_id: int = 2**62
    ) -> list[MetricRow]:
        """The records of these trials that count, trial by trial."""
        return list(chain.from_iterable(self.metric_pages(is_final, first_sequence_id, last_sequence_id)))

    def place_of(self, trial_id: str) -> tuple[int, int]:
        """The first and the last sequence number of one trial; none lies between them when there is no such trial."""
        found = [row["sequence_id"] for row in self._rows("get_sequence_id", {"trial_id": trial_id})]
        return (found[0], found[0]) if found else (0, -1)

    def metric_pages(
        self, is_final: bool | None, first_sequence_id: int, last_sequence_id: int
    ) -> Iterator[list[MetricRow]]:
        """The same in pages of some rows, as long as there are any: a trial may have more than memory should hold.

        Between two pages nothing is held in the database, so whoever takes them slowly holds up nobody.
        """
        after_offset = -1
        while True:
            rows = list(
                self._rows(
                    "get_metrics",
                    {
                        "is_final": is_final,
                        "first_sequence_id": first_sequence_id,
                        "last_sequence_id": last_sequence_id,
                        "after_offset": after_offset,
                        "most": ROWS_OF_A_PAGE,
                    },
                )
            )
            if rows:
                yield [_metric_of(row) for row in rows]
            if len(rows) < ROWS_OF_A_PAGE:
                return
            first_sequence_id, after_offset = rows[-1]["sequence_id"], rows[-1]["record_offset"]

    def latest_intermediates(self) -> list[MetricRow]:
        """The newest intermediate record of each trial."""
        return [_metric_of(row) for row in self._rows("get_latest_intermediates")]

    def _rows(self, query: str, values: Mapping[str, Any] | None = None) -> Iterable[sqlite3.Row]:
        with _readers_errors(self._path):
            return self._connection.execute(QUERIES[query], values or {}).fetchall()


def _metric_of(row: sqlite3.Row) -> MetricRow:
    return MetricRow(
        row["trial_id"],
        row["attempt"],
        row["task"],
        row["record_offset"],
        bool(row["is_final"]),
        row["parameter_id"],
        row["sequence"],
        row["value"],
        row["stored_at_s"],
    )
