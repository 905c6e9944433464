"""Lists the experiments of this user, resolves ids and prefixes, and reads each from its manager or its store."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_manager.client.manager_client import ManagerClient, ManagerRefusal, ManagerUnresponsive
from nni_manager.errors import NniManagerError, UserError
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
    """One experiment, and the manager that owned it when it was looked up; None: no manager.

    `problem`: the problem of its folder, for people; empty: none. `view`: the process that served a view of it then.
    """

    folder: ExperimentFolder
    manager: ManagerProcess | None
    problem: str = ""
    view: ManagerProcess | None = None

    @property
    def is_served(self) -> bool:
        """True if a manager, a view, or both run for it."""
        return self.manager is not None or self.view is not None

    @property
    def experiment_id(self) -> str:
        """The experiment's id."""
        return self.folder.experiment_id

    def running_process(self) -> ManagerProcess | None:
        """The manager that owns it now; None if none does."""
        now = look(self.folder)
        return None if now is None else now.manager

    def manager_is_frozen(self) -> bool:
        """True if its manager's lease has expired, so that another manager may take over."""
        return self.manager is not None and not self.problem and self.folder.lease_is_expired()

    def client(self) -> ManagerClient | None:
        """A client of its manager; None if no manager runs."""
        return None if self.manager is None else ManagerClient(self.experiment_id, self.manager)

    def trials(self) -> list[dict[str, Any]]:
        """All trials, from its manager or, if none runs, from the store."""
        client = self.client()
        return stored_trials(self.folder) if client is None else client.get("/trial-jobs")

    def trial_list(self) -> Sequence[dict[str, Any]]:
        """The list columns of all trials, with the keys of `trials`: from the store or, if it is unreadable, from the manager."""
        return self.trials() if self.problem else stored_list(self.folder)

    def trial_id(self, given: str) -> str:
        """The id of the trial that has the given id, or whose id starts with the given prefix.

        Raises:
            UserError: no trial matches, or several do.
        """
        self.check_trial_id(given)
        if self.problem:
            return given  # the store is unreadable, so its manager checks the id
        found = stored_ids(self.folder, given)
        if len(found) > 1:
            raise UserError(
                f"cannot tell which trial {given!r} is; write more of one of {', '.join(found)}, as "
                f"`nnictl trial ls {self.experiment_id}` shows them"
            )
        if not found:
            raise self._unknown(given)
        return found[0]

    def trial(self, trial_id: str) -> dict[str, Any]:
        """One trial, from its manager or from the store.

        Raises:
            UserError: there is no such trial.
        """
        self.check_trial_id(trial_id)
        client, unknown = self.client(), None
        found: dict[str, Any] | None = None
        if client is None:
            found = stored_trial(self.folder, trial_id)
        else:
            try:
                found = client.get("/trial-jobs", trial_id)
            except ManagerRefusal as error:
                unknown = error
        if found is None:
            raise self._unknown(trial_id) from unknown
        return found

    def trial_is_over(self, trial_id: str) -> bool:
        """True if the trial, which must exist, is terminal."""
        from nni_manager.store.reader import StoreReader

        with StoreReader(self.folder.database) as reader:
            found = reader.trial(trial_id)
        return found is None or found.state.is_terminal

    def check_trial_id(self, trial_id: str) -> None:
        """Check that the id is safe: it becomes a part of URLs and of paths.

        Raises:
            UserError: no trial can have this id.
        """
        if not is_safe_name(trial_id):
            raise self._unknown(trial_id)

    def _unknown(self, trial_id: str) -> UserError:
        return UserError(
            f"cannot find trial {trial_id!r} in experiment {self.experiment_id}; "
            f"`nnictl trial ls {self.experiment_id}` shows those there are"
        )

    def status(self) -> dict[str, Any]:
        """Its status, and what stopped it, from its manager or from the store."""
        client = self.client()
        return stored_status(self.folder) if client is None else client.get("/check-status")

    def statistics(self) -> list[dict[str, Any]]:
        """The number of trials per status, from its manager or from the store."""
        client = self.client()
        return stored_statistics(self.folder) if client is None else client.get("/job-statistics")

    def metrics(self, trial_id: str | None = None) -> list[dict[str, Any]]:
        """The metric records of all trials or of one, which must exist, from its manager or from the store."""
        client = self.client()
        if client is None:
            return stored_metrics(self.folder, trial_id)
        found: list[dict[str, Any]] = client.get("/metric-data", *(() if trial_id is None else (trial_id,)))
        return found

    def results(self) -> list[dict[str, Any]]:
        """Parameters and final results of the trials, from its manager or from the store."""
        client = self.client()
        return stored_results(self.folder) if client is None else client.get("/export-data")

    def profile(self) -> dict[str, Any]:
        """NNI's profile, from its manager or from the store."""
        client = self.client()
        return stored_profile(self.folder) if client is None else client.get("/experiment")

    def line(self) -> dict[str, Any]:
        """The fields of a list entry. `managerIsRunning` false with a status like RUNNING: the manager died; resume it."""
        known: dict[str, Any] = {"id": self.experiment_id}
        try:
            client = self.client()
            known |= stored_metadata(self.folder) if client is None else client.get("/experiment-metadata")
        except ManagerUnresponsive:
            known |= stored_metadata(self.folder) | {"status": "NOT ANSWERING"}
        except NniManagerError as error:
            # One corrupt database must not hide the other experiments.
            known |= {"status": "UNREADABLE", "problem": str(error)}
        if self.problem:
            known |= {"problem": self.problem} | ({} if self.manager else {"status": "UNREADABLE"})
        return known | served_by(self.folder, self.manager, self.view)


def known_experiments() -> list[KnownExperiment]:
    """All experiments of this user that have a folder or a manager, by id."""
    # Deleted folders stay in the registry; the cache scans the processes once for all of them.
    managers = functools.cache(_managers_by_folder)
    looks = [_look(folder, managers) for folder in Registry.of_user().all()]
    return [known for known in looks if known is not None]


def look(folder: ExperimentFolder) -> KnownExperiment | None:
    """The current state of the experiment; None: nothing is stored, and no manager runs."""
    return _look(folder, _managers_by_folder)


def _look(
    folder: ExperimentFolder, managers: Callable[[], dict[Path, ManagerProcess]]
) -> KnownExperiment | None:
    """As `look`, None included; `managers` is called only if the folder cannot name its manager."""
    try:
        manager, has_database = folder.running_process(), folder.has_database()
    except FolderUnreadable as error:
        return KnownExperiment(folder, managers().get(folder.path), str(error))
    if has_database:
        try:
            return KnownExperiment(folder, manager, view=folder.running_view())
        except FolderUnreadable as error:
            return KnownExperiment(folder, manager, str(error))
    # A manager outlives its folder: it still holds its ports, and its trials still run.
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
    """The running managers by folder, found by their command lines: for unreadable or deleted folders."""
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
    """The experiment with the given id or id prefix; None: the only one that runs.

    Raises:
        ExperimentUnknown: no experiment matches.
        UserError: several match, or the match is unreadable.
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
            raise UserError(
                f"cannot choose among {len(running)} running experiments; name one of {_listed(running)}"
            )
        return running[0]
    matching = match_prefix(given, known)
    if not matching:
        spoilt = Registry.of_user().spoilt()
        if given in spoilt:
            raise UserError(spoilt[given])
        ids = [each.experiment_id for each in known]
        near = difflib.get_close_matches(given, ids, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ExperimentUnknown(
            f"cannot find experiment {given!r}; {hint}`nnictl experiment list --all` shows those there are"
        )
    if len(matching) > 1:
        raise UserError(
            f"cannot tell which experiment {given!r} is; write more of one of {_listed(matching)}"
        )
    if matching[0].problem and matching[0].manager is None:
        raise UserError(matching[0].problem)
    return matching[0]


def match_prefix(prefix: str, known: Sequence[KnownExperiment]) -> list[KnownExperiment]:
    """The experiment with this id, or those whose ids start with it."""
    exact = [each for each in known if each.experiment_id == prefix]
    return exact or [each for each in known if prefix and each.experiment_id.startswith(prefix)]


def _listed(known: Sequence[KnownExperiment]) -> str:
    return ", ".join(
        f"{each.experiment_id} (port {each.manager.port})" if each.manager else each.experiment_id
        for each in known
    )


# ---- The store, in the format of the manager's HTTP API. Imports are local: most commands do not need SQLite.


def stored_trials(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """All trials of an experiment without a manager."""
    from nni_manager.engine.serializers import trial_view
    from nni_manager.engine.snapshot import ExperimentSnapshot
    from nni_manager.store.reader import StoreReader

    snapshot = ExperimentSnapshot.stored(folder, has_trials=False)
    with StoreReader(folder.database) as reader:
        return [trial_view(snapshot, trial) for trial in reader.trials()]


def stored_list(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """The list columns of all trials. A manager may run at the same time."""
    import json

    from nni_manager.store.reader import StoreReader

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
    """The number of trials per status, without statuses that no trial has."""
    from nni_manager.engine.serializers import statistics_view
    from nni_manager.engine.snapshot import ExperimentSnapshot

    return statistics_view(ExperimentSnapshot.stored(folder).experiment)


def stored_metrics(folder: ExperimentFolder, trial_id: str | None) -> list[dict[str, Any]]:
    """The metric records of all trials, or of one, which must exist."""
    from nni_manager.engine.serializers import metric_view
    from nni_manager.store.reader import StoreReader

    with StoreReader(folder.database) as reader:
        first, last = (0, 2**62) if trial_id is None else reader.place_of(trial_id)
        return [metric_view(row) for page in reader.metric_pages(None, first, last) for row in page]


def stored_results(folder: ExperimentFolder) -> list[dict[str, Any]]:
    """Parameters and final results of the trials."""
    from nni_manager.engine.serializers import export_view
    from nni_manager.store.reader import StoreReader

    with StoreReader(folder.database) as reader:
        return export_view(reader.trials())


def stored_ids(folder: ExperimentFolder, beginning: str, most: int = 2) -> list[str]:
    """The trial with this id, or up to `most` whose ids start with it. A manager may run at the same time."""
    from nni_manager.store.reader import StoreReader

    with StoreReader(folder.database) as reader:
        return reader.trial_ids(beginning, most)


def stored_trial(folder: ExperimentFolder, trial_id: str) -> dict[str, Any] | None:
    """One trial of an experiment without a manager; None if no trial has that id."""
    from nni_manager.engine.serializers import trial_view
    from nni_manager.engine.snapshot import ExperimentSnapshot
    from nni_manager.store.reader import StoreReader

    with StoreReader(folder.database) as reader:
        found = reader.trial(trial_id)
    return None if found is None else trial_view(ExperimentSnapshot.stored(folder, has_trials=False), found)


def corrupt_bytes(folder: ExperimentFolder) -> dict[str, int]:
    """The number of corrupt bytes in the metrics of each trial that has any. A manager may run at the same time."""
    from nni_manager.store.reader import StoreReader

    with StoreReader(folder.database) as reader:
        return reader.corrupt_bytes()


def stored_summary(folder: ExperimentFolder) -> dict[str, Any]:
    """The summary of an experiment without a manager: status, errors, counts, and its best and failed trials."""
    from nni_manager.engine.serializers import summary_view
    from nni_manager.engine.snapshot import ExperimentSnapshot

    return summary_view(ExperimentSnapshot.stored(folder))


def stored_profile(folder: ExperimentFolder) -> dict[str, Any]:
    """NNI's profile of an experiment without a manager."""
    from nni_manager.engine.serializers import profile_view
    from nni_manager.engine.snapshot import ExperimentSnapshot

    return profile_view(ExperimentSnapshot.stored(folder))


def stored_metadata(folder: ExperimentFolder) -> dict[str, Any]:
    """The list fields of an experiment without a manager."""
    from nni_manager.engine.serializers import metadata_view
    from nni_manager.engine.snapshot import ExperimentSnapshot

    return metadata_view(ExperimentSnapshot.stored(folder, has_trials=False))


def stored_status(folder: ExperimentFolder) -> dict[str, Any]:
    """The last status of an experiment without a manager, and what stopped it."""
    from nni_manager.store.reader import StoreReader

    with StoreReader(folder.database) as reader:
        stored = reader.experiment()
    return {
        "status": stored.state.value,
        "errors": [stored.error] if stored.error else [],
        "isOver": stored.state.is_over,
    }
