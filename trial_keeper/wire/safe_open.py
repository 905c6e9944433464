"""Opens files in a folder that others may write to: follows no symbolic link out of it, and never blocks on a pipe."""

import errno
import os
import stat
from pathlib import Path


class UnsafePath(OSError):
    """A link, a pipe, a folder or another user's file has replaced a file of a keeper or a manager."""


def open_beneath(folder: Path, path: Path, flags: int = os.O_RDONLY, *, owned_as: Path | None = None) -> int:
    """Open the regular file `path` below `folder`; returns its descriptor. The path of the folder itself may contain links.

    `owned_as`: a directory on the way from `folder` to `path`; the file must have its owner.

    Raises:
        UnsafePath: the path is not a regular file, contains a link, or belongs to another user.
        OSError: the file cannot be opened.
        ValueError: the path is not below the folder.
    """
    *folders, name = path.relative_to(folder).parts
    if ".." in (*folders, name):
        raise ValueError(f"cannot open {path}: it is outside {folder}; use a path without ..")
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    owner: int | None = None
    depth_of_owner = -1 if owned_as is None else len(owned_as.relative_to(folder).parts)
    try:
        for depth, each in enumerate(folders, 1):
            outer = within
            within = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            os.close(outer)
            if depth == depth_of_owner:
                owner = os.fstat(within).st_uid
        # O_NONBLOCK: opening a pipe must not block.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise UnsafePath(error.errno, "its path contains a link or a pipe", str(path)) from error
        raise
    finally:
        os.close(within)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise UnsafePath(errno.EINVAL, "it is not a regular file", str(path))
    if owner is not None and found.st_uid != owner:
        os.close(descriptor)
        raise UnsafePath(
            errno.EPERM, f"its owner is user {found.st_uid}, but its attempt's is user {owner}", str(path)
        )
    return descriptor
