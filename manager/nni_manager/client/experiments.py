"""Lists the experiments of this user, resolves ids and prefixes, and reads each from its manager or its store."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_manager.client.manager_client import ManagerClient, ManagerRefusal, ManagerUnresponsive
from nni_manager.errors import NniManagerError, UserError
from nni_manager.store import folders
from nni_manager.store.registry import Registry, served_by
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.safe_open import is_safe_name

if TYPE_CHECKING:
    from nni_manager.client.stored import StoredDocuments

# The statuses of unfinished trials in NNI's API.
_UNFINISHED = ("WAITING", "RUNNING")

Managers = Callable[[], dict[Path, folders.ManagerProcess]]
"""Returns the managers that run on this machine, by folder."""


@dataclass(frozen=True, slots=True)
class KnownExperiment:
    """An experiment, with the manager and the view that served it when this object was created; None: none.

    `problem`: an error message about the experiment's folder; empty: none.
    """

    folder: folders.ExperimentFolder
    manager: folders.ManagerProcess | None
    problem: str = ""
    view: folders.ManagerProcess | None = None

    @property
    def is_served(self) -> bool:
        """True if a manager or a view of the experiment runs."""
        return self.manager is not None or self.view is not None

    @property
    def experiment_id(self) -> str:
        """The experiment's id."""
        return self.folder.experiment_id

    def running_process(self) -> folders.ManagerProcess | None:
        """The manager that owns the experiment now; None if no manager does."""
        now = known_experiment(self.folder)
        return None if now is None else now.manager

    def manager_is_starting(self, managers: Managers | None = None) -> bool:
        """True if a process of this machine starts as its manager: it is not recorded yet. `managers`: see `managers_once`."""
        if self.manager is not None:
            return False
        process = (managers or _managers_by_folder)().get(self.folder.path)
        return process is not None and not process.token

    def manager_is_frozen(self) -> bool:
        """True if its manager's lease has expired, so that another manager may take over."""
        return self.manager is not None and not self.problem and self.folder.lease_is_expired()

    def client(self) -> ManagerClient | None:
        """A client of its manager; None if no manager runs."""
        return None if self.manager is None else ManagerClient(self.experiment_id, self.manager)

    @property
    def stored(self) -> StoredDocuments:
        """The documents in its store."""
        from nni_manager.client.stored import StoredDocuments

        return StoredDocuments(self.folder)

    def get(self, path: str, *names: str) -> Any:
        """A document of the manager's HTTP API, from its manager or, if none runs, from the store."""
        return (self.client() or self.stored).get(path, *names)

    def trial_list(self) -> Sequence[dict[str, Any]]:
        """The list columns of all trials, from the store; from the manager if the store is unreadable.

        Those of unfinished trials have the message of a running manager: what the cluster reports about their jobs.
        """
        if self.problem:
            trials: Sequence[dict[str, Any]] = self.get("/trials")
            return trials
        found, client = self.stored.trial_list(), self.client()
        if client is not None and any(each["endTime"] is None for each in found):
            # The store has the trials, whether the manager answers or not.
            with contextlib.suppress(ManagerUnresponsive):
                messages = {
                    each["id"]: each["message"]
                    for status in _UNFINISHED
                    for each in client.get("/trials", status=status)
                }
                for each in found:
                    each["message"] = messages.get(each["id"], each["message"])
        return found

    def trial_id(self, given: str) -> str:
        """The id of the trial that has the given id, or whose id starts with the given prefix.

        Raises:
            UserError: no trial matches, or several do.
        """
        self._check_trial_id(given)
        if self.problem:
            return given  # the store is unreadable, so its manager checks the id
        found = self.stored.read(lambda reader: reader.trial_ids(given, 2))
        if len(found) > 1:
            raise UserError(
                f"cannot use trial id {given!r}: several ids start with it, such as {', '.join(found)}; write more "
                f"characters of one; `nnictl trial ls {self.experiment_id}` lists them"
            )
        if not found:
            raise self._unknown(given)
        return found[0]

    def trial(self, trial_id: str) -> dict[str, Any]:
        """One trial, from its manager or from the store.

        Raises:
            UserError: there is no such trial.
        """
        self._check_trial_id(trial_id)
        try:
            found: dict[str, Any] = self.get("/trials", trial_id)
        except ManagerRefusal as error:
            raise self._unknown(trial_id) from error
        return found

    def packages(self, trial_id: str) -> list[str]:
        """The packages with which a trial ran, as NAME==VERSION.

        Raises:
            UserError: there is no such trial, or its packages are not recorded.
        """
        attempts = self.trial(trial_id)["provenance"]["attempts"]
        digests = [each["packages"] for each in attempts if each["packages"]]
        found = self.stored.read(lambda reader: reader.packages(digests[-1])) if digests else None
        if found is None:
            raise UserError(
                f"cannot list the packages of trial {trial_id}: they are not recorded; they are read when training code asks "
                "nni_sdk for its parameters, or reports"
            )
        return found

    def _check_trial_id(self, trial_id: str) -> None:
        # The id becomes a part of URLs and of paths. Callers of the Python API may pass None.
        if not (isinstance(trial_id, str) and is_safe_name(trial_id)):
            raise self._unknown(trial_id)

    def _unknown(self, trial_id: str) -> UserError:
        return UserError(
            f"cannot find trial {trial_id!r} in experiment {self.experiment_id}; "
            f"`nnictl trial ls {self.experiment_id}` lists them"
        )

    def line(self) -> dict[str, Any]:
        """The fields of a list entry. A status such as RUNNING with `managerIsRunning` false means that the manager died."""
        known: dict[str, Any] = {"id": self.experiment_id}
        try:
            known |= self.get("/experiment-metadata")
        except ManagerUnresponsive:
            known |= self.stored.get("/experiment-metadata") | {"status": "NOT ANSWERING"}
        except NniManagerError as error:
            # One corrupt database must not hide the other experiments.
            known |= {"status": "UNREADABLE", "problem": str(error)}
        if self.problem:
            known |= {"problem": self.problem} | ({} if self.manager else {"status": "UNREADABLE"})
        return known | served_by(self.folder, self.manager, self.view, known.get("tags", ()))


def _managers_by_folder() -> dict[Path, folders.ManagerProcess]:
    """The running managers by folder, found by their command lines: for unreadable or deleted folders."""
    import psutil

    found = {}
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        options = dict(itertools.pairwise(arguments))
        if (
            options.get("-m") == "nni_manager"
            and {"--folder", "--host"} <= options.keys()
            and "--view" not in arguments
            and options.get("--port", "").isdecimal()
        ):
            folder = folders.ExperimentFolder(Path(options["--folder"]))
            found[folder.path] = folder.held_process(process.pid) or folders.ManagerProcess(
                process.pid, options["--host"], int(options["--port"]), "unknown"
            )
    return found


def managers_once() -> Managers:
    """The managers at the time of the first call: a scan of all processes takes up to a second."""
    return functools.cache(_managers_by_folder)


def known_experiment(
    folder: folders.ExperimentFolder,
    managers: Managers = _managers_by_folder,
) -> KnownExperiment | None:
    """The current state of the experiment; None: nothing is stored, and no manager runs.

    `managers` is called only if the folder cannot name its manager.
    """
    try:
        folder.check_files()
        manager, has_database = folder.running_process(), folder.has_database()
    except folders.FolderUnreadable as error:
        return KnownExperiment(folder, managers().get(folder.path), str(error))
    if has_database:
        try:
            return KnownExperiment(folder, manager, view=folder.running_view())
        except folders.FolderUnreadable as error:
            return KnownExperiment(folder, manager, str(error))
    # A manager outlives its folder: it still holds its ports, and its trials still run.
    manager = manager or managers().get(folder.path)
    name = folder.experiment_id
    if manager is None and not folder.path.is_dir():
        return None
    if manager is None:
        return KnownExperiment(
            folder,
            None,
            f"cannot find {folder.database}: it was removed; restore it from a copy, or remove the experiment with "
            f"`nnictl experiment delete {name} --force`",
        )
    return KnownExperiment(
        folder,
        manager,
        f"cannot store anything: {folder.path} was deleted; end its manager with `nnictl stop {name}`",
    )


def known_experiments() -> list[KnownExperiment]:
    """All experiments of this user that have a folder or a manager, by id."""
    # Deleted folders stay in the registry; the cache scans the processes once for all of them.
    managers = managers_once()
    found = [known_experiment(folder, managers) for folder in Registry.of_user().all()]
    return [known for known in found if known is not None]


def _with_trial(given: str, known: Sequence[KnownExperiment]) -> str | None:
    """The id of the first readable experiment with a trial of exactly this id; None: there is none."""
    for each in known:
        # A damaged database of another experiment does not concern the user here.
        with contextlib.suppress(NniManagerError):
            if not each.problem and given in each.stored.read(lambda reader: reader.trial_ids(given, 1)):
                return each.experiment_id
    return None


def resolve(given: str | None) -> KnownExperiment:
    """The experiment with the given id or id prefix; None: the only one that runs or, if none does, the latest.

    Raises:
        ExperimentUnknown: no experiment matches.
        UserError: several match, or the match is unreadable.
    """
    known = known_experiments()
    if given is None:
        running = [each for each in known if each.manager is not None]
        readable = [each for each in known if not each.problem]
        if not running and readable:
            registry = Registry.of_user()
            return max(readable, key=lambda each: registry.added_at_s(each.experiment_id))
        if not running:
            raise folders.ExperimentUnknown("cannot find an experiment; start one with `nnictl create FILE`")
        if len(running) > 1:
            raise UserError(
                f"cannot choose among {len(running)} running experiments; name one of {_listed(running)}"
            )
        return running[0]
    matching = match_prefix(given, known)
    if not matching:
        corrupt = Registry.of_user().spoilt()
        if given in corrupt:
            raise UserError(corrupt[given])
        if (owner := _with_trial(given, known)) is not None:
            raise folders.ExperimentUnknown(
                f"cannot find experiment {given!r}: it is a trial of experiment {owner}; write `--trial-id {given}`"
            )
        ids = [each.experiment_id for each in known]
        near = difflib.get_close_matches(given, ids, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise folders.ExperimentUnknown(
            f"cannot find experiment {given!r}; {hint}`nnictl experiment list --all` lists them"
        )
    if len(matching) > 1:
        raise UserError(
            f"cannot use experiment id {given!r}: several ids start with it: {_listed(matching)}; write one of them"
        )
    if matching[0].problem and matching[0].manager is None:
        raise UserError(matching[0].problem)
    return matching[0]


def register(path: Path, given: str | None) -> str:
    """Add the experiment of a folder to this user's experiments, and return its id, which is the folder's name.

    Raises:
        UserError: it is not the folder of an experiment, or of another one than `given`.
    """
    folder = folders.ExperimentFolder(path.resolve())
    if not folder.database.parent.is_dir():
        raise UserError(
            f"cannot use {path} as an experiment: it has no folder {folder.database.parent.name}; "
            "name the experiment's own folder, <logDir>/<ID>"
        )
    if given not in (None, folder.experiment_id):
        raise UserError(
            f"cannot find experiment {given!r} in {path}: it has experiment {folder.experiment_id}; use that id, or leave it out"
        )
    registry = Registry.of_user()
    for other in registry.all():
        if other.experiment_id == folder.experiment_id and other.has_database():
            if other.path.samefile(path):
                return other.experiment_id
            raise UserError(
                f"cannot add experiment {folder.experiment_id} of {path}: this user has another one with that id, in "
                f"{other.path}; save and delete that one with `nnictl experiment save` and `nnictl experiment delete`"
            )
    registry.add(folder)
    return folder.experiment_id


def match_prefix(prefix: str, known: Sequence[KnownExperiment]) -> list[KnownExperiment]:
    """The experiment with this id, or those whose ids start with it."""
    exact = [each for each in known if each.experiment_id == prefix]
    return exact or [each for each in known if prefix and each.experiment_id.startswith(prefix)]


def _listed(known: Sequence[KnownExperiment]) -> str:
    return ", ".join(
        f"{each.experiment_id} (port {each.manager.port})" if each.manager else each.experiment_id
        for each in known
    )
