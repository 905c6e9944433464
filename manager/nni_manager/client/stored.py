"""An experiment's documents from its store, with the paths and the format of the manager's HTTP API.

Import this module late: most commands do not need SQLite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nni_manager.client.manager_client import ManagerRefusal
from nni_manager.config.model import ExperimentSpec
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader

Answer = TypeVar("Answer")
# Documents that need the trials in the snapshot; reading all trials takes long.
_WITH_TRIALS = ("/export-data", "/job-statistics", "/summary", "/experiment")


class StoredDocuments:
    """Reads the store of an experiment. A manager may run at the same time, except for `get`."""

    def __init__(self, folder: ExperimentFolder) -> None:
        self._folder = folder

    def get(self, path: str, *names: str) -> Any:
        """The same document as from `ManagerClient.get`, of an experiment without a manager.

        Raises:
            ManagerRefusal: no trial has the given id.
        """
        # Imported here: the imports take 100 ms, and lists and completions do not need them.
        from nni_manager.engine import nni_views, profiles, serializers
        from nni_manager.engine.snapshot import ExperimentSnapshot

        match path, names:
            case "/check-status", ():
                return self.status()
            case "/metric-data", _:
                return self.read(lambda reader: _metrics(reader, *names))
        snapshot = ExperimentSnapshot.stored(self._folder, has_trials=path in _WITH_TRIALS)
        match path, names:
            case "/trials", ():
                return [serializers.trial_view(snapshot, trial) for trial in self.read(StoreReader.trials)]
            case "/trials", (trial_id,):
                found = self.read(lambda reader: reader.trial(trial_id))
                if found is None:
                    raise ManagerRefusal(f"cannot find trial {trial_id!r}")
                environments = self.read(lambda reader: reader.environments(trial_id)).get(trial_id, ())
                marks = self.read(lambda reader: reader.marks(trial_id))
                return serializers.whole_trial_view(snapshot, found, environments, marks)
            case "/trial-jobs", ():
                reports = self.read(lambda reader: nni_views.reports_of(reader, self._folder.workspace))
                return nni_views.trial_jobs_view(snapshot, self.read(StoreReader.trials), reports)
            case "/experiment-metadata", ():
                return profiles.stored_metadata_view(self._folder)
            case "/export-data", ():
                return serializers.export_view(snapshot.experiment)
            case "/job-statistics", ():
                return serializers.statistics_view(snapshot.experiment)
            case "/summary", ():
                return serializers.summary_view(snapshot)
            case "/experiment", ():
                return profiles.profile_view(snapshot)
        raise AssertionError(path)

    def read(self, read: Callable[[StoreReader], Answer]) -> Answer:
        """The result of `read`, which receives a reader of the store."""
        with StoreReader(self._folder.database) as reader:
            return read(reader)

    def config(self) -> ExperimentSpec:
        """The configuration of the experiment."""
        return ExperimentSpec.from_json(self.read(StoreReader.experiment).config)

    def status(self) -> dict[str, Any]:
        """The last status, and the error that stopped the experiment."""
        stored = self.read(StoreReader.experiment)
        return {
            "status": stored.state.value,
            "errors": [stored.error] if stored.error else [],
            "isTerminal": stored.state.is_terminal,
        }

    def trial_list(self) -> list[dict[str, Any]]:
        """The list columns of all trials."""
        return self.read(lambda reader: [_list_entry(row) for row in reader.trial_list()])

    def trial_is_terminal(self, trial_id: str) -> bool:
        """True if the trial, which must exist, is terminal."""
        found = self.read(lambda reader: reader.trial(trial_id))
        return found is None or found.state.is_terminal


def _list_entry(row: Mapping[str, Any]) -> dict[str, Any]:
    began, ended = row["started_at_s"], row["ended_at_s"]
    asked = row["stop_asked_at_s"] if row["state"] == "STOPPING" else None
    return {
        "sequenceId": row["sequence_id"],
        "id": row["trial_id"],
        "state": row["state"],
        "stoppingSince": None if asked is None else asked * 1000,
        "parameters": json.loads(row["parameters"]),
        "value": row["value"],
        "startTime": None if began is None else began * 1000,
        "endTime": None if ended is None else ended * 1000,
        "reason": row["reason"],
        "exitCode": row["exit_code"],
        "message": row["message"],
        "warning": row["warning"],
        **row["remarks"].to_json(),
    }


def _metrics(reader: StoreReader, trial_id: str | None = None) -> list[dict[str, Any]]:
    from nni_manager.engine.serializers import metric_view

    first, last = (0, 2**62) if trial_id is None else reader.sequence_ids_of(trial_id)
    return [metric_view(row) for page in reader.metric_pages(None, first, last) for row in page]
