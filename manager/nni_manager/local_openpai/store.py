"""The cluster's database. `JobStore` handles one call at a time and reads the views defined in `jobs`."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from nni_manager.errors import InternalError
from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.job import (
    Allocation,
    PaiJob,
    RecordEvent,
    SaveTask,
    SaveTaskAttempt,
    Task,
)
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.core.policies import RetryCounts, TaskEnd, Trigger, Verdict
from nni_manager.local_openpai.core.states import (
    EventType,
    ExecutionType,
    SubState,
    state_of,
)
from nni_manager.local_openpai.errors import JobExists, JobNotFound, StateBusy, StateDirUnusable
from nni_manager.local_openpai.jobs import (
    AttemptSummary,
    JobDetail,
    JobEventRecord,
    JobSummary,
    TaskAttempt,
    TaskDetail,
    TaskRoleDetail,
)
from nni_manager.store.database_files import OPEN_DATABASES

SCHEMA_VERSION = 1
_QUERY = re.compile(r"^-- name: (\w+) -- .+\n((?:(?!^-- name:).*\n?)*)", re.MULTILINE)


def _text_of(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


QUERIES = {name: statement.strip() for name, statement in _QUERY.findall(_text_of("queries.sql"))}


@dataclass(frozen=True, slots=True)
class Write:
    """One statement with its values, captured at creation."""

    query: str
    values: Mapping[str, Any]


def job_write(job: PaiJob) -> Write:
    """The write that stores the job's current state."""
    return Write(
        "save_job",
        {
            "job_id": job.job_id,
            "sub_state": job.sub_state.value,
            "execution_type": job.execution_type.value,
            "attempt_id": job.attempt_id,
            "retries": json.dumps(asdict(job.counts)),
            "launched_at_s": job.launched_at_s,
            "completed_at_s": job.completed_at_s,
            "code": job.code,
            "is_over": job.is_over,
        },
    )


def attempt_write(job_id: int, kept: SaveTaskAttempt) -> Write:
    """The write that stores an attempt of a job."""
    attempt = kept.attempt
    return Write(
        "save_attempt",
        {
            "job_id": job_id,
            "attempt_id": attempt.attempt_id,
            "sub_state": attempt.sub_state.value,
            "created_at_s": attempt.created_at_s,
            "launched_at_s": attempt.launched_at_s,
            "completed_at_s": attempt.completed_at_s,
            "exit": _json(attempt.exit),
            "trigger": _json(attempt.trigger),
        },
    )


def task_write(job: PaiJob, kept: SaveTask) -> Write:
    """The write that stores an attempt of a task."""
    task = kept.task
    names = [role.name for role in job.plan.roles]
    return Write(
        "save_task",
        {
            "job_id": job.job_id,
            "job_attempt_id": kept.job_attempt_id,
            "role": task.role,
            "task_index": task.index,
            "attempt_id": task.attempt_id,
            "mangled_role": job.plan.role(task.role).mangled_name,
            "role_order": names.index(task.role),
            "task_uid": task.task_uid,
            "container_id": task.container_id,
            "sub_state": task.sub_state.value,
            "retries": json.dumps(asdict(task.counts)),
            "created_at_s": task.created_at_s,
            "launched_at_s": task.launched_at_s,
            "completed_at_s": task.completed_at_s,
            "attempt_created_at_s": task.attempt_created_at_s,
            "attempt_launched_at_s": task.attempt_launched_at_s,
            "attempt_completed_at_s": task.attempt_completed_at_s,
            "place": _json(task.place),
            "stop_code": task.stop_code,
            "exit": _json(task.exit),
        },
    )


def event_write(job_id: int, note: RecordEvent, at_s: float) -> Write:
    """The write that adds an event of a job."""
    return Write(
        "add_event",
        {
            "job_id": job_id,
            "type": note.type.value,
            "reason": note.reason,
            "message": note.message,
            "at_s": at_s,
            "attempt_id": note.attempt_id,
            "role": note.role,
            "task_index": note.index,
            "container_id": note.container_id,
        },
    )


@contextmanager
def _own_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StateBusy(
            f"cannot write {path}: {error}; free some space on its disk, or wait and try again"
        ) from error
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

    _is_counted = False

    def __init__(self, path: Path) -> None:
        """Open the database, or create it.

        Raises:
            StateDirUnusable: another version wrote it, it is corrupt, or the file is not a database.
            StateBusy: it cannot be written now.
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
        self._is_counted = True
        try:
            with _own_errors(path):
                self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except BaseException:
            self._is_counted = False
            OPEN_DATABASES.remove(path)
            raise
        try:
            with _own_errors(path):
                self._connection.row_factory = sqlite3.Row
                self._connection.execute("PRAGMA journal_mode = WAL")
                # A confirmed submission survives a power failure.
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute("PRAGMA foreign_keys = ON")
                # Deleted rows hold secrets, so their bytes are overwritten.
                self._connection.execute("PRAGMA secure_delete = ON")
                self._make_or_check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        if self._is_counted:
            self._is_counted = False
            OPEN_DATABASES.remove(self._path)

    def _make_or_check(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            schema = _text_of("schema.sql")
            self._connection.executescript(f"BEGIN; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StateDirUnusable(
                f"cannot open {self._path}: it has format {version} and this version reads {SCHEMA_VERSION}; "
                "use the version of trial-keeper that made it"
            )

    # ---- writing

    def add_job(
        self, plan: JobPlan, masked_text: str, now_s: float, notes: Sequence[RecordEvent] = ()
    ) -> int:
        """The id of a new job, stored durably together with its events.

        Raises:
            JobExists: the user has a job of that name.
            StateBusy: nothing was written.
        """
        values = {
            "user": plan.user,
            "name": plan.name,
            "debug_id": plan.debug_id,
            "virtual_cluster": plan.virtual_cluster,
            "priority": plan.priority,
            "total_gpus": sum(role.tasks * role.need.gpu for role in plan.roles),
            "total_tasks": plan.total_tasks,
            "total_task_roles": len(plan.roles),
            "submitted_at_s": now_s,
            "config": masked_text,
            "plan": plan.to_json(),
            "sub_state": SubState.ATTEMPT_CREATION_PENDING.value,
            "execution_type": ExecutionType.START.value,
            "retries": json.dumps(asdict(RetryCounts())),
        }
        with self._transaction():
            try:
                job_id = int(self._connection.execute(QUERIES["add_job"], values).lastrowid or 0)
            except sqlite3.IntegrityError as error:
                raise JobExists(
                    f"cannot submit {plan.framework_name}: a job of that name already exists; choose another name"
                ) from error
            for note in notes:
                self._connection.execute(QUERIES["add_event"], event_write(job_id, note, now_s).values)
        return job_id

    def commit(self, writes: Sequence[Write]) -> None:
        """Commit all writes durably, or none of them.

        Raises:
            StateBusy: nothing was written; the call can be retried.
        """
        with self._transaction():
            for write in writes:
                self._connection.execute(QUERIES[write.query], write.values)

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

    def remove_tag(self, job_id: int, tag: str) -> bool:
        """Remove a tag; True if the job had it."""
        with _own_errors(self._path):
            return (
                self._connection.execute(QUERIES["remove_tag"], {"job_id": job_id, "tag": tag}).rowcount > 0
            )

    def notifications(self) -> list[tuple[int, str]]:
        """The oldest undelivered notifications, as id and JSON."""
        return [(row["notification_id"], row["body"]) for row in self._rows("get_notifications")]

    # ---- reading

    def jobs(self) -> list[JobSummary]:
        """All jobs, the newest first."""
        tags: dict[int, list[str]] = {}
        for row in self._rows("get_all_tags"):
            tags.setdefault(row["job_id"], []).append(row["tag"])
        return [_summary(row, tags.get(row["job_id"], ())) for row in self._rows("get_jobs")]

    def job_id(self, user: str, name: str) -> int:
        """The id of a job.

        Raises:
            JobNotFound: no such job.
        """
        return int(self._job(user, name)["job_id"])

    def summary(self, user: str, name: str) -> JobSummary:
        """One job.

        Raises:
            JobNotFound: no such job.
        """
        row = self._job(user, name)
        return _summary(row, [tag["tag"] for tag in self._rows("get_tags", job_id=row["job_id"])])

    def config(self, user: str, name: str) -> str:
        """The job's text with its secrets masked.

        Raises:
            JobNotFound: no such job.
        """
        return str(self._job(user, name)["config"])

    def detail(self, user: str, name: str, attempt_id: int | None) -> JobDetail:
        """A job with one attempt: the newest if `attempt_id` is None.

        Raises:
            JobNotFound: no such job or attempt.
        """
        summary = self.summary(user, name)
        job_id = self.job_id(user, name)
        wanted = summary.attempt_id if attempt_id is None else attempt_id
        rows = self._rows("get_attempt", job_id=job_id, attempt_id=wanted)
        if not rows and attempt_id is not None:
            raise JobNotFound(
                f"cannot find attempt {attempt_id} of job {summary.framework_name}; its newest is {summary.attempt_id}"
            )
        tasks = self._rows("get_tasks", job_id=job_id, job_attempt_id=wanted)
        roles: dict[tuple[str, str], list[TaskDetail]] = {}
        for row in tasks:
            roles.setdefault((row["role"], row["mangled_role"]), []).append(_task_detail(row))
        attempt = (
            _attempt(rows[0])
            if rows
            # Just after the submission no attempt exists yet.
            else AttemptSummary(
                0, summary.state, summary.sub_state, summary.created_at_s, None, None, None, None
            )
        )
        details = tuple(TaskRoleDetail(*names, tuple(found)) for names, found in roles.items())
        return JobDetail(summary, attempt, details)

    def attempts(self, user: str, name: str) -> list[AttemptSummary]:
        """All attempts of a job, the newest first.

        Raises:
            JobNotFound: no such job.
        """
        return [_attempt(row) for row in self._rows("get_attempts", job_id=self.job_id(user, name))]

    def task_attempts(
        self, user: str, name: str, attempt_id: int, role: str, index: int
    ) -> tuple[TaskDetail, list[TaskAttempt]]:
        """A task and all its attempts, the newest first.

        Raises:
            JobNotFound: no such job, attempt or task.
        """
        rows = self._rows(
            "get_task_attempts",
            job_id=self.job_id(user, name),
            job_attempt_id=attempt_id,
            role=role,
            task_index=index,
        )
        if not rows:
            raise JobNotFound(
                f"cannot find task {index} of role {role} in attempt {attempt_id} of job {user}~{name}; "
                "look at the job to see its tasks"
            )
        return _task_detail(rows[0]), [_task_attempt(row) for row in rows]

    def container_of(
        self, user: str, name: str, attempt_id: int, role: str, index: int, task_attempt_id: int
    ) -> tuple[str, str, str]:
        """The job's debug id, the role's mangled name, and the container id of a task's attempt.

        Raises:
            JobNotFound: no such job, attempt or task.
        """
        job = self._job(user, name)
        found = self._rows(
            "get_container",
            job_id=job["job_id"],
            job_attempt_id=attempt_id,
            role=role,
            task_index=index,
            attempt_id=task_attempt_id,
        )
        if not found:
            raise JobNotFound(
                f"cannot find attempt {task_attempt_id} of task {index} of role {role} in attempt {attempt_id} "
                f"of job {user}~{name}; look at the job to see its tasks"
            )
        return job["debug_id"], found[0]["mangled_role"], found[0]["container_id"]

    def events(self, user: str, name: str, event_type: EventType | None) -> list[JobEventRecord]:
        """The events of a job, the oldest first.

        Raises:
            JobNotFound: no such job.
        """
        return [
            JobEventRecord(
                str(row["event_id"]),
                EventType(row["type"]),
                row["reason"],
                row["message"],
                row["at_s"],
                row["attempt_id"],
                row["role"],
                row["task_index"],
                row["container_id"],
            )
            for row in self._rows("get_events", job_id=self.job_id(user, name))
            if event_type is None or row["type"] == event_type.value
        ]

    def unfinished(self, new_id: Callable[[], str], most_platform_retries: int) -> list[PaiJob]:
        """The jobs that are not terminal, as last stored, in the order of submission."""
        return [self._restored(row, new_id, most_platform_retries) for row in self._rows("get_unfinished")]

    def _restored(self, row: sqlite3.Row, new_id: Callable[[], str], most_platform_retries: int) -> PaiJob:
        job = PaiJob(
            job_id=row["job_id"],
            plan=JobPlan.from_json(row["plan"]),
            submitted_at_s=row["submitted_at_s"],
            new_id=new_id,
            most_platform_retries=most_platform_retries,
            sub_state=SubState(row["sub_state"]),
            execution_type=ExecutionType(row["execution_type"]),
            attempt_id=row["attempt_id"],
            counts=_counts(row),
            launched_at_s=row["launched_at_s"],
        )
        for attempt in self._rows("get_attempt", job_id=job.job_id, attempt_id=job.attempt_id):
            job.attempt_created_at_s = attempt["created_at_s"]
            job.attempt_launched_at_s = attempt["launched_at_s"]
            if attempt["exit"] is not None:
                job.verdict = Verdict(
                    TaskExit(**json.loads(attempt["exit"])), Trigger(**json.loads(attempt["trigger_"]))
                )
        tasks = [
            _task(task) for task in self._rows("get_tasks", job_id=job.job_id, job_attempt_id=job.attempt_id)
        ]
        job.tasks = {(task.role, task.index): task for task in tasks}
        job.latest_s = max(
            at_s or 0.0
            for at_s in (
                *(job.submitted_at_s, job.launched_at_s, job.attempt_created_at_s, job.attempt_launched_at_s),
                *(
                    each
                    for task in tasks
                    for each in (task.attempt_created_at_s, task.attempt_completed_at_s)
                ),
                *(task.attempt_launched_at_s for task in tasks),
            )
        )
        ended = sorted(
            (task for task in tasks if task.is_over and task.stop_code is None),
            key=lambda task: task.completed_at_s or 0.0,
        )
        job.ends = [TaskEnd(task.role, task.index, task.exit) for task in ended if task.exit is not None]
        return job

    def _job(self, user: str, name: str) -> sqlite3.Row:
        rows = self._rows("get_job", user=user, name=name)
        if not rows:
            raise JobNotFound(
                f"cannot find job {user}~{name}: there is none; list the jobs to see what there is"
            )
        return rows[0]

    def _rows(self, query: str, **values: Any) -> list[sqlite3.Row]:
        with _own_errors(self._path):
            return self._connection.execute(QUERIES[query], values).fetchall()


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(asdict(value))


def _exit(row: sqlite3.Row) -> TaskExit | None:
    return None if row["exit"] is None else TaskExit(**json.loads(row["exit"]))


# Cached: a list has thousands of jobs, and most have no retries.
@lru_cache(maxsize=256)
def _counts_of(text: str) -> RetryCounts:
    return RetryCounts(**json.loads(text))


def _counts(row: sqlite3.Row) -> RetryCounts:
    return _counts_of(row["retries"])


def _place(row: sqlite3.Row) -> Allocation | None:
    if row["place"] is None:
        return None
    values = json.loads(row["place"])
    ports = {label: tuple(found) for label, found in values["ports"].items()}
    return Allocation(values["host_ip"], ports, tuple(values["gpus"]))


def _summary(row: sqlite3.Row, tags: Sequence[str]) -> JobSummary:
    sub_state = SubState(row["sub_state"])
    is_over = sub_state is SubState.COMPLETED
    return JobSummary(
        debug_id=row["debug_id"],
        user=row["user"],
        name=row["name"],
        state=state_of(sub_state, row["code"]),
        sub_state=sub_state,
        execution_type=ExecutionType(row["execution_type"]),
        tags=tuple(tags),
        retries=_counts(row),
        submitted_at_s=row["submitted_at_s"],
        created_at_s=row["submitted_at_s"],
        launched_at_s=row["launched_at_s"],
        completed_at_s=row["completed_at_s"],
        exit_code=row["code"] if is_over else None,
        virtual_cluster=row["virtual_cluster"],
        priority=row["priority"],
        total_gpus=row["total_gpus"],
        total_tasks=row["total_tasks"],
        total_task_roles=row["total_task_roles"],
        attempt_id=row["attempt_id"],
    )


def _attempt(row: sqlite3.Row) -> AttemptSummary:
    ended, sub_state = _exit(row), SubState(row["sub_state"])
    is_over = row["completed_at_s"] is not None
    trigger = None if row["trigger_"] is None else Trigger(**json.loads(row["trigger_"]))
    return AttemptSummary(
        attempt_id=row["attempt_id"],
        state=state_of(sub_state, None if ended is None else ended.code),
        sub_state=sub_state,
        created_at_s=row["created_at_s"],
        launched_at_s=row["launched_at_s"],
        completed_at_s=row["completed_at_s"],
        exit=ended if is_over else None,
        trigger=trigger if is_over else None,
    )


def _task(row: sqlite3.Row) -> Task:
    return Task(
        role=row["role"],
        index=row["task_index"],
        task_uid=row["task_uid"],
        container_id=row["container_id"],
        created_at_s=row["created_at_s"],
        attempt_created_at_s=row["attempt_created_at_s"],
        sub_state=SubState(row["sub_state"]),
        attempt_id=row["attempt_id"],
        counts=_counts(row),
        launched_at_s=row["launched_at_s"],
        completed_at_s=row["completed_at_s"],
        attempt_launched_at_s=row["attempt_launched_at_s"],
        attempt_completed_at_s=row["attempt_completed_at_s"],
        place=_place(row),
        stop_code=row["stop_code"],
        exit=_exit(row),
    )


def _task_attempt(row: sqlite3.Row) -> TaskAttempt:
    task = _task(row)
    # An attempt that is followed by another one is terminal.
    sub_state = SubState.COMPLETED if task.attempt_completed_at_s is not None else task.sub_state
    return TaskAttempt(
        attempt_id=task.attempt_id,
        container_id=task.container_id,
        state=state_of(sub_state, task.code),
        sub_state=sub_state,
        created_at_s=task.attempt_created_at_s,
        launched_at_s=task.attempt_launched_at_s,
        completed_at_s=task.attempt_completed_at_s,
        container_ip=None if task.place is None else task.place.host_ip,
        node_name=None if task.place is None else task.place.host_ip,
        ports={} if task.place is None else task.place.ports,
        gpus=() if task.place is None else task.place.gpus,
        exit=task.exit,
    )


def _task_detail(row: sqlite3.Row) -> TaskDetail:
    task = _task(row)
    return TaskDetail(
        index=task.index,
        task_uid=task.task_uid,
        state=state_of(task.sub_state, task.code),
        sub_state=task.sub_state,
        retries=task.counts,
        created_at_s=task.created_at_s,
        launched_at_s=task.launched_at_s,
        completed_at_s=task.completed_at_s,
        attempt=_task_attempt(row),
    )
