"""Prepares the shared storage: waits for the mount, checks it, tests writing, and unpacks the training code."""

import gzip
import os
import posixpath
import queue
import tarfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from trial_keeper.errors import CodeDamaged, MountMissing, MountUnreadable, WorkspaceMissing
from trial_keeper.host.attempt_files import FOLDER_MODE, not_readable, not_writable, open_shared
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.safe_open import is_safe_name
from trial_keeper.wire.workspace import AttemptFolder, Workspace

# Healthy storage is available within this time; a longer wait is logged.
_LOG_AFTER_S = 5.0
_RETRY_DELAY_S = 0.2
# The storage needs this time to respond to one check.
_MIN_WAIT_S = 1.0
_TEMPORARY = (MountMissing, MountUnreadable, WorkspaceMissing)
_PROBE_BYTES = 4096
_READ_BYTES = 2**20
_NAMES_SHOWN = 5


# ---- the mount


def wait_for_mount(mount: Path, workspace: Workspace, wait_s: float, log: Callable[[str], None]) -> None:
    """Return once the experiment's folder exists and is readable.

    Polls in a separate thread, because a call on storage with an unreachable server hangs. `log` receives the current problem
    after 5 s, and then at growing intervals.

    Raises:
        MountMissing, MountUnreadable, WorkspaceMissing: the folder was not readable within `wait_s`.
    """
    results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.is_set():
            try:
                check_mounted(mount, workspace)
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                results.put(error)
            else:
                results.put(None)
                return
            stopped.wait(_RETRY_DELAY_S)

    began_at_s = time.monotonic()
    deadline_s = began_at_s + max(wait_s, _MIN_WAIT_S)
    log_after_s = _LOG_AFTER_S
    problem: Exception = MountUnreadable(
        f"cannot read {mount}: the shared storage does not respond; check its server and the network to it"
    )
    # A daemon thread: a poll that hangs must not block the exit.
    thread = threading.Thread(target=poll, name="mount", daemon=True)
    thread.start()
    try:
        while (now_s := time.monotonic()) < deadline_s:
            log_at_s = began_at_s + log_after_s
            if now_s >= log_at_s:
                log(f"waiting up to {deadline_s - now_s:.0f} s more for the shared storage: {problem}")
                log_after_s *= 2
                continue
            try:
                result = results.get(timeout=min(log_at_s, deadline_s) - now_s)
            except queue.Empty:
                continue
            if result is None:
                thread.join()  # no other thread may run when the keeper forks
                return
            if not isinstance(result, _TEMPORARY):
                raise result
            problem = result
        raise problem
    finally:
        stopped.set()


def check_mounted(mount: Path, workspace: Workspace) -> None:
    """Check once that the experiment's folder exists, and that its manager.json is readable.

    Raises:
        MountMissing: there is no such path.
        WorkspaceMissing: the path exists, but the experiment's folder does not.
        MountUnreadable: this user may not read the folder, or the storage fails.
    """
    try:
        os.stat(mount)
        workspace.read_document(workspace.manager_json)
    except (FileNotFoundError, NotADirectoryError) as error:
        there = next((folder for folder in (mount, *mount.parents) if os.path.isdir(folder)), Path("/"))
        if there != mount:
            raise MountMissing(
                f"cannot enter {mount}: {error.strerror} (the path exists only up to {there}); mount the shared storage "
                f"at {mount} in this container, or correct the path (on OpenPAI containerNFSMountPath)"
            ) from error
        raise WorkspaceMissing(_why_missing(mount, workspace)) from error
    except OSError as error:
        raise not_readable(workspace.root if os.path.exists(mount) else mount, error) from error


def _why_missing(mount: Path, workspace: Workspace) -> str:
    try:
        names = sorted(os.listdir(mount))
    except OSError:
        names = [workspace.root.name]
    beginning = f"cannot find the experiment's folder {workspace.root}"
    if not names:
        return (
            f"{beginning}: {mount} is empty; mount the manager's shared storage there (on OpenPAI the one that the manager has "
            "at nniManagerNFSMountPath)"
        )
    if workspace.root.name in names:
        return (
            f"cannot find {workspace.manager_json}; run `nnictl resume` so that the manager writes it, "
            "or check why the storage does not show it"
        )
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return (
        f"{beginning}: {mount} contains only {shown}; unless the experiment was deleted, mount the manager's storage (on OpenPAI "
        "the one that the manager has at nniManagerNFSMountPath)"
    )


def written_folder(workspace: Workspace, trial_id: str | None) -> Path:
    """The nearest existing parent of the first folder that a trial's keeper creates. `trial_id` None: any trial."""
    folders = [workspace.trials]
    if trial_id is not None and is_safe_name(trial_id):
        trial = workspace.trial(trial_id)
        folders = [trial.attempts, trial.path, workspace.trials]
    return next(filter(os.path.isdir, folders), workspace.root)


def check_writing(folder: Path) -> os.stat_result:
    """Write a file in the folder, sync it to the storage, and remove it. Returns the file's status as the storage reported it.

    Raises:
        WorkspaceNotWritable: the file cannot be written; a subclass names the cause.
    """
    path = folder / f".keeper-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(_PROBE_BYTES))
            # A full or failing server reports the problem at fsync at the latest.
            os.fsync(descriptor)
            return path.stat()
        finally:
            os.close(descriptor)
            path.unlink()
    except OSError as error:
        raise not_writable(folder, error) from error


# ---- the code


def with_code(workspace: Workspace, trial: TrialDocument, folder: AttemptFolder) -> TrialDocument:
    """Return the trial with its code folder: a new copy of the snapshot, or the folder that the trial names.

    Raises:
        CodeDamaged: the snapshot is incomplete, or was not packed by a manager.
        WorkspaceMissing, MountUnreadable: the snapshot is missing, or cannot be read.
        WorkspaceNotWritable: there is no space for the copy.
    """
    if trial.code_snapshot is None:
        return trial
    try:
        snapshot = workspace.file(trial.code_snapshot)
    except ValueError as error:
        raise CodeDamaged(f"cannot unpack the training code: {error}") from error
    unpack_code(snapshot, folder.code)
    return replace(trial, code_dir=str(folder.code))


def unpack_code(snapshot: Path, folder: Path) -> None:
    """Create the folder and extract the snapshot into it. Rejects members and links that point outside.

    Raises:
        CodeDamaged, WorkspaceMissing, MountUnreadable, WorkspaceNotWritable: as for `with_code`.
    """
    with open_shared(snapshot) as file:
        try:
            folder.mkdir(FOLDER_MODE)
            with gzip.GzipFile(mode="rb", fileobj=_Snapshot(file, snapshot)) as content:
                with tarfile.open(
                    fileobj=content, mode="r|", encoding="utf-8", errors="surrogateescape"
                ) as archive:
                    _extract(archive, folder)
                # The checksum is at the end of the file.
                while content.read(_READ_BYTES):
                    pass
        except (gzip.BadGzipFile, zlib.error, tarfile.TarError, EOFError, ValueError) as error:
            raise CodeDamaged(
                f"cannot unpack {snapshot}: {error or 'it is incomplete'}; remove it, and run `nnictl resume` to pack it again"
            ) from error
        except OSError as error:
            raise not_writable(folder, error) from error


class _Snapshot:
    """The file of a snapshot for `gzip`. An error of its storage is not one of the folder that is written."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def read(self, size_bytes: int) -> bytes:
        """Read as a file does.

        Raises:
            MountUnreadable: the storage fails.
        """
        try:
            return self._file.read(size_bytes)
        except OSError as error:
            raise not_readable(self._path, error) from error

    def seek(self, offset: int) -> int:
        """Seek as a file does."""
        return self._file.seek(offset)


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    links: set[PurePosixPath] = set()
    for member in archive:
        path = PurePosixPath(member.name)
        if not (member.isreg() or member.isdir() or member.issym()):
            raise tarfile.ExtractError(f"{member.name!r} is not a file, folder or link")
        if not links.isdisjoint(path.parents) or _leads_out(member.name):
            raise tarfile.ExtractError(f"{member.name!r} is outside the code folder")
        if member.issym():
            links.add(path)
            if posixpath.isabs(member.linkname) or _leads_out(
                posixpath.join(posixpath.dirname(member.name), member.linkname)
            ):
                raise tarfile.ExtractError(
                    f"{member.name!r} links outside the code folder, to {member.linkname!r}"
                )
        if hasattr(tarfile, "data_filter"):
            archive.extract(member, folder, filter=_closed_to_others)
        else:  # Python 3.10 before 3.10.12, and 3.11 before 3.11.4
            member.mode &= 0o755
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            archive.extract(member, folder)


def _closed_to_others(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """tarfile's data filter, which leaves the modes of folders to the umask, and with it who may replace the code."""
    safe = tarfile.data_filter(member, folder)
    return safe.replace(mode=FOLDER_MODE, deep=False) if safe.isdir() else safe


def _leads_out(path: str) -> bool:
    return posixpath.isabs(path) or posixpath.normpath(path).split("/")[0] == ".."
