"""The cluster's database. `JobStore` returns the snapshots of `jobs`; `StoreThread` calls it from an event loop."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from pydantic import TypeAdapter

from nni_manager.errors import InternalError
from nni_manager.local_openpai.core.job import JobAttempt, PaiJob, RecordEvent, SaveAttempt, SaveTask, Task
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.core.policies import RetryCounts, TaskEnd
from nni_manager.local_openpai.core.states import ExecutionType, SubState
from nni_manager.local_openpai.errors import ApiError, ClusterClosed, StateBusy, StateDirUnusable, no_job
from nni_manager.local_openpai.jobs import JobDetail, JobEvent, JobSummary
from nni_manager.store.database_files import OPEN_DATABASES
from nni_manager.store.queries import named_queries, sql_text

SCHEMA_VERSION = 1
QUERIES = named_queries(__package__)
# The columns that hold JSON.
_JSON = frozenset({"plan", "retries", "exit", "trigger", "allocation", "tags"})
_P = ParamSpec("_P")
_T = TypeVar("_T")


# ---- rows


def _column(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return json.dumps(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value


def _columns(stored: Any) -> dict[str, Any]:
    """The values of a dataclass's fields, as stored."""
    return {field.name: _column(getattr(stored, field.name)) for field in fields(stored)}


# Built once for each class.
_adapter = lru_cache(TypeAdapter[Any])


def _object(kind: Callable[..., _T], row: sqlite3.Row, **others: Any) -> _T:
    """The object stored in a row, and fields that have no column."""
    values = dict(row)
    values |= {name: json.loads(values[name]) for name in _JSON & values.keys() if values[name] is not None}
    found: _T = _adapter(kind).validate_python({**values, **others})
    return found


Write = tuple[str, Mapping[str, Any]]
"""The name of a statement and its values."""


def job_write(job: PaiJob) -> Write:
    """The write that stores the job's current state."""
    names = (
        "job_id",
        "sub_state",
        "execution_type",
        "retries",
        "launched_at_s",
        "completed_at_s",
        "is_terminal",
    )
    values = {name: _column(getattr(job, name)) for name in names}
    return ("save_job", {**values, "attempt_id": job.attempt.attempt_id, "code": job.attempt.code})


def effect_write(job: PaiJob, effect: SaveTask | SaveAttempt | RecordEvent, now_s: float) -> Write:
    """The write that stores an attempt of a task or of the job, or adds an event at `now_s`."""
    match effect:
        case SaveTask():
            role = job.plan.role(effect.task.role)
            values = {
                "job_id": job.job_id,
                "job_attempt_id": effect.job_attempt_id,
                "mangled_role": role.mangled_name,
                "role_order": job.plan.roles.index(role),
            }
            return ("save_task", {**_columns(effect.task), **values})
        case SaveAttempt():
            return ("save_attempt", {**_columns(effect.attempt), "job_id": job.job_id})
        case RecordEvent():
            return _event_write(job.job_id, effect, now_s)


def _event_write(job_id: int, event: RecordEvent, now_s: float) -> Write:
    return ("add_event", {**_columns(event), "job_id": job_id, "at_s": now_s})


@contextmanager
def _own_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StateBusy(f"cannot write {path}: {error}; free disk space, or try again later") from error
    except sqlite3.IntegrityError as error:
        raise InternalError(
            f"cannot store a row in {path}: {error}; this is a bug of trial-keeper"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StateDirUnusable(
            f"cannot use {path}: {error}; restore it from a copy, or choose another state directory"
        ) from error


class JobStore:
    """The database of one cluster. Calls may come from any thread, and must not overlap."""

    def __init__(self, path: Path) -> None:
        """Open the database, or create it.

        Raises:
            StateDirUnusable: the file is corrupt, is not a database, or was written by another version.
            StateBusy: the database cannot be written now.
        """
        self._path = path
        is_new = not path.exists()
        if is_new:
            path.touch(mode=0o600)  # contains secrets
        if (damage := OPEN_DATABASES.add(path, is_new=is_new)) is not None:
            raise StateDirUnusable(
                f"cannot use the cluster's database: {damage}; restore the file from a copy, or remove {path}* to start without "
                "any job"
            )
        with ExitStack() as opened, _own_errors(path):
            opened.callback(OPEN_DATABASES.remove, path)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            opened.callback(self._connection.close)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            # A confirmed submission survives a power failure.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            # Deleted rows hold secrets, so their bytes are overwritten.
            self._connection.execute("PRAGMA secure_delete = ON")
            self._make_or_check()
            self._resources = opened.pop_all()

    def close(self) -> None:
        """Close the database."""
        self._resources.close()

    def _make_or_check(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            schema = sql_text(__package__, "schema.sql")
            self._connection.executescript(f"BEGIN; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StateDirUnusable(
                f"cannot open {self._path}: it has format {version}, but this version reads only {SCHEMA_VERSION}; "
                "use the version of trial-keeper that created it"
            )

    # ---- writing

    def add_job(
        self, plan: JobPlan, masked_text: str, now_s: float, events: Sequence[RecordEvent] = ()
    ) -> int:
        """The id of a new job, stored durably together with its events.

        Raises:
            ApiError: ConflictJobError, the user has a job of that name.
            StateBusy: nothing was written.
        """
        names = ("user", "name", "debug_id", "virtual_cluster", "priority", "total_tasks")
        values = {
            **{name: getattr(plan, name) for name in names},
            "total_gpus": sum(role.tasks * role.need.gpu for role in plan.roles),
            "total_task_roles": len(plan.roles),
            "submitted_at_s": now_s,
            "config": masked_text,
            "plan": _column(plan),
            "sub_state": SubState.ATTEMPT_CREATION_PENDING.value,
            "execution_type": ExecutionType.START.value,
            "retries": _column(RetryCounts()),
        }
        with self._transaction():
            try:
                job_id = int(self._connection.execute(QUERIES["add_job"], values).lastrowid or 0)
            except sqlite3.IntegrityError as error:
                message = f"cannot submit {plan.framework_name}: a job of that name already exists; choose another name"
                raise ApiError("ConflictJobError", message) from error
            for event in events:
                self._execute(_event_write(job_id, event, now_s))
        return job_id

    def commit(self, writes: Sequence[Write]) -> None:
        """Commit all writes durably, or none of them.

        Raises:
            StateBusy: nothing was written; the call can be retried.
        """
        with self._transaction():
            for write in writes:
                self._execute(write)

    def remove_tag(self, job_id: int, tag: str) -> bool:
        """Remove a tag from a job; False if the job does not have it, for example because another request has removed it.

        Raises:
            StateBusy: as for `commit`.
        """
        with self._transaction():
            return self._execute(("remove_tag", {"job_id": job_id, "tag": tag})) > 0

    def _execute(self, write: Write) -> int:
        """Returns the number of changed rows."""
        query, values = write
        return self._connection.execute(QUERIES[query], values).rowcount

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _own_errors(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def notifications(self) -> list[tuple[int, str]]:
        """The oldest undelivered notifications, as id and JSON."""
        return [(row["notification_id"], row["body"]) for row in self._rows("get_notifications")]

    # ---- reading

    def jobs(self) -> list[JobSummary]:
        """All jobs, the newest first."""
        return [_object(JobSummary, row) for row in self._rows("get_jobs")]

    def summary(self, user: str, name: str) -> JobSummary:
        """One job.

        Raises:
            ApiError: NoJobError, no such job.
        """
        return _object(JobSummary, self._job(user, name))

    def config(self, user: str, name: str) -> str:
        """The job's text with its secrets masked.

        Raises:
            ApiError: NoJobError, no such job.
        """
        return str(self._job(user, name)["config"])

    def detail(self, user: str, name: str, attempt_id: int | None = None) -> JobDetail:
        """A job with one attempt: the newest if `attempt_id` is None.

        Raises:
            ApiError: NoJobError, no such job or attempt.
        """
        job = self.summary(user, name)
        wanted = job.attempt_id if attempt_id is None else attempt_id
        rows = self._rows("get_attempt", job_id=job.job_id, attempt_id=wanted)
        if not rows and attempt_id is not None:
            raise ApiError(
                "NoJobError",
                f"cannot find attempt {attempt_id} of job {job.framework_name}; the newest is {job.attempt_id}",
            )
        # Just after the submission no attempt exists yet.
        attempt = _object(JobAttempt, rows[0]) if rows else JobAttempt(created_at_s=job.submitted_at_s)
        tasks: dict[str, list[Task]] = {}
        for row in self._rows("get_tasks", job_id=job.job_id, job_attempt_id=wanted):
            tasks.setdefault(row["mangled_role"], []).append(_object(Task, row))
        return JobDetail(job, attempt, tasks)

    def task_attempts(self, user: str, name: str, attempt_id: int, role: str, index: int) -> list[Task]:
        """All attempts of a task within one attempt of the job, the newest first. `role` in either spelling.

        Raises:
            ApiError: NoJobError, no such job, attempt or task.
        """
        rows = self._task_rows(self._job(user, name), attempt_id, role, index)
        return [_object(Task, row) for row in rows]

    def container_of(
        self, user: str, name: str, attempt_id: int, role: str, index: int, task_attempt_id: int
    ) -> tuple[str, str, str]:
        """The job's debug id, the role's mangled name, and the container id of a task's attempt.

        Raises:
            ApiError: NoJobError, no such job, attempt or task.
        """
        job = self._job(user, name)
        for row in self._task_rows(job, attempt_id, role, index):
            if row["attempt_id"] == task_attempt_id:
                return job["debug_id"], row["mangled_role"], row["container_id"]
        raise ApiError(
            "NoJobError",
            f"cannot find attempt {task_attempt_id} of task {index} of role {role} in attempt {attempt_id} "
            f"of job {user}~{name}; the job's detail lists its tasks",
        )

    def _task_rows(self, job: sqlite3.Row, attempt_id: int, role: str, index: int) -> list[sqlite3.Row]:
        values = {"job_id": job["job_id"], "job_attempt_id": attempt_id, "role": role, "task_index": index}
        rows = self._rows("get_task_attempts", **values)
        if not rows:
            raise ApiError(
                "NoJobError",
                f"cannot find task {index} of role {role} in attempt {attempt_id} of job {job['user']}~{job['name']}; "
                "the job's detail lists its tasks",
            )
        return rows

    def events(self, user: str, name: str, event_type: str | None = None) -> list[JobEvent]:
        """The events of a job, the oldest first; only those of `event_type` if given.

        Raises:
            ApiError: NoJobError, no such job.
        """
        rows = self._rows("get_events", job_id=self._job(user, name)["job_id"])
        return [_object(JobEvent, row) for row in rows if event_type in (None, row["type"])]

    def unfinished(self, new_id: Callable[[], str], most_platform_retries: int) -> list[PaiJob]:
        """The jobs that are not terminal, as last stored, in the order of submission."""
        return [self._restored(row, new_id, most_platform_retries) for row in self._rows("get_unfinished")]

    def _restored(self, row: sqlite3.Row, new_id: Callable[[], str], most_platform_retries: int) -> PaiJob:
        job = _object(PaiJob, row, new_id=new_id, most_platform_retries=most_platform_retries)
        for attempt in self._rows("get_attempt", job_id=job.job_id, attempt_id=row["attempt_id"]):
            job.attempt = _object(JobAttempt, attempt)
        rows = self._rows("get_tasks", job_id=job.job_id, job_attempt_id=row["attempt_id"])
        tasks = [_object(Task, task) for task in rows]
        job.tasks = {(task.role, task.index): task for task in tasks}
        times = [job.submitted_at_s, job.launched_at_s, job.attempt.created_at_s, job.attempt.launched_at_s]
        for task in tasks:
            times += [task.attempt_created_at_s, task.attempt_launched_at_s, task.attempt_completed_at_s]
        job.latest_s = max(at_s or 0.0 for at_s in times)
        ended = sorted(
            (task for task in tasks if task.is_terminal and task.stop_code is None),
            key=lambda task: task.completed_at_s or 0.0,
        )
        job.ends = [TaskEnd(task.role, task.index, task.exit) for task in ended if task.exit is not None]
        return job

    def _job(self, user: str, name: str) -> sqlite3.Row:
        rows = self._rows("get_job", user=user, name=name)
        if not rows:
            raise no_job(f"{user}~{name}")
        return rows[0]

    def _rows(self, query: str, **values: Any) -> list[sqlite3.Row]:
        with _own_errors(self._path):
            try:
                return self._connection.execute(QUERIES[query], values).fetchall()
            except OverflowError:  # no row has a number of more than 64 bits, such as one in a request's path
                return []


class StoreThread:
    """A `JobStore` behind a thread of its own, so that calls neither overlap nor block the event loop."""

    def __init__(self, path: Path, name: str) -> None:
        """Store the path; no I/O."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._store: JobStore | None = None

    async def open(self) -> None:
        """Open the database, or create it. Raises what `JobStore` raises."""
        self._store = await asyncio.get_running_loop().run_in_executor(self._thread, JobStore, self._path)

    async def call(
        self, method: Callable[Concatenate[JobStore, _P], _T], /, *values: _P.args, **named: _P.kwargs
    ) -> _T:
        """The result of a method of `JobStore`.

        Raises:
            ClusterClosed: the store is not open.
        """
        if self._store is None:
            raise ClusterClosed
        call = partial(method, self._store, *values, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self) -> None:
        """Close the database after the pending calls; idempotent."""
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown()
