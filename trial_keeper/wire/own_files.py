"""Opening what lies in a folder that others may write to: no link is followed out of it, and nothing is waited for."""

import errno
import os
import stat
from pathlib import Path


class NotOwnFile(OSError):
    """A link, a pipe or a folder stands where a file should be: none that a keeper or a manager made."""


def open_inside(folder: Path, path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `path`, which lies below `folder`. The way to the folder itself may hold links.

    Raises:
        NotOwnFile: it is none, or a link leads there.
        OSError: it cannot be opened.
        ValueError: the path does not lie below the folder.
    """
    *folders, name = path.relative_to(folder).parts
    if ".." in (*folders, name):
        raise ValueError(f"cannot open {path}: it leads out of {folder}; use a path without ..")
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in folders:
            outer = within
            within = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            os.close(outer)
        # O_NONBLOCK: a pipe is not waited for.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise NotOwnFile(error.errno, "it is a link or a pipe, or behind one", str(path)) from error
        raise
    finally:
        os.close(within)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOwnFile(errno.EINVAL, "it is no file", str(path))
    return descriptor
