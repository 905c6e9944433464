"""Converts an experiment file from NNI's first schema to the second, and reads files of both as the second."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nni_manager.config.diagnostics import folded, key_of
from nni_manager.config.document import as_yaml, read_yaml
from nni_manager.config.keys import get, keys_on
from nni_manager.config.platform_file import PlatformFile, file_of
from nni_manager.config.platforms import PLATFORMS
from nni_manager.config.reader import read_first_schema, schema_of
from nni_manager.config.schema import is_placeholder, names_of_kind
from nni_manager.config.units import megabytes
from trial_keeper.frozen_dataclass import dataclass

_WHY_DROPPED = {
    "authorName": "the second schema has no such key",
    "multiPhase": "NNI removed this key",
    "multiThread": "NNI removed this key",
}


@dataclass(frozen=True, slots=True)
class Converted:
    """The text of a file in the second schema, and the keys that it lacks, each with the reason."""

    text: str
    dropped: tuple[str, ...]


def read_keys(path: Path) -> dict[str, Any]:
    """The keys and values of a file in the second schema, or converted to it, with absolute paths.

    Raises:
        ConfigInvalid: the file cannot be read, or is an invalid file in the first schema.
    """
    value = yaml.safe_load(convert(path).text) if schema_of(path) == "v1" else read_yaml(path).value
    platform = get(get(value, "trainingService"), "platform")
    file = file_of(platform) if isinstance(platform, str) and platform in PLATFORMS else PlatformFile
    found: dict[str, Any] = _with_absolute_paths(value, path.absolute().parent, file)
    return found


def _with_absolute_paths(value: Any, folder: Path, file: type[PlatformFile], *, is_path: bool = False) -> Any:
    if isinstance(value, Mapping):
        is_open = {folded(name) for name in (*names_of_kind(file.schema, "open"), *file.open_keys)}
        return {
            name: item
            if folded(str(name)) in is_open
            else _with_absolute_paths(item, folder, file, is_path=file.is_path(str(name), value))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_with_absolute_paths(item, folder, file, is_path=is_path) for item in value]
    return str(folder / os.path.expanduser(value)) if is_path and isinstance(value, str) else value


def convert(path: Path, folder: Path | None = None) -> Converted:
    """Convert the file at `path` from the first schema to the second. Relative paths become relative to `folder`.

    Comments and the order of keys are lost. `folder` None leaves paths unchanged.

    Raises:
        ConfigInvalid: a key or a type is wrong, or the file is in the second schema already.
    """
    raw = read_first_schema(path)
    service = raw["trainingService"]
    file = file_of(service["platform"])
    file.convert(raw, service)
    for kind in ("tuner", "assessor", "advisor"):
        section = raw.get(kind) or {}
        module = section.pop("classFileName", None)
        if module is not None and section.get("className") is not None:
            section["className"] = f"{Path(module).stem}.{section['className']}"  # v2 joins module and class
    dropped = []
    for key in keys_on(service["platform"]):
        above: Any = raw
        for step in key.path[:-1]:
            above = above.get(step) if isinstance(above, dict) else None
        if key.declared.only_v1 and above and above.pop(key.path[-1], None) is not None:
            written = key_of(key.v1[0])
            why = {**_WHY_DROPPED, **file.why_dropped}.get(written, "the second schema has no such key")
            dropped.append(f"{written}: {why}")
    if file.reuses_jobs:
        # The second schema's default is true, the first's false.
        service.setdefault("reuseMode", False)
    text = f"# {path.name}, in NNI's second schema. Made by `nnictl config convert`.\n"
    made = {key: item for key, item in raw.items() if key != "trainingService"} | {"trainingService": service}
    return Converted(text + as_yaml(_converted(made, file, path, folder)), tuple(dropped))


def _converted(
    mapping: dict[str, Any], file: type[PlatformFile], path: Path, folder: Path | None
) -> dict[str, Any]:
    """A mapping in v2's notation, without keys whose value is null."""

    def converted(key: str, value: Any) -> Any:
        if isinstance(value, dict) and key != "classArgs":
            return _converted(value, file, path, folder)
        if isinstance(value, list):
            return [converted("", item) for item in value]
        if key in names_of_kind(file.schema, "size") and (isinstance(value, int) or value.strip().isdigit()):
            return f"{megabytes(value)}mb"
        if folder is not None and file.is_path(key, mapping):
            return _relative(value, path, folder)
        return value

    return {key: converted(key, value) for key, value in mapping.items() if value is not None}


def _relative(written: str, path: Path, folder: Path) -> str:
    """A path relative to the file at `path` as a path relative to `folder`."""
    if written.startswith(("/", "~")) or is_placeholder(written):
        return written
    return os.path.relpath(path.parent / written, folder)
