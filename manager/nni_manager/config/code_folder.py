"""Lists the files, folders and links of a code folder that trials receive, without those in `.nniignore`."""

import contextlib
import os
import posixpath
import stat
import tarfile
from pathlib import Path

from nni_manager.config.ignore_file import IGNORE_FILE, IgnoreRules, is_left_out
from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

# Bounds the scan when the code folder is, for example, a home directory.
_MAX_ENTRIES = 100_000
# The maximum number of paths in a message.
_SHOWN = 3


class CodeUnusable(UserError):
    """cannot pack codeDir; list files that trials do not need in .nniignore"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or link of the code folder.

    `path` is relative, with /. `source` is the path of its content, `kind` a type of tarfile, `target` the target of a link.
    """

    path: str
    source: str
    kind: bytes
    mode: int
    size_bytes: int = 0
    target: str = ""


class CodeFolder:
    """The part of a code folder that is packed or copied.

    `excluded` are folders to skip, such as that of the experiments. A link to the outside is replaced by its target. With
    `keeps_links_to_folders`, only links to files are replaced, and readers must share the file system.
    """

    def __init__(
        self,
        code_dir: Path,
        excluded: tuple[Path, ...],
        secret_files: tuple[Path, ...],
        *,
        keeps_links_to_folders: bool = False,
    ) -> None:
        """Prepare a scan. `secret_files` are excluded wherever they are."""
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
        """The entries to pack, a folder before its contents.

        Raises:
            CodeUnusable: the folder cannot be read, or a link or .nniignore in it is invalid.
        """
        try:
            self._walk(os.fspath(self._code_dir), "", (), ())
        except RecursionError:
            raise CodeUnusable(
                f"cannot pack codeDir {self._code_dir}: its folders are nested too deeply; list the topmost of them in "
                f"{IGNORE_FILE}"
            ) from None
        if self._unreadable:
            shown = ", ".join(map(repr, self._unreadable[:_SHOWN]))
            more = f" and {len(self._unreadable) - _SHOWN} more" if len(self._unreadable) > _SHOWN else ""
            raise CodeUnusable(
                f"cannot read {shown}{more} in codeDir {self._code_dir}; grant yourself read permission, or list the "
                f"paths in {IGNORE_FILE}"
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
                    f"cannot read codeDir {source}: {error.strerror}; choose a folder that you can read"
                ) from error
            self._unreadable.append(folder)
            return
        identity = (status.st_dev, status.st_ino)
        if identity in ancestors:
            raise CodeUnusable(
                f"cannot pack {folder!r} of codeDir {self._code_dir}: a link in this path leads to a folder that "
                f"contains the link; remove the link, or list it in {IGNORE_FILE}"
            )
        if IGNORE_FILE in names:
            rules = (*rules, self._read_rules(posixpath.join(source, IGNORE_FILE), folder))
        for name in names:
            if len(self._entries) >= _MAX_ENTRIES:
                self.is_cut_short = True
                return
            self._visit(posixpath.join(source, name), folder + name, rules, (*ancestors, identity))

    def _read_rules(self, source: str, folder: str) -> IgnoreRules:
        try:
            text = Path(source).read_text("utf-8-sig", "surrogateescape")
            return IgnoreRules.of(folder, text)
        except OSError as error:
            raise CodeUnusable(
                f"cannot read {source}: {error.strerror}; grant yourself read permission"
            ) from error
        except ValueError as error:
            raise CodeUnusable(
                f"cannot use {source}: {error}; write a backslash or ! only before a name"
            ) from error

    def _visit(
        self, source: str, path: str, rules: tuple[IgnoreRules, ...], ancestors: tuple[tuple[int, int], ...]
    ) -> None:
        try:
            status = os.lstat(source)
            target = os.readlink(source) if stat.S_ISLNK(status.st_mode) else ""
        except OSError:
            return  # deleted since the folder was listed
        if target:
            if is_left_out(rules, path):
                return
            if _stays_inside(path, target):
                self._entries.append(Entry(path, source, tarfile.SYMTYPE, 0o777, target=target))
                return
            if self._keeps_links_to_folders and not os.path.isfile(source):
                # The link may be relative to its old folder.
                self._entries.append(
                    Entry(path, source, tarfile.SYMTYPE, 0o777, target=os.path.realpath(source))
                )
                return
            try:
                status = os.stat(source)
            except OSError as error:
                raise CodeUnusable(
                    f"cannot pack the link {path!r} of codeDir {self._code_dir}: its target {target!r}, outside codeDir, does "
                    f"not exist; list the link in {IGNORE_FILE}, and create it with the trial command"
                ) from error
        if stat.S_ISDIR(status.st_mode):
            if not is_left_out(rules, path + "/") and not self._is_excluded(source):
                self._entries.append(Entry(path, source, tarfile.DIRTYPE, 0o755))
                self._walk(source, path + "/", rules, ancestors)
        elif not is_left_out(rules, path):
            self._add_file(source, path, status)

    def _add_file(self, source: str, path: str, status: os.stat_result) -> None:
        if (status.st_dev, status.st_ino) in self._secret_files:
            return
        if not stat.S_ISREG(status.st_mode):
            self.left_out.append(path)
        elif not os.access(source, os.R_OK):
            self._unreadable.append(path)
        else:
            # The container runs as another user, so all users get read and execute permission.
            mode = 0o755 if status.st_mode & 0o111 else 0o644
            self._entries.append(Entry(path, source, tarfile.REGTYPE, mode, status.st_size))

    def _is_excluded(self, source: str) -> bool:
        for folder in self._excluded:
            with contextlib.suppress(OSError):
                if os.path.samefile(source, folder):
                    return True
        return False


def _stays_inside(path: str, target: str) -> bool:
    """True if the target of a link at `path` is relative and never ascends above the code folder."""
    if posixpath.isabs(target):
        return False
    depth = path.count("/")
    for part in target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return False
    return True
