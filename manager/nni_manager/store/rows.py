"""The rows that the database stores and returns."""

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.jobs import Job
from nni_manager.domain.learning_curve import StoredMark
from nni_manager.domain.provenance import CodeVersion
from nni_manager.domain.remarks import Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.domain.usage import PeakUsage
from nni_manager.store.queries import QUERIES
from nni_sdk.records import Mark
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import AttemptKey, Environment, Usage
from trial_keeper.wire.reasons import ExitReason


@dataclass(frozen=True, slots=True)
class StoredExperiment:
    """The row of table `experiment`. Times are in seconds since the epoch."""

    experiment_id: str
    config: str
    secret: bytes
    created_at_s: float
    ended_at_s: float | None
    state: ExperimentState
    error: str
    active_s: float
    any_compatible_keeper: bool
    remarks: Remarks


def json_of(document: object) -> str:
    """A document as the database stores it."""
    # A fast path: most documents are empty, and each trial is stored five times.
    return json.dumps(document) if document else "{}"


# The fields of `Trial` and of its `TrialRun` that are stored.
_COLUMNS = re.findall(r":(\w+)", QUERIES["save_trial"])
_OF_RUN = frozenset(_COLUMNS) & {field.name for field in fields(TrialRun)}
_values_of = attrgetter(*(f"run.{name}" if name in _OF_RUN else name for name in _COLUMNS))
_REASON = (lambda reason: reason and reason.value, lambda value: ExitReason(value) if value else None)
# Those that are converted: (to the store, from the store).
_CONVERTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "parameters": (json_of, json.loads),
    "metadata": (json_of, json.loads),
    "state": (attrgetter("value"), TrialState),
    "stop_reason": _REASON,
    "reason": _REASON,
    "peak_usage": (
        lambda usage: usage and usage.to_json(),
        lambda text: text and PeakUsage.from_json(text),
    ),
    "is_customized": (bool, bool),
}


def trial_of(row: sqlite3.Row, remarks: Remarks, **reports: Any) -> Trial:
    """The trial of a row of table `trial`. `reports`: fields of its run that are in other tables."""
    converted = {name: from_store(row[name]) for name, (_, from_store) in _CONVERTED.items()}
    values = {name: row[name] for name in _COLUMNS} | converted
    run = TrialRun(**{name: values.pop(name) for name in _OF_RUN}, **reports)
    return Trial(**values, run=run, remarks=remarks)


@dataclass(frozen=True, slots=True)
class RowWrite:
    """A queued write of one row by the SQL statement named `query`. A newer write of the same row replaces an older one."""

    query: str
    identity: str
    values: Mapping[str, Any]


def trial_row(trial: Trial) -> RowWrite:
    """A snapshot of a trial, which may change afterwards."""
    values = dict(zip(_COLUMNS, _values_of(trial), strict=True))
    converted = {name: to_store(values[name]) for name, (to_store, _) in _CONVERTED.items()}
    return RowWrite("save_trial", trial.trial_id, values | converted)


def attempt_row(key: AttemptKey, number: int, is_lost: bool = False) -> RowWrite:
    """An attempt and the number that represents it in other tables."""
    return RowWrite("save_attempt", str(key), columns_of(key, attempt=number, is_lost=is_lost))


def environment_row(key: AttemptKey, environment: Environment) -> RowWrite:
    """The environment of an attempt, whose row exists."""
    return RowWrite("save_environment", str(key), columns_of(key, **asdict(environment)))


def packages_row(digest: str, text: str) -> RowWrite:
    """A list of packages, one per line."""
    return RowWrite("add_packages", digest, {"digest": digest, "list": text})


def code_row(version: CodeVersion) -> RowWrite:
    """A version of the training code."""
    return RowWrite("add_code", str(version.since_s), asdict(version))


def job_row(job: Job, now_s: float, ended_at_s: float | None) -> RowWrite:
    """A snapshot of a job. `now_s`: the creation time of a new row. `ended_at_s` None: the job may still run."""
    values = {"job_id": job.job_id, "ever_connected": job.ever_connected}
    return RowWrite("save_job", job.job_id, values | {"now_s": now_s, "ended_at_s": ended_at_s})


def experiment_row(
    state: ExperimentState, error: str, active_s: float, ended_at_s: float | None, any_compatible_keeper: bool
) -> RowWrite:
    """The mutable columns of table `experiment`."""
    values = {"state": state.value, "error": error, "active_s": active_s, "ended_at_s": ended_at_s}
    return RowWrite("save_experiment", "", values | {"any_compatible_keeper": any_compatible_keeper})


def config_row(config: str) -> RowWrite:
    """The experiment's new configuration, as JSON."""
    return RowWrite("save_config", "", {"config": config})


def imported_rows(position: int, results: Iterable[PriorResult]) -> RowWrite:
    """Imported results, all or none. `position` is the number of results that were imported before."""
    texts = json.dumps([(json.dumps(result.parameters), result.metric) for result in results])
    return RowWrite("add_imported", str(position), {"position": position, "results": texts})


def remarks_row(trial_id: str | None, remarks: Remarks) -> RowWrite:
    """The remarks of a trial; `trial_id` None: of the experiment."""
    values = {"trial_id": trial_id or "", "tags": json.dumps(remarks.tags), "note": remarks.note}
    return RowWrite("save_remarks", values["trial_id"], values)


@dataclass(frozen=True, slots=True)
class TrialTotals:
    """The number of trials in each state, and the lowest and the highest value that counts; None: no trial has one."""

    counts: Mapping[TrialState, int]
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A stored job, for display. `ended_at_s` None: it may still run."""

    job_id: str
    created_at_s: float
    ended_at_s: float | None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Write: resource usage of one task at one time, in seconds since the epoch. Reads return it, too."""

    usage: Usage
    at_s: float

    @property
    def key(self) -> AttemptKey:
        """The attempt."""
        return self.usage.key


Write = StreamWrite | UsageRow | RowWrite


@dataclass(frozen=True, slots=True)
class Stored:
    """The cost of a transaction. `sync_s`: seconds that the syncs took. `problem`: a message for operators, or empty."""

    sync_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One record of the attempt and task that count for its trial. `parameter_id` and `value` are JSON text."""

    trial_id: str
    attempt: int
    task: str
    record_offset: int
    is_final: bool
    parameter_id: str
    sequence: int
    value: str
    stored_at_s: float


def mark_columns(key: AttemptKey, number: int, mark: Mark) -> dict[str, Any]:
    """The columns of a mark in the metrics of an attempt."""
    is_load = mark.attempt_id is not None
    return columns_of(
        key,
        attempt=number,
        record_offset=mark.offset,
        checkpoint=mark.checkpoint,
        source_trial_id=mark.trial_id if is_load else None,
        source_attempt_id=mark.attempt_id,
        source_task=mark.task if is_load else None,
        load=mark.load,
    )


def mark_of(row: sqlite3.Row) -> StoredMark:
    """The mark in a row of table `mark`."""
    source = None
    if row["source_attempt_id"] is not None:
        source = AttemptKey(row["source_trial_id"], row["source_attempt_id"], row["source_task"])
    return StoredMark(
        row["attempt"],
        row["attempt_id"],
        row["task"],
        row["record_offset"],
        row["checkpoint"],
        source,
        row["load"],
    )


def columns_of(key: AttemptKey, **others: Any) -> dict[str, Any]:
    """The columns that identify an attempt of a task, and others."""
    return {"trial_id": key.trial_id, "attempt_id": key.attempt_id, "task": key.task} | others
