"""The file of tuners and assessors that users have registered by name.

The file and its keys are NNI's, so algorithms registered with NNI's `nnictl algo register` are available here:

    tuners:
      - {builtinName: demotuner, className: demo_tuner.DemoTuner, classArgsValidator: demo_tuner.Validator}
    assessors: []
    advisors: []

Rows with `source: nni` are NNI's built-in algorithms and are ignored: the built-in algorithms here replace them. NNI has no
`codeDirectory`, the folder of a module that is not installed. Source: NNI v2.10, nni/tools/package_utils and `nnictl algo`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, shown
from nni_manager.config.schema import Schema, check, must_be
from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.small_files import replace_file

if TYPE_CHECKING:
    from nni_manager.config.document import Document

AlgorithmKind = Literal["tuner", "assessor"]
AlgorithmSection = Literal["tuner", "assessor", "advisor"]
"""The sections of an experiment file that can name a class of the user; advisors cannot be registered."""
KINDS: tuple[AlgorithmKind, ...] = ("tuner", "assessor")
_DOTTED = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"


@dataclass(frozen=True, slots=True)
class RegisteredAlgorithm:
    """One algorithm. `class_name` and `validator` are dotted, module and class; `code_dir` None: the module is installed."""

    kind: AlgorithmKind
    name: str
    class_name: str
    validator: str | None = None
    code_dir: Path | None = None


class AlgorithmTaken(UserError):
    """cannot register this name: it is taken; choose another, or unregister it first"""


class AlgorithmUnknown(UserError):
    """cannot unregister this name: it is not registered; see `nnictl algo list`"""


class AlgorithmFileInvalid(UserError):
    """cannot read the file of registered algorithms; fix or remove it"""


class _Row(Schema):
    builtin_name: str = must_be("a name without blanks", "demotuner", pattern=r"^[\w.-]+$")
    class_name: str = must_be("module and class", "demo_tuner.DemoTuner", pattern=_DOTTED)
    class_args_validator: str | None = must_be(
        "module and class", "demo_tuner.Validator", None, pattern=_DOTTED
    )
    code_directory: str | None = must_be("a folder", ".", None, min_length=1)
    # NNI's keys, ignored.
    source: str | None = None
    accept_class_args: bool | None = None
    class_args: Any = None


class _Meta(_Row):
    algo_type: AlgorithmKind = must_be("tuner or assessor", "tuner")


def registry_file() -> Path:
    """The path of this user's file of algorithms (below XDG_CONFIG_HOME)."""
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nni/registered_algorithms.yml"
    )


def read_meta(path: Path) -> RegisteredAlgorithm:
    """The algorithm that a file for `nnictl algo register --meta` describes.

    Raises:
        ConfigInvalid: with every error of the file.
    """
    from nni_manager.config.document import read_yaml  # a manager reads no YAML without registered algorithms

    document = read_yaml(path)
    meta, diagnostics = check(_Meta, document.value, document)
    folder = None
    if meta is not None and meta.code_directory is not None:
        folder = Path(os.path.abspath(path.parent / os.path.expanduser(meta.code_directory)))
        if not folder.is_dir():
            message = f"cannot use codeDirectory: there is no folder {folder}; create it or fix the path"
            diagnostics.append(document.diagnostic(("codeDirectory",), message))
    if meta is None or diagnostics or document.diagnostics:
        raise ConfigInvalid(sorted([*document.diagnostics, *diagnostics], key=lambda each: each.line or 0))
    return RegisteredAlgorithm(
        meta.algo_type, meta.builtin_name, meta.class_name, meta.class_args_validator, folder
    )


def registered_algorithms() -> list[RegisteredAlgorithm]:
    """All algorithms of this user, tuners first, in order of registration.

    Raises:
        AlgorithmFileInvalid: the file is not what `register` writes.
    """
    rows = _read()
    return [_algorithm(kind, row) for kind in KINDS for row in rows.get(f"{kind}s", [])]


def registered(kind: AlgorithmKind, name: str) -> RegisteredAlgorithm | None:
    """The algorithm of this kind and name; None if it is not registered.

    Raises:
        AlgorithmFileInvalid: the file is not what `register` writes.
    """
    return next((each for each in registered_algorithms() if (each.kind, each.name) == (kind, name)), None)


def register(algorithm: RegisteredAlgorithm, built_in: AbstractSet[str]) -> None:
    """Store the algorithm. `built_in`: the reserved names.

    Raises:
        AlgorithmTaken: the name is reserved or registered already.
        AlgorithmFileInvalid: the file is not what `register` writes.
        OSError: the file cannot be written.
    """
    if algorithm.name in built_in:
        raise AlgorithmTaken(
            f"cannot register {algorithm.kind} {algorithm.name!r}: a built-in {algorithm.kind} has this name; choose "
            "another name"
        )
    if registered(algorithm.kind, algorithm.name) is not None:
        raise AlgorithmTaken(
            f"cannot register {algorithm.kind} {algorithm.name!r}: it is registered already; choose another name, or "
            f"`nnictl algo unregister {algorithm.name}` first"
        )
    rows = _read()
    row = {
        "builtinName": algorithm.name,
        "className": algorithm.class_name,
        "classArgsValidator": algorithm.validator,
        "codeDirectory": None if algorithm.code_dir is None else str(algorithm.code_dir),
    }
    rows.setdefault(f"{algorithm.kind}s", []).append({key: each for key, each in row.items() if each})
    _write(rows)


def unregister(name: str) -> list[RegisteredAlgorithm]:
    """Remove the algorithms of this name; return them.

    Raises:
        AlgorithmUnknown: no algorithm has this name.
        AlgorithmFileInvalid: the file is not what `register` writes.
        OSError: the file cannot be written.
    """
    gone = [each for each in registered_algorithms() if each.name == name]
    if not gone:
        raise AlgorithmUnknown(f"cannot unregister {name!r}: it is not registered; see `nnictl algo list`")
    rows = _read()
    for kind in KINDS:
        rows[f"{kind}s"] = [row for row in rows.get(f"{kind}s", []) if row.get("builtinName") != name]
    _write(rows)
    return gone


def _read() -> dict[str, list[dict[str, Any]]]:
    """The rows by kind, without NNI's built-in algorithms."""
    path = registry_file()
    if not path.exists():
        return {}
    from nni_manager.config.document import read_yaml

    try:
        document = read_yaml(path)
        _refuse_unless_rows(document, path)
    except ConfigInvalid as error:
        raise AlgorithmFileInvalid(f"{error}; fix or remove {path}") from error
    return {
        kind: [row for row in rows if row.get("source") != "nni"]
        for kind, rows in document.value.items()
        if rows is not None
    }


def _refuse_unless_rows(document: Document, path: Path) -> None:
    value = document.value
    is_rows = isinstance(value, Mapping) and all(
        rows is None or (isinstance(rows, list) and all(isinstance(row, dict) for row in rows))
        for rows in value.values()
    )
    if not is_rows:
        message = f"cannot use {path.name}: {shown(value)} is not a mapping with lists of algorithms"
        raise ConfigInvalid([*document.diagnostics, Diagnostic(str(path), None, None, "", message)])
    diagnostics = list(document.diagnostics)
    for kind in KINDS:
        for number, row in enumerate(value.get(f"{kind}s") or []):
            if row.get("source") != "nni":
                diagnostics += check(_Row, row, document, (f"{kind}s", cast(str, number)))[1]
    if diagnostics:
        raise ConfigInvalid(diagnostics)


def _algorithm(kind: AlgorithmKind, row: Mapping[str, Any]) -> RegisteredAlgorithm:
    folder = row.get("codeDirectory")
    return RegisteredAlgorithm(
        kind,
        row["builtinName"],
        row["className"],
        row.get("classArgsValidator"),
        None if folder is None else Path(folder),
    )


def _write(rows: Mapping[str, Any]) -> None:
    from nni_manager.config.document import as_yaml

    path = registry_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, as_yaml(dict(rows)).encode(), is_durable=True)
