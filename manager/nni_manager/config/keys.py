"""The table of all keys of experiment files: for each platform the path of each key in both of NNI's schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nni_manager.config.diagnostics import folded
from nni_manager.config.dialect import Keys
from nni_manager.config.experiment_schema import ExperimentKeys
from nni_manager.config.platform_file import file_of
from nni_manager.config.schema import Key, keys_in

ALGORITHMS = ("tuner", "assessor", "advisor")


def keys_on(platform: str | None) -> tuple[Key, ...]:
    """All keys for a platform, by its name in v2, in the order of the schema; None: those that all platforms share."""
    return keys_in(ExperimentKeys if platform is None else file_of(platform).schema)


def names_in_v1(platform: str | None, kind: str | None = None) -> dict[Keys, Keys]:
    """The v1 path of each key. `kind` is the kind of storage, which selects the path of a key with several."""
    found: dict[Keys, Keys] = {}
    for key in keys_on(platform):
        for v1 in key.v1:
            if platform is None or not is_of_other_kind(platform, v1, kind):
                found.setdefault(key.path, v1)
    return found


def is_of_other_kind(platform: str, v1: Keys, kind: str | None) -> bool:
    """True if the v1 path is that of a key of another kind of storage."""
    parts_by_kind = file_of(platform).parts_by_kind
    others = {part for each, parts in parts_by_kind.items() if each != kind for part in parts}
    return kind in parts_by_kind and not others.isdisjoint(v1[1:2])


def get(value: Any, name: str) -> Any:
    """The value of a key in any of its spellings; None if it is absent."""
    if not isinstance(value, Mapping):
        return None
    return next(
        (item for key, item in value.items() if isinstance(key, str) and folded(key) == folded(name)), None
    )
