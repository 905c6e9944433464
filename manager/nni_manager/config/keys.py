"""The table of all keys of experiment files: for each platform the path of each key in both of NNI's schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from nni_manager.config.diagnostics import folded
from nni_manager.config.dialect import EACH, Keys
from nni_manager.config.experiment_schema import EXPERIMENTS
from nni_manager.config.model import Platform
from nni_manager.config.schema import ONLY_V1, V1_PATHS, Schema, fields_of, schema_in

SERVICE = ("trainingService",)
STORAGE = (*SERVICE, "storage")
# The supported platforms: the second schema's name to the first's.
PLATFORMS: dict[str, Platform] = {
    "local": "local",
    "openpai": "pai",
    "frameworkcontroller": "frameworkcontroller",
    "kubeflow": "kubeflow",
}
KUBERNETES = ("frameworkcontroller", "kubeflow")
REPLICAS = ("worker", "ps", "master")
ALGORITHMS = ("tuner", "assessor", "advisor")
_CLUSTERS = "a cluster («=openpai», frameworkcontroller, kubeflow)"
# NNI's platforms that are not supported: the reason and the remedy.
UNSUPPORTED: dict[str, str] = {
    "remote": "trials are not started over SSH; run nnictl on that machine with «trainingService.platform: local», or use "
    + _CLUSTERS,
    "paiYarn": "OpenPAI on YARN was discontinued with OpenPAI 0.14; use «trainingService.platform: openpai»",
    "dlts": f"DLTS is no longer maintained; use {_CLUSTERS}",
    "aml": f"Azure Machine Learning is not supported; use {_CLUSTERS}, such as Kubernetes on Azure",
    "dlc": f"Alibaba's DLC is not supported; use {_CLUSTERS}, such as Kubernetes on Alibaba Cloud",
    "adl": "AdaptDL is no longer maintained; use «trainingService.platform: kubeflow»",
    "hybrid": f"an experiment runs on one platform; use local or {_CLUSTERS}",
}
# The keys of each kind of storage; the last of a claim is optional.
STORAGE_KEYS = {
    "nfs": ("server", "path"),
    "azureStorage": ("azureAccount", "azureShare", "keyVaultName", "keyVaultKey"),
    "pvc": ("path", "claimName"),
}
# The sections of v1 files with these keys.
STORAGE_PARTS = {"nfs": ("nfs",), "azureStorage": ("azureStorage", "keyVault"), "pvc": ("pvc",)}


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
def keys_on(platform: str) -> tuple[Key, ...]:
    """All keys for a platform, by its name in v2, in the order of the schema."""

    def within(schema: type[Schema], above: Keys, above_v1: Keys) -> Iterator[Key]:
        for name, field in fields_of(schema).items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            v1 = tuple(_below(above_v1, each) for each in str(extra.get(V1_PATHS, name)).split())
            path, inner = (*above, name), schema_in(field)
            yield Key(path, v1, schema, field, ONLY_V1 not in extra, inner is not None)
            if inner is not None:
                each = (EACH,) if "list" in str(field.annotation) else ()
                yield from within(inner, (*path, *each), (*v1[0], *each))

    return tuple(within(EXPERIMENTS[platform], (), ()))


def _below(above: Keys, written: str) -> Keys:
    if written == ".":
        return above
    steps = tuple(written.strip("/").split("."))
    return steps if written.startswith("/") else (*above, *steps)


def names_in_v1(platform: str, storage: str | None = None) -> dict[Keys, Keys]:
    """The v1 path of each key. `storage` is the kind of storage, which selects the path of a key with several."""
    found: dict[Keys, Keys] = {}
    for key in keys_on(platform):
        for v1 in key.v1:
            if not is_of_other_storage(v1, storage):
                found.setdefault(key.path, v1)
    return found


def is_of_other_storage(v1: Keys, storage: str | None) -> bool:
    """True if the v1 path is that of a key of another kind of storage."""
    others = {part for kind, parts in STORAGE_PARTS.items() if kind != storage for part in parts}
    return storage in STORAGE_PARTS and not others.isdisjoint(v1[1:2])


def get(value: Any, name: str) -> Any:
    """The value of a key in any of its spellings; None if it is absent."""
    if not isinstance(value, Mapping):
        return None
    return next(
        (item for key, item in value.items() if isinstance(key, str) and folded(key) == folded(name)), None
    )
