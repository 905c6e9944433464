"""The training code as one file in the workspace, for jobs that cannot see the code folder itself.

What is packed: files, folders, and links that stay inside the code folder. A link that leads outside is replaced by what it leads
to, because the same path means something else in a container, or nothing. Sockets, pipes and devices are left out.

The same content gives the same bytes: members in the order of their names, no owners, no times.
"""

import contextlib
import gzip
import hashlib
import os
import posixpath
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nni_manager.config.code_folder import CodeFolder, CodeUnusable, Entry
from nni_manager.config.ignore_file import IGNORE_FILE
from nni_manager.errors import TryAgain
from trial_keeper.wire.workspace import Workspace

# Source: NNI v2.10, which allows a code folder as much.
MOST_FILES = 2000
MOST_BYTES = 300 * 2**20
# Archives that know only 1980 and later, such as wheels, can be made of the files.
_TIME_S = 315_532_800
_TRIES = 3
_IN_MEMORY_BYTES = 8 * 2**20
_READ_BYTES = 2**20
# Paths that a message names.
_SHOWN = 3
# A folder is named by its subfolder when nearly all of it lies there.
_NEARLY_ALL = 0.9
_DIGEST_LETTERS = 16
_TEMPORARY = ".code.tar.gz.new"


class SnapshotNotWritten(TryAgain):
    """cannot write the code snapshot; see to the shared storage"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in the workspace: its file's name, and what it holds. `left_out` are paths that are no files."""

    name: str
    files: int
    size_bytes: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.files} files, {_mib(self.size_bytes)} in {self.name}"


def take_snapshot(
    code_dir: Path, workspace: Workspace, secret_files: tuple[Path, ...] = (), excluded: tuple[Path, ...] = ()
) -> Snapshot:
    """Pack the code folder into the workspace, unless a snapshot of this content is there already.

    Whoever may read the shared storage may read the snapshot, so `secret_files` are not in it; nor are the `excluded` folders.

    A file that changes meanwhile is packed as it is at some moment, or, when it never stands still, as it is read.

    Raises:
        CodeUnusable: it is too large, cannot be read, or a link or .nniignore in it cannot be used.
        SnapshotNotWritten: the workspace cannot be written.
    """
    entries, files, size_bytes, left_out = _packable(code_dir, (workspace.root, *excluded), secret_files)
    path = workspace.code_snapshot(_feed(code_dir, entries, lambda *_: None))
    if not path.is_file():
        path = _write(code_dir, entries, workspace)
    return Snapshot(path.name, files, size_bytes, left_out)


def size_of(code_dir: Path, storage: Path, secret_files: tuple[Path, ...] = ()) -> str:
    """What a snapshot of the code folder would hold, in words. `storage` holds workspaces, which are never packed.

    Raises:
        CodeUnusable: as for `take_snapshot`.
    """
    _, files, size_bytes, left_out = _packable(code_dir, (storage,), secret_files)
    without = f", without {len(left_out)} that are no files" if left_out else ""
    return f"{files} files, {_mib(size_bytes)}{without}"


def _packable(
    code_dir: Path, excluded: tuple[Path, ...], secret_files: tuple[Path, ...]
) -> tuple[list[Entry], int, int, tuple[str, ...]]:
    """The members of a snapshot, how many of them are files, their bytes, and what is left out because it is no file."""
    scan = CodeFolder(code_dir, excluded, secret_files)
    entries = scan.entries()
    files = sum(entry.kind != tarfile.DIRTYPE for entry in entries)
    size_bytes = sum(entry.size_bytes for entry in entries)
    if files > MOST_FILES or size_bytes > MOST_BYTES or scan.is_cut_short:
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
                # Half a snapshot under the whole one's name would fail every trial, now and after a resume.
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
    """Give every member to `add`; the digest of all."""
    digest = hashlib.sha256(b"1")  # of this way to count
    left_bytes = MOST_BYTES
    for entry in entries:
        content = None
        if entry.kind == tarfile.REGTYPE:
            content = _steady(code_dir, entry, left_bytes)
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
                for piece in _pieces(content):
                    digest.update(piece)
                content.seek(0)
            add(member, content)
    return digest.hexdigest()[:_DIGEST_LETTERS]


def _steady(code_dir: Path, entry: Entry, most_bytes: int) -> IO[bytes] | None:
    """The file's content in a copy that nobody changes; None if it is gone."""
    with contextlib.ExitStack() as stack:
        copy: IO[bytes] = stack.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES))
        try:
            # Should a pipe have taken its place, nobody waits for a writer.
            file = stack.enter_context(
                open(os.open(entry.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CodeUnusable(
                f"cannot read {entry.source}: {error.strerror}; give yourself the right to read, or name it in {IGNORE_FILE}"
            ) from error
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


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    content.seek(0)
    return iter(lambda: content.read(_READ_BYTES), b"")


# ---- words


def _too_much(code_dir: Path, entries: list[Entry], files: int, size_bytes: int, is_cut_short: bool) -> str:
    at_least = "more than " if is_cut_short else ""
    by_size = size_bytes > MOST_BYTES
    return (
        f"cannot pack codeDir {code_dir}: it holds {at_least}{files} files of {_mib(size_bytes)}, and {MOST_FILES} files of "
        f"{_mib(MOST_BYTES)} is the most; the most is in {_largest(entries, by_size=by_size)}; name what trials do not need in "
        f"{IGNORE_FILE} there, or put data on the shared storage"
    )


def _largest(entries: list[Entry], *, by_size: bool) -> str:
    """The few paths that most of it lies in, each with what it holds."""
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
            path = below[0]  # noqa: PLW2901 - the same share, named more precisely
        slash = "/" if path in children else ""
        found.append(f"{path!r}{slash} ({files[path]} files, {_mib(sizes[path])})")
    return ", ".join(found)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
