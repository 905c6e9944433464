"""Where this machine has the storage that a cluster's containers mount. Nothing is mounted here: that is for the user to do."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from nni_manager.errors import UserMistake

_MOUNTS = Path("/proc/self/mountinfo")
_NFS = ("nfs", "nfs4")


class NotMounted(UserMistake):
    """cannot find the shared storage on this machine; mount it"""


def folder_of_export(server: str, path: str) -> Path:
    """The folder of this machine that is the export of an NFS server, or a folder below it.

    Raises:
        NotMounted: there is none.
    """
    found = export_in(_MOUNTS.read_text(), server, path)
    if found is None:
        raise NotMounted(
            f"cannot find {server}:{path} on this machine: the manager writes there what containers read; mount it, e.g. "
            f"`sudo mount -t nfs {server}:{path} /mnt/nni`"
        )
    return found


def export_in(mountinfo: str, server: str, path: str) -> Path | None:
    """The folder that is the export according to a table of mounts; of several the last, which hides the others.

    Source: proc(5), /proc/pid/mountinfo.
    """
    wanted, found = PurePosixPath(path), None
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        kind, *rest = after.split()
        if not dash or kind not in _NFS or not rest:
            continue
        host, _, exported = _plain(rest[0]).partition(":/")
        _, _, _, root, folder, *_ = map(_plain, before.split())
        seen = PurePosixPath("/", exported, root.lstrip("/"))
        if host.strip("[]") == server.strip("[]") and wanted.is_relative_to(seen):
            found = Path(folder, wanted.relative_to(seen))
    return found


def _plain(text: str) -> str:
    """Without the table's escapes of blanks."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
