"""The rows that the database stores and returns."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.trial import Trial
from trial_keeper.wire.messages import AttemptKey, Usage


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


@dataclass(frozen=True, slots=True)
class TrialRow:
    """Write: a snapshot of a trial. The trial itself may have changed since."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, trial: Trial) -> "TrialRow":
        """Take a snapshot of the trial."""
        return cls(
            {
                "trial_id": trial.trial_id,
                "sequence_id": trial.sequence_id,
                "parameters": json_of(trial.parameters),
                "metadata": json_of(trial.metadata),
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
            }
        )


def json_of(document: object) -> str:
    """A document as the database stores it."""
    # Most documents are empty, and each trial is stored five times.
    return json.dumps(document) if document else "{}"


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
