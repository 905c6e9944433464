"""Finds this machine's mount of the storage that a cluster's containers use. The user mounts it; this module never does."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from nni_manager.errors import UserError

_MOUNTS = Path("/proc/self/mountinfo")
_NFS = ("nfs", "nfs4")


def folder_of_export(server: str, path: str) -> Path:
    """Returns this machine's folder for `path` on an NFS server: the mounted export or a folder below it.

    Raises:
        UserError: no mount covers it, or the export has no such folder.
    """
    found = export_in(_MOUNTS.read_text(), server, path)
    if found is None:
        raise UserError(
            f"cannot find a mount of {server}:{path} on this machine: the manager shares files with containers there; mount the "
            f"export, e.g. `sudo mount -t nfs {server}:{path} /mnt/nni`"
        )
    _check_folder(found, server, path)
    return found


def _check_folder(folder: Path, server: str, path: str) -> None:
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        # Kubernetes mounts no folder that does not exist.
        exists = next(each for each in folder.parents if each.exists())
        raise UserError(
            f"cannot find the folder {path} on NFS server {server}: its export is mounted here, and {exists} has no "
            f"{folder.relative_to(exists)}; create it with `mkdir -p {folder}`, or correct the path"
        ) from error
    except OSError:
        pass  # who may not look into the export gets the error of the first access


def export_in(mountinfo: str, server: str, path: str) -> Path | None:
    """Returns the export's folder according to a mount table. The last matching mount counts: it hides earlier ones.

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
    """Decode the table's octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
