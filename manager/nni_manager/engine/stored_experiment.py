"""Read-only access to a stored experiment, while its manager runs or later."""

import time
from dataclasses import replace
from typing import NoReturn

from nni_manager.domain.experiment import ExperimentCore
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.errors import UserError
from nni_manager.store.folders import ExperimentFolder, FolderUnreadable
from nni_manager.store.reader import StoreReader

# Each poll that finds a change reads all trials again.
_POLL_INTERVAL_S = 1.0


class ViewOnly(UserError):
    """cannot change the experiment: this view is read-only; `nnictl resume ID` resumes the experiment"""


class StoredExperimentReader:
    """Serves the snapshots of an experiment from its store. The reader writes nothing, holds no lease and starts no process.

    Runs on one event loop. Snapshots of a running experiment are up to a second old.
    """

    def __init__(self, folder: ExperimentFolder) -> None:
        """Read the experiment for the first time.

        Raises:
            StoreUnusable: the experiment cannot be read.
        """
        self.folder = folder
        self._reader = StoreReader(folder.database)
        self._polled_s = time.monotonic()
        self._version = self._reader.data_version()
        self._snapshot = ExperimentSnapshot.stored(folder)

    def snapshot(self) -> ExperimentSnapshot:
        """A snapshot of the stored experiment."""
        now_s = time.monotonic()
        if now_s - self._polled_s >= _POLL_INTERVAL_S:
            self._polled_s = now_s
            version = self._reader.data_version()
            if version != self._version:
                # Data written between the two reads is read now, and again at the next poll.
                before, self._version = self._snapshot.experiment, version
                self._snapshot = ExperimentSnapshot.stored(self.folder)
                _continue_log(before, self._snapshot.experiment)
        return replace(self._snapshot, problems=tuple(filter(None, (self._problem(),))), is_view=True)

    def stop(self) -> None:
        """Not supported: raises ViewOnly."""
        raise self._view_only("stop experiment", self.folder.experiment_id)

    def stop_trial(self, trial_id: str) -> None:
        """Not supported: raises ViewOnly."""
        raise self._view_only("stop trial", trial_id)

    @property
    def commands(self) -> NoReturn:
        """Not supported: raises ViewOnly."""
        raise self._view_only("change experiment", self.folder.experiment_id)

    def close(self) -> None:
        """Close the store."""
        self._reader.close()

    def _problem(self) -> str:
        try:
            if self._snapshot.experiment.state.is_terminal or self.folder.running_process() is not None:
                return ""
        except FolderUnreadable as error:
            return str(error)
        name = self.folder.experiment_id
        return f"the manager of experiment {name} is not running, this is its last status; `nnictl resume {name}` resumes it"

    def _view_only(self, what: str, which: str) -> ViewOnly:
        manager, name = self.folder.running_process(), self.folder.experiment_id
        remedy = f"`nnictl resume {name}` resumes it"
        if manager is not None:
            remedy = f"use its manager on port {manager.port}"
        return ViewOnly(f"cannot {what} {which}: experiment {name} is open read-only here; {remedy}")


def _continue_log(before: ExperimentCore, now: ExperimentCore) -> None:
    """Continue the change log of the earlier snapshot, and add a revision for each trial that differs."""
    now.change_log = before.change_log
    for trial_id, trial in now.trials.items():
        if before.trials.get(trial_id) != trial:
            now.change_log.note(trial_id)
