"""A folder as clients of network storage see it: one FUSE mount process per client.

    far_storage.py FOLDER MOUNTPOINT FAULTS

FAULTS is a file with one line of JSON, which is read at every call. `{"slow_s": 0.1}` delays each call by 0.1 s.
With `{"stale_s": 3}`, attributes and missing names are returned in a state of up to three seconds ago. `{"error": "ESTALE"}`
fails each call. As with NFS, an append writes at the end of file that this client has cached.

Source: what an NFS client may cache, nfs(5), "Data and metadata coherence".
"""

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy

_OF_STAT = ("atime", "ctime", "mtime")
_OF_STATVFS = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "flag", "frsize", "namemax")


class FarStorage(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, folder: str, faults: Path) -> None:
        self._folder = folder
        self._faults = faults
        self._seen: dict[str, tuple[float, dict[str, int] | int]] = {}
        """The cached answer for each name, and its time: attributes, or an error number."""
        self._changes: dict[str, int] = {}
        """The number of this client's own changes of each name, which it always sees."""
        self._lock = threading.Lock()

    def _meet(self) -> dict[str, Any]:
        """Apply the current faults, and return them."""
        try:
            faults: dict[str, Any] = json.loads(self._faults.read_bytes())
        except FileNotFoundError:
            return {}
        if "slow_s" in faults:
            time.sleep(faults["slow_s"])
        if "error" in faults:
            raise mfusepy.FuseOSError(getattr(errno, faults["error"]))
        return faults

    def _there(self, path: str) -> str:
        return self._folder + path

    def _changed(self, path: str) -> None:
        # An NFS client sees its own changes immediately. So this client forgets the attributes of a path once it has
        # changed the file there.
        with self._lock:
            self._seen.pop(path, None)
            self._changes[path] = self._changes.get(path, 0) + 1

    # ---- attributes and folders

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        stale_s = self._meet().get("stale_s", 0.0)
        with self._lock:
            seen_at_s, seen = self._seen.get(path, (0.0, 0))
            changes = self._changes.get(path, 0)
        if time.monotonic() - seen_at_s < stale_s:
            return _told(seen)
        try:
            status = os.fstat(fh) if fh is not None else os.lstat(self._there(path))
        except OSError as error:
            seen = error.errno or errno.EIO
        else:
            names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
            seen = {f"st_{name}": getattr(status, f"st_{name}") for name in names}
            seen |= {f"st_{name}": getattr(status, f"st_{name}_ns") for name in _OF_STAT}
        with self._lock:
            if self._changes.get(path, 0) == changes:
                self._seen[path] = time.monotonic(), seen
        return _told(seen)

    def readdir(self, path: str, _fh: int) -> list[str]:
        self._meet()
        return [".", "..", *os.listdir(self._there(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._there(path))

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._there(path))
        return {f"f_{name}": getattr(status, f"f_{name}") for name in _OF_STATVFS}

    # ---- files

    def open(self, path: str, flags: int) -> int:
        self._meet()
        return os.open(self._there(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, _fi: Any = None) -> int:
        self._meet()
        try:
            return os.open(self._there(path), os.O_RDWR | os.O_CREAT, mode)
        finally:
            self._changed(path)

    def read(self, _path: str, size: int, offset: int, fh: int) -> bytes:
        self._meet()
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._meet()
        try:
            return os.pwrite(fh, data, offset)
        finally:
            self._changed(path)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._meet()
        os.truncate(self._there(path) if fh is None else fh, length)
        self._changed(path)
        return 0

    def fsync(self, _path: str, _datasync: int, fh: int) -> int:
        self._meet()
        os.fsync(fh)
        return 0

    def flush(self, _path: str, _fh: int) -> int:
        return 0

    def release(self, _path: str, fh: int) -> int:
        os.close(fh)
        return 0

    # ---- names

    def _do(self, change: Callable[..., None], *paths: str, **options: Any) -> int:
        self._meet()
        change(*map(self._there, paths), **options)
        for path in paths:
            self._changed(path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        return self._do(os.mkdir, path, mode=mode)

    def rmdir(self, path: str) -> int:
        return self._do(os.rmdir, path)

    def unlink(self, path: str) -> int:
        return self._do(os.unlink, path)

    def rename(self, old: str, new: str) -> int:
        return self._do(os.replace, old, new)

    def symlink(self, target: str, source: str) -> int:
        self._meet()
        os.symlink(source, self._there(target))
        self._changed(target)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        return self._do(os.chmod, path, mode=mode)

    def chown(self, path: str, uid: int, gid: int) -> int:
        return self._do(os.chown, path, uid=uid, gid=gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return self._do(os.utime, path, ns=times)


def _told(seen: dict[str, int] | int) -> dict[str, int]:
    if isinstance(seen, int):
        raise mfusepy.FuseOSError(seen)
    return seen


def main(folder: str, mountpoint: str, faults: str) -> None:
    """Serve until the folder is unmounted."""
    # The kernel's caches are off, because this program itself simulates stale attributes, and a fault may start at any time.
    mfusepy.FUSE(
        FarStorage(folder, Path(faults)),
        mountpoint,
        foreground=True,
        nothreads=False,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        direct_io=False,
        fsname="far-storage",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
