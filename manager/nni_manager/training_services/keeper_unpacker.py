"""Unpacks the archive of the keeper's bundle that fits the Python that runs this code.

run.sh contains this file and runs it in containers, so it imports only the standard library. A Python that is too old for
it exits with 1, as one for which the bundle has no archive. One process checks and unpacks: on a busy node, each further process
delays the job by tens of milliseconds.
"""

import ctypes
import hashlib
import io
import os
import shutil
import sys
import tarfile
import tempfile
import zlib

_RAW = -15
"""The argument `wbits` of zlib.decompress for data without header and checksum."""
_HEADER, _CHECKSUM, _SIZE = 10, 4, 4
"""Bytes of gzip's format before and after the data, if it has no file name. Source: RFC 1952."""


def archive_name() -> str:
    """The name of the archive for this Python, by its tag in the names of wheels, and this machine.

    Raises:
        OSError, ValueError: the C library is not glibc, or a library is missing that grpcio's wheels need.
    """
    os.confstr("CS_GNU_LIBC_VERSION")
    ctypes.CDLL("libstdc++.so.6")
    major, minor = sys.version_info[:2]
    return f"{sys.implementation.name[:1]}p{major}{minor}{sys.abiflags}-{os.uname().machine}"


def unpack(archives: dict[str, tuple[str, str]], parents: list[str], damaged: int, no_room: int) -> None:
    """Unpack the archive, and print the folder with the keeper. The working directory is the workspace.

    `archives`: the path and the SHA-256 of each archive, by its name.
    The new folder is in the first of `parents` that is writable, has room and allows programs.
    Exits with 1 if no archive fits. If the archive is damaged or no folder can be used, it prints the archive's path and exits
    with `damaged` or `no_room`.
    """
    name = archive_name()
    if name not in archives:
        sys.exit(1)
    path, digest = archives[name]
    try:
        with open(path, "rb") as file:
            packed = file.read()
    except OSError:
        packed = b""
    if hashlib.sha256(packed).hexdigest() != digest:
        print(path)
        sys.exit(damaged)
    # In one call and into one buffer; tarfile would read small pieces, each copied. The digest makes gzip's own checksum
    # superfluous. Together that saves a quarter of the time.
    size = int.from_bytes(packed[-_SIZE:], "little")
    content = zlib.decompress(memoryview(packed)[_HEADER : -_CHECKSUM - _SIZE], _RAW, size)
    for parent in parents:
        try:
            folder = tempfile.mkdtemp(prefix="trial-keeper.", dir=parent)
        except OSError:
            continue
        if _extract(content, folder):
            print(folder)
            return
        shutil.rmtree(folder, ignore_errors=True)
    print(path)
    sys.exit(no_room)


def _extract(content: bytes, folder: str) -> bool:
    """Returns whether all was written and programs may run there."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder)  # noqa: S202 - its digest is one that the manager wrote into run.sh
    except OSError:
        return False
    return os.access(f"{folder}/trial-keeper", os.X_OK)
