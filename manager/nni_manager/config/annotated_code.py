"""Reads a code folder with annotations: returns its search space, and writes the copy that trials run."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_manager.config.annotations import read_annotations, with_values
from nni_manager.config.code_folder import CodeFolder, CodeUnusable, Entry
from nni_manager.config.diagnostics import Diagnostic
from nni_manager.config.ignore_file import IGNORE_FILE
from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

_PYTHON = ".py"


class CodeNotCopied(UserError):
    """cannot copy codeDir; free some space in logDir, or choose another logDir"""


@dataclass(frozen=True, slots=True)
class AnnotatedCode:
    """The result of reading the annotations of a code folder. `generated`: the new text of each annotated file, by path."""

    space: Mapping[str, Any]
    diagnostics: tuple[Diagnostic, ...]
    generated: Mapping[str, bytes]
    entries: tuple[Entry, ...]


def read_code(
    code_dir: Path, shown: Path, excluded: tuple[Path, ...], secret_files: tuple[Path, ...] = ()
) -> AnnotatedCode:
    """Read every Python file that `.nniignore` does not exclude. `shown` is the folder's path in messages.

    `excluded`: folders inside the code folder that contain no code, such as those of experiments.

    Raises:
        CodeUnusable: the folder cannot be read, or is too large to copy.
    """
    folder = CodeFolder(code_dir, excluded, secret_files, keeps_links_to_folders=True)
    entries = tuple(folder.entries())
    if folder.is_cut_short:
        raise CodeUnusable(
            f"cannot copy codeDir {code_dir}: it has more than {len(entries)} files and folders; list those that trials do "
            f"not need in {IGNORE_FILE}, or choose a smaller folder"
        )
    space: dict[str, Any] = {}
    files: dict[str, str] = {}  # the file that defined each key
    diagnostics: list[Diagnostic] = []
    generated: dict[str, bytes] = {}
    for entry in entries:
        if entry.kind != tarfile.REGTYPE or not entry.path.endswith(_PYTHON):
            continue
        file = os.fsencode(shown / entry.path).decode(errors="replace")
        found = read_annotations(_content(entry), module_of(entry.path), file)
        diagnostics += found.diagnostics
        if found.generated is not None:
            generated[entry.path] = found.generated
        for key, parameter in found.space.items():
            if space.setdefault(key, parameter) != parameter:
                message = (
                    f"cannot use {key}: {files[key]} gives this key other values, and both files are the module "
                    f"{module_of(entry.path)}; rename one of the files"
                )
                diagnostics.append(Diagnostic(file, None, None, "", message))
            files.setdefault(key, entry.path)
    return AnnotatedCode(space, tuple(diagnostics), generated, entries)


def module_of(path: str) -> str:
    """The dotted module name of a file of the code folder, used in keys of the search space."""
    return path.removesuffix(_PYTHON).replace("/", ".")


def write_copy(code: AnnotatedCode, copy: Path, annotated: Path) -> None:
    """Create `copy`, the code that trials run, and `annotated`, the originals of the files that differ.

    Files without annotations are copied byte for byte.

    Raises:
        CodeNotCopied: a file cannot be read or written.
    """
    try:
        for folder in (copy, annotated):
            folder.mkdir()
        for entry in code.entries:
            target = copy / entry.path
            if entry.kind == tarfile.DIRTYPE:
                target.mkdir()
            elif entry.kind == tarfile.SYMTYPE:
                target.symlink_to(entry.target)
            elif entry.path not in code.generated:
                shutil.copy2(entry.source, target)
            else:
                # The mtime is not copied: otherwise Python could use bytecode of the original file.
                target.write_bytes(code.generated[entry.path])
                shutil.copymode(entry.source, target)
                original = annotated / entry.path
                original.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry.source, original)
    except OSError as error:
        raise CodeNotCopied(
            f"cannot copy codeDir to {copy}: {error.filename}: {error.strerror}; free some space in logDir, or choose another "
            "logDir, and do not change the code during the copy"
        ) from error


def files_with_values(annotated: Path, parameters: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that `write_copy` put into `annotated`, by path, with a trial's values substituted.

    Raises:
        ValueMissing: the trial lacks a value for an annotation.
    """
    paths = sorted(path.relative_to(annotated).as_posix() for path in annotated.rglob(f"*{_PYTHON}"))
    return {path: with_values((annotated / path).read_bytes(), module_of(path), parameters) for path in paths}


def _content(entry: Entry) -> bytes:
    try:
        return Path(entry.source).read_bytes()
    except OSError as error:
        raise CodeUnusable(
            f"cannot read {entry.source}: {error.strerror}; grant yourself read permission, or list the file in {IGNORE_FILE}"
        ) from error
