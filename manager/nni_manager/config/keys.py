"""The table of all keys of experiment files: for each platform the path of each key in both of NNI's schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from nni_manager.config.diagnostics import folded
from nni_manager.config.dialect import EACH, Keys
from nni_manager.config.experiment_schema import ExperimentKeys
from nni_manager.config.platform_file import file_of
from nni_manager.config.schema import ONLY_V1, V1_PATHS, Schema, fields_of, schema_in

ALGORITHMS = ("tuner", "assessor", "advisor")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of experiment files: its path in v2, its paths in v1 files, and its field in the schema `owner`.

    `is_mapping`: its value has keys of its own.
    """

    path: Keys
    v1: tuple[Keys, ...]
    owner: type[Schema]
    field: FieldInfo
    is_in_v2: bool
    is_mapping: bool


@cache
def keys_on(platform: str | None) -> tuple[Key, ...]:
    """All keys for a platform, by its name in v2, in the order of the schema; None: those that all platforms share."""

    def within(schema: type[Schema], above: Keys, above_v1: Keys) -> Iterator[Key]:
        for name, field in fields_of(schema).items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            v1 = tuple(_below(above_v1, each) for each in str(extra.get(V1_PATHS, name)).split())
            path, inner = (*above, name), schema_in(field)
            yield Key(path, v1, schema, field, ONLY_V1 not in extra, inner is not None)
            if inner is not None:
                each = (EACH,) if "list" in str(field.annotation) else ()
                yield from within(inner, (*path, *each), (*v1[0], *each))

    return tuple(within(ExperimentKeys if platform is None else file_of(platform).schema, (), ()))


def _below(above: Keys, written: str) -> Keys:
    if written == ".":
        return above
    steps = tuple(written.strip("/").split("."))
    return steps if written.startswith("/") else (*above, *steps)


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
