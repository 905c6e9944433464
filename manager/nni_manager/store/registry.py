"""The registry of all experiments of a user, and the entries of lists of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nni_manager.errors import UserError
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.unusable_files import why_unusable
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.small_files import replace_file

_ADD_AGAIN = (
    "remove it, then name the experiment's folder with `nnictl resume {0} --experiment_dir <logDir>/{0}`"
)


def state_of_user() -> Path:
    """Folder for the state of this user's programs on this machine (XDG_STATE_HOME)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "trial-keeper"


@dataclass(frozen=True, slots=True)
class Registry:
    """All experiments of this user: one small file each. It needs no locks, and a corrupt entry does not affect the others."""

    folder: Path

    @classmethod
    def of_user(cls) -> Registry:
        """The registry in the user's state folder."""
        return cls(state_of_user() / "experiments")

    def add(self, folder: ExperimentFolder) -> None:
        """Register an experiment.

        Raises:
            UserError: the registry cannot be written.
        """
        content = json.dumps({"folder": str(folder.path)}).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._entry(folder.experiment_id), content, is_durable=True)
        except OSError as error:
            raise UserError(
                f"cannot register experiment {folder.experiment_id}: {error.filename or self.folder}: {error.strerror}; set "
                "XDG_STATE_HOME to a folder in which you may write, or fix the disk"
            ) from error

    def remove(self, experiment_id: str) -> None:
        """Unregister an experiment; an unknown id is ignored."""
        # unlink() of an absent file also fails on a read-only disk, and below a file in place of a folder.
        if (entry := self._entry(experiment_id)).exists():
            entry.unlink(missing_ok=True)

    def added_at_s(self, experiment_id: str) -> float:
        """When an experiment was added, in seconds since the epoch; 0 for an unknown id."""
        try:
            return self._entry(experiment_id).stat().st_mtime
        except OSError:
            return 0.0

    def all(self) -> list[ExperimentFolder]:
        """The folder of every experiment, by id, whether or not it still exists. For corrupt entries see `spoilt`."""
        return [found for _, found in self._entries() if isinstance(found, ExperimentFolder)]

    def spoilt(self) -> dict[str, str]:
        """The problem of each corrupt entry, by experiment id."""
        return {name: found for name, found in self._entries() if isinstance(found, str)}

    def _entries(self) -> Iterator[tuple[str, ExperimentFolder | str]]:
        if not self.folder.is_dir():
            return
        for entry in sorted(entry for entry in self.folder.iterdir() if entry.suffix == ".json"):
            if why := why_unusable(entry, _ADD_AGAIN.format(entry.stem)):
                yield entry.stem, why
                continue
            try:
                yield entry.stem, ExperimentFolder(Path(json.loads(entry.read_bytes())["folder"]))
            except (OSError, ValueError, TypeError, KeyError):
                yield (
                    entry.stem,
                    f"cannot read {entry}: it does not name the experiment's folder; "
                    f'write {{"folder": "<logDir>/{entry.stem}"}} into it, or remove it',
                )

    def _entry(self, experiment_id: str) -> Path:
        return self.folder / f"{experiment_id}.json"


def latest_first(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of a list of experiments in the order of every such list: the latest first, those without a start last."""
    return sorted(lines, key=lambda line: (-line.get("startTime", 0), str(line["id"])))


def served_by(
    folder: ExperimentFolder, manager: ManagerProcess | None, view: ManagerProcess | None, tags: Iterable[str]
) -> dict[str, Any]:
    """Fields of a list entry: where an experiment is stored, and which processes serve it.

    NNI's clients expect `webuiUrl`, `tag` (the experiment's tags) and `prefixUrl` in each entry.
    """
    server = manager or view
    return {
        "managerIsRunning": manager is not None,
        "pid": manager and manager.pid,
        "port": manager and manager.port,
        "viewPort": view and view.port,
        "webuiUrl": [] if server is None else [server.base_url],
        "tag": list(tags),
        "prefixUrl": server and (server.url_prefix or None),
        "logDir": str(folder.path),
    }


def corrupt_entries(registry: Registry) -> list[dict[str, Any]]:
    """List entries for experiments whose registry file is corrupt."""
    return [
        {"id": name, "status": "UNREADABLE", "problem": problem}
        | {"managerIsRunning": False, "pid": None, "port": None, "viewPort": None, "logDir": None}
        | {"webuiUrl": [], "tag": [], "prefixUrl": None}
        for name, problem in registry.spoilt().items()
    ]
