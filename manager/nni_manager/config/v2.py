"""Reads experiment files in NNI's second schema: spellings, other names of keys, notations and defaults.

Source: NNI v2.10, nni/experiment/config.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nni_manager.config import keys as table
from nni_manager.config.diagnostics import Place, folded, key_of, ref, shown
from nni_manager.config.dialect import EACH, Keys, with_indices
from nni_manager.config.document import Document
from nni_manager.config.keys import SERVICE, STORAGE, get
from nni_manager.config.model import LOCAL_HOST
from nni_manager.config.translation import Translation, put
from nni_manager.config.units import SECONDS_OF

_POLICY = (*SERVICE, "taskRoles", EACH, "frameworkAttemptCompletionPolicy")
# Other names of the same keys in some versions of NNI.
ALIASES: dict[Keys, Keys] = {
    **{
        (*SERVICE, key): (key,)
        for key in ("trialCommand", "trialCodeDirectory", "trialGpuNumber", "nniManagerIp")
    },
    (*STORAGE, "storage"): (*STORAGE, "storageType"),
    (*STORAGE, "keyVault"): (*STORAGE, "keyVaultName"),
    (*STORAGE, "keyVaultSecret"): (*STORAGE, "keyVaultKey"),
    (*_POLICY, "minSucceededTaskCount"): (*_POLICY, "minSucceedTaskCount"),
}
_HINTS = {
    "sharedStorage": "it is not supported; write the storage into trainingService",
    "trainingService.openpaiConfig": "it is not supported; write it into a file, and set «trainingService.openpaiConfigFile» to "
    "that file",
    "name": "did you mean experimentName?",
    "authorName": "NNI's second schema has no such key; remove it",
    "trial": "it belongs to NNI's first schema; write trialCommand, trialCodeDirectory and trialGpuNumber",
    "multiPhase": "NNI removed this key; remove it",
    "multiThread": "NNI removed this key; remove it",
    **{
        f"trainingService.storage.{key}": f"it applies to «trainingService.storage.storageType: {kind}»; remove it, or change "
        "«trainingService.storage.storageType»"
        for kind, keys in table.STORAGE_KEYS.items()
        for key in (*keys, *(["uploadRetryCount"] if kind == "azureStorage" else []))
    },
    "trainingService.maxTrialNumPerGpu": "did you mean maxTrialNumberPerGpu?",
    "trainingService.reuse": "did you mean reuseMode?",
}
DURATIONS = ("maxExperimentDuration", "maxTrialDuration", "reuseIdleTimeout", "callTimeout")
DURATION_PATTERN = r"^\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([smhdSMHD])\s*$"
# NNI's default image.
DEFAULT_IMAGE = "msranni/nni:latest"


@cache
def keys_of_v2(platform: str | None, storage: str | None = None) -> tuple[table.Key, ...]:
    """The keys of v2 files for a platform; None adds no keys. `storage` is the kind of storage; None: any kind."""
    known = [key for key in table.keys_on(platform or "local") if key.is_in_v2]
    if platform is None:
        proper = (SERVICE, (*SERVICE, "platform"))
        return tuple(key for key in known if key.path[:1] != SERVICE or key.path in proper)
    if storage not in table.STORAGE_KEYS:
        return tuple(known)
    others = {name for keys in table.STORAGE_KEYS.values() for name in keys} | {"uploadRetryCount"}
    others -= {*table.STORAGE_KEYS[storage], *(["uploadRetryCount"] if storage == "azureStorage" else [])}
    return tuple(key for key in known if not (key.path[:-1] == STORAGE and key.path[-1] in others))


def implicit_keys(platform: str) -> set[Keys]:
    """The required keys for which only v2 has a default."""
    found: set[Keys] = {("experimentName",), ("trialCodeDirectory",)}
    found.add((*SERVICE, *(("taskRoles", EACH) if platform == "frameworkcontroller" else ()), "dockerImage"))
    if platform == "kubeflow":
        found |= {(*SERVICE, role, key) for role in table.REPLICAS for key in ("dockerImage", "gpuNumber")}
    return found


@cache
def _keys_only_in_v2() -> frozenset[str]:
    """The folded keys that only v2 files have."""
    of_v1 = {v1[0] for key in table.keys_on("local") for v1 in key.v1}
    return frozenset(folded(key.path[0]) for key in keys_of_v2("local") if key.path[0] not in of_v1)


def is_v2(value: Mapping[Any, Any]) -> bool:
    """True if a file's content is in the v2 schema."""
    keys = {folded(key) for key in value if isinstance(key, str)}
    return bool(keys & _keys_only_in_v2()) and folded("trainingServicePlatform") not in keys


def from_v2(document: Document) -> Document:
    """A v2 file with the proper name of each key, and with the schema's notations and NNI's defaults."""
    return _FromV2(document).translated()


class _FromV2(Translation):
    knows_any_case = True
    aliases = ALIASES

    def __init__(self, document: Document) -> None:
        service = get(document.value, "trainingService")
        self.word = get(service, "platform")
        word = "openpai" if self.word == "pai" else self.word  # the name in v1
        self.platform = word if isinstance(word, str) and word in table.PLATFORMS else None
        storage = get(service, "storage")
        kind = get(storage, "storageType") or get(storage, "storage")
        known = keys_of_v2(self.platform, kind if isinstance(kind, str) else None)
        leaves = {key.path: key.path for key in known if not key.is_mapping}
        sections = {key.path: key.path for key in known if key.is_mapping}
        leaves |= {alias: to for alias, to in ALIASES.items() if to in leaves}
        super().__init__(document, document.dialect, leaves, sections)
        self.sources: dict[Place, Place] = {}
        self.value |= {"authorName": "unknown", "experimentName": Path(document.file).stem}

    def translated(self) -> Document:
        """The document in the schema's notation."""
        self.move(self.document.value)
        self.refuse_platform((*SERVICE, "platform"), self.word, table.PLATFORMS)
        if self.platform is not None:
            put(self.value, (*SERVICE, "platform"), self.platform)
        service = self.value["trainingService"]
        if isinstance(service, dict):
            match self.platform:
                case "openpai":
                    self._apply_openpai_defaults(service)
                case "frameworkcontroller" | "kubeflow":
                    self._apply_kubernetes_defaults(service)
        self.value.setdefault("trialCodeDirectory", ".")
        return self.document_of_v2()

    def put_value(self, v2: Keys, place: Keys, here: Place, item: Any) -> None:
        """Move a value, unless it is null, which means that the key is absent, or another key takes precedence."""
        target = with_indices(v2, here)
        if target in self.sources:
            first = self.sources[target]
            is_inner = place[:1] == SERVICE and v2[:1] != SERVICE
            winner, other = (here, first) if is_inner else (first, here)
            self._warn(f"{ref(winner)} takes precedence over {ref(other)}")
            if not is_inner:
                return
        if item is None or (item == [] and (*place, EACH) in self.children):
            return
        if place == SERVICE and isinstance(item, list):
            example = "«trainingService: {platform: openpai, ...}»"
            self.refuse(here, f"several at once are not supported; write one, such as {example}")
            self.refused.add(place)
            return
        self.sources[target] = here
        if place != v2:
            names = {**self.dialect.names, v2: place}
            self.dialect = dataclasses.replace(self.dialect, names=names)
        put(self.value, target, self._duration(here, item) if v2[-1] in DURATIONS else item)

    def _duration(self, here: Place, item: Any) -> str:
        """The duration in v1's notation."""
        if isinstance(item, int) and not isinstance(item, bool) and 0 < item < 10**9:
            return f"{item}s"
        found = re.match(DURATION_PATTERN, item) if isinstance(item, str) else None
        seconds = float(found[1]) * SECONDS_OF[found[2].lower()] if found else 0
        if not 0 < seconds < 10**9:
            why = f"{shown(item)} is not a number and one of s, m, h, d; write e.g. {ref(here, '1h')}"
            self.refuse(here, why)
            return "1h"
        if found and found[1].isdigit():
            return f"{int(found[1])}{found[2].lower()}"
        return f"{max(1, round(seconds))}s"

    def answer(self, place: Keys, here: Place, item: Any) -> str | None:
        """The hint for an unknown key."""
        if item is None or (self.platform is None and place[:1] == SERVICE):
            return ""
        hint = _HINTS.get(key_of(place))
        v2 = {v1: v2 for v2, v1 in table.names_in_v1(self.platform or "local").items()}.get(place)
        if hint is None and v2 is not None and (len(place) == 1 or place[0] in table.ALGORITHMS):
            put(self.value, v2, item)  # prevents a second diagnostic that the key is missing
            return f"it belongs to NNI's first schema; write {key_of(v2) if len(place) == 1 else v2[-1]} here"
        if hint is None and len(place) == 1 and (place[0].endswith("Config") or place[0] == "machineList"):
            return "it belongs to NNI's first schema; write its keys into trainingService"
        return hint

    def _warn(self, message: str) -> None:
        self.warnings.append(self.document.dialect.text(message))

    # ---- v2's own defaults

    def _apply_openpai_defaults(self, service: dict[str, Any]) -> None:
        service.setdefault("reuseMode", True)
        host = service.get("host")
        if isinstance(host, str) and "://" not in host and host.lower() != LOCAL_HOST:
            service["host"] = f"https://{host}"
        if "dockerImage" not in service and "openpaiConfigFile" not in service:
            self._default_image(service, SERVICE)

    def _apply_kubernetes_defaults(self, service: dict[str, Any]) -> None:
        service.setdefault("reuseMode", True)
        listed = service.get("taskRoles")
        roles: dict[Place, Any] = {
            ("taskRoles", i): role for i, role in enumerate(listed if isinstance(listed, list) else ())
        }
        roles |= {(name,): service[name] for name in table.REPLICAS if name in service}
        for place, role in roles.items():
            if not isinstance(role, dict):
                continue
            if self.platform == "kubeflow":
                role.setdefault("gpuNumber", 0)
            if "dockerImage" not in role:
                self._default_image(role, (*SERVICE, *place))
        for key in ("trialCommand", "trialGpuNumber"):
            if key in self.value:
                self._warn(f"{ref((key,))} has no effect on {self.platform}: each role has its own value")
        self._one_code_directory({place: role for place, role in roles.items() if isinstance(role, dict)})

    def _default_image(self, pod: dict[str, Any], place: Place) -> None:
        pod["dockerImage"] = DEFAULT_IMAGE
        self._warn(
            f"{ref((*place, 'dockerImage'))} is not set: NNI's default {DEFAULT_IMAGE} is used, which lacks trial-keeper; "
            "`nnictl help images` describes how to build an image with trial-keeper"
        )

    def _one_code_directory(self, roles: Mapping[Place, dict[str, Any]]) -> None:
        given = {place: role["codeDirectory"] for place, role in roles.items() if "codeDirectory" in role}
        folders = {folder for folder in given.values() if isinstance(folder, str)}
        if "trialCodeDirectory" not in self.value and len(folders) == 1:
            (place, self.value["trialCodeDirectory"]), *_ = given.items()
            names = {
                **self.dialect.names,
                ("trialCodeDirectory",): (*SERVICE, str(place[0]), "codeDirectory"),
            }
            self.dialect = dataclasses.replace(self.dialect, names=names)
            return
        for place, folder in given.items():
            if folder != self.value.get("trialCodeDirectory", "."):
                key = ref((*SERVICE, *place, "codeDirectory"))
                self._warn(f"{key} has no effect: every role runs the code of «trialCodeDirectory»")
