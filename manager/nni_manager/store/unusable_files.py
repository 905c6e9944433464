"""Recognizes state files that must not be opened: a pipe blocks its reader, and a device may have no end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def why_no_folder(path: Path, remedy: str) -> str:
    """Why `path` is not a folder, with a remedy for what is there; empty: it is one, or it is missing."""
    if path.is_dir() or not os.path.lexists(path):
        return ""
    return f"cannot use {path}: it is not a folder; {remedy}"


def why_unusable(path: Path, remedy: str, access: int = os.R_OK) -> str:
    """Why the file `path` cannot be opened, with a remedy; empty: it can, or it is missing.

    `remedy` is for something else in the file's place; `access`: the rights that this user needs, as for `os.access`.
    """
    for _ in range(2):  # SQLite may remove a file between the two calls
        try:
            mode = path.stat().st_mode
        except OSError:  # it is missing, or its folder is closed, which the program that opens it reports
            return ""
        if not stat.S_ISREG(mode):
            return f"cannot use {path}: it is a {_KINDS[stat.S_IFMT(mode)]}, not a file; {remedy}"
        if os.access(path, access, effective_ids=True):
            return ""
    return f"cannot open {path}: this user has no permission for it; run `chmod u+rw {path}`, or ask its owner to open it"


def why_unusable_database(path: Path, remedy: str) -> str:
    """Like `why_unusable`, for a SQLite database with its log and its index. `remedy` is for the database's own place."""
    files = {"": remedy, "-wal": "remove it", "-shm": "remove it"}
    reasons = (why_unusable(Path(f"{path}{suffix}"), each) for suffix, each in files.items())
    return next(filter(None, reasons), "")
