"""Converts an experiment file from NNI's first schema to the second."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_manager.config.diagnostics import Place, key_of
from nni_manager.config.document import as_yaml
from nni_manager.config.kubernetes import SECTION, kind_of_storage
from nni_manager.config.model import LOCAL_HOST
from nni_manager.config.reader import read_first_schema
from nni_manager.config.schema import is_placeholder
from nni_manager.config.v1 import PATH_KEYS, SECTIONS, megabytes
from nni_manager.config.v2 import PLATFORMS, names_on, place_of, put, with_indices

_WHY_DROPPED = {
    "authorName": "the second schema has no such key",
    "multiPhase": "NNI removed this key",
    "multiThread": "NNI removed this key",
    "paiConfig.maxTrialNumPerGpu": "it has no effect on OpenPAI",
    "paiConfig.useActiveGpu": "it has no effect on OpenPAI",
    "paiConfig.gpuNum": "trial.gpuNum takes precedence",
    "paiConfig.cpuNum": "trial.cpuNum takes precedence",
    "paiConfig.memoryMB": "trial.memoryMB takes precedence",
}
_SIZES = ("memoryMB", "shmMB")


@dataclass(frozen=True, slots=True)
class Converted:
    """The text of a file in the second schema, and the keys that it lacks, each with the reason."""

    text: str
    dropped: tuple[str, ...]


def convert(path: Path, folder: Path | None = None) -> Converted:
    """Convert the file at `path` from the first schema to the second. Relative paths become relative to `folder`.

    Comments and the order of keys are lost. `folder` None leaves paths unchanged.

    Raises:
        ConfigInvalid: a key or a type is wrong, or the file is in the second schema already.
    """
    raw = read_first_schema(path)
    v1_platform = raw["trainingServicePlatform"]
    platform = next(v2 for v2, v1 in PLATFORMS.items() if v1 == v1_platform)
    section = raw.get(SECTIONS[v1_platform][0]) or {}
    kind = kind_of_storage(section) if v1_platform in SECTION else None
    names = {v1: v2 for v2, v1 in names_on(platform, kind).items()}
    made: dict[str, Any] = {}
    dropped = []
    for v1, value in _leaves(raw, (), names):
        if value is None:
            continue
        if v1 == ("trainingServicePlatform",) or v1[-1] == "classFileName":
            continue  # v2 has `platform`, and the module in className
        target = _target(v1, raw, names)
        if target is None:
            key = key_of(v1)
            dropped.append(f"{key}: {_WHY_DROPPED.get(key, 'the second schema has no such key')}")
            continue
        put(made, target, _value(v1, value, path, folder))
        if v1[-1] == "className" and (file := raw[str(v1[0])].get("classFileName")) is not None:
            put(made, target, f"{Path(file).stem}.{value}")  # v2 joins module and class
    service = {"platform": platform, **made.pop("trainingService", {})}
    if v1_platform in SECTION:
        service["storage"] = {"storageType": kind} | service.get("storage", {})
    if v1_platform != "local":
        # The second schema's default is true, the first's false.
        service.setdefault("reuseMode", False)
    text = f"# {path.name}, in NNI's second schema. Made by `nnictl config convert`.\n"
    return Converted(text + as_yaml({**made, "trainingService": service}), tuple(dropped))


def _leaves(
    value: Any, here: Place, names: Mapping[tuple[str, ...], tuple[str, ...]]
) -> Iterator[tuple[Place, Any]]:
    """The v1 paths and values that have a v2 name, and all other leaves."""
    place = place_of(here)
    if place in names or not isinstance(value, dict | list) or not value:
        yield here, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*here, key), names)
    else:
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*here, index), names)


def _target(
    v1: Place, raw: Mapping[str, Any], names: Mapping[tuple[str, ...], tuple[str, ...]]
) -> Place | None:
    if (
        v1[0] == "paiConfig"
        and v1[-1] in ("gpuNum", "cpuNum", "memoryMB")
        and raw["trial"].get(v1[-1]) is None
    ):
        v1 = ("trial", v1[-1])  # the default for a trial without its own number
    there = names.get(place_of(v1))
    return None if there is None else with_indices(there, v1)


def _value(v1: Place, value: Any, path: Path, folder: Path | None) -> Any:
    if v1[-1] in _SIZES and (isinstance(value, int) or value.strip().isdigit()):
        return f"{megabytes(value)}mb"
    if v1 == ("paiConfig", "host") and "://" not in value and value.lower() != LOCAL_HOST:
        return f"http://{value}"
    is_path = v1[-1] in PATH_KEYS or v1[-2:] == ("pvc", "path")
    if is_path and folder is not None and not value.startswith(("/", "~")) and not is_placeholder(value):
        return os.path.relpath(path.parent / value, folder)
    return value
