"""Locates the user's own class of a tuner, an assessor or an advisor: from keys of the experiment file to module and class."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_manager.config.model import CALL_TIMEOUT_S, UserClass
from nni_manager.config.registered_algorithms import AlgorithmFileInvalid, AlgorithmSection, registered

OWN_KEYS = ("codeDirectory", "classFileName", "className")


def user_class(
    kind: AlgorithmSection,
    name: object,
    section: Mapping[str, Any],
    code_dir: Path,
    call_timeout_s: float | None,
) -> UserClass | None:
    """The class that a section names or that is registered under `name`; None if the algorithm is built in.

    `code_dir` is the absolute path of `codeDirectory`, or the folder of the file. `reason_against_class` reports errors.
    """
    limit_s = CALL_TIMEOUT_S if call_timeout_s is None else call_timeout_s
    if isinstance(section.get("className"), str):
        return UserClass(_dotted(section), str(code_dir), None, limit_s, is_advisor=kind == "advisor")
    try:
        found = registered(kind, name) if isinstance(name, str) and kind != "advisor" else None
    except AlgorithmFileInvalid:
        return None  # the schema reports it
    if found is None:
        return None
    folder = None if found.code_dir is None else str(found.code_dir)
    return UserClass(found.class_name, folder, found.validator, limit_s)


def _dotted(section: Mapping[str, Any]) -> str:
    """The dotted name of the class: v1 has separate keys for file and class, v2 joins module and class."""
    name, file = str(section["className"]), section.get("classFileName")
    return name if file is None else f"{Path(str(file)).stem}.{name}"


def reason_against_class(
    kind: AlgorithmSection, section: Mapping[str, Any], code_dir: Path | None
) -> tuple[str, str] | None:
    """The wrong key, and the reason as a sentence, if the section's class cannot be used; None if no error is found.

    `code_dir` is the absolute path of `codeDirectory`; without it the module may be installed.
    """
    name, file = section.get("className"), section.get("classFileName")
    given = [key for key in OWN_KEYS if section.get(key) is not None]
    if not given or not all(isinstance(section[key], str) for key in given):
        return None
    own = given[0]
    if section.get("name") is not None:
        return own, (
            f"cannot use «{kind}.{own}» together with «{kind}.name»: they exclude each other; remove «{kind}.name», or the "
            "keys of your own class"
        )
    if name is None:
        return "className", (
            f"cannot do without «{kind}.className» next to «{kind}.{own}»: it must be the name of a class; write e.g. "
            f"«{kind}.className: my_{kind}.My{kind.capitalize()}»"
        )
    if file is None and "." not in str(name):
        return "className", (
            f"cannot use «{kind}.className»: it has no module; write module and class as one name, such as "
            f"«{kind}.className: my_{kind}.{name}»"
        )
    if code_dir is None or not (file is None or str(file).endswith(".py")):
        return None  # the module may be installed, or the schema reports the error
    if not code_dir.is_dir():
        return (
            "codeDirectory",
            f"cannot use «{kind}.codeDirectory»: there is no folder {code_dir}; create it or fix the path",
        )
    return _reason_against_file(kind, _dotted(section), code_dir, own)


def _reason_against_file(
    kind: AlgorithmSection, class_name: str, code_dir: Path, key: str
) -> tuple[str, str] | None:
    module, _, name = class_name.rpartition(".")
    base = code_dir / Path(*module.split("."))
    path = next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()), None)
    if path is None:
        return key, (
            f"cannot use «{kind}.{key}»: there is no file {base.with_suffix('.py')}; create it, or fix the folder and the names"
        )
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        return key, f"cannot use «{kind}.{key}»: {path} cannot be read as Python: {error}; fix it"
    if _may_define(tree, name):
        return None
    return "className", (
        f"cannot use «{kind}.className»: {path} does not define {name}; write the name of a class in that file"
    )


def _may_define(tree: ast.Module, name: str) -> bool:
    """True if the source may define the name: it binds the name anywhere, or has a star import."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.Name(id=found) if found == name:
                return True
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                if any(name == (alias.asname or alias.name) or alias.name == "*" for alias in aliases):
                    return True
    return False
