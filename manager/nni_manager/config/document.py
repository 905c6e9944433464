"""Reads a YAML or JSON file into plain values, with the line of each value."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import yaml

from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    ConfigInvalid,
    Diagnostic,
    KeyPath,
    folded,
    key_of,
    shown,
)
from nni_manager.config.dialect import OF_FILES, Dialect, Keys
from nni_manager.config.platforms import PLATFORMS
from nni_manager.support.yaml_reader import (
    LONE_SURROGATE,
    TAGS,
    PositionedLoader,
    Tree,
    Unreadable,
    explained,
    line_and_column,
)
from nni_sdk.nesting import TOO_DEEP, is_too_deep
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.safe_open import read_named

# Experiment files have some kB. PyYAML parses only 100 kB a second.
MAX_BYTES = 512 * 1024
# The largest double has 1,024 bits; Python refuses to print much longer integers.
_MAX_BITS = 1024
# Diagnostics of larger JSON files have no lines: finding them takes longer than reading the file.
_MAX_BYTES_WITH_LINES = 256 * 1024
_WHY_UNREADABLE = {
    errno.ENOENT: "there is no such file; check the path",
    errno.EISDIR: "it is a folder; name a file in the folder",
}


class _Loader(PositionedLoader):
    """Loads YAML's safe types, and numbers such as 1e-4, which YAML 1.1 reads as text. Integers are bounded."""

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """The value of a scalar. PyYAML raises other errors for one such as 2024-02-30, or `!!int x`."""
        try:
            value = super().scalar(node)
        except (AttributeError, IndexError, KeyError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{shown(node.value)} is not a valid {kind}; correct it, or put text in quotes"
            raise Unreadable(problem, node.start_mark) from error
        return self.text(node) if isinstance(value, str) else value

    def key(self, node: yaml.ScalarNode) -> tuple[str, Any]:
        """The key as written, e.g. `on` or `1`: JSON, in which experiments are stored, has no others."""
        text = self.text(node)
        return text, text

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """A whole number of at most 1,024 bits."""
        value = self.construct_yaml_int(node)
        if value.bit_length() > _MAX_BITS:
            raise Unreadable("the number is too large; write a smaller one", node.start_mark)
        return value


_Loader.add_constructor(f"{TAGS}int", _Loader.construct_number)


class _JsonLoader(PositionedLoader):
    """Records positions only."""

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """The text of a scalar."""
        return node.value


class _Dumper(yaml.SafeDumper):
    """Dumps YAML; quotes text that would be read as a number."""


_FLOAT = (
    f"{TAGS}float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def as_yaml(value: Any) -> str:
    """A mapping as YAML text, in its order; `read_yaml` restores the same mapping."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content as plain values (`value`), with the syntax diagnostics that did not prevent reading.

    `file` is the path as given, for messages. `root` None: no positions are available. `dialect` has the names of keys in
    the file if `value` has others. `warnings` are not errors. `refused` are the sections of the file that cannot be used as a
    whole: one diagnostic about each is enough.
    """

    file: str
    value: Any
    root: Tree | None
    diagnostics: tuple[Diagnostic, ...] = ()
    dialect: Dialect = OF_FILES
    warnings: tuple[str, ...] = ()
    refused: frozenset[Keys] = frozenset()

    def is_refused(self, key_path: KeyPath) -> bool:
        """True if a section that contains the key path is refused as a whole."""
        path = self.dialect.path(key_path)
        return any(path[: len(section)] == section for section in self.refused)

    def diagnostic(self, key_path: KeyPath, message: str) -> Diagnostic:
        """A diagnostic at a key path of `value`, or at its nearest parent that is in the file; `message` has marked keys."""
        line, column = (
            (None, None) if self.root is None else self.root.position_of(self.dialect.path(key_path), folded)
        )
        return Diagnostic(self.file, line, column, self.dialect.key(key_path), self.dialect.text(message))


def _document(path: Path, value: Any, tree: Tree) -> Document:
    diagnostics = tuple(
        Diagnostic(
            str(path),
            *line_and_column(each.mark),
            key_of(each.path),
            f"cannot use {key_of(each.path)}: line {each.first_line} has the same key; keep one of the two",
        )
        for each in tree.repeated_keys[:MAX_DIAGNOSTICS]
    )
    return Document(str(path), value, tree, diagnostics)


def read_yaml(path: Path) -> Document:
    """The single YAML document in `path`, of safe types only.

    Raises:
        ConfigInvalid: it cannot be read or is not one YAML document; exactly one diagnostic.
    """
    text = _text(path)
    try:
        tree = _Loader(text).tree()
    except yaml.MarkedYAMLError as error:
        problem, *where = explained(text, error, _SECTION_OF)
        raise _refused(path, f"cannot read {path.name}: {problem}", *where) from error
    except yaml.YAMLError as error:
        raise _refused(
            path, f"cannot read {path.name}: {' '.join(str(error).split())}; fix the YAML there"
        ) from error
    if tree.root is None:
        raise _refused(path, f"cannot read {path.name}: the file is empty; write the keys of the experiment")
    return _document(path, tree.value, tree)


def read_json(path: Path, most_bytes: int = MAX_BYTES) -> Document:
    """The JSON document in `path`. NaN and Infinity are refused: they are not JSON.

    Raises:
        ConfigInvalid: it cannot be read or is not JSON; exactly one diagnostic.
    """
    text = _text(path, most_bytes)
    if not text.strip():
        raise _refused(path, f"cannot read {path.name}: the file is empty; write a JSON document", 1, 1)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        problem = f"not JSON at column {error.colno}, {error.msg}; fix it there"
        if is_at_comment(error):
            problem = f"JSON has no comments, as at column {error.colno}; remove the comment"
        message = f"cannot read {path.name}: {problem}"
        raise _refused(path, message, error.lineno, error.colno) from error
    except ValueError as error:
        raise _refused(path, f"cannot read {path.name}: {error}; write a finite number") from error
    except RecursionError as error:
        raise _refused(path, f"cannot read {path.name}: it is {TOO_DEEP}; make it flatter") from error
    try:
        # An escape can be half of a surrogate pair.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _refused(path, f"cannot read {path.name}: {LONE_SURROGATE}") from error
    if is_too_deep(value):
        raise _refused(path, f"cannot read {path.name}: it is {TOO_DEEP}; make it flatter")
    if len(text) > _MAX_BYTES_WITH_LINES:
        return Document(str(path), value, None)
    try:
        # JSON is YAML except for tabs between tokens. JSON strings contain no tabs, so columns stay correct.
        return _document(path, value, _JsonLoader(text.replace("\t", " ")).tree())
    except yaml.YAMLError:
        # The text is valid JSON: only the lines of diagnostics are lost.
        return Document(str(path), value, None)


def is_at_comment(error: json.JSONDecodeError) -> bool:
    """True if the text has a comment of JavaScript where JSON has none."""
    return error.doc.startswith(("//", "/*"), error.pos)


# Text copied from web pages often lacks the lines that contain only a section name.
_SECTION_OF = {
    "builtinTunerName": "tuner",
    "builtinAssessorName": "assessor",
    "builtinAdvisorName": "advisor",
    "optimize_mode": "classArgs",
    "command": "trial",
    "codeDir": "trial",
    "platform": "trainingService",
    **{row.key_of_section: row.section for row in PLATFORMS.values() if row.key_of_section},
}


def _text(path: Path, most_bytes: int = MAX_BYTES) -> str:
    try:
        return read_named(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"cannot read {path.name}: byte {error.start} is not UTF-8; save the file as UTF-8"
        raise _refused(path, message, line) from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            message = f"cannot read {path.name}: it has more than {most_bytes:,} bytes; remove what the experiment does not need"
            raise _refused(path, message) from error
        why = _WHY_UNREADABLE.get(error.errno or 0, f"{error.strerror}; check the file")
        # The file cannot be read: the diagnostic has no position.
        raise ConfigInvalid([Diagnostic("", None, None, "", f"cannot read {path}: {why}")]) from error


def _refused(path: Path, message: str, line: int | None = None, column: int | None = None) -> ConfigInvalid:
    return ConfigInvalid([Diagnostic(str(path), line, column, "", message)])


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")
