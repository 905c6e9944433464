"""Unpacks an untrusted archive of an experiment. Sizes are measured during unpacking, because headers may lie.

bytes of the file, members, bytes unpacked    bounded by `ArchiveLimits`, which the user may lift
bytes of one header, sparse files             always refused: they use memory or disk that no limit counts
"""

from __future__ import annotations

import errno
import gzip
import io
import math
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from nni_manager.engine.code_snapshot import MAX_BYTES as MAX_CODE_BYTES
from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

# An extended header holds paths or an owner's name; the longest path of Linux has 4 KiB.
_MAX_HEADER_BYTES = 64 * 1024
# Errors that a member's name can cause, such as a folder in the place of a file.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits on the size of an archive.

    10,000 trials with 100 kB of logs each make one gigabyte. Compression by gzip reduces logs to a tenth or less, so even a
    small file may fill a disk. Both the packed and the unpacked size are limited.
    """

    archive_bytes: float = 1 * 2**30
    members: float = 200_000
    """10,000 trials with 20 files and folders each. Each member uses at least 4 KiB of the disk."""
    unpacked_bytes: float = 2 * 2**30
    code_bytes: float = MAX_CODE_BYTES + 64 * 2**20
    """Of the code folder: `save` packs at most `MAX_CODE_BYTES`; the rest is for headers."""

    def of_code(self) -> ArchiveLimits:
        """The limits for the nested archive of the code."""
        return ArchiveLimits(math.inf, self.members, self.code_bytes, self.code_bytes)


LIMITS = ArchiveLimits()
NO_LIMITS = ArchiveLimits(math.inf, math.inf, math.inf, math.inf)


class _CountedStream(io.RawIOBase):
    """The decompressed bytes of a tar file. Seeking beyond the limit raises.

    tarfile reads at most 16 KiB at a time, except for extended headers, so a larger read is a header.
    """

    def __init__(self, packed: gzip.GzipFile, refuse: Callable[[], UserError], most_bytes: float) -> None:
        self._packed, self.refuse, self._most_bytes = packed, refuse, most_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header has {size} bytes; the limit is {_MAX_HEADER_BYTES}")
        return self._packed.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence != os.SEEK_SET or offset > self._most_bytes:
            raise self.refuse()
        return self._packed.seek(offset)

    def tell(self) -> int:
        return self._packed.tell()


def unpack_experiment(
    path: Path, target: Path, files: set[str], folders: set[str], limits: ArchiveLimits
) -> None:
    """Unpack an archive with these files and with anything in these folders; errors as for `unpack`."""

    def check(member: tarfile.TarInfo) -> None:
        first, *rest = member.name.split("/")
        is_named = (first in files and not rest and member.isreg()) or (
            first in folders and (member.isdir() or (member.isreg() and rest))
        )
        if not is_named or posixpath.normpath(member.name) != member.name:
            raise ValueError(f"{member.name!r} does not belong to an experiment")

    unpack(path, target, check, limits, (0o700, 0o600), str(path))


def unpack_code(path: Path, target: Path, limits: ArchiveLimits, shown: str) -> None:
    """Unpack the archive of the code, which may also contain links in its folder; errors as for `unpack`."""
    unpack(path, target, CodeMembers(), limits.of_code(), (0o755, 0o644), shown)
    refuse_links_out(target)


def unpack(
    path: Path,
    target: Path,
    check: Callable[[tarfile.TarInfo], None],
    limits: ArchiveLimits,
    modes: tuple[int, int],
    shown: str,
) -> None:
    """Unpack the members that `check` accepts; `check` raises ValueError for an unexpected member.

    `modes`: permissions of folders and programs, and of other files. `shown`: the archive's name in messages.

    Raises:
        UserError: the archive exceeds the limits.
        ValueError, tarfile.TarError, OSError, EOFError, zlib.error: the file is not an archive that `save` wrote.
    """
    remedy = "if you trust its author, load it with --no-limits"

    def too_large(what: str) -> UserError:
        return UserError(f"cannot load {shown}: it {what}; {remedy}")

    size = path.stat().st_size
    if size > limits.archive_bytes:
        raise too_large(f"has {size} bytes; the limit for untrusted archives is {limits.archive_bytes}")

    def members() -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        with gzip.open(path, "rb") as packed:
            assert isinstance(packed, gzip.GzipFile)  # because it opens a path in binary mode
            stream = _CountedStream(
                packed,
                lambda: too_large(f"holds more than {limits.unpacked_bytes / 2**20:.0f} MiB once unpacked"),
                limits.unpacked_bytes,
            )
            with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Member) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all members, half a kilobyte each
                    if member.issparse():
                        raise ValueError(f"{member.name!r} is a sparse file")
                    if stream.tell() + member.size > limits.unpacked_bytes:
                        raise stream.refuse()  # before it fills the disk
                    yield archive, member

    # To create a file takes far longer than to count it.
    for count, _ in enumerate(members(), 1):
        if count > limits.members:
            raise too_large(f"has more than {limits.members} members")
    for archive, member in members():
        check(member)
        try:
            _extract(archive, member, target, modes)
        except OSError as error:
            if error.errno in _OF_NAMES:
                raise ValueError(f"cannot create {member.name!r}: {error.strerror}") from error
            raise


class _Member(tarfile.TarInfo):
    """A member that is no global header. tarfile keeps all global headers and iterates over them for each member."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Parse one header, as the base class does; raise ValueError for a global header."""
        member = super().frombuf(buf, encoding, errors)
        if member.type == tarfile.XGLTYPE:
            raise ValueError(f"{member.name!r} is a global header")
        return member


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, modes: tuple[int, int]) -> None:
    is_open = member.isdir() or member.mode & stat.S_IXUSR
    member.mode = modes[0] if is_open else modes[1]
    if hasattr(tarfile, "data_filter"):
        archive.extract(member, target, filter="data")
    else:  # Python 3.10 before 3.10.12, and 3.11 before 3.11.4
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        archive.extract(member, target)


def refuse_links_out(folder: Path) -> None:
    """Raise ValueError for a link that leads out of the folder through other links. Each link alone may look valid."""
    root = os.path.realpath(folder)
    for above, folders, files in os.walk(folder):
        for path in (os.path.join(above, each) for each in (*folders, *files)):
            if os.path.islink(path) and os.path.commonpath((root, os.path.realpath(path))) != root:
                raise ValueError(f"{os.path.relpath(path, folder)!r} of the code is a link out of the folder")


class CodeMembers:
    """Accepts files, folders, and links that stay inside the folder. Nothing is written through a link."""

    def __init__(self) -> None:
        self._links: set[str] = set()

    def __call__(self, member: tarfile.TarInfo) -> None:
        """Raise ValueError for anything else."""
        above = {posixpath.normpath(str(each)) for each in Path(member.name).parents}
        name = posixpath.normpath(member.name)
        if not (member.isreg() or member.isdir() or member.issym()) or not self._links.isdisjoint(
            {*above, name}
        ):
            raise ValueError(f"{member.name!r} of the code is neither file nor folder nor link")
        if _leads_out(member.name):
            raise ValueError(f"{member.name!r} of the code lies outside the folder")
        if member.issym():
            self._links.add(name)
            if posixpath.isabs(member.linkname) or _leads_out(
                posixpath.join(posixpath.dirname(member.name), member.linkname)
            ):
                raise ValueError(f"{member.name!r} of the code is a link out of the folder")


def _leads_out(path: str) -> bool:
    return posixpath.isabs(path) or posixpath.normpath(path).split("/")[0] == ".."
