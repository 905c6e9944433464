"""Opens and reads the files of a workspace, to which other users may write, and the files that a person names.

The only way to a file of a workspace: it follows no symbolic link below it, never blocks on a pipe, a device or a lease, and
reads a bounded number of bytes.
"""

import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

MAX_DOCUMENT_BYTES = 64 << 20
"""The bound of documents that the manager writes. Parameters and commands need a few KiB; the margin is for unusual ones."""
# An id names a folder, so path separators and ".." are excluded.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,239}")
# One read for nearly every document.
_READ_BYTES = 16 * 1024
# The caller of the process has opened what these paths name.
_GIVEN_DESCRIPTORS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
# ELOOP, ENOTDIR: a link; ENXIO: a pipe without a reader, or a socket; EAGAIN: the file's owner holds a lease on it.
_REPLACED = {
    errno.ELOOP: "its path contains a link or a pipe",
    errno.ENOTDIR: "its path contains a link or a pipe",
    errno.ENXIO: "its path contains a link or a pipe",
    errno.EAGAIN: "its owner blocks reading it with a lease",
}


class UnsafePath(OSError):
    """A link, a pipe, a folder, another user's file or an oversized one has replaced a file of a keeper or a manager."""


class OthersMayWrite(UnsafePath):
    """Users other than the owner can write to a file or a folder, so its content proves nothing."""


def is_safe_name(name: str) -> bool:
    """True if the name can be a single path component in a workspace."""
    return _SAFE_NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """Return the name unchanged.

    Raises:
        ValueError: the name could escape its parent folder.
    """
    if not is_safe_name(name):
        raise ValueError(
            f"cannot use {name!r} as the name of a folder; use letters, digits, '.', '_' and '-' only"
        )
    return name


class Content(NamedTuple):
    """A whole file and the uid of its owner."""

    data: bytes
    uid: int


def open_beneath(
    folder: Path,
    path: Path,
    flags: int = os.O_RDONLY,
    *,
    owned_as: Path | None = None,
    may_be_shared: bool = False,
) -> int:
    """Open the regular file `path` below `folder`; returns its descriptor. The path of the folder itself may contain links.

    `owned_as`: a directory on the way from `folder` to `path`. The file must have its owner, and no other user may be able to
    write to the file or replace it (see `other_writers`). `may_be_shared`: others may write, as in a log that a trial opened to
    them. A new file is readable for all and writable for its owner only, less the umask.

    Raises:
        OthersMayWrite: other users can write to the file, or to a folder on the way to it.
        UnsafePath: the path is not a regular file, contains a link, or belongs to another user.
        OSError: the file cannot be opened; `filename` is the whole path.
        ValueError: the path is not below the folder.
    """
    *folders, name = path.relative_to(folder).parts
    if ".." in (*folders, name):
        raise ValueError(f"cannot open {path}: it is outside {folder}; use a path without ..")
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    root = owner = None
    depth_of_owner = -1 if owned_as is None else len(owned_as.relative_to(folder).parts)
    try:
        if owned_as is not None:
            root = os.fstat(within)
            owner = root.st_uid
        for depth, each in enumerate(folders, 1):
            outer = within
            within = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            os.close(outer)
            if root is not None:
                found = os.fstat(within)
                owner = found.st_uid if depth <= depth_of_owner else owner
                if not may_be_shared:
                    _check_writers(found, root, folder.joinpath(*folders[:depth]))
        # O_NONBLOCK: opening a pipe must not block.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=within)
    except UnsafePath:
        raise
    except OSError as error:
        if error.errno in _REPLACED:
            raise UnsafePath(error.errno, _REPLACED[error.errno], str(path)) from error
        error.filename = str(path)  # the whole path instead of its last component
        raise
    finally:
        os.close(within)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafePath(errno.EINVAL, "it is not a regular file", str(path))
        if root is not None and found.st_uid != owner:
            raise UnsafePath(
                errno.EPERM, f"its owner is user {found.st_uid}, but its attempt's is user {owner}", str(path)
            )
        if root is not None and not may_be_shared:
            _check_writers(found, root, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_append(folder: Path, path: Path) -> int:
    """Open the file `path` below `folder` for a process that appends to it, as `open_beneath` does; returns its descriptor."""
    descriptor = open_beneath(folder, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.set_blocking(descriptor, True)  # a trial inherits the flags
    return descriptor


def read_beneath(folder: Path, path: Path, max_bytes: int, *, owned_as: Path | None = None) -> Content:
    """Read a whole file below `folder`. For the other arguments and errors see `open_beneath`.

    Raises:
        UnsafePath: also if the file has more than `max_bytes`.
    """
    return _read_and_close(open_beneath(folder, path, owned_as=owned_as), path, max_bytes)


def read_named(path: Path, max_bytes: int) -> bytes:
    """Read a whole file that a person names, whose path may contain links.

    stdin and the pipe of a shell's `<(command)` are read to their end. Any other pipe or device might block without end.

    Raises:
        UnsafePath: it is not a regular file, or it has more than `max_bytes`.
        OSError: the file cannot be read; `filename` is the path.
    """
    # O_NONBLOCK: opening a pipe must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if str(path).startswith(_GIVEN_DESCRIPTORS) and not stat.S_ISDIR(mode):
        os.set_blocking(descriptor, True)
    elif not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise UnsafePath(errno.EINVAL, "it is not a regular file", str(path))
    return _read_and_close(descriptor, path, max_bytes).data


def _read_and_close(descriptor: int, path: Path, max_bytes: int) -> Content:
    try:
        found = os.fstat(descriptor)
        pieces, size, read_bytes = [], found.st_size, 0
        # The bound holds also if the file grows meanwhile.
        while size <= max_bytes and (piece := os.read(descriptor, min(_READ_BYTES, max_bytes + 1))):
            pieces.append(piece)
            read_bytes += len(piece)
            size = max(size, read_bytes)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    if size > max_bytes:
        raise UnsafePath(errno.EFBIG, f"it has {size} bytes, more than the limit of {max_bytes}", str(path))
    return Content(b"".join(pieces), found.st_uid)


def other_writers(found: os.stat_result, root: os.stat_result) -> str:
    """Who besides its owner can write to a file or a folder: "its group", "all users", or "" for nobody.

    Nobody counts if other users cannot enter `root`, the folder above. Users who can replace the entries of `root` do not count
    either: closing what is inside would not keep them out. Storage that keeps no modes shows such a root. In a sticky folder
    others can only add entries.
    """
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return ""
    if not root.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return ""
    replaces = 0 if root.st_mode & stat.S_ISVTX else root.st_mode
    if replaces & stat.S_IWOTH:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "all users"
    if found.st_mode & stat.S_IWGRP and not (replaces & stat.S_IWGRP and root.st_gid == found.st_gid):
        return "its group"
    return ""


def _check_writers(found: os.stat_result, root: os.stat_result, path: Path) -> None:
    if writers := other_writers(found, root):
        mode = stat.S_IMODE(found.st_mode)
        what = "folder" if stat.S_ISDIR(found.st_mode) else "file"
        raise OthersMayWrite(
            errno.EPERM,
            f"{writers} can write to this {what} (mode {mode:04o}); run `chmod go-w` on it",
            str(path),
        )
