"""Packs the training code into one file in the workspace, for jobs that cannot access the code folder itself.

The snapshot contains files, folders, and links that stay inside the code folder. A link that leads outside is replaced by its
target, because in a container that path is missing or means something else. Sockets, pipes and devices are left out.

The same content gives the same bytes: members are in the order of their names, without owners and times.
"""

import contextlib
import gzip
import hashlib
import os
import posixpath
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from nni_manager.config.code_folder import CodeFolder, CodeUnusable, Entry
from nni_manager.config.ignore_file import IGNORE_FILE
from nni_manager.errors import RetryableError
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.workspace import Workspace

# Source: the limits of NNI v2.10 for a code folder.
MAX_FILES = 2000
MAX_BYTES = 300 * 2**20
# 1980: some archive formats, such as wheels, allow no earlier time for the files.
_TIME_S = 315_532_800
_TRIES = 3
_IN_MEMORY_BYTES = 8 * 2**20
_READ_BYTES = 2**20
# The number of paths that a message names.
_SHOWN = 3
# A message names a subfolder instead of its folder if it contains this share of it.
_NEARLY_ALL = 0.9
_DIGEST_LETTERS = 16
_TEMPORARY = ".code.tar.gz.new"


class SnapshotNotWritten(RetryableError):
    """cannot write the code snapshot; check the shared storage"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in the workspace: its file name and contents. `left_out`: paths that are not files."""

    name: str
    files: int
    size_bytes: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.files} files, {_mib(self.size_bytes)} in {self.name}"


def take_snapshot(
    code_dir: Path, workspace: Workspace, secret_files: tuple[Path, ...] = (), excluded: tuple[Path, ...] = ()
) -> Snapshot:
    """Pack the code folder into the workspace, unless a snapshot with this content exists.

    The snapshot excludes `secret_files`, because any reader of the shared storage can read it, and the `excluded` folders.

    If a file changes during packing, a consistent state is packed if possible.

    Raises:
        CodeUnusable: the folder is too large, cannot be read, or contains an unusable link or .nniignore.
        SnapshotNotWritten: the workspace cannot be written.
    """
    entries, files, size_bytes, left_out = _packable(code_dir, (workspace.root, *excluded), secret_files)
    path = workspace.code_snapshot(_feed(code_dir, entries, lambda *_: None))
    if not path.is_file():
        path = _write(code_dir, entries, workspace)
    return Snapshot(path.name, files, size_bytes, left_out)


def digest_of(code_dir: Path, excluded: Path, secret_files: tuple[Path, ...] = ()) -> str:
    """The digest in the name of a snapshot of the code folder without the `excluded` folder; writes nothing.

    Raises:
        CodeUnusable: as for `take_snapshot`.
    """
    entries, _, _, _ = _packable(code_dir, (excluded,), secret_files)
    return _feed(code_dir, entries, lambda *_: None)


def size_of(code_dir: Path, storage: Path, secret_files: tuple[Path, ...] = ()) -> str:
    """The size of a snapshot of the code folder, as text. `storage`: a folder of workspaces, which are never packed.

    Raises:
        CodeUnusable: as for `take_snapshot`.
    """
    _, files, size_bytes, left_out = _packable(code_dir, (storage,), secret_files)
    without = f", without {len(left_out)} sockets, pipes or devices" if left_out else ""
    return f"{files} files, {_mib(size_bytes)}{without}"


def _packable(
    code_dir: Path, excluded: tuple[Path, ...], secret_files: tuple[Path, ...]
) -> tuple[list[Entry], int, int, tuple[str, ...]]:
    """The members of a snapshot, the number of files, their bytes, and the left-out paths that are not files."""
    scan = CodeFolder(code_dir, excluded, secret_files)
    entries = scan.entries()
    files = sum(entry.kind != tarfile.DIRTYPE for entry in entries)
    size_bytes = sum(entry.size_bytes for entry in entries)
    if files > MAX_FILES or size_bytes > MAX_BYTES or scan.is_cut_short:
        raise CodeUnusable(_too_much(code_dir, entries, files, size_bytes, scan.is_cut_short))
    return entries, files, size_bytes, tuple(scan.left_out)


# ---- packing


def _write(code_dir: Path, entries: list[Entry], workspace: Workspace) -> Path:
    temporary = workspace.root / _TEMPORARY
    try:
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), 0o644)
                with (
                    gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed,
                    tarfile.open(
                        fileobj=packed,
                        mode="w",
                        format=tarfile.GNU_FORMAT,
                        encoding="utf-8",
                        errors="surrogateescape",
                    ) as archive,
                ):
                    digest = _feed(code_dir, entries, archive.addfile)
                file.flush()
                # A partial snapshot under the final name would fail every trial, now and after a resume.
                os.fsync(file.fileno())
            path = workspace.code_snapshot(digest)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotNotWritten(
            f"cannot write the code snapshot in {workspace.root}: {error.strerror}; mount the shared storage read-write here, "
            "and free some space there"
        ) from error
    return path


def _feed(
    code_dir: Path, entries: list[Entry], add: Callable[[tarfile.TarInfo, IO[bytes] | None], None]
) -> str:
    """Pass every member to `add`; returns the digest of all."""
    digest = hashlib.sha256(b"1")  # the version of this digest
    left_bytes = MAX_BYTES
    for entry in entries:
        content = None
        if entry.kind == tarfile.REGTYPE:
            content = _consistent_copy(code_dir, entry, left_bytes)
            if content is None:
                continue
        with content or contextlib.nullcontext():
            member = tarfile.TarInfo(entry.path)
            member.type, member.mode, member.linkname, member.mtime = (
                entry.kind,
                entry.mode,
                entry.target,
                _TIME_S,
            )
            member.size = 0 if content is None else content.seek(0, os.SEEK_END)
            left_bytes -= member.size
            names = b"\0".join(os.fsencode(name) for name in (entry.path, entry.target))
            digest.update(b"%s %o %d %d\0%s" % (entry.kind, entry.mode, len(names), member.size, names))
            if content is not None:
                content.seek(0)
                for piece in iter(partial(content.read, _READ_BYTES), b""):
                    digest.update(piece)
                content.seek(0)
            add(member, content)
    return digest.hexdigest()[:_DIGEST_LETTERS]


def _consistent_copy(code_dir: Path, entry: Entry, most_bytes: int) -> IO[bytes] | None:
    """A private copy of the file's content; None if the file no longer exists."""
    with contextlib.ExitStack() as stack:
        copy: IO[bytes] = stack.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES))
        try:
            # O_NONBLOCK: if a pipe has replaced the file, open does not wait for a writer.
            file = stack.enter_context(
                open(os.open(entry.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CodeUnusable(
                f"cannot read {entry.source}: {error.strerror}; make it readable for your user, or name it in {IGNORE_FILE}"
            ) from error
        try:
            for _ in range(_TRIES):
                before = os.fstat(file.fileno())
                if before.st_size > most_bytes:
                    raise CodeUnusable(
                        f"cannot pack codeDir {code_dir}: {entry.path!r} grows while it is read; name it in {IGNORE_FILE} there"
                    )
                _copy(file, copy, before.st_size)
                after = os.fstat(file.fileno())
                if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
                    break
        except OSError as error:
            raise CodeUnusable(
                f"cannot copy {entry.source} to a temporary file: {error.strerror}; check its storage, free space in the "
                f"temporary folder, which TMPDIR names, or name the file in {IGNORE_FILE}"
            ) from error
        file.close()
        stack.pop_all()
        return copy


def _copy(file: IO[bytes], copy: IO[bytes], size_bytes: int) -> None:
    file.seek(0)
    copy.seek(0)
    copy.truncate()
    while size_bytes > 0 and (data := file.read(min(size_bytes, _READ_BYTES))):
        copy.write(data)
        size_bytes -= len(data)


# ---- messages


def _too_much(code_dir: Path, entries: list[Entry], files: int, size_bytes: int, is_cut_short: bool) -> str:
    at_least = "more than " if is_cut_short else ""
    by_size = size_bytes > MAX_BYTES
    return (
        f"cannot pack codeDir {code_dir}: it holds {at_least}{files} files of {_mib(size_bytes)}; the limits are "
        f"{MAX_FILES} files and {_mib(MAX_BYTES)}; most is in {_largest(entries, by_size=by_size)}; name what trials do not "
        f"need in {IGNORE_FILE} there, or put data on the shared storage"
    )


def _largest(entries: list[Entry], *, by_size: bool) -> str:
    """The few paths with most of the content, each with its files and size."""
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    children: dict[str, set[str]] = {}
    for entry in entries:
        if entry.kind == tarfile.DIRTYPE:
            continue
        path = entry.path
        while path:
            files[path] += 1
            sizes[path] += entry.size_bytes
            parent = posixpath.dirname(path)
            children.setdefault(parent, set()).add(path)
            path = parent
    weights = sizes if by_size else files

    def heaviest(folder: str) -> list[str]:
        return sorted(children.get(folder, ()), key=lambda path: (-weights[path], path))

    found = []
    for path in heaviest("")[:_SHOWN]:
        while (below := heaviest(path)) and weights[below[0]] >= _NEARLY_ALL * weights[path]:
            path = below[0]  # noqa: PLW2901 - nearly the same content, named more precisely
        slash = "/" if path in children else ""
        found.append(f"{path!r}{slash} ({files[path]} files, {_mib(sizes[path])})")
    return ", ".join(found)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
