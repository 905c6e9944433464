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
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nni_manager.engine.ignore_file import IGNORE_FILE, IgnoreRules, is_left_out
from nni_manager.errors import TryAgain, UserMistake
from trial_keeper.wire.workspace import Workspace

# Source: NNI v2.10, which allows a code folder as much.
MOST_FILES = 2000
MOST_BYTES = 300 * 2**20
# A code folder that is somebody's home is not looked at to its end.
_MOST_LOOKED_AT = 100_000
# Archives that know only 1980 and later, such as wheels, can be made of the files.
_TIME_S = 315_532_800
_TRIES = 3
_IN_MEMORY_BYTES = 8 * 2**20
_READ_BYTES = 2**20
_SHOWN = 3
# A folder is named by its subfolder when nearly all of it lies there.
_NEARLY_ALL = 0.9
_DIGEST_LETTERS = 16
_TEMPORARY = ".code.tar.gz.new"


class CodeUnusable(UserMistake):
    """cannot pack codeDir; name what trials do not need in a file .nniignore there"""


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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member to be. `path` is relative with /, `source` is where its content is read."""

    path: str
    source: str
    kind: bytes
    mode: int
    size_bytes: int = 0
    target: str = ""


def take_snapshot(code_dir: Path, workspace: Workspace, secret_files: tuple[Path, ...] = ()) -> Snapshot:
    """Pack the code folder into the workspace, unless a snapshot of this content is there already.

    Whoever may read the shared storage may read the snapshot, so `secret_files` are not in it.

    A file that changes meanwhile is packed as it is at some moment, or, when it never stands still, as it is read.

    Raises:
        CodeUnusable: it is too large, cannot be read, or a link or .nniignore in it cannot be used.
        SnapshotNotWritten: the workspace cannot be written.
    """
    entries, files, size_bytes, left_out = _packable(code_dir, workspace.root, secret_files)
    path = workspace.code_snapshot(_feed(code_dir, entries, lambda *_: None))
    if not path.is_file():
        path = _write(code_dir, entries, workspace)
    return Snapshot(path.name, files, size_bytes, left_out)


def size_of(code_dir: Path, storage: Path, secret_files: tuple[Path, ...] = ()) -> str:
    """What a snapshot of the code folder would hold, in words. `storage` holds workspaces, which are never packed.

    Raises:
        CodeUnusable: as for `take_snapshot`.
    """
    _, files, size_bytes, left_out = _packable(code_dir, storage, secret_files)
    without = f", without {len(left_out)} that are no files" if left_out else ""
    return f"{files} files, {_mib(size_bytes)}{without}"


def _packable(
    code_dir: Path, workspace_root: Path, secret_files: tuple[Path, ...]
) -> tuple[list[_Entry], int, int, tuple[str, ...]]:
    """The members of a snapshot, how many of them are files, their bytes, and what is left out because it is no file."""
    scan = _Scan(code_dir, workspace_root, secret_files)
    entries = scan.entries()
    files = sum(entry.kind != tarfile.DIRTYPE for entry in entries)
    size_bytes = sum(entry.size_bytes for entry in entries)
    if files > MOST_FILES or size_bytes > MOST_BYTES or scan.is_cut_short:
        raise CodeUnusable(_too_much(code_dir, entries, files, size_bytes, scan.is_cut_short))
    return entries, files, size_bytes, tuple(scan.left_out)


# ---- what there is


class _Scan:
    """Walks a code folder."""

    def __init__(self, code_dir: Path, workspace_root: Path, secret_files: tuple[Path, ...]) -> None:
        self._code_dir = code_dir
        self._secret_files = {
            (status.st_dev, status.st_ino) for status in map(os.stat, filter(os.path.exists, secret_files))
        }
        self._workspace_root = workspace_root
        self._entries: list[_Entry] = []
        self._unreadable: list[str] = []
        self.left_out: list[str] = []
        self.is_cut_short = False

    def entries(self) -> list[_Entry]:
        """What is to be packed, a folder before what it holds.

        Raises:
            CodeUnusable: see `take_snapshot`.
        """
        self._walk(os.fspath(self._code_dir), "", (), ())
        if self._unreadable:
            shown = ", ".join(map(repr, self._unreadable[:_SHOWN]))
            more = f" and {len(self._unreadable) - _SHOWN} more" if len(self._unreadable) > _SHOWN else ""
            raise CodeUnusable(
                f"cannot read {shown}{more} in codeDir {self._code_dir}; give yourself the right to read, or name it in "
                f"{IGNORE_FILE} there"
            )
        return self._entries

    def _walk(
        self,
        source: str,
        folder: str,
        rules: tuple[IgnoreRules, ...],
        ancestors: tuple[tuple[int, int], ...],
    ) -> None:
        try:
            status = os.stat(source)
            names = sorted(os.listdir(source), key=os.fsencode)
        except OSError as error:
            if not folder:
                raise CodeUnusable(
                    f"cannot read codeDir {source}: {error.strerror}; name a folder that you can read"
                ) from error
            self._unreadable.append(folder)
            return
        identity = (status.st_dev, status.st_ino)
        if identity in ancestors:
            raise CodeUnusable(
                f"cannot pack {folder!r} of codeDir {self._code_dir}: a link on the way there leads to a folder that "
                f"holds the link; remove it, or name it in {IGNORE_FILE}"
            )
        if IGNORE_FILE in names:
            rules = (*rules, self._read_rules(posixpath.join(source, IGNORE_FILE), folder))
        for name in names:
            if len(self._entries) >= _MOST_LOOKED_AT:
                self.is_cut_short = True
                return
            self._look(posixpath.join(source, name), folder + name, rules, (*ancestors, identity))

    def _read_rules(self, source: str, folder: str) -> IgnoreRules:
        try:
            text = Path(source).read_text("utf-8-sig", "surrogateescape")
            return IgnoreRules.of(folder, text)
        except OSError as error:
            raise CodeUnusable(
                f"cannot read {source}: {error.strerror}; give yourself the right to read"
            ) from error
        except ValueError as error:
            raise CodeUnusable(
                f"cannot use {source}: {error}; write a backslash or ! only before a name"
            ) from error

    def _look(
        self, source: str, path: str, rules: tuple[IgnoreRules, ...], ancestors: tuple[tuple[int, int], ...]
    ) -> None:
        try:
            status = os.lstat(source)
        except OSError:
            return  # gone since the folder was listed
        if stat.S_ISLNK(status.st_mode):
            if is_left_out(rules, path):
                return
            target = os.readlink(source)
            if _stays_inside(path, target):
                self._entries.append(_Entry(path, source, tarfile.SYMTYPE, 0o777, target=target))
                return
            try:
                status = os.stat(source)
            except OSError as error:
                raise CodeUnusable(
                    f"cannot pack the link {path!r} of codeDir {self._code_dir}: it leads outside, to {target!r}, where there is "
                    f"nothing; name it in {IGNORE_FILE}, and let the command make it in the container"
                ) from error
        if stat.S_ISDIR(status.st_mode):
            if not is_left_out(rules, path + "/") and not self._is_workspace(source):
                self._entries.append(_Entry(path, source, tarfile.DIRTYPE, 0o755))
                self._walk(source, path + "/", rules, ancestors)
        elif not is_left_out(rules, path):
            self._look_at_file(source, path, status)

    def _look_at_file(self, source: str, path: str, status: os.stat_result) -> None:
        if (status.st_dev, status.st_ino) in self._secret_files:
            return
        if not stat.S_ISREG(status.st_mode):
            self.left_out.append(path)
        elif not os.access(source, os.R_OK):
            self._unreadable.append(path)
        else:
            # The container's user is another one: what may be run here, all may run there.
            mode = 0o755 if status.st_mode & 0o111 else 0o644
            self._entries.append(_Entry(path, source, tarfile.REGTYPE, mode, status.st_size))

    def _is_workspace(self, source: str) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samefile(source, self._workspace_root)
        return False


def _stays_inside(path: str, target: str) -> bool:
    """Whether a link at `path` names something below the code folder, whatever the folder itself is called."""
    if posixpath.isabs(target):
        return False
    depth = path.count("/")
    for part in target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return False
    return True


# ---- packing


def _write(code_dir: Path, entries: list[_Entry], workspace: Workspace) -> Path:
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
    code_dir: Path, entries: list[_Entry], add: Callable[[tarfile.TarInfo, IO[bytes] | None], None]
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


def _steady(code_dir: Path, entry: _Entry, most_bytes: int) -> IO[bytes] | None:
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


def _too_much(code_dir: Path, entries: list[_Entry], files: int, size_bytes: int, is_cut_short: bool) -> str:
    at_least = "more than " if is_cut_short else ""
    by_size = size_bytes > MOST_BYTES
    return (
        f"cannot pack codeDir {code_dir}: it holds {at_least}{files} files of {_mib(size_bytes)}, and {MOST_FILES} files of "
        f"{_mib(MOST_BYTES)} is the most; the most is in {_largest(entries, by_size=by_size)}; name what trials do not need in "
        f"{IGNORE_FILE} there, or put data on the shared storage"
    )


def _largest(entries: list[_Entry], *, by_size: bool) -> str:
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
