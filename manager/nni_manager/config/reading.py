"""One pass over one experiment file: what its checks share, the document, the diagnostics and the absolute paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_manager.config import model
from nni_manager.config.diagnostics import KeyPath, leaves, ref, shown
from nni_manager.config.dialect import SERVICE
from nni_manager.config.document import Document
from nni_manager.config.schema import PATHS, Schema, is_placeholder, names_of_kind


class Reading:
    """Collects diagnostics, warnings and absolute paths of a file. Key paths are those of the second schema."""

    def __init__(self, path: Path, document: Document, schema: type[Schema]) -> None:
        self.path = path
        self.schema = schema
        self.document = document
        self.raw: dict[str, Any] = document.value
        self.service = self.within("trainingService")
        self.diagnostics = list(document.diagnostics)
        self.expansions: list[model.Expansion] = []
        self.warnings: list[str] = list(document.warnings)

    def within(self, section: str) -> Mapping[str, Any]:
        """The mapping with this key; empty if there is none."""
        found = self.raw.get(section)
        return found if isinstance(found, Mapping) else {}

    def refuse(self, key_path: KeyPath, why: str, cannot: str = "use") -> None:
        """Record an error of a key; `why` ends with the remedy."""
        self.report(key_path, f"cannot {cannot} {ref(key_path)}: {why}")

    def report(self, key_path: KeyPath, message: str) -> None:
        """Record an error at a key path, unless one of a section above it is recorded."""
        if not self.document.is_refused(key_path):
            self.diagnostics.append(self.document.diagnostic(key_path, message))

    def warn(self, message: str) -> None:
        """Record a warning."""
        self.warnings.append(self.document.dialect.text(message))

    def refuse_placeholders(self, *exempt: str) -> None:
        """Refuse each placeholder that the user must replace. Commands are exempt: they may contain similar text."""
        reported = {each.key for each in self.diagnostics}
        paths = names_of_kind(self.schema, *PATHS)
        for key_path, value in leaves(self.service, SERVICE):
            is_exempt = key_path[-1] in ("command", *paths, *exempt) or not is_placeholder(value)
            if not is_exempt and self.document.dialect.key(key_path) not in reported:
                self.refuse(key_path, f"{value} is a placeholder of an example; replace it")

    def refuse_absent(self, key_path: KeyPath, path: Path) -> None:
        """Refuse a path without the file, or without the folder, that the key names."""
        is_folder = key_path[-1] not in names_of_kind(self.schema, "file")
        if path.is_dir() if is_folder else path.is_file():
            return
        noun = "folder" if is_folder else "file"
        what = f"{path} is not a {noun}" if path.exists() else f"there is no {noun} {path}"
        self.refuse(key_path, f"{what}; create it or fix the path")

    def absolute(self, key_path: KeyPath, written: Any) -> Path | None:
        """The absolute path of a path in the file; None when it is not a path, which the schema reports."""
        if not isinstance(written, str) or not written:
            return None
        if is_placeholder(written):
            self.refuse(key_path, f"{written} is a placeholder of an example; write a path")
            return None
        if "\0" in written:
            self.refuse(key_path, f"{shown(written)} contains a NUL character; fix the path")
            return None
        try:
            # Not resolve(): symbolic links stay as the user wrote them.
            absolute = Path(os.path.abspath(self.path.parent / Path(written).expanduser()))
            absolute.exists()
        except RuntimeError as error:  # ~nobody
            self.refuse(key_path, f"the user in {shown(written)} is unknown; fix the path ({error})")
            return None
        except OSError as error:  # a path that is too long, or a folder without permission
            self.refuse(key_path, f"{shown(written)}: {error.strerror}; fix the path")
            return None
        if str(absolute) != written:
            self.expansions.append(model.Expansion(self.document.dialect.key(key_path), written, absolute))
        return absolute
