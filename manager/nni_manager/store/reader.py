"""Reads the database, concurrently with its writer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.attempts import AttemptPhase, Attempts, RegisteredAttempt
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.jobs import Job
from nni_manager.domain.learning_curve import LearningCurve, Segment, StoredMark, curve_of
from nni_manager.domain.metrics import truncate_for_display
from nni_manager.domain.objectives import MAXIMIZE, Objectives, violated
from nni_manager.domain.provenance import AttemptEnvironment, CodeVersion
from nni_manager.domain.remarks import NO_REMARKS, Remarks
from nni_manager.domain.trial import STATES_WITH_RESULT, TERMINAL_STATES, Trial, TrialState
from nni_manager.domain.usage import gpus_from_json
from nni_manager.store.database_files import OPEN_DATABASES
from nni_manager.store.errors import StoreUnusable, read_errors, register_opening
from nni_manager.store.migrations import SCHEMA_VERSION, migrated_copy, version_of
from nni_manager.store.queries import QUERIES
from nni_manager.store.rows import (
    MetricRow,
    SeenJob,
    StoredExperiment,
    TrialTotals,
    UsageRow,
    columns_of,
    mark_of,
    trial_of,
)
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import AttemptKey, Stream, Usage

# SQLite's busy timeout: how long it waits for another writer.
BUSY_WAIT_MS = 5000
# Page size of metrics reads: 100 MB with records of maximum size, 20 KB with plain numbers.
ROWS_OF_A_PAGE = 100

Record = TypeVar("Record", StoredExperiment, SeenJob, MetricRow, AttemptEnvironment, CodeVersion)


@dataclass(frozen=True, slots=True)
class _Continued:
    """A trial that continued from a checkpoint."""

    trial_id: str
    sequence_id: int
    curve: LearningCurve


class StoreReader:
    """Reads the database concurrently with the writer, also while no manager runs. Use one per thread and close it.

    It changes nothing: the owner may be a manager of an older version, which supports only its own schema. A database in an
    older schema is shown as of the opening.
    """

    def __init__(self, path: Path) -> None:
        """Open for reading.

        Raises:
            StoreUnusable: there is no such database, or a newer version wrote it.
        """
        self._path = path
        with ExitStack() as resources:
            register_opening(path)
            resources.callback(OPEN_DATABASES.remove, path)
            uri = f"{path.absolute().as_uri()}?mode=ro"
            try:
                self._file = sqlite3.connect(uri, uri=True, check_same_thread=False)
            except sqlite3.OperationalError as error:
                raise StoreUnusable(
                    f"cannot open {path}: {error}; `nnictl experiment list --all` lists all experiments"
                ) from error
            resources.callback(self._file.close)
            with read_errors(path):
                is_current = version_of(path, self._file) == SCHEMA_VERSION
                self._connection = self._file if is_current else migrated_copy(path, self._file)
            resources.callback(self._connection.close)
            self._connection.row_factory = sqlite3.Row
            self._resources = resources.pop_all()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; idempotent."""
        self._resources.close()

    def data_version(self) -> int:
        """A number that changes when another connection has written since the last call."""
        with read_errors(self._path):
            (version,) = self._file.execute("PRAGMA data_version").fetchone()
        return int(version)

    def experiment(self) -> StoredExperiment:
        """The row of table `experiment`."""
        (row,) = self._rows("get_experiment")
        return _record(
            StoredExperiment,
            row,
            state=ExperimentState(row["state"]),
            any_compatible_keeper=bool(row["any_compatible_keeper"]),
            remarks=self.remarks(),
        )

    def trials(self) -> list[Trial]:
        """All trials, in order of creation."""
        return self._trials("get_trials", "get_progress_of_trials", {})

    def trial_list(self) -> Sequence[Mapping[str, Any]]:
        """The rows of all trials in order of creation, with the columns that a list shows, and `remarks`.

        `parameters` is JSON text.
        """
        remarks = self.all_remarks()
        return [
            dict(row) | {"remarks": remarks.get(row["trial_id"], NO_REMARKS)}
            for row in self._rows("get_trial_list")
        ]

    def trial_totals(self) -> TrialTotals:
        """The number of trials in each state that any is in, and the range of the values that count."""
        rows = {TrialState(row["state"]): row for row in self._rows("get_trial_totals")}
        counted = [rows[state] for state in STATES_WITH_RESULT & rows.keys()]
        return TrialTotals(
            {state: row["count"] for state, row in rows.items()},
            min((row["lowest"] for row in counted if row["lowest"] is not None), default=None),
            max((row["highest"] for row in counted if row["highest"] is not None), default=None),
        )

    def trial_ids(self, beginning: str, most: int) -> list[str]:
        """The one trial with exactly this id; otherwise up to `most` ids with this prefix, in order of creation."""
        values = {"beginning": beginning, "most": most}
        found = [row["trial_id"] for row in self._rows("get_trial_ids", values)]
        return found[:1] if found and found[0] == beginning else found

    def results(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield id, parameters and final result (JSON text) of each trial whose result counts, in order of creation."""
        for row in self._results():
            yield row["trial_id"], json.loads(row["parameters"]), row["final"]

    def finals(self) -> Iterator[tuple[str, str]]:
        """Yield id and final result (JSON text) of each trial whose result counts, in order of creation."""
        return ((row["trial_id"], row["final"]) for row in self._results())

    def _results(self) -> Sequence[sqlite3.Row]:
        return self._rows("get_results", {"states": _STATES_WITH_RESULT})

    def values_over_time(self, objectives: Objectives) -> list[tuple[float, float | None]]:
        """When each trial whose result counts ended (seconds since the epoch), and the result's number, in the order of time.

        A result that violates a constraint has no number here.
        """
        rows = self._rows("get_values_over_time", {"states": _STATES_WITH_RESULT})
        return [
            (row["ended_at_s"], None if violated(objectives, row["final"]) else row["value"]) for row in rows
        ]

    def trial(self, trial_id: str) -> Trial | None:
        """One trial; None if the id is unknown."""
        found = self._trials("get_trial", "get_progress_of_trial", {"trial_id": trial_id})
        return found[0] if found else None

    def remarks(self, trial_id: str | None = None) -> Remarks:
        """The remarks of a trial; None: of the experiment."""
        return self.all_remarks(trial_id or "").get(trial_id or "", NO_REMARKS)

    def all_remarks(self, trial_id: str | None = None) -> dict[str, Remarks]:
        """The remarks of every trial that has any, and of the experiment with an empty id; or only those with the given id."""
        return {
            row["trial_id"]: Remarks(tuple(json.loads(row["tags"])), row["note"])
            for row in self._rows("get_remarks", {"trial_id": trial_id})
        }

    def _trials(self, query: str, progress_query: str, values: Mapping[str, Any]) -> list[Trial]:
        progress = {
            row["trial_id"]: (truncate_for_display(row["value"]), row["count"])
            for row in self._rows(progress_query, values)
        }
        for continued in self._continued(trial_id=values.get("trial_id")):
            last, count = self.progress_of(continued.trial_id, continued.curve.segments)
            if last is not None:
                progress[continued.trial_id] = truncate_for_display(last["value"]), count
        all_remarks = self.all_remarks(values.get("trial_id"))
        trials = []
        for row in self._rows(query, values):
            newest, count = progress.get(row["trial_id"], (None, 0))
            remarks = all_remarks.get(row["trial_id"], NO_REMARKS)
            trials.append(trial_of(row, remarks, intermediate=newest, intermediate_count=count))
        return trials

    def jobs(self) -> tuple[list[Job], list[str]]:
        """The jobs that had not ended at the last write, and the ids of those that had."""
        live, ended = [], []
        for row in self._rows("get_jobs"):
            if row["ended_at_s"] is None:
                live.append(Job(row["job_id"], ever_connected=bool(row["ever_connected"])))
            else:
                ended.append(row["job_id"])
        return live, ended

    def newest_jobs(self, most_ended: int) -> list[SeenJob]:
        """All jobs that have not ended, and the `most_ended` newest ones that have; newest first."""
        rows = self._rows("get_newest_jobs", {"most": most_ended})
        return [_record(SeenJob, row) for row in rows]

    def imported(self, objectives: Objectives = MAXIMIZE) -> list[PriorResult]:
        """The imported results, in order of import. `objectives` determine the number of each."""
        return [
            PriorResult(json.loads(row["parameters"]), objectives.value_of(row["metric"]), row["metric"])
            for row in self._rows("get_imported")
        ]

    def streams(self) -> list[tuple[str, str, str]]:
        """Trial, task and name of each replicated stream."""
        return [(row["trial_id"], row["task"], row["stream"]) for row in self._rows("get_streams")]

    def rows_of(self, table: str, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Yield every row of one of the schema's tables."""
        # Names come from the schema; quoted, because some are SQL keywords.
        named = ", ".join(f'"{column}"' for column in columns)
        with read_errors(self._path):
            yield from map(tuple, self._connection.execute(f'SELECT {named} FROM "{table}"'))

    def usage_of(self, trial_id: str) -> list[tuple[int, UsageRow]]:
        """Usage samples of a trial's tasks, in all its attempts, oldest first; each with the attempt's number."""
        rows = self._rows("get_usage_of_trial", {"trial_id": trial_id})
        return [(row["attempt"], _usage_of(row)) for row in rows]

    def offsets(self, key: AttemptKey) -> dict[Stream, int]:
        """The durable offset of each stream of an attempt; a stream without stored bytes is absent."""
        rows = self._rows("get_offsets", columns_of(key))
        return {Stream(row["stream"]): row["durable_offset"] for row in rows}

    def attempts(self, trial_id: str | None = None) -> list[RegisteredAttempt]:
        """The registered attempts of one trial, or of all if `trial_id` is None, by task and number."""
        return [_attempt_of(row) for row in self._rows("get_attempts", {"trial_id": trial_id})]

    def environments(self, trial_id: str | None = None) -> dict[str, list[AttemptEnvironment]]:
        """Where and with what the attempts of one trial, or of all, ran: by trial, oldest first."""
        found: dict[str, list[AttemptEnvironment]] = {}
        for row in self._rows("get_environments", {"trial_id": trial_id}):
            found.setdefault(row["trial_id"], []).append(_record(AttemptEnvironment, row))
        return found

    def packages(self, digest: str) -> list[str] | None:
        """The packages of a list by its digest, as NAME==VERSION; None: it is not stored."""
        rows = self._rows("get_packages", {"digest": digest})
        return rows[0]["list"].splitlines() if rows else None

    def package_digests(self) -> list[str]:
        """The digests of all stored lists of packages."""
        return [row["digest"] for row in self._rows("get_package_digests")]

    def code(self) -> list[CodeVersion]:
        """The versions of the training code, in the order of time."""
        return [
            _record(CodeVersion, row, is_dirty=None if row["is_dirty"] is None else bool(row["is_dirty"]))
            for row in self._rows("get_code")
        ]

    def open_attempts(self) -> dict[str, Attempts]:
        """The registered attempts of the trials that are not terminal, by trial."""
        values = {"terminal_states": json.dumps([state.value for state in TERMINAL_STATES])}
        found: dict[str, Attempts] = {}
        for row in self._rows("get_open_attempts", values):
            found.setdefault(row["trial_id"], Attempts()).registered.append(_attempt_of(row))
        return found

    def corrupt_bytes(self) -> dict[str, int]:
        """Number of corrupt bytes in the metrics files of each trial, by trial id; trials without any are absent."""
        return {row["trial_id"]: row["corrupt_bytes"] for row in self._rows("get_corrupt_bytes")}

    def metrics(self, is_final: bool | None = None) -> list[MetricRow]:
        """The records that count, trial by trial."""
        return list(chain.from_iterable(self.metric_pages(is_final)))

    def sequence_ids_of(self, trial_id: str) -> tuple[int, int]:
        """The first and the last sequence number of one trial; an empty range if there is no such trial."""
        found = [row["sequence_id"] for row in self._rows("get_sequence_id", {"trial_id": trial_id})]
        return (found[0], found[0]) if found else (0, -1)

    def metric_pages(
        self, is_final: bool | None, first_sequence_id: int = 0, last_sequence_id: int = 2**62
    ) -> Iterator[list[MetricRow]]:
        """Yield the same records, of a range of trials, in pages: a trial may have more than fits into memory.

        No read transaction stays open between two pages, so a slow consumer does not block the writer. Of a trial that continued
        from a checkpoint these are the records of its learning curve, in the order of the curve.
        """
        for trial in self._continued(first_sequence_id, last_sequence_id):
            yield from self._plain_pages(is_final, first_sequence_id, trial.sequence_id - 1)
            for segment in trial.curve.segments:
                yield from self.segment_pages(trial.trial_id, segment, is_final)
            first_sequence_id = trial.sequence_id + 1
        yield from self._plain_pages(is_final, first_sequence_id, last_sequence_id)

    def segment_pages(
        self, trial_id: str, segment: Segment, is_final: bool | None = None
    ) -> Iterator[list[MetricRow]]:
        """Yield the records of one segment of a trial's learning curve, in pages."""
        values = {"trial_id": trial_id, "is_final": is_final, "most": ROWS_OF_A_PAGE} | asdict(segment)
        while rows := self._rows("get_segment", values):
            yield [_metric_of(row) for row in rows]
            values["after_offset"] = rows[-1]["record_offset"]

    def marks(self, trial_id: str) -> list[StoredMark]:
        """All marks in the metrics of a trial's attempts, those of a task in order."""
        return [mark_of(row) for row in self._rows("get_marks", {"trial_id": trial_id})]

    def _continued(
        self, first_sequence_id: int = 0, last_sequence_id: int = 2**62, trial_id: str | None = None
    ) -> list[_Continued]:
        """The trials in a range, or the one with this id, whose counting attempt has continued from a checkpoint."""
        if trial_id is not None:
            first_sequence_id, last_sequence_id = self.sequence_ids_of(trial_id)
        values = {"first_sequence_id": first_sequence_id, "last_sequence_id": last_sequence_id}
        return [
            _Continued(
                row["trial_id"],
                row["sequence_id"],
                curve_of(row["trial_id"], self.marks(row["trial_id"]), row["attempt"], row["reporter"]),
            )
            for row in self._rows("get_continued", values)
        ]

    def progress_of(self, trial_id: str, segments: Sequence[Segment]) -> tuple[sqlite3.Row | None, int]:
        """The newest intermediate record in these segments of a trial's learning curve, and the number of these records."""
        newest, count = None, 0
        for segment in segments:
            values = {"trial_id": trial_id} | asdict(segment)
            for row in self._rows("get_progress_of_segment", values):
                if row["count"]:
                    newest, count = row, count + row["count"]
        return newest, count

    def _plain_pages(
        self, is_final: bool | None, first_sequence_id: int, last_sequence_id: int
    ) -> Iterator[list[MetricRow]]:
        """Yield the records of the counting attempts of trials of which none continued from a checkpoint."""
        values: dict[str, Any] = {"is_final": is_final, "most": ROWS_OF_A_PAGE, "after_offset": -1}
        values |= {"first_sequence_id": first_sequence_id, "last_sequence_id": last_sequence_id}
        while rows := self._rows("get_metrics", values):
            yield [_metric_of(row) for row in rows]
            if len(rows) < ROWS_OF_A_PAGE:
                return
            values |= {
                "first_sequence_id": rows[-1]["sequence_id"],
                "after_offset": rows[-1]["record_offset"],
            }

    def latest_intermediates(self) -> list[MetricRow]:
        """The newest intermediate record of each trial."""
        latest = {row["trial_id"]: row for row in self._rows("get_latest_intermediates")}
        newest = {
            trial.trial_id: self.progress_of(trial.trial_id, trial.curve.segments)[0]
            for trial in self._continued()
        }
        latest |= {trial_id: row for trial_id, row in newest.items() if row is not None}
        return [_metric_of(row) for row in latest.values()]

    def _rows(self, query: str, values: Mapping[str, Any] | None = None) -> list[sqlite3.Row]:
        with read_errors(self._path):
            return self._connection.execute(QUERIES[query], values or {}).fetchall()


_STATES_WITH_RESULT = json.dumps([state.value for state in STATES_WITH_RESULT])


def _key_of(row: sqlite3.Row) -> AttemptKey:
    return AttemptKey(row["trial_id"], row["attempt_id"], row["task"])


def _attempt_of(row: sqlite3.Row) -> RegisteredAttempt:
    phase = AttemptPhase.LOST if row["is_lost"] else AttemptPhase.REGISTERED
    return RegisteredAttempt(_key_of(row), row["attempt"], phase)


def _usage_of(row: sqlite3.Row) -> UsageRow:
    gpus = gpus_from_json(row["gpus"])
    usage = Usage(_key_of(row), row["cpu_percent"], row["rss_bytes"], row["disk_bytes"], gpus)
    return UsageRow(usage, row["at_s"])


def _metric_of(row: sqlite3.Row) -> MetricRow:
    return _record(MetricRow, row, is_final=bool(row["is_final"]))


def _record(kind: type[Record], row: sqlite3.Row, **converted: object) -> Record:
    """The record whose fields are columns of the row, except the converted ones."""
    names = [field.name for field in fields(kind) if field.name not in converted]
    return kind(**{name: row[name] for name in names} | converted)
