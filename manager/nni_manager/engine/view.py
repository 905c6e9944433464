"""An experiment to be looked at and not changed: what is stored of it, while its manager runs or long after."""

import time
from dataclasses import replace
from typing import NoReturn

from nni_manager.domain.experiment import Experiment
from nni_manager.engine.picture import Picture
from nni_manager.errors import UserMistake
from nni_manager.store.folders import ExperimentFolder, FolderUnreadable
from nni_manager.store.store import StoreReader

# Of an experiment that runs, all trials are read anew for each look that finds something new.
_LOOKS_EVERY_S = 1.0


class ViewOnly(UserMistake):
    """cannot change the experiment: it is only viewed here; `nnictl resume ID` goes on with it"""


class View:
    """Serves the pictures that an engine would, from the store. Writes nothing there, owns nothing, and starts nothing.

    Lives on one event loop. An experiment whose manager runs is shown as of a second ago.
    """

    def __init__(self, folder: ExperimentFolder) -> None:
        """
        Raises:
            StoreUnusable: nothing can be read of the experiment.
        """
        self.folder = folder
        self._reader = StoreReader(folder.database)
        self._looked_s = time.monotonic()
        self._version = self._reader.data_version()
        self._picture = Picture.stored(folder)

    def picture(self) -> Picture:
        """The experiment as it is stored."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOKS_EVERY_S:
            self._looked_s = now_s
            version = self._reader.data_version()
            if version != self._version:
                # What is written between the two is read now, and once more the next time.
                before, self._version = self._picture.experiment, version
                self._picture = Picture.stored(self.folder)
                _go_on_from(before, self._picture.experiment)
        return replace(self._picture, problem=self._problem(), is_view=True)

    def stop(self) -> None:
        """Not here.

        Raises:
            ViewOnly: always.
        """
        raise self._refusal("stop experiment", self.folder.experiment_id)

    def stop_trial(self, trial_id: str) -> None:
        """Not here.

        Raises:
            ViewOnly: always.
        """
        raise self._refusal("stop trial", trial_id)

    @property
    def changes(self) -> NoReturn:
        """Not here.

        Raises:
            ViewOnly: always.
        """
        raise self._refusal("change experiment", self.folder.experiment_id)

    def close(self) -> None:
        """Let go of the store."""
        self._reader.close()

    def _problem(self) -> str:
        try:
            is_as_it_seems = (
                self._picture.experiment.state.is_over or self.folder.running_process() is not None
            )
        except FolderUnreadable as error:
            return str(error)
        name = self.folder.experiment_id
        return (
            ""
            if is_as_it_seems
            else f"the manager of experiment {name} does not run, this is its last status; `nnictl resume {name}` goes on with it"
        )

    def _refusal(self, what: str, which: str) -> ViewOnly:
        manager, name = self.folder.running_process(), self.folder.experiment_id
        way_out = (
            f"`nnictl resume {name}` goes on with it"
            if manager is None
            else f"ask its manager, on port {manager.port}"
        )
        return ViewOnly(f"cannot {what} {which}: experiment {name} is only viewed here; {way_out}")


def _go_on_from(before: Experiment, now: Experiment) -> None:
    """What was read anew has the revisions of what was read before, and more only of the trials that differ."""
    now.revisions = before.revisions
    for trial_id, trial in now.trials.items():
        if before.trials.get(trial_id) != trial:
            now.revisions.note(trial_id)
