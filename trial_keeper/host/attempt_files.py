"""The keeper's access to an attempt's folder: claims the folder once, and reads its files while they grow."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from trial_keeper import errors
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.attempt_ids import new_attempt_id, start_ms_of
from trial_keeper.wire.documents import AttemptDocument, TrialDocument
from trial_keeper.wire.file_changes import FileChange
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.safe_open import UnsafePath, open_beneath, read_beneath
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file, write_all
from trial_keeper.wire.workspace import MAX_ATTEMPT_JSON_BYTES, AttemptFolder, Workspace

# An NFS client may report "no such file" for this long after another client has created the file; twice the measured 3 s.
SHARED_STORAGE_LAG_S = 6.0
_RETRY_DELAY_S = 0.2
# Two records rarely end in 64 equal bytes: each record has its own sequence number.
_COMPARED_BYTES = 64
# Less the umask, which must not let other users write to an attempt: what they append would be replicated as the trial's own.
FOLDER_MODE = 0o755
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_NOT_WRITABLE: dict[int | None, tuple[type[errors.WorkspaceNotWritable], str]] = {
    errno.EROFS: (errors.MountReadOnly, "mount it read-write"),
    errno.ENOSPC: (errors.MountFull, "free some space there"),
    errno.EDQUOT: (errors.MountFull, "free some space there or request more quota"),
}

# A file that another client of NFS replaces while it is read is stale; the others are a server that fails over.
_TEMPORARY = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)

Found = TypeVar("Found")


def read_shared(workspace: Workspace, path: Path) -> bytes:
    """Read a document that the manager wrote before it started this job.

    Raises:
        WorkspaceMissing: the file does not exist, even after the lag of shared storage.
        MountUnreadable: the file cannot be read.
    """
    return _retried(path, lambda: workspace.read_document(path))


def open_shared(path: Path) -> BinaryIO:
    """Open for reading a file of the workspace's own folder that the manager wrote before it started this job.

    Raises:
        WorkspaceMissing, MountUnreadable: as for `read_shared`.
    """
    return _retried(path, lambda: open(open_beneath(path.parent, path), "rb"))


def _retried(path: Path, access: Callable[[], Found]) -> Found:
    deadline_s = time.monotonic() + SHARED_STORAGE_LAG_S
    while True:
        try:
            return access()
        except FileNotFoundError as error:
            if time.monotonic() > deadline_s:
                raise errors.WorkspaceMissing(
                    f"cannot find {path}: the experiment's folder is not mounted, or the experiment was deleted; "
                    "check the mount of the shared storage in this container"
                ) from error
        except OSError as error:
            if error.errno not in _TEMPORARY or time.monotonic() > deadline_s:
                raise not_readable(path, error) from error
        time.sleep(_RETRY_DELAY_S)


def read_trial(workspace: Workspace, trial_id: str, own_command: str | None = None) -> TrialDocument:
    """Read this job's trial. `own_command`: the command of this task, which replaces the trial's.

    Raises:
        WorkspaceMissing: trial.json is missing or invalid.
        MountUnreadable: trial.json cannot be read.
        SettingsInvalid: no trial can have this id.
    """
    try:
        path = workspace.trial(trial_id).trial_json
    except ValueError as error:
        raise errors.SettingsInvalid(f"cannot run trial {trial_id!r}: {error}") from error
    try:
        return _read_trial(read_shared(workspace, path), own_command)
    except DocumentInvalid as error:
        raise errors.WorkspaceMissing(
            f"{error}; use a keeper of the version of the manager that wrote {path}"
        ) from error


def try_read_trial(
    workspace: Workspace, trial_id: str, own_command: str | None = None
) -> TrialDocument | None:
    """Read this job's trial without waiting; None if the storage shows no valid document yet."""
    try:
        return _read_trial(workspace.read_document(workspace.trial(trial_id).trial_json), own_command)
    except (OSError, ValueError):  # a DocumentInvalid is a ValueError
        return None


def _read_trial(content: bytes, own_command: str | None) -> TrialDocument:
    trial = TrialDocument.from_bytes(content)
    return trial if own_command is None else replace(trial, command=own_command)


def claim_attempt(
    workspace: Workspace, settings: KeeperSettings, trial_id: str, task: str, attempt_id: str | None = None
) -> tuple[AttemptKey, AttemptFolder]:
    """Create a new attempt of this task, with its signed directory and its parameters.

    `attempt_id`: the manager's choice, or None to generate an id. Creating the directory is the claim, which succeeds once,
    also between two containers on NFS.

    Raises:
        WorkspaceNotWritable: the storage is read-only, full, or belongs to another user.
        WorkspaceMissing, MountUnreadable: the parameters are missing, or cannot be read.
    """
    trial = workspace.trial(trial_id)
    parameters = read_shared(workspace, trial.parameter_cfg)
    try:
        if attempt_id is None:
            attempt_id = new_attempt_id(time.time(), _latest_attempt(workspace, settings, trial_id, task))
        while True:
            key = AttemptKey(trial_id, attempt_id, task)
            folder = workspace.attempt(key)
            path, around = str(folder.path), str(folder.path.parent)
            with contextlib.suppress(FileExistsError):
                try:
                    os.mkdir(around, FOLDER_MODE)
                except FileNotFoundError:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(trial.attempts, FOLDER_MODE)
                    os.mkdir(around, FOLDER_MODE)
            # Other users may write to the folder too, so a symbolic link is not accepted as a parent.
            if stat.S_ISDIR(os.lstat(around).st_mode):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, FOLDER_MODE)
                    break
            attempt_id = new_attempt_id(time.time(), attempt_id)
        # Minimise round trips: the file server may be remote.
        os.mkdir(folder.output, FOLDER_MODE)
        os.mkdir(os.path.dirname(folder.stream(Stream.METRICS)), FOLDER_MODE)
        for stream in Stream:
            os.close(_made(folder.stream(stream)))
        write_all(_made(folder.parameter_cfg), parameters)
        # Last: a signed directory is complete.
        document = AttemptDocument(settings.experiment_id, settings.job_id, key, time.time())
        replace_file(folder.attempt_json, document.to_bytes(settings.token))
    except OSError as error:
        raise not_writable(workspace.root, error) from error
    return key, folder


def _latest_attempt(workspace: Workspace, settings: KeeperSettings, trial_id: str, task: str) -> str | None:
    """Return an attempt of this task that starts later than now, because a clock was set back; None if there is none."""
    now_ms = time.time() * 1000
    try:
        keys = workspace.attempts_of(trial_id)
    except PermissionError:  # no folder is this user's
        return None
    for key in reversed(keys):
        if start_ms_of(key.attempt_id) < now_ms:
            return None
        if key.task == task:
            with contextlib.suppress(OSError, DocumentInvalid):
                folder = workspace.attempt(key)
                content = read_beneath(
                    workspace.root, folder.attempt_json, MAX_ATTEMPT_JSON_BYTES, owned_as=folder.path
                ).data
                if AttemptDocument.from_bytes(content, lambda _: settings.token).key == key:
                    return key.attempt_id
    return None


def _made(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def not_readable(path: Path, error: OSError) -> errors.MountUnreadable:
    """Build the error for shared storage that is mounted and cannot be read."""
    if isinstance(error, UnsafePath):
        path = Path(error.filename)
        remedy = (
            f"remove it, check who may write to {path.parent}, and run `nnictl resume`, which writes it again"
        )
    elif error.errno in _FORBIDDEN:
        remedy = f"let user {os.geteuid()} of this container read the path, or {_as_its_owner(path)}"
    else:
        remedy = "check the storage's server and the network to it"
    return errors.MountUnreadable(f"cannot read {path}: {error.strerror}; {remedy}")


def not_writable(path: Path, error: OSError) -> errors.WorkspaceNotWritable:
    """Build the error for a workspace that cannot be written. `path` is a folder in it."""
    beginning = f"cannot write to the workspace {path}: {error.strerror}"
    if error.errno in _NOT_WRITABLE:
        kind, remedy = _NOT_WRITABLE[error.errno]
        return kind(f"{beginning}; {remedy}")
    if error.errno in _FORBIDDEN:
        user = os.geteuid()
        # Root may write anywhere, except if the server maps root to another user.
        squash = "export the storage with no_root_squash, " if user == 0 else ""
        return errors.MountForbidden(
            f"{beginning} for user {user} of this container; {squash}{_as_its_owner(path)}, or run `chmod 1777` on it"
        )
    return errors.WorkspaceNotWritable(f"{beginning}; check the storage's server and the network to it")


def _as_its_owner(path: Path) -> str:
    """Build a remedy with owner and mode of the path, or of its nearest parent that can be read."""
    for known in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = known.stat()
            mode = stat.filemode(status.st_mode)
            return (
                f"run the container as user {status.st_uid}, who owns {known} ({mode}), or in group {status.st_gid} "
                "if that group has access (runAsUser, fsGroup)"
            )
    return "run the container as the owner of the folder (runAsUser, fsGroup)"


class Tail:
    """The growing files of one attempt. They are polled, because shared storage sends no notifications.

    A file appears not to grow if the storage fails temporarily, or if the file was removed or replaced by a link. A truncation
    is detected by the size. `changes` has the files that were replaced or rewritten; a rewrite is detected if the last bytes that
    were read have changed. `trials`: the workspace's folder of trials, which exists as long as the storage is mounted.
    """

    def __init__(self, folder: AttemptFolder, trials: Path) -> None:
        self._folder = folder.path
        self._trials = trials
        self._paths = {stream: folder.stream(stream) for stream in Stream}
        self._descriptors: dict[Stream, int] = {}
        self._sizes = dict.fromkeys(Stream, 0)
        self._read: dict[Stream, tuple[int, bytes]] = {}
        """Per stream, the end of the last read, and the bytes before that end."""
        self._missing_since_s: dict[Stream, float] = {}
        """Per stream without a file to open, the time of the first try. Monotonic."""
        self.changes: dict[Stream, FileChange] = {}

    def sizes(self, streams: Iterable[Stream] | None = None) -> dict[Stream, int]:
        """The current sizes of these streams, or of all, in bytes."""
        polled = tuple(self._paths if streams is None else streams)
        for stream in polled:
            if (size := self._size_now(stream)) is not None:
                self._sizes[stream] = size
        return {stream: self._sizes[stream] for stream in polled}

    def read(self, stream: Stream, offset: int, size_bytes: int) -> bytes:
        """Read bytes of a stream. Returns fewer bytes only if the file was truncated, or cannot be read now."""
        data = self._pread(stream, offset, size_bytes)
        if data:
            self._compare(stream, offset)
            self._read[stream] = offset + len(data), data[-_COMPARED_BYTES:]
        return data

    def check(self, streams: Iterable[Stream]) -> None:
        """Detect files that were replaced, or rewritten since the last read."""
        for stream in streams:
            if stream in self._read:
                self._compare(stream, self._read[stream][0])
            with contextlib.suppress(OSError):
                if not self._is_in_place(stream):
                    self.changes.setdefault(stream, FileChange.REPLACED)

    def _is_in_place(self, stream: Stream) -> bool:
        """True if the open file is still the one at the stream's path."""
        if (descriptor := self._descriptors.get(stream)) is None:
            return True  # the file was never read, so no byte was missed
        opened = os.fstat(descriptor)
        try:
            named = os.lstat(self._paths[stream])
        except FileNotFoundError:
            return False
        # A copy of the same size has lost no byte, and some FUSE file systems change the inode number of an open file.
        return os.path.samestat(opened, named) or opened.st_size == named.st_size

    def _compare(self, stream: Stream, offset: int) -> None:
        """Check that the last bytes that were read are unchanged, if the last read ended at `offset`."""
        end, known = self._read.get(stream, (0, b""))
        if end != offset:
            return
        found = self._pread(stream, offset - len(known), len(known))
        # `truncated_size` detects a shorter file.
        if len(found) == len(known) and found != known:
            self.changes.setdefault(stream, FileChange.REWRITTEN)

    def _pread(self, stream: Stream, offset: int, size_bytes: int) -> bytes:
        try:
            return os.pread(self._descriptor(stream), size_bytes, offset)
        except OSError:
            self._let_go(stream)
            return b""

    def truncated_size(self, stream: Stream, promised: int) -> int | None:
        """Return the size of a file with fewer than the `promised` bytes; None if it has more, or cannot be read now.

        A file that was removed, or replaced by a link, has size 0. A file with enough bytes is opened again for the next read.
        """
        size = self._size_now(stream)
        if size is None and self._is_removed(stream):
            self.changes.setdefault(stream, FileChange.REPLACED)
            return 0
        if size is not None and size >= promised:
            # FUSE reports the size of the file at the path, but reads the open file, which another client may have replaced.
            self._let_go(stream)
            return None
        return size

    def _is_removed(self, stream: Stream) -> bool:
        """True if no file can be opened for longer than the lag of shared storage, although the storage is mounted."""
        missing_since_s = self._missing_since_s.get(stream)
        return (
            missing_since_s is not None
            and time.monotonic() - missing_since_s > SHARED_STORAGE_LAG_S
            and os.path.isdir(self._trials)  # False if the storage fails
        )

    def _size_now(self, stream: Stream) -> int | None:
        # A descriptor that fails, as after a failover of the server, is replaced at once: this may be the size at the end.
        for _ in range(2 if stream in self._descriptors else 1):
            try:
                return os.fstat(self._descriptor(stream)).st_size
            except OSError:
                self._let_go(stream)
        return None

    def last_text(self, stream: Stream, longest_bytes: int) -> str:
        """Return the end of a stream as text, from the start of a line if possible."""
        size = self.sizes((stream,))[stream]
        data = self.read(stream, max(size - longest_bytes, 0), longest_bytes)
        if size > longest_bytes and b"\n" in data[:-1]:
            data = data[data.index(b"\n") + 1 :]
        return data.decode(errors="replace").strip()

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, stream: Stream) -> int:
        descriptor = self._descriptors.get(stream)
        if descriptor is None:
            try:
                descriptor = open_beneath(self._folder, self._paths[stream])
            except (FileNotFoundError, UnsafePath):
                self._missing_since_s.setdefault(stream, time.monotonic())
                raise
            self._missing_since_s.pop(stream, None)
            self._descriptors[stream] = descriptor
        return descriptor

    def _let_go(self, stream: Stream) -> None:
        """Close the descriptor, so that the next poll opens the file again: a stale descriptor on NFS never recovers."""
        descriptor = self._descriptors.pop(stream, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
