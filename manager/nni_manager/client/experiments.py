"""The experiments of this user: which there are, which one is meant, and what is known of each."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_manager.client.manager_client import ManagerClient, ManagerSilent, RequestRefused
from nni_manager.errors import NniManagerError, UserMistake
from nni_manager.store.folders import (
    ExperimentFolder,
    ExperimentUnknown,
    FolderUnreadable,
    ManagerProcess,
    Registry,
    served_by,
)
from trial_keeper.wire.workspace import is_safe_name


@dataclass(frozen=True, slots=True)
class KnownExperiment:
    """One experiment, and the manager that owned it a moment ago; None when none did.

    `problem`: what is wrong with its folder, for people; empty when nothing is. `view`: who served a view of it then.
    """

    folder: ExperimentFolder
    manager: ManagerProcess | None
    problem: str = ""
    view: ManagerProcess | None = None

    @property
    def is_served(self) -> bool:
        """Whether a process of it runs: its manager, a view, or both."""
        return self.manager is not None or self.view is not None

    @property
    def experiment_id(self) -> str:
        """The experiment's id."""
        return self.folder.experiment_id

    def running_process(self) -> ManagerProcess | None:
        """The manager that owns it now; None when none does."""
        now = look(self.folder)
        return None if now is None else now.manager

    def client(self) -> ManagerClient | None:
        """Calls to its manager; None when none runs."""
        return None if self.manager is None else ManagerClient(self.experiment_id, self.manager)

    def trials(self) -> list[dict[str, Any]]:
        """All trials, from its manager or, when none runs, from what is stored."""
        client = self.client()
        return stored_trials(self.folder) if client is None else client.get("/trial-jobs")

    def trial_list(self) -> Sequence[dict[str, Any]]:
        """Of all trials what a list shows, as `trials` names it. It costs the manager nothing, unless nobody else can tell."""
        return self.trials() if self.problem else stored_list(self.folder)

    def trial_id(self, given: str) -> str:
        """The id of the trial that a command line means: by its id, or by the beginning of it.

        Raises:
            UserMistake: there is no such trial, or there are several.
        """
        self.check_trial_id(given)
        if self.problem:
            return given  # its manager knows
        found = stored_ids(self.folder, given)
        if len(found) > 1:
            raise UserMistake(
                f"cannot tell which trial {given!r} is; write more of one of {', '.join(found)}, as "
                f"`nnictl trial ls {self.experiment_id}` shows them"
            )
        if not found:
            raise self._unknown(given)
        return found[0]

    def trial(self, trial_id: str) -> dict[str, Any]:
        """One trial, from its manager or from what is stored.

        Raises:
            UserMistake: there is no such trial.
        """
        self.check_trial_id(trial_id)
        client, unknown = self.client(), None
        found: dict[str, Any] | None = None
        if client is None:
            found = stored_trial(self.folder, trial_id)
        else:
            try:
                found = client.get("/trial-jobs", trial_id)
            except RequestRefused as error:
                unknown = error
        if found is None:
            raise self._unknown(trial_id) from unknown
        return found

    def trial_is_over(self, trial_id: str) -> bool:
        """Whether the trial, which there is, is over."""
        from nni_manager.store.store import StoreReader

        with StoreReader(self.folder.database) as reader:
            found = reader.trial(trial_id)
        return found is None or found.state.is_final

    def check_trial_id(self, trial_id: str) -> None:
        """See that no trial but one is meant: the id becomes a part of addresses and of paths.

        Raises:
            UserMistake: no trial can have this id.
        """
        if not is_safe_name(trial_id):
            raise self._unknown(trial_id)

    def _unknown(self, trial_id: str) -> UserMistake:
        return UserMistake(
            f"cannot find trial {trial_id!r} in experiment {self.experiment_id}; "
            f"`nnictl trial ls {self.experiment_id}` shows those there are"
        )

    def status(self) -> dict[str, Any]:
        """Its status, and what stopped it, from its manager or from what is stored."""
        client = self.client()
        return stored_status(self.folder) if client is None else client.get("/check-status")

    def statistics(self) -> list[dict[str, Any]]:
        """How many trials have each status, from its manager or from what is stored."""
        client = self.client()
        return stored_statistics(self.folder) if client is None else client.get("/job-statistics")

    def metrics(self, trial_id: str | None = None) -> list[dict[str, Any]]:
        """The records of all trials or of one, which there is, from its manager or from what is stored."""
        client = self.client()
        if client is None:
            return stored_metrics(self.folder, trial_id)
        found: list[dict[str, Any]] = client.get("/metric-data", *(() if trial_id is None else (trial_id,)))
        return found

    def results(self) -> list[dict[str, Any]]:
        """Parameters and results of the trials that succeeded, from its manager or from what is stored."""
        client = self.client()
        return stored_results(self.folder) if client is None else client.get("/export-data")

    def profile(self) -> dict[str, Any]:
        """NNI's profile, from its manager or from what is stored."""
        client = self.client()
        return stored_profile(self.folder) if client is None else client.get("/experiment")

    def line(self) -> dict[str, Any]:
        """What a list shows. `managerIsRunning` false with a status like RUNNING: the manager died; resume goes on."""
        known: dict[str, Any] = {"id": self.experiment_id}
        try:
            client = self.client()
            known |= stored_metadata(self.folder) if client is None else client.get("/experiment-metadata")
        except ManagerSilent:
            known |= stored_metadata(self.folder) | {"status": "NOT ANSWERING"}
        except NniManagerError as error:
            # One spoilt database must not hide the other experiments.
            known |= {"status": "UNREADABLE", "problem": str(error)}
        if self.problem:
            known |= {"problem": self.problem} | ({} if self.manager else {"status": "UNREADABLE"})
        return known | served_by(self.folder, self.manager, self.view)


def known_experiments() -> list[KnownExperiment]:
    """All experiments of this user that have a folder or a manager, by id."""
    # Folders that are gone stay in the registry, and all of them together cost one look at the processes.
    managers = functools.cache(_managers_by_folder)
    looks = [_look(folder, managers) for folder in Registry.of_user().all()]
    return [known for known in looks if known is not None]


def look(folder: ExperimentFolder) -> KnownExperiment | None:
    """The experiment as it is now; None: nothing is stored of it any more, and no manager runs."""
    return _look(folder, _managers_by_folder)


def _look(
    folder: ExperimentFolder, managers: Callable[[], dict[Path, ManagerProcess]]
) -> KnownExperiment | None:
    """None: nothing is stored of it any more, and no manager runs."""
    try:
        manager, has_database = folder.running_process(), folder.has_database()
    except FolderUnreadable as error:
        return KnownExperiment(folder, managers().get(folder.path), str(error))
    if has_database:
        try:
            return KnownExperiment(folder, manager, view=folder.running_view())
        except FolderUnreadable as error:
            return KnownExperiment(folder, manager, str(error))
    # A manager outlives its folder: it holds its ports, and its trials run.
    manager = manager or managers().get(folder.path)
    if manager is None:
        return None
    name = folder.experiment_id
    return KnownExperiment(
        folder,
        manager,
        f"cannot store anything: {folder.path} was deleted; `nnictl stop {name}` ends its manager",
    )


def _managers_by_folder() -> dict[Path, ManagerProcess]:
    """The managers that run, by their command lines: for folders that cannot tell."""
    import psutil

    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        options = dict(itertools.pairwise(words))
        if (
            options.get("-m") == "nni_manager"
            and {"--folder", "--host"} <= options.keys()
            and "--view" not in words
            and options.get("--port", "").isdecimal()
        ):
            folder = ExperimentFolder(Path(options["--folder"]))
            found[folder.path] = folder.held_process(process.pid) or ManagerProcess(
                process.pid, options["--host"], int(options["--port"]), "unknown"
            )
    return found


def resolve(given: str | None) -> KnownExperiment:
    """The experiment that a command line means: by its id, by the beginning of it, or as the only one that runs.

    Raises:
        ExperimentUnknown: there is none.
        UserMistake: there are several, or nothing can be read of it.
    """
    known = known_experiments()
    if given is None:
        running = [each for each in known if each.manager is not None]
        if not running:
            raise ExperimentUnknown(
                "cannot find a running experiment; name one (`nnictl experiment list --all` shows all), "
                "or start one with `nnictl create --config FILE`"
            )
        if len(running) > 1:
            raise UserMistake(
                f"cannot choose among {len(running)} running experiments; name one of {_listed(running)}"
            )
        return running[0]
    matching = beginning_with(given, known)
    if not matching:
        spoilt = Registry.of_user().spoilt()
        if given in spoilt:
            raise UserMistake(spoilt[given])
        ids = [each.experiment_id for each in known]
        near = difflib.get_close_matches(given, ids, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ExperimentUnknown(
            f"cannot find experiment {given!r}; {hint}`nnictl experiment list --all` shows those there are"
        )
    if len(matching) > 1:
        raise UserMistake(
            f"cannot tell which experiment {given!r} is; write more of one of {_listed(matching)}"
        )
    if matching[0].problem and matching[0].manager is None:
        raise UserMistake(matching[0].problem)
    return matching[0]


def beginning_with(prefix: str, known: Sequence[KnownExperiment]) -> list[KnownExperiment]:
    """The experiment of this id, or those whose ids begin so."""
    exact = [each for each in known if each.experiment_id == prefix]
    return exact or [each for each in known if prefix and each.experiment_id.startswith(prefix)]


def _listed(known: Sequence[KnownExperiment]) -> str:
    return ", ".join(
        f"{each.experiment_id} (port {each.manager.port})" if each.manager else each.experiment_id
        for each in known
    )


# ---- what is stored, as the manager's HTTP API would say it. SQLite and the rest are imported by those who come here.


def stored_trials(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """All trials of an experiment without a manager."""
    from nni_manager.engine.picture import Picture
    from nni_manager.engine.views import trial_view
    from nni_manager.store.store import StoreReader

    picture = Picture.stored(folder, has_trials=False)
    with StoreReader(folder.database) as reader:
        return [trial_view(picture, trial) for trial in reader.trials()]


def stored_list(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """What a list shows of all trials, read beside a manager that may run."""
    import json

    from nni_manager.store.store import StoreReader

    def shown(row: Mapping[str, Any]) -> dict[str, Any]:
        began, ended = row["started_at_s"], row["ended_at_s"]
        return {
            "sequenceId": row["sequence_id"],
            "id": row["trial_id"],
            "state": row["state"],
            "parameters": json.loads(row["parameters"]),
            "value": row["value"],
            "startTime": None if began is None else began * 1000,
            "endTime": None if ended is None else ended * 1000,
            "reason": row["reason"],
            "exitCode": row["exit_code"],
            "message": row["message"],
            "warning": row["warning"],
        }

    with StoreReader(folder.database) as reader:
        return [shown(row) for row in reader.trial_list()]


def stored_statistics(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """How many trials have each status; those there are none of are left out."""
    from nni_manager.engine.picture import Picture
    from nni_manager.engine.views import statistics_view

    return statistics_view(Picture.stored(folder).experiment)


def stored_metrics(folder: ExperimentFolder, trial_id: str | None) -> list[dict[str, Any]]:
    """The records of all trials, or of one, which there is."""
    from nni_manager.engine.views import metric_view
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        first, last = (0, 2**62) if trial_id is None else reader.place_of(trial_id)
        return [metric_view(row) for page in reader.metric_pages(None, first, last) for row in page]


def stored_results(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """Parameters and results of the trials that succeeded."""
    from nni_manager.engine.views import export_view
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        return export_view(reader.trials())


def stored_ids(folder: ExperimentFolder, beginning: str, most: int = 2) -> list[str]:
    """The one trial of this id, or some whose ids begin so; read beside a manager that may run."""
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        return reader.trial_ids(beginning, most)


def stored_trial(folder: ExperimentFolder, trial_id: str) -> dict[str, Any] | None:
    """One trial of an experiment without a manager; None when there is none of that id."""
    from nni_manager.engine.picture import Picture
    from nni_manager.engine.views import trial_view
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        found = reader.trial(trial_id)
    return None if found is None else trial_view(Picture.stored(folder, has_trials=False), found)


def garbage_bytes(folder: ExperimentFolder) -> dict[str, int]:
    """How many bytes of a trial's metrics were no record, by trial; read beside a manager that may run."""
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        return reader.garbage_bytes()


def stored_summary(folder: ExperimentFolder) -> dict[str, Any]:
    """The end of an experiment whose manager has gone: status, errors, counts, and its best and failed trials."""
    from nni_manager.engine.picture import Picture
    from nni_manager.engine.views import summary_view

    return summary_view(Picture.stored(folder))


def stored_profile(folder: ExperimentFolder) -> dict[str, Any]:
    """NNI's profile of an experiment without a manager."""
    from nni_manager.engine.picture import Picture
    from nni_manager.engine.views import profile_view

    return profile_view(Picture.stored(folder))


def stored_metadata(folder: ExperimentFolder) -> dict[str, Any]:
    """What a list shows of an experiment without a manager."""
    from nni_manager.engine.picture import Picture
    from nni_manager.engine.views import metadata_view

    return metadata_view(Picture.stored(folder, has_trials=False))


def stored_status(folder: ExperimentFolder) -> dict[str, Any]:
    """The last status of an experiment without a manager, and what stopped it."""
    from nni_manager.store.store import StoreReader

    with StoreReader(folder.database) as reader:
        stored = reader.experiment()
    return {
        "status": stored.state.value,
        "errors": [stored.error] if stored.error else [],
        "isOver": stored.state.is_over,
    }
