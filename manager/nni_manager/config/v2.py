"""Reads NNI's v2 experiment files: translates them to v1, and translates keys in diagnostics back to v2.

Diagnoses what v1 cannot express. The tables and both translations are one file: a change to a key affects all of them.
Source: NNI v2.10, nni/experiment/config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from nni_manager.config.diagnostics import Diagnostic, Place, folded, key_of, remedy_for_unknown, shown
from nni_manager.config.document import Document, PathInFile
from nni_manager.config.kubernetes import EXPERIMENTS, REPLICAS, SECTION, STORAGE_PARTS
from nni_manager.config.model import LOCAL_HOST, Platform
from nni_manager.config.schema import V2_NAME, Schema, fields_of, schema_in
from nni_manager.config.v1 import OWN_ADVISOR, SECONDS_OF, LocalExperimentV1

# A path of keys; `*` replaces the index of an item.
_Keys = tuple[str, ...]
EACH = "*"
_ALGORITHMS = ("tuner", "advisor", "assessor")
_SEARCH_SPACE = ("searchSpace",)


def _places(table: Mapping[str, str]) -> dict[_Keys, _Keys]:
    return {tuple(v2.split(".")): tuple(v1.split(".")) for v2, v1 in table.items()}


# Other names of the same keys in some versions of NNI.
ALIASES = _places(
    {
        "trainingService.trialCommand": "trialCommand",
        "trainingService.trialCodeDirectory": "trialCodeDirectory",
        "trainingService.trialGpuNumber": "trialGpuNumber",
        "trainingService.nniManagerIp": "nniManagerIp",
        "trainingService.storage.storage": "trainingService.storage.storageType",
        "trainingService.storage.keyVault": "trainingService.storage.keyVaultName",
        "trainingService.storage.keyVaultSecret": "trainingService.storage.keyVaultKey",
        "trainingService.taskRoles.*.frameworkAttemptCompletionPolicy.minSucceededTaskCount": "trainingService.taskRoles.*."
        "frameworkAttemptCompletionPolicy.minSucceedTaskCount",
    }
)
# The supported platforms: v2's name to v1's name.
PLATFORMS: dict[str, Platform] = {
    "local": "local",
    "openpai": "pai",
    "frameworkcontroller": "frameworkcontroller",
    "kubeflow": "kubeflow",
}
# Sections that exist in both schemas: v1 diagnoses errors of the section as a whole.
SECTIONS = _places(
    {each: each for each in _ALGORITHMS}
    | {"trainingService.taskRoles": "trial.taskRoles", "trainingService.taskRoles.*": "trial.taskRoles.*"}
    | {f"trainingService.{role}": f"trial.{role}" for role in REPLICAS}
)
# v1 sections without a counterpart in v2: the v2 section that contains their keys.
_WHOLES: dict[_Keys, _Keys] = {
    (section,): ("trainingService",) for section in ("localConfig", "paiConfig", *SECTION.values())
} | {
    (section, part): ("trainingService", "storage")
    for section in SECTION.values()
    for part in ("nfs", "azureStorage", "keyVault", "pvc")
}
# The keys of each kind of storage.
_STORAGE_KEYS = {
    "nfs": ("server", "path"),
    "azureStorage": ("azureAccount", "azureShare", "keyVaultName", "keyVaultKey", "uploadRetryCount"),
    "pvc": ("path", "claimName"),
}
_STORAGE_EXAMPLE = "storage: {storageType: nfs, server: 10.10.10.10, path: /var/nfs/nni}"
_UNSUPPORTED = {
    "sharedStorage": "write the storage into trainingService",
    "trainingService.openpaiConfig": "write it into a file, and set openpaiConfigFile to that file",
}
_ANSWERS = {
    "name": "did you mean experimentName?",
    "authorName": "NNI's second schema has no such key; remove it",
    "trial": "it belongs to NNI's first schema; write trialCommand, trialCodeDirectory and trialGpuNumber",
    "experimentType": "architecture search is not supported; write hpo, or remove it",
    "advisor.className": OWN_ADVISOR,
    "advisor.codeDirectory": OWN_ADVISOR,
    "multiPhase": "NNI removed this key; remove it",
    "multiThread": "NNI removed this key; remove it",
    **{
        f"trainingService.storage.{key}": f"it applies to storageType: {kind}; remove it, or change storageType"
        for kind, keys in _STORAGE_KEYS.items()
        for key in keys
    },
    "trainingService.maxTrialNumPerGpu": "did you mean maxTrialNumberPerGpu?",
    "trainingService.reuse": "did you mean reuseMode?",
}
DURATIONS = ("maxExecDuration", "maxTrialDuration", "reuseIdleTimeout", "callTimeout")
DURATION_PATTERN = r"^\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([smhdSMHD])\s*$"
# NNI's default image.
DEFAULT_IMAGE = "msranni/nni:latest"


def names_on(platform: str | None, storage: str | None = None) -> dict[_Keys, _Keys]:
    """The v1 key path of each v2 key path. `platform` is v2's name; None or an unknown one adds no keys."""
    if platform not in PLATFORMS:
        platform_key = ("trainingService", "platform")
        return {
            v2: v1 for v2, v1 in names_on("local").items() if v2[0] != platform_key[0] or v2 == platform_key
        }
    of_others: set[str] = set()
    if storage in _STORAGE_KEYS:
        of_others = {part for kind, parts in STORAGE_PARTS.items() if kind != storage for part in parts}
        of_others |= {"uploadRetryCount"} - {*_STORAGE_KEYS[storage]}
    found: dict[_Keys, _Keys] = {}
    for key in keys_on(platform):
        if not key.is_mapping and of_others.isdisjoint(key.v1[1:2]):
            found.setdefault(key.v2, key.v1)
    return found


@dataclass(frozen=True, slots=True)
class KeyV2:
    """A key of v2 files with its v1 path. `owner` is the v1 schema of the mapping that has the key.

    `is_required`: v1 requires it, and v2 has no default.
    """

    v2: _Keys
    v1: _Keys
    owner: type[Schema]
    is_required: bool
    is_mapping: bool


def keys_on(platform: str) -> Iterator[KeyV2]:
    """All keys of v2 files for a platform, in the order of the model. Parts of v1 may share a v2 mapping."""
    optional = {*implicit_keys(platform).values()}
    sections = {*SECTIONS.values()}

    def keys_in(schema: type[Schema], v1: _Keys, v2: _Keys, is_needed: bool) -> Iterator[KeyV2]:
        for key, field_ in fields_of(schema).items():
            extra = field_.json_schema_extra
            name = str(extra[V2_NAME]) if isinstance(extra, dict) else key
            if not name:
                continue
            steps = tuple(name.strip("/").split("."))
            there, here = (steps if name.startswith("/") else (*v2, *steps)), (*v1, key)
            is_required = is_needed and field_.is_required() and here not in optional
            inner = schema_in(field_)
            yield KeyV2(there, here, schema, is_required, inner is not None)
            if inner is not None:
                each = (EACH,) if "list" in str(field_.annotation) else ()
                yield from keys_in(inner, (*here, *each), (*there, *each), is_required or here in sections)

    return keys_in(EXPERIMENTS[PLATFORMS[platform]], (), (), True)


def implicit_keys(platform: str) -> dict[_Keys, _Keys]:
    """The v1 key path of each v2 key that v1 lacks, or for which only v2 has a default; () without a v1 key."""
    places = _places({"experimentName": "experimentName", "trialCodeDirectory": "trial.codeDir"})
    if platform == "openpai":
        return places | _places({"trainingService.dockerImage": "trial.image"})
    if platform == "frameworkcontroller":
        places |= _places({"trainingService.taskRoles.*.dockerImage": "trial.taskRoles.*.image"})
    if platform == "kubeflow":
        for role in REPLICAS:
            places |= _places({f"trainingService.{role}.dockerImage": f"trial.{role}.image"})
            places |= _places({f"trainingService.{role}.gpuNumber": f"trial.{role}.gpuNum"})
            places["trainingService", role, "codeDirectory"] = ()
    if platform in SECTION:
        places |= {("trialCommand",): (), ("trialGpuNumber",): ()}
        places |= {("trainingService", key): () for key in ("trialCommand", "trialGpuNumber")}
    return places


def v2_hints() -> dict[str, str]:
    """The hint for each v2 key that appears in a v1 file."""
    names = {
        key_of(v2): v1[-1] if v2[0] == v1[0] else key_of(v1)
        for v2, v1 in names_on(None).items()
        if v2[-1] != v1[-1] and v2[0] != "trainingService"
    }
    answers = {v2: f"it belongs to NNI's second schema; write {v1} here" for v2, v1 in names.items()}
    return answers | {
        "trainingService": "it belongs to NNI's second schema, but trainingServicePlatform to the first; use one schema",
        "searchSpace": "it belongs to NNI's second schema; write it into a JSON file, and set searchSpacePath to that file",
    }


@cache
def _keys_only_in_v2() -> frozenset[str]:
    """The folded keys that only v2 files have."""
    tops = {v2[0] for v2 in (*names_on(None), _SEARCH_SPACE)} - fields_of(LocalExperimentV1).keys()
    return frozenset(map(folded, tops))


def is_v2(value: Mapping[Any, Any]) -> bool:
    """True if a file's content is in the v2 schema."""
    keys = {folded(key) for key in value if isinstance(key, str)}
    return bool(keys & _keys_only_in_v2()) and folded("trainingServicePlatform") not in keys


@dataclass(frozen=True, slots=True)
class DocumentV2(Document):
    """A v2 file. Its `value` is that of the equivalent v1 file."""

    names: Mapping[_Keys, _Keys] = field(default_factory=dict)
    """The v2 key path of each v1 key path."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user that are not errors."""

    def key(self, path: PathInFile) -> str:
        """The v2 key for a path of the v1 file."""
        return key_of(self._v2(path) or path)

    def diagnostic(self, path: PathInFile, message: str) -> Diagnostic:
        """A diagnostic at this path of the v1 file, or of the file's search space, with the path and keys of this file."""
        if tuple(path[:1]) != _SEARCH_SPACE:  # its keys are the user's names
            message = _in_keys_of_v2(message, self.names)
        if tuple(path) == ("trainingServicePlatform",):
            message = re.sub(r"\bpai\b", "openpai", message)
        for length in range(len(path), 0, -1):
            if (there := self._v2(path[:length])) is not None:
                path = (*there, *path[length:])
                break
        return Document.diagnostic(self, path, message)

    def _v2(self, path: PathInFile) -> Place | None:
        place = place_of(path)
        there = self.names.get(place)
        if there is None:
            # The path may be a whole section.
            there = next((v2 for v2, v1 in SECTIONS.items() if v1 == place), _WHOLES.get(place))
        return None if there is None else with_indices(there, path)


def as_v1(document: Document) -> DocumentV2:
    """The v1 equivalent of a v2 file. Its `diagnostics` cover what v1 cannot express."""
    return _V2ToV1(document).translated()


class _V2ToV1:
    """One pass over one file: moves each value to its v1 path and diagnoses what v1 cannot express."""

    def __init__(self, document: Document) -> None:
        self.document = document
        service = _get(document.value, "trainingService")
        platform = _get(service, "platform")
        self.platform = platform if isinstance(platform, str) else None
        if platform == "pai":
            self.platform = "openpai"
        storage = _get(service, "storage")
        kind = _get(storage, "storageType") or _get(storage, "storage")
        self.table = names_on(self.platform, kind if isinstance(kind, str) else None)
        self.sections = {v2[:length] for v2 in (*self.table, *ALIASES) for length in range(1, len(v2))}
        self.value: dict[str, Any] = {
            "authorName": "unknown",
            "experimentName": Path(document.file).stem,
            "trial": {},
        }
        self.names = {v1: v2 for v2, v1 in self.table.items()}
        self.source_of: dict[Place, Place] = {}
        self.diagnostics: list[Diagnostic] = list(document.diagnostics)
        self.warnings: list[str] = []
        self.code_directories: dict[Place, Any] = {}
        if platform == "pai":
            why = '"pai" is the name in NNI\'s first schema; write platform: openpai'
            self._refuse(("trainingService", "platform"), why)

    def translated(self) -> DocumentV2:
        self._move(self.document.value, (), ())
        service = _get(self.document.value, "trainingService")
        platform = self.platform or _get(service, "platform")  # other than text: the schema reports it
        if service is not None and not isinstance(service, Mapping):
            platform = "local"  # the error is already reported
        if platform is not None:
            is_known = platform == self.platform and platform in PLATFORMS
            self.value["trainingServicePlatform"] = PLATFORMS[platform] if is_known else platform
        match self.platform:
            case "openpai":
                self._apply_openpai_defaults()
            case "frameworkcontroller" | "kubeflow":
                self._apply_kubernetes_defaults()
        self.value["trial"].setdefault("codeDir", ".")
        made = self.document
        return DocumentV2(
            made.file, self.value, made.root, tuple(self.diagnostics), self.names, tuple(self.warnings)
        )

    def _move(self, value: Any, place: _Keys, here: Place) -> None:
        """Copy the value at `place`; `here` is the same path with the indices of items."""
        if isinstance(value, list) and (*place, EACH) in self.sections:
            for index, item in enumerate(value):
                self._move(item, (*place, EACH), (*here, index))
        elif isinstance(value, Mapping) and (*place, EACH) in self.sections:
            put(self.value, with_indices(SECTIONS[place], here), value)  # not a list: v1 reports it
        elif isinstance(value, Mapping) and (place in self.sections or not place):
            if place in SECTIONS:
                put(self.value, with_indices(SECTIONS[place], here), {})
            known = {
                folded(each[len(place)]): each[len(place)]
                for each in (*self.table, *ALIASES, _SEARCH_SPACE)
                if each[: len(place)] == place and len(each) > len(place)
            }
            seen: set[str] = set()
            for key, item in value.items():
                name = known.get(folded(key), key) if isinstance(key, str) else str(key)
                if name in seen:
                    self._refuse((*here, str(key)), f"it is another spelling of {name}; keep one of the two")
                    continue
                seen.add(name)
                self._move_key(item, (*place, name), (*here, name))
        elif place == ("trainingService",) and isinstance(value, list):
            self._refuse(
                here,
                "several at once are not supported; write one, such as trainingService: {platform: openpai, ...}",
            )
        elif place in SECTIONS:
            put(self.value, with_indices(SECTIONS[place], here), value)
        elif value is not None:
            example = {"trainingService": "{platform: local}"}.get(
                place[-1], "{storageType: nfs, server: ..., path: ...}"
            )
            self._refuse(here, f"{shown(value)} is not a mapping; write e.g. {place[-1]}: {example}")

    def _move_key(self, item: Any, place: _Keys, here: Place) -> None:
        key = key_of(place)
        primary = ALIASES.get(place, place)
        if place == _SEARCH_SPACE:
            self.value["searchSpace"] = item
        elif key in _UNSUPPORTED and place not in self.table:
            self._refuse(here, f"it is not supported; {_UNSUPPORTED[key]}")
        elif primary in self.table:
            self._put_value(self.table[primary], primary, place, here, item)
        elif place in self.sections:
            self._move(item, place, here)
        elif (
            self.platform == "kubeflow"
            and place[-2:-1] in [(role,) for role in REPLICAS]
            and folded(place[-1]) == "codedirectory"
        ):
            self.code_directories[here] = item
        elif self.platform in SECTION and primary in (("trialCommand",), ("trialGpuNumber",)):
            self.warnings.append(
                f"{key_of(here)} has no effect on {self.platform}: each role has its own value"
            )
        elif key == "experimentType" and item in ("hpo", None):
            pass  # NNI v3 writes hpo; the other value is architecture search
        elif item is not None and (self.platform in PLATFORMS or place[0] != "trainingService"):
            self._refuse_unknown(place, here, item)

    def _put_value(self, v1: _Keys, primary: _Keys, place: _Keys, here: Place, item: Any) -> None:
        target = with_indices(v1, here)
        if target in self.source_of:
            first = key_of(self.source_of[target])
            is_inner = place[0] == "trainingService" and primary[0] != "trainingService"
            winner = key_of(here) if is_inner else first
            self.warnings.append(f"{winner} takes precedence over {first if is_inner else key_of(here)}")
            if not is_inner:
                return
        if item is None:
            return  # null means that the key is absent
        self.source_of[target] = here
        self.names[v1] = place
        if v1[-1] in DURATIONS:
            item = self._duration(here, item)
        put(self.value, target, item)

    def _duration(self, here: Place, item: Any) -> str:
        """The duration in v1's notation."""
        if isinstance(item, int) and not isinstance(item, bool) and 0 < item < 10**9:
            return f"{item}s"
        found = re.match(DURATION_PATTERN, item) if isinstance(item, str) else None
        seconds = float(found[1]) * SECONDS_OF[found[2].lower()] if found else 0
        if not 0 < seconds < 10**9:
            self._refuse(
                here, f"{shown(item)} is not a number and one of s, m, h, d; write e.g. {here[-1]}: 1h"
            )
            return "1h"
        if found and found[1].isdigit():
            return f"{int(found[1])}{found[2].lower()}"
        return f"{max(1, round(seconds))}s"

    def _refuse(self, here: PathInFile, why: str) -> None:
        self.diagnostics.append(self.document.diagnostic(here, f"cannot use {key_of(here)}: {why}"))

    def _refuse_unknown(self, place: _Keys, here: Place, item: Any) -> None:
        answer = _ANSWERS.get(key_of(place))
        if answer is None and place in self.names and (len(place) == 1 or place[0] in _ALGORITHMS):
            name = key_of(self.names[place]) if len(place) == 1 else self.names[place][-1]
            answer = f"it belongs to NNI's first schema; write {name} here"
            put(self.value, place, item)  # prevents a second diagnostic that the key is missing
        if answer is None and len(place) == 1 and (place[0].endswith("Config") or place[0] == "machineList"):
            answer = "it belongs to NNI's first schema; write its keys into trainingService"
        if answer is None:
            known = [v2[-1] for v2 in self.table if v2[:-1] == place[:-1]] or [
                key_of(v2) for v2 in self.table
            ]
            answer = (
                f"there is no such key here; {remedy_for_unknown(place[-1], known, verb='remove it or use')}"
            )
        self._refuse(here, answer)

    # ---- v2's own keys and defaults

    def _apply_openpai_defaults(self) -> None:
        trial, cluster = self.value["trial"], self.value.setdefault("paiConfig", {})
        cluster.setdefault("reuse", True)
        host = cluster.get("host")
        if isinstance(host, str) and "://" not in host and host.lower() != LOCAL_HOST:
            cluster["host"] = f"https://{host}"
        if "image" not in trial and "paiConfigPath" not in trial:
            self._default_image(trial, "trainingService.dockerImage")

    def _apply_kubernetes_defaults(self) -> None:
        trial, section = self.value["trial"], self.value.setdefault(SECTION[str(self.platform)], {})
        section.setdefault("reuse", True)
        roles = trial.get("taskRoles")
        found = {f"taskRoles[{i}]": role for i, role in enumerate(roles if isinstance(roles, list) else ())}
        found |= {name: trial[name] for name in REPLICAS if name in trial}
        for name, role in found.items():
            if not isinstance(role, dict):
                continue
            if self.platform == "kubeflow":
                role.setdefault("gpuNum", 0)
            if "image" not in role:
                self._default_image(role, f"trainingService.{name}.dockerImage")
        self._one_code_directory(trial)

    def _default_image(self, pod: dict[str, Any], key: str) -> None:
        pod["image"] = DEFAULT_IMAGE
        self.warnings.append(
            f"{key} is not set: NNI's default {DEFAULT_IMAGE} is used, which lacks trial-keeper; docs/images.md describes "
            "how to build an image with trial-keeper"
        )

    def _one_code_directory(self, trial: dict[str, Any]) -> None:
        folders = {value for value in self.code_directories.values() if isinstance(value, str)}
        if "codeDir" not in trial and len(folders) == 1:
            here, trial["codeDir"] = next(iter(self.code_directories.items()))
            self.names["trial", "codeDir"] = tuple(map(str, here))
            return
        for here, folder in self.code_directories.items():
            if folder != trial.get("codeDir", "."):
                self.warnings.append(
                    f"{key_of(here)} has no effect: every role runs the code of trialCodeDirectory"
                )


def _get(value: Any, name: str) -> Any:
    """The value of a key in any of its spellings; None if it is absent."""
    if not isinstance(value, Mapping):
        return None
    return next(
        (item for key, item in value.items() if isinstance(key, str) and folded(key) == folded(name)), None
    )


def put(value: dict[str, Any], path: PathInFile, item: Any) -> None:
    """Set the item at a path and create the mappings and lists above it. An empty mapping replaces no existing mapping."""
    inside: Any = value
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(inside, list) and isinstance(step, int):
            inside += [{} for _ in range(step + 1 - len(inside))]
        if following is None:
            if item != {} or not isinstance(_at(inside, step), dict):
                inside[step] = item
            return
        if not isinstance(_at(inside, step), dict | list):
            inside[step] = [] if isinstance(following, int) else {}
        inside = inside[step]


def _at(inside: Any, step: str | int) -> Any:
    if isinstance(inside, list):
        return inside[step] if isinstance(step, int) and step < len(inside) else None
    return inside.get(step)


def place_of(path: PathInFile) -> _Keys:
    """A path with `*` in place of the indices of items."""
    return tuple(EACH if isinstance(step, int) else step for step in path)


def with_indices(place: _Keys, path: PathInFile) -> Place:
    """The path with each `*` replaced by the indices in `path`, in order."""
    indices = iter([step for step in path if isinstance(step, int)])
    return tuple(next(indices, 0) if step == EACH else step for step in place)


def _in_keys_of_v2(message: str, names: Mapping[_Keys, _Keys]) -> str:
    replaced = _WHOLES | {v1: v2 for v1, v2 in names.items() if v1 != v2}
    replaced |= {
        v1: v2 for v2, v1 in SECTIONS.items() if v1 != v2 and any(name[:2] == v1[:2] for name in names)
    }
    head, example, tail = message.partition("write e.g. ")
    for v1 in sorted(replaced, key=lambda place: len(key_of(place)), reverse=True):
        pattern, v2 = rf"(?<![\w.]){_pattern(v1)}(?!\w)", replaced[v1]
        head = re.sub(pattern, partial(_written, v2), head)
        if len(v1) > 1:
            tail = re.sub(pattern, partial(_written, v2), tail)
    # Examples contain only the last key of a path, and keys inside a mapping.
    lasts: dict[str, set[str]] = {}
    for v1, v2 in names.items():
        lasts.setdefault(v1[-1], set()).add(v2[-1])
    for last, others in lasts.items():
        if len(others) == 1 and last not in others:
            (v2_last,) = others
            tail = re.sub(rf"(?<![\w.]){last}(?=: )", v2_last, tail)
            if last != last.lower() or last == "reuse":
                head = re.sub(rf"(?<![\w.]){last}(?![\w:.])|(?<={{){last}(?=:)", v2_last, head)
    tail = tail.replace("codeDir, classFileName and className", "codeDirectory and className")
    if "nfs: {" in tail:
        tail = _STORAGE_EXAMPLE
    tail = re.sub(r"(?:keyVault|azureStorage): \{", "storage: {storageType: azureStorage, ", tail)
    tail = tail.replace("pvc: {", "storage: {storageType: pvc, ")
    return head + example + tail.replace(", name: storage-key", ", keyVaultKey: storage-key")


def _pattern(place: _Keys) -> str:
    return re.escape(key_of(place)).replace(r"\.\*", r"\[(\d+)\]")


def _written(place: _Keys, found: re.Match[str]) -> str:
    return key_of(with_indices(place, [int(index) for index in found.groups()]))
