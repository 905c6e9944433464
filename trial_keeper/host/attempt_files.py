"""The attempt's folder on this side: claimed once, and read while it grows."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from trial_keeper.errors import (
    MountForbidden,
    MountFull,
    MountReadOnly,
    MountUnreadable,
    SettingsInvalid,
    WorkspaceMissing,
    WorkspaceNotWritable,
)
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.own_files import open_inside
from trial_keeper.wire.small_files import read_all, write_all
from trial_keeper.wire.workspace import AttemptFolder, DocumentInvalid, TrialDocument, Workspace

# An NFS client may go on saying "no such file" this long after another has made it; twice the 3 s that were measured.
SHARED_STORAGE_LAG_S = 6.0
_LOOK_AGAIN_S = 0.2
_FORBIDDEN = (errno.EACCES, errno.EPERM)

Found = TypeVar("Found")


def read_shared(path: Path) -> bytes:
    """The content of a file that the manager wrote before it started this job.

    Raises:
        WorkspaceMissing: it is not there, even after the shared storage had time to show it.
        MountUnreadable: it cannot be read.
    """
    return _once_shown(path, lambda: read_all(path))


def open_shared(path: Path) -> BinaryIO:
    """A file that the manager wrote before it started this job, open for reading.

    Raises:
        WorkspaceMissing, MountUnreadable: as for `read_shared`.
    """
    return _once_shown(path, lambda: path.open("rb"))


def _once_shown(path: Path, look: Callable[[], Found]) -> Found:
    gives_up_at_s = time.monotonic() + SHARED_STORAGE_LAG_S
    while True:
        try:
            return look()
        except FileNotFoundError as error:
            if time.monotonic() > gives_up_at_s:
                raise WorkspaceMissing(
                    f"cannot find {path}: the experiment's folder is not mounted here, or the experiment was deleted; "
                    "check the mount of the shared storage in this container"
                ) from error
            time.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            raise not_readable(path, error) from error


def read_trial(workspace: Workspace, trial_id: str, own_command: str | None = None) -> TrialDocument:
    """The trial this job is for, with the command of this task in place of the trial's where there is one.

    Raises:
        WorkspaceMissing: its document is not there or is not one.
        MountUnreadable: it cannot be read.
        SettingsInvalid: no trial can have this id.
    """
    try:
        path = workspace.trial(trial_id).trial_json
    except ValueError as error:
        raise SettingsInvalid(f"cannot run trial {trial_id!r}: {error}") from error
    try:
        return _read_trial(read_shared(path), own_command)
    except DocumentInvalid as error:
        raise WorkspaceMissing(f"{error}; {path} was not written by a manager of this version") from error


def glimpse_trial(
    workspace: Workspace, trial_id: str, own_command: str | None = None
) -> TrialDocument | None:
    """The same, if the storage shows it at this moment."""
    try:
        return _read_trial(read_all(workspace.trial(trial_id).trial_json), own_command)
    except (OSError, ValueError):  # a DocumentInvalid is one
        return None


def _read_trial(content: bytes, own_command: str | None) -> TrialDocument:
    trial = TrialDocument.from_bytes(content)
    return trial if own_command is None else replace(trial, command=own_command)


def claim_attempt(workspace: Workspace, trial_id: str, task: str) -> tuple[AttemptKey, AttemptFolder]:
    """The next attempt of this task, with its folder made and the parameters in place.

    Making the folder is the claim: it succeeds once, also between two containers on NFS.

    Raises:
        WorkspaceNotWritable: the storage is read-only, full, or belongs to another user.
        WorkspaceMissing, MountUnreadable: the parameters are not there, or cannot be read.
    """
    parameters = read_shared(workspace.trial(trial_id).parameter_cfg)
    number = 0
    try:
        while True:
            key = AttemptKey(trial_id, number, task)
            folder = workspace.attempt(key)
            path, around = str(folder.path), str(folder.path.parent)
            with contextlib.suppress(FileExistsError):
                try:
                    os.mkdir(around)
                except FileNotFoundError:
                    os.makedirs(around)
            # Others may write there, too: a link of theirs is no place for this attempt.
            if stat.S_ISDIR(os.lstat(around).st_mode):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                    break
            number += 1
        # The fewest words to a server that may be far away.
        os.mkdir(folder.output)
        os.mkdir(os.path.dirname(folder.stream(Stream.METRICS)))
        for stream in Stream:
            os.close(_made(folder.stream(stream)))
        write_all(_made(folder.parameter_cfg), parameters)
    except OSError as error:
        raise not_writable(workspace.root, error) from error
    return key, folder


def _made(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def not_readable(path: Path, error: OSError) -> MountUnreadable:
    """What to say when the shared storage is there and does not show what it holds."""
    if error.errno in _FORBIDDEN:
        remedy = f"let user {os.geteuid()} of this container read there, {_as_its_owner(path)}"
    else:
        remedy = "check the storage's server and the network to it"
    return MountUnreadable(f"cannot read {path}: {error.strerror}; {remedy}")


def not_writable(path: Path, error: OSError) -> WorkspaceNotWritable:
    """What to say when the workspace takes no more. `path` is a folder there."""
    beginning = f"cannot write in the workspace {path}: {error.strerror}"
    if error.errno == errno.EROFS:
        return MountReadOnly(f"{beginning}; mount it read-write")
    if error.errno == errno.ENOSPC:
        return MountFull(f"{beginning}; free some space there")
    if error.errno == errno.EDQUOT:
        return MountFull(f"{beginning}; free some space there or ask for more quota")
    if error.errno in _FORBIDDEN:
        user = os.geteuid()
        # Root may do anything, except where the server takes it for somebody else.
        squash = "export it with no_root_squash, " if user == 0 else ""
        return MountForbidden(
            f"{beginning} for user {user} of this container; {squash}{_as_its_owner(path)}, or chmod it for all"
        )
    return WorkspaceNotWritable(f"{beginning}; check the storage's server and the network to it")


def _as_its_owner(path: Path) -> str:
    """A remedy. Tells the owner and the mode of the path, or of the last folder on the way that can be looked at."""
    for known in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = known.stat()
            mode = stat.filemode(status.st_mode)
            return (
                f"run the container as user {status.st_uid}, who owns {known} ({mode}), or in group {status.st_gid} "
                "if that may (runAsUser, fsGroup)"
            )
    return "run the container as the owner of the folder (runAsUser, fsGroup)"


class Tail:
    """The growing files of one attempt. Polled: shared storage tells nobody when a file grows.

    A storage that fails for the moment, or a trial that removes its files or puts a link there, looks like a file that does not
    grow. A file that somebody cut is told apart by its size.
    """

    def __init__(self, folder: AttemptFolder, streams: tuple[Stream, ...]) -> None:
        self._folder = folder.path
        self._paths = {stream: folder.stream(stream) for stream in streams}
        self._descriptors: dict[Stream, int] = {}
        self._sizes = dict.fromkeys(streams, 0)

    def sizes(self, streams: Iterable[Stream] | None = None) -> dict[Stream, int]:
        """The sizes of these streams, or of all, at this moment, in bytes."""
        looked_at = tuple(self._paths if streams is None else streams)
        for stream in looked_at:
            try:
                self._sizes[stream] = os.fstat(self._descriptor(stream)).st_size
            except OSError:
                self._let_go(stream)
        return {stream: self._sizes[stream] for stream in looked_at}

    def read(self, stream: Stream, offset: int, size_bytes: int) -> bytes:
        """Bytes of a stream; fewer than asked for only if somebody cut the file, or it cannot be read now."""
        try:
            return os.pread(self._descriptor(stream), size_bytes, offset)
        except OSError:
            self._let_go(stream)
            return b""

    def cut_size(self, stream: Stream, promised: int) -> int | None:
        """The size of a stream's file that has fewer than the `promised` bytes; None if it has them, or cannot tell now."""
        try:
            size = os.fstat(self._descriptor(stream)).st_size
        except OSError:
            self._let_go(stream)
            return None
        return size if size < promised else None

    def last_text(self, stream: Stream, longest_bytes: int) -> str:
        """The end of a stream as text, from the beginning of a line where it can."""
        size = self.sizes((stream,))[stream]
        data = self.read(stream, max(size - longest_bytes, 0), longest_bytes)
        if size > longest_bytes and b"\n" in data[:-1]:
            data = data[data.index(b"\n") + 1 :]
        return data.decode(errors="replace").strip()

    def close(self) -> None:
        """Let go of the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, stream: Stream) -> int:
        descriptor = self._descriptors.get(stream)
        if descriptor is None:
            descriptor = open_inside(self._folder, self._paths[stream])
            self._descriptors[stream] = descriptor
        return descriptor

    def _let_go(self, stream: Stream) -> None:
        """The next look begins with a fresh descriptor: a stale one of NFS never recovers."""
        descriptor = self._descriptors.pop(stream, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
