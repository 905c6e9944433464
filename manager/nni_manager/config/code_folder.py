"""What a code folder holds for trials: files, folders and links, without what `.nniignore` names."""

import contextlib
import os
import posixpath
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path

from nni_manager.config.ignore_file import IGNORE_FILE, IgnoreRules, is_left_out
from nni_manager.errors import UserMistake

# A code folder that is somebody's home is not looked at to its end.
_MOST_LOOKED_AT = 100_000
# Paths that a message names.
_SHOWN = 3


class CodeUnusable(UserMistake):
    """cannot pack codeDir; name what trials do not need in a file .nniignore there"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of it. `path` is relative with /, `source` is where its content is read, `kind` is tarfile's word for it."""

    path: str
    source: str
    kind: bytes
    mode: int
    size_bytes: int = 0
    target: str = ""


class CodeFolder:
    """What is to be packed or copied of a code folder.

    `excluded` are folders that are never part of it, such as that of the experiments. A link that leads outside is replaced by
    what it leads to; with `keeps_links_to_folders`, one that leads to no file stays a link, for who sees the same
    file system.
    """

    def __init__(
        self,
        code_dir: Path,
        excluded: tuple[Path, ...],
        secret_files: tuple[Path, ...],
        *,
        keeps_links_to_folders: bool = False,
    ) -> None:
        """`secret_files` are left out wherever they lie."""
        self._code_dir = code_dir
        self._secret_files = {
            (status.st_dev, status.st_ino) for status in map(os.stat, filter(os.path.exists, secret_files))
        }
        self._excluded = excluded
        self._keeps_links_to_folders = keeps_links_to_folders
        self._entries: list[Entry] = []
        self._unreadable: list[str] = []
        self.left_out: list[str] = []
        self.is_cut_short = False

    def entries(self) -> list[Entry]:
        """What is to be packed, a folder before what it holds.

        Raises:
            CodeUnusable: it cannot be read, or a link or .nniignore in it cannot be used.
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
                self._entries.append(Entry(path, source, tarfile.SYMTYPE, 0o777, target=target))
                return
            if self._keeps_links_to_folders and not os.path.isfile(source):
                # The link may have been relative to where it was.
                self._entries.append(
                    Entry(path, source, tarfile.SYMTYPE, 0o777, target=os.path.realpath(source))
                )
                return
            try:
                status = os.stat(source)
            except OSError as error:
                raise CodeUnusable(
                    f"cannot pack the link {path!r} of codeDir {self._code_dir}: it leads outside, to {target!r}, where there is "
                    f"nothing; name it in {IGNORE_FILE}, and let the command make it in the container"
                ) from error
        if stat.S_ISDIR(status.st_mode):
            if not is_left_out(rules, path + "/") and not self._is_excluded(source):
                self._entries.append(Entry(path, source, tarfile.DIRTYPE, 0o755))
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
            self._entries.append(Entry(path, source, tarfile.REGTYPE, mode, status.st_size))

    def _is_excluded(self, source: str) -> bool:
        for folder in self._excluded:
            with contextlib.suppress(OSError):
                if os.path.samefile(source, folder):
                    return True
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
