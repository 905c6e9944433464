"""Where things of an experiment lie on the manager's machine, and how `nnictl` finds all experiments of a user."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nni_manager.errors import UserMistake
from nni_manager.store.certificate import Certificate
from nni_manager.store.owner_lock import OwnerLock
from nni_manager.store.ownership import Owner, Ownership, owner_elsewhere, owner_in
from trial_keeper.wire.workspace import Workspace, replace_file

# A folder where any user may make files and folders, and remove only their own.
OPEN_TO_ALL = 0o1777


class ExperimentUnknown(UserMistake):
    """cannot find the experiment; `nnictl experiment list --all` shows those there are"""


class ExperimentTaken(UserMistake):
    """cannot own the experiment: another manager does; stop that one first"""


class FolderUnreadable(UserMistake):
    """cannot read what is known of the experiment; see to the file that the message names"""


@dataclass(frozen=True, slots=True)
class ManagerProcess:
    """The manager that owns an experiment, or the last one that did."""

    pid: int
    host: str
    port: int
    version: str
    token: str = field(default="", repr=False)
    """What its HTTP API asks for. Empty where only a command line is known of it."""
    certificate_sha256: str | None = None
    """The fingerprint of the certificate with which it speaks HTTPS; None: HTTP, on loopback."""

    @property
    def origin(self) -> str:
        """Where this machine's programs find it, as addresses begin."""
        scheme = "http" if self.certificate_sha256 is None else "https"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ExperimentFolder:
    """One experiment's folder, `<logDir>/<experiment id>`. The workspace of local jobs is the same folder.

    That of jobs on a cluster is `<shared storage>/<experiment id>`, and `workspace` here is a link to it.
    """

    path: Path

    @property
    def experiment_id(self) -> str:
        """The folder is named after its experiment."""
        return self.path.name

    @property
    def database(self) -> Path:
        """The experiment's SQLite file."""
        return self.path / "db" / "experiment.sqlite"

    @property
    def log(self) -> Path:
        """Logs of the manager's own."""
        return self.path / "log"

    @property
    def manager_log(self) -> Path:
        """What the manager decided, one line each."""
        return self.log / "nnimanager.log"

    @property
    def manager_stdout(self) -> Path:
        """The manager's stdout when it runs in the background."""
        return self.log / "nnictl_stdout.log"

    @property
    def manager_stderr(self) -> Path:
        """The manager's stderr when it runs in the background."""
        return self.log / "nnictl_stderr.log"

    @property
    def view_stderr(self) -> Path:
        """The stderr of whoever serves a view of the experiment."""
        return self.log / "view_stderr.log"

    @property
    def ended_sessions(self) -> Path:
        """Which sessions of the web page were ended before their time."""
        return self.path / "ended-sessions.json"

    @property
    def collected_logs(self) -> Path:
        """Logs of trials that keepers sent."""
        return self.log / "trials"

    @property
    def generated_code(self) -> Path:
        """What trials run of a code folder with annotations; there only when it has some."""
        return self.path / "code"

    @property
    def annotated_code(self) -> Path:
        """The files of it that differ in `generated_code`, as their user had them."""
        return self.path / "code-with-annotations"

    @property
    def jobs(self) -> Path:
        """What the local training service remembers of its jobs."""
        return self.path / "jobs"

    def certificate(self, names: Iterable[str]) -> Certificate:
        """The manager's own, made when it is asked for the first time; `names`: see `Certificate.of`.

        Raises:
            OSError: it can be neither read nor made.
        """
        return Certificate.of(self.path / "tls.pem", names)

    @property
    def workspace(self) -> Workspace:
        """What manager and keepers share, as the manager sees it."""
        with contextlib.suppress(OSError):  # there is no link
            return Workspace(Path(os.readlink(self._workspace_link)))
        return Workspace(self.path)

    @property
    def _workspace_link(self) -> Path:
        return self.path / "workspace"

    @property
    def _process_json(self) -> Path:
        return self.path / "manager-process.json"

    @property
    def _lock(self) -> OwnerLock:
        return OwnerLock(self.path / "owner.lock")

    @property
    def _view_json(self) -> Path:
        return self.path / "view-process.json"

    @property
    def _view_lock(self) -> OwnerLock:
        return OwnerLock(self.path / "view.lock")

    def make(self, storage: Path | None = None, *, reuses_jobs: bool = False) -> None:
        """Make the folder of a new experiment, closed to other users.

        `storage`: where the workspace is made, for jobs that do not see this machine's files. What is there may be read by all
        users that containers run as. A keeper without a trial of its own (`reuses_jobs`) sees by `trials` whether it may write.

        Raises:
            FileExistsError: there is one already.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        for folder in (self.database.parent, self.log, self.jobs):
            folder.mkdir()
        if storage is not None:
            root = storage / self.experiment_id
            root.mkdir()
            root.chmod(0o755)
            self._workspace_link.symlink_to(root)
        trials = self.workspace.trials
        trials.mkdir()
        if storage is not None:
            trials.chmod(OPEN_TO_ALL if reuses_jobs else 0o755)

    def remove(self) -> None:
        """Remove all there is of the experiment, as far as this user may."""
        root = self.workspace.root
        if root != self.path:
            shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def write_process(self, process: ManagerProcess) -> None:
        """Let this user's programs know who owns the experiment now, and how to speak to it."""
        replace_file(self._process_json, json.dumps(asdict(process)).encode(), 0o600)

    def hold_process(self) -> int:
        """A descriptor of what was written. While it is open, `held_process` finds it, also when the folder is deleted."""
        return os.open(self._process_json, os.O_RDONLY | os.O_CLOEXEC)

    def held_process(self, pid: int) -> ManagerProcess | None:
        """What the manager of this process id holds open; None: nothing, or nobody can tell."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError, ValueError, TypeError):  # closed meanwhile
                    if Path(os.readlink(entry).removesuffix(" (deleted)")).name == self._process_json.name:
                        return ManagerProcess(**json.loads(entry.read_bytes()))
        return None

    def token_file(self, *, is_view: bool) -> Path:
        """The note of who serves the experiment, which holds the token of its HTTP API."""
        return self._view_json if is_view else self._process_json

    def process(self) -> ManagerProcess | None:
        """Who owns the experiment, or did so last; None as long as a new manager is not ready, or when nobody can tell."""
        with contextlib.suppress(FolderUnreadable):
            return self._read_process(self._process_json)
        return None

    def write_view(self, process: ManagerProcess) -> None:
        """Let others know who serves a view of the experiment now."""
        replace_file(self._view_json, json.dumps(asdict(process)).encode(), 0o600)

    def running_view(self) -> ManagerProcess | None:
        """Who serves a view of the experiment now; None when nobody does.

        Raises:
            FolderUnreadable: nobody can tell.
        """
        return self._running(self._view_lock, self._view_json)

    def _read_process(self, path: Path) -> ManagerProcess | None:
        try:
            return ManagerProcess(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FolderUnreadable(
                f"cannot read {path}: {error.strerror}; give yourself the right to read it"
            ) from error
        except (ValueError, TypeError) as error:
            raise FolderUnreadable(
                f"cannot read {path}: no manager wrote this; "
                f"stop the manager of {self.experiment_id} and `nnictl resume {self.experiment_id}`"
            ) from error

    def running_process(self) -> ManagerProcess | None:
        """The manager that owns the experiment now; None when there is none.

        Raises:
            FolderUnreadable: nobody can tell.
        """
        return self._running(self._lock, self._process_json)

    def _running(self, lock: OwnerLock, path: Path) -> ManagerProcess | None:
        try:
            return self._read_process(path) if lock.is_owned() else None
        except OSError as error:
            raise FolderUnreadable(
                f"cannot tell whether experiment {self.experiment_id} runs: {error.filename or lock.path}: "
                f"{error.strerror}; give yourself the right to read it"
            ) from error

    def owner(self) -> Owner | None:
        """The process that has put its name down as the owner; None: nobody has."""
        found = owner_in(self._lock.path)
        return None if found is None else found[0]

    def has_database(self) -> bool:
        """Whether there is anything stored of the experiment.

        Raises:
            FolderUnreadable: nobody can tell.
        """
        try:
            return self.database.is_file()
        except OSError as error:
            raise FolderUnreadable(
                f"cannot look into {self.path}: {error.strerror}; give yourself the right to read it"
            ) from error

    @contextlib.contextmanager
    def owned(self) -> Iterator[Ownership]:
        """Own the experiment: one manager at a time, and none after it died, however it died.

        Takes a while when the last owner was a process of another machine and has not said that it left.

        Raises:
            ExperimentTaken: another process owns it.
        """
        path, name = self._lock.path, self.experiment_id
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._lock.owned())
            except BlockingIOError as error:
                owner, process = self.owner(), self.process()
                whom = f"manager {owner}" if owner else "another manager"
                port = f", port {process.port}" if process and owner and process.pid == owner.pid else ""
                raise ExperimentTaken(
                    f"cannot own experiment {name}: {whom}{port} does; stop it first with `nnictl stop {name}`"
                ) from error
            elsewhere = owner_elsewhere(path)
            if elsewhere is not None:
                raise ExperimentTaken(
                    f"cannot own experiment {name}: manager {elsewhere} does, and goes on writing to {path}; "
                    f"stop it there first with `nnictl stop {name}`"
                )
            # It speaks of the manager before, whose process id and port may be somebody else's by now.
            self._process_json.unlink(missing_ok=True)
            ownership = Ownership(path)
            try:
                yield ownership
            finally:
                ownership.give_up()

    @contextlib.contextmanager
    def viewed(self) -> Iterator[None]:
        """Serve a view of the experiment: one process at a time. It keeps no manager from owning the experiment.

        Raises:
            ExperimentTaken: another process does.
            FolderUnreadable: the folder takes no note of it.
        """
        name = self.experiment_id
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._view_lock.owned())
            except BlockingIOError as error:
                raise ExperimentTaken(
                    f"cannot view experiment {name}: another process does; `nnictl experiment list` shows on which port, and "
                    f"`nnictl stop {name}` ends it"
                ) from error
            except OSError as error:
                raise FolderUnreadable(
                    f"cannot write {self._view_lock.path}: {error.strerror}; give yourself the right to write there"
                ) from error
            self._view_json.unlink(missing_ok=True)  # as for a manager
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # the folder was deleted, or takes nothing any more
                    self._view_json.unlink()


def state_of_user() -> Path:
    """Where programs keep what belongs to a user of this machine and is no document of theirs (XDG_STATE_HOME)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "trial-keeper"


@dataclass(frozen=True, slots=True)
class Registry:
    """All experiments of this user: one small file each, so that nothing is locked and nothing can spoil the rest."""

    folder: Path

    @classmethod
    def of_user(cls) -> "Registry":
        """The registry in the user's state folder."""
        return cls(state_of_user() / "experiments")

    def add(self, folder: ExperimentFolder) -> None:
        """Remember an experiment."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._entry(folder.experiment_id), json.dumps({"folder": str(folder.path)}).encode())

    def remove(self, experiment_id: str) -> None:
        """Forget an experiment; no matter if it was known."""
        self._entry(experiment_id).unlink(missing_ok=True)

    def all(self) -> list[ExperimentFolder]:
        """The folder of every experiment, by id, whether it is still there or not. What cannot be read is in `spoilt`."""
        return [found for _, found in self._entries() if isinstance(found, ExperimentFolder)]

    def spoilt(self) -> dict[str, str]:
        """What is wrong with each entry that names no folder, by the experiment's id."""
        return {name: found for name, found in self._entries() if isinstance(found, str)}

    def _entries(self) -> Iterator[tuple[str, ExperimentFolder | str]]:
        if not self.folder.is_dir():
            return
        for entry in sorted(entry for entry in self.folder.iterdir() if entry.suffix == ".json"):
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


def served_by(
    folder: ExperimentFolder, manager: ManagerProcess | None, view: ManagerProcess | None
) -> dict[str, Any]:
    """What a list shows of where an experiment lies and who serves it."""
    return {
        "managerIsRunning": manager is not None,
        "pid": manager and manager.pid,
        "port": manager and manager.port,
        "viewPort": view and view.port,
        "logDir": str(folder.path),
    }


def spoilt_lines(registry: Registry) -> list[dict[str, Any]]:
    """What a list shows of those that nothing is known of but that they were there."""
    return [
        {"id": name, "status": "UNREADABLE", "problem": problem}
        | {"managerIsRunning": False, "pid": None, "port": None, "viewPort": None, "logDir": None}
        for name, problem in registry.spoilt().items()
    ]
