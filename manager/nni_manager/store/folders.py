"""Paths of an experiment on the manager's machine, and the processes that own it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, field
from pathlib import Path

from nni_manager.errors import RetryableError, UserError
from nni_manager.store import lease
from nni_manager.store.certificate import Certificate
from nni_manager.store.owner_lock import OwnerLock
from nni_manager.store.unusable_files import why_no_folder, why_unusable, why_unusable_database
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import Workspace

# Any user may create files in such a folder, but remove only their own files.
WORLD_WRITABLE_STICKY = 0o1777


class ExperimentUnknown(UserError):
    """cannot find the experiment; `nnictl experiment list --all` lists all experiments"""


class ExperimentExists(UserError):
    """cannot create the experiment: a folder has its id; choose another id, or resume that experiment"""

    def __init__(self, folder: ExperimentFolder) -> None:
        name = folder.experiment_id
        super().__init__(
            f"cannot create experiment {name}: {folder.path} has this id; choose another id, or resume it"
        )


class ExperimentLocked(UserError):
    """cannot own the experiment: another manager owns it; stop that manager first"""


class WorkspaceUnusable(RetryableError):
    """cannot use the workspace; mount its storage, or fix what the message names"""


class FolderUnreadable(UserError):
    """cannot read a file of the experiment; check the file that the message names"""


@dataclass(frozen=True, slots=True)
class ManagerProcess:
    """The manager that owns an experiment, or the last one that did."""

    pid: int
    host: str
    port: int
    version: str
    token: str = field(default="", repr=False)
    """Token of its HTTP API; empty if only the command line of the process is known."""
    certificate_sha256: str | None = None
    """Fingerprint of the certificate for HTTPS; None: HTTP, on loopback."""
    url_prefix: str = ""
    """The path before all its addresses, such as `/lab/digits`; empty: none."""
    certificate_host: str = ""
    """A host name in a certificate from files, for which browsers accept it; empty: none."""

    @property
    def base_url(self) -> str:
        """The URL before the paths of its page and its HTTP API, for programs on this machine."""
        scheme = "http" if self.certificate_sha256 is None else "https"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}{self.url_prefix}"


class _Inside:
    """A path inside an experiment's folder."""

    def __init__(self, *parts: str) -> None:
        self._relative = Path(*parts)

    def __get__(self, folder: ExperimentFolder, owner: type[ExperimentFolder]) -> Path:
        return folder.path / self._relative


@dataclass(frozen=True, slots=True)
class ExperimentFolder:
    """One experiment's folder, `<logDir>/<experiment id>`. It is also the workspace of local jobs.

    The workspace of cluster jobs is `<shared storage>/<experiment id>`, and `workspace` here is a link to it.
    """

    path: Path

    @property
    def experiment_id(self) -> str:
        """The experiment's id, which is the folder's name."""
        return self.path.name

    database = _Inside("db", "experiment.sqlite")
    """The experiment's SQLite file."""
    log = _Inside("log")
    """Folder of the manager's own logs."""
    manager_log = _Inside("log", "nnimanager.log")
    """The manager's log, one line per decision."""
    manager_stdout = _Inside("log", "nnictl_stdout.log")
    """The manager's stdout when it runs in the background."""
    manager_stderr = _Inside("log", "nnictl_stderr.log")
    """The manager's stderr when it runs in the background."""
    view_stderr = _Inside("log", "view_stderr.log")
    """The stderr of the process that serves a view of the experiment."""
    notifications_log = _Inside("log", "notifications.log")
    """The output of the commands of `notify`."""
    ended_sessions = _Inside("ended-sessions.json")
    """Record of the web sessions that were ended before they expired."""
    collected_logs = _Inside("log", "trials")
    """Folder of the trial logs that keepers sent."""
    generated_code = _Inside("code")
    """The code that trials run instead of an annotated code folder; exists only if there are annotations."""
    annotated_code = _Inside("code-with-annotations")
    """The user's originals of the files that differ in `generated_code`."""
    objective = _Inside("objective")
    """The function that trials run instead of a command; exists only if there is one. Not part of an archive."""
    jobs = _Inside("jobs")
    """The local training service's state of its jobs."""
    leftover_jobs = _Inside("leftover-jobs.json")
    """What the experiment may have left on its cluster; see `store.leftover_jobs`."""
    _certificate = _Inside("tls.pem")
    _workspace_link = _Inside("workspace")
    _process_json = _Inside("manager-process.json")
    _view_json = _Inside("view-process.json")

    def certificate(self, names: Iterable[str]) -> Certificate:
        """The manager's own certificate, created by the first call; `names`: see `Certificate.of`.

        Raises:
            OSError: it can be neither read nor created.
        """
        return Certificate.of(self._certificate, names)

    @property
    def workspace(self) -> Workspace:
        """The workspace that manager and keepers share, at the manager's path."""
        with contextlib.suppress(OSError):  # there is no link
            return Workspace(Path(os.readlink(self._workspace_link)))
        return Workspace(self.path)

    def check_files(self) -> None:
        """Check the files that every command opens.

        Raises:
            FolderUnreadable: something else is in a file's place, or the database is closed to this user.
        """
        _refuse(why_unusable_database(self.database, "restore it from a copy"))
        records = (self._process_json, self._view_json, self.leftover_jobs)
        for path in (self._lock.path, self._view_lock.path, *records):
            _refuse(why_unusable(path, "remove it", os.F_OK))

    def check_files_of_manager(self) -> None:
        """Check the files that a manager opens or replaces.

        Raises:
            FolderUnreadable: something else is in a file's place, or the file is closed to this user.
        """
        self.check_files()
        workspace, remedy = self.workspace, "move it away, and the manager creates a new one"
        for path in (workspace.trials, workspace.sdk, *workspace.sdk_packages):
            _refuse(why_no_folder(path, remedy))
        logs = (self.manager_log, self.manager_stdout, self.manager_stderr, self.notifications_log)
        replaced = (
            workspace.manager_json,
            workspace.run_sh,
            *workspace.code_snapshots(),
            *workspace.sdk.glob("**/*.py"),
        )
        read = (self.ended_sessions, self._certificate, *self.jobs.glob("*.json"))
        for access, paths in ((os.W_OK, logs), (os.F_OK, replaced), (os.R_OK, read)):
            for path in paths:
                _refuse(why_unusable(path, remedy, access))

    @property
    def _lock(self) -> OwnerLock:
        return OwnerLock(self.path / "owner.lock")

    @property
    def _view_lock(self) -> OwnerLock:
        return OwnerLock(self.path / "view.lock")

    def make(self, storage: Path | None = None) -> None:
        """Create the folder of a new experiment, closed to other users.

        `storage`: parent of the workspace, for jobs that do not see this machine's files. The workspace is closed to other users,
        too, until a manager opens it: see `set_access`.

        Raises:
            ExperimentExists: the folder exists already. Whoever created it may be using it, so do not remove it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ExperimentExists(self) from error
        for folder in (self.database.parent, self.log, self.jobs):
            folder.mkdir()
        if storage is not None:
            (storage / self.experiment_id).mkdir(mode=0o700)
            self.restore_link(storage)
        self.workspace.trials.mkdir(0o755)

    def restore_link(self, storage: Path) -> None:
        """Create the link to the workspace below `storage`, unless there is one. Without it, this folder would be the workspace.

        Raises:
            FolderUnreadable: something else is in its place.
        """
        root = storage / self.experiment_id
        try:
            self._workspace_link.symlink_to(root)
        except FileExistsError as error:
            if not self._workspace_link.is_symlink():
                raise FolderUnreadable(
                    f"cannot use {self._workspace_link}: it is not the link to {root}; move it away"
                ) from error

    def open_workspace(self, *, is_private: bool, reuses_jobs: bool) -> bool:
        """Create the workspace's folder of trials if it is missing, and set the permissions of a workspace outside this folder.

        `is_private`: tasks run as this user, so no other user gets access. Otherwise all users may read: containers run as other
        users. `reuses_jobs`: a keeper without its own trial tests at `trials` whether it may write. True: the folder was missing.

        Raises:
            WorkspaceUnusable: the workspace is missing, or the folder of trials cannot be created.
            OSError: the storage refuses the change of permissions.
        """
        workspace = self.workspace
        was_missing = self._create_trials(workspace)
        if workspace.root != self.path:
            workspace.trials.chmod(WORLD_WRITABLE_STICKY if reuses_jobs and not is_private else 0o755)
            workspace.root.chmod(0o700 if is_private else 0o755)
        return was_missing

    def _create_trials(self, workspace: Workspace) -> bool:
        """Create the folder of trials; False if it exists."""
        root, trials = workspace.root, workspace.trials
        try:
            trials.mkdir(0o755)
        except FileNotFoundError as error:
            # A workspace created below the mount point of an unmounted storage would be taken for one that lost its trials.
            raise WorkspaceUnusable(
                f"cannot find workspace {root}; mount its storage, or, if the workspace is lost, create an empty folder there: "
                "its trials then end without their files"
            ) from error
        except OSError as error:
            if trials.is_dir():
                return False
            raise WorkspaceUnusable(
                why_no_folder(trials, "move it away")
                or f"cannot create {trials}: {error.strerror}; fix the storage"
            ) from error
        return True

    def remove(self) -> None:
        """Remove all files of the experiment that this user may remove."""
        root = self.workspace.root
        if root != self.path:
            shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def write_process(self, process: ManagerProcess, *, is_view: bool = False) -> None:
        """Publish the experiment's owner or the process that serves a view of it, for this user's programs."""
        replace_file(self.token_file(is_view=is_view), json.dumps(asdict(process)).encode(), 0o600)

    def open_process_file(self) -> int:
        """Open the process file and return its descriptor.

        While it is open, `held_process` finds the file, also after the folder is deleted.
        """
        return os.open(self._process_json, os.O_RDONLY | os.O_CLOEXEC)

    def held_process(self, pid: int) -> ManagerProcess | None:
        """Read the process file that the manager with this pid holds open; None: there is none, or it is not readable."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError, ValueError, TypeError):  # closed meanwhile
                    if Path(os.readlink(entry).removesuffix(" (deleted)")).name == self._process_json.name:
                        return ManagerProcess(**json.loads(entry.read_bytes()))
        return None

    def token_file(self, *, is_view: bool) -> Path:
        """The process file of the server (manager or view), which contains the token of its HTTP API."""
        return self._view_json if is_view else self._process_json

    def process(self) -> ManagerProcess | None:
        """The current or last owner of the experiment; None until a new manager is ready, or if the file is unreadable."""
        with contextlib.suppress(FolderUnreadable):
            return self._read_process(self._process_json)
        return None

    def running_view(self) -> ManagerProcess | None:
        """The process that serves a view of the experiment now; None if there is none.

        Raises:
            FolderUnreadable: it cannot be determined.
        """
        return self._running(self._view_lock, self._view_json)

    def _read_process(self, path: Path) -> ManagerProcess | None:
        try:
            return ManagerProcess(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FolderUnreadable(
                f"cannot read {path}: {error.strerror}; give this user read permission for it"
            ) from error
        except (ValueError, TypeError) as error:
            raise FolderUnreadable(
                f"cannot read {path}: it is not a process file of a manager; "
                f"stop the manager of {self.experiment_id}, then run `nnictl resume {self.experiment_id}`"
            ) from error

    def running_process(self) -> ManagerProcess | None:
        """The manager that owns the experiment now; None if there is none.

        Raises:
            FolderUnreadable: it cannot be determined.
        """
        return self._running(self._lock, self._process_json)

    def _running(self, lock: OwnerLock, path: Path) -> ManagerProcess | None:
        try:
            return self._read_process(path) if lock.is_owned() else None
        except OSError as error:
            raise FolderUnreadable(
                f"cannot determine whether experiment {self.experiment_id} runs: {error.filename or lock.path}: "
                f"{error.strerror}; give this user read permission for it"
            ) from error

    def lease_holder(self) -> lease.LeaseHolder | None:
        """The process that the lock file names; None if it names none."""
        found = lease.read_record(self._lock.path)
        return None if found is None else found.holder

    def lease_is_expired(self) -> bool:
        """True if the manager that owns the experiment is frozen, so that another one may take over.

        Takes a few seconds if it runs on another machine, and `LEASE_TTL_S` if it is frozen there.
        """
        return lease.is_expired(self._lock.path)

    def has_database(self) -> bool:
        """True if anything of the experiment is stored.

        Raises:
            FolderUnreadable: it cannot be determined.
        """
        try:
            return self.database.is_file()
        except OSError as error:
            raise FolderUnreadable(
                f"cannot read {self.path}: {error.strerror}; give this user read permission for it"
            ) from error

    @contextlib.contextmanager
    def owned(self, *, is_brief: bool = False) -> Iterator[lease.Lease]:
        """Own the experiment: one manager at a time. Ownership ends with the process, however it ends.

        `is_brief`: the owner is no manager, so afterwards the process file names the last manager again: `nnictl resume` reads
        its URL prefix.

        Takes a while if the last owner was on another machine and did not release its lease. An owner that holds the lock but
        has not renewed its lease for `LEASE_TTL_S` is replaced.

        Raises:
            ExperimentLocked: another process owns it.
            StoreBusy: the process to be replaced is frozen in the middle of a write.
        """
        path, name, holder = self._lock.path, self.experiment_id, lease.LeaseHolder.here()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._lock.owned())
            except BlockingIOError as error:
                if not self.lease_is_expired():
                    raise self._taken() from error
                try:
                    stack.enter_context(self._lock.taken_over(lambda path: self._fence(path, holder)))
                except BlockingIOError as later:
                    raise self._taken() from later
            elsewhere = lease.find_remote_holder(path)
            if elsewhere is not None:
                raise ExperimentLocked(
                    f"cannot own experiment {name}: manager {elsewhere} owns it and still writes to {path}; "
                    f"stop it there with `nnictl stop {name}`"
                )
            last = self.process() if is_brief else None
            # The file names the previous manager; its pid and port may have been reused.
            self._process_json.unlink(missing_ok=True)
            own = lease.Lease(path, holder)
            try:
                yield own
            finally:
                own.release()
                if last is not None and not own.is_lost:
                    with contextlib.suppress(OSError):  # a full disk
                        self.write_process(last)

    def _taken(self) -> ExperimentLocked:
        name, holder, process = self.experiment_id, self.lease_holder(), self.process()
        whom = f"manager {holder}" if holder else "another manager"
        port = f", port {process.port}" if process and holder and process.pid == holder.pid else ""
        return ExperimentLocked(
            f"cannot own experiment {name}: {whom}{port} owns it; stop it first with `nnictl stop {name}`"
        )

    def _fence(self, successor: Path, holder: lease.LeaseHolder) -> None:
        """Fence a frozen process: it can store nothing more, even after it resumes.

        Raises:
            ExperimentLocked: it resumed, or another process took over first.
            StoreBusy: it is frozen in the middle of a write.
        """
        from nni_manager.store.errors import StoreBusy, is_locked
        from nni_manager.store.writer import Store

        if not self.lease_is_expired():
            raise self._taken()
        frozen = self.lease_holder()
        if self.has_database():
            try:
                Store(self.database, self.collected_logs).close()
            except StoreBusy as error:
                if frozen is None or not is_locked(error):
                    raise
                raise StoreBusy(
                    f"cannot take over experiment {self.experiment_id}: its manager, {frozen}, is frozen in the middle of a "
                    f"write and keeps {self.database} locked; end it there with `kill -9 {frozen.pid}` (nothing stored is lost), "
                    "then resume again"
                ) from error
        lease.write_record(successor, lease.LeaseRecord(holder, 0, time.monotonic()))

    @contextlib.contextmanager
    def viewed(self) -> Iterator[None]:
        """Serve a view of the experiment: one process at a time. It does not block a manager from owning the experiment.

        Raises:
            ExperimentLocked: another process serves one.
            FolderUnreadable: the folder cannot be written.
        """
        name = self.experiment_id
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._view_lock.owned())
            except BlockingIOError as error:
                raise ExperimentLocked(
                    f"cannot view experiment {name}: another process serves it; `nnictl experiment list` shows its port, and "
                    f"`nnictl stop {name}` ends it"
                ) from error
            except OSError as error:
                raise FolderUnreadable(
                    f"cannot write {self._view_lock.path}: {error.strerror}; give this user write permission there"
                ) from error
            self._view_json.unlink(missing_ok=True)  # as in `owned`
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # the folder was deleted, or is not writable any more
                    self._view_json.unlink()


def _refuse(why: str) -> None:
    if why:
        raise FolderUnreadable(why)
