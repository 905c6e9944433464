"""The rows that the database stores and returns."""

import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.usage import PeakUsage
from nni_manager.store.queries import QUERIES
from trial_keeper.wire.messages import AttemptKey, Usage
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


@dataclass(frozen=True, slots=True)
class ExperimentRow:
    """Write: the mutable columns of table `experiment`."""

    state: ExperimentState
    error: str
    active_s: float
    ended_at_s: float | None
    any_compatible_keeper: bool


def json_of(document: object) -> str:
    """A document as the database stores it."""
    # A fast path: most documents are empty, and each trial is stored five times.
    return json.dumps(document) if document else "{}"


def _value_of(reason: ExitReason | None) -> str | None:
    return reason and reason.value


def _reason_of(value: str | None) -> ExitReason | None:
    return ExitReason(value) if value else None


# The fields of `Trial` that are stored.
_COLUMNS = re.findall(r":(\w+)", QUERIES["save_trial"])
# Those that are converted: (to the store, from the store).
_CONVERTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "parameters": (json_of, json.loads),
    "metadata": (json_of, json.loads),
    "state": (attrgetter("value"), TrialState),
    "stop_reason": (_value_of, _reason_of),
    "reason": (_value_of, _reason_of),
    "peak_usage": (
        lambda usage: usage and usage.to_json(),
        lambda text: text and PeakUsage.from_json(text),
    ),
    "is_customized": (bool, bool),
}


def trial_of(row: sqlite3.Row, **fields: Any) -> Trial:
    """The trial of a row of table `trial`. `fields`: those that are not in its columns."""
    converted = {name: from_store(row[name]) for name, (_, from_store) in _CONVERTED.items()}
    return Trial(**{name: row[name] for name in _COLUMNS} | converted | fields)


@dataclass(frozen=True, slots=True)
class TrialRow:
    """Write: a snapshot of a trial. The trial itself may have changed since."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, trial: Trial) -> "TrialRow":
        """Take a snapshot of the trial."""
        converted = {name: convert(getattr(trial, name)) for name, (convert, _) in _CONVERTED.items()}
        return cls({name: getattr(trial, name) for name in _COLUMNS} | converted)


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """Write: an attempt and the number that represents it in other tables."""

    key: AttemptKey
    number: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class JobRow:
    """Write: a snapshot of a job. `ended_at_s` None: the job may still run."""

    job_id: str
    ever_connected: bool
    ended_at_s: float | None = None


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


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """Write: the experiment's new configuration, as JSON."""

    config: str


@dataclass(frozen=True, slots=True)
class ImportedRows:
    """Write: imported results, all or none. `position` is the number of results that were imported before."""

    position: int
    results: tuple[PriorResult, ...]


Write = StreamWrite | TrialRow | AttemptRow | ExperimentRow | JobRow | UsageRow | ConfigRow | ImportedRows


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


def columns_of(key: AttemptKey, **others: Any) -> dict[str, Any]:
    """The columns that identify an attempt of a task, and others."""
    return {"trial_id": key.trial_id, "attempt_id": key.attempt_id, "task": key.task} | others
