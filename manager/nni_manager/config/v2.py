"""Reads experiment files in NNI's second schema: spellings, other names of keys, notations and defaults.

Source: NNI v2.10, nni/experiment/config.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nni_manager.config import keys as table
from nni_manager.config.diagnostics import KeyPath, folded, key_of, ref, shown
from nni_manager.config.dialect import EACH, SERVICE, Keys, with_indices
from nni_manager.config.document import Document
from nni_manager.config.keys import get
from nni_manager.config.platform_file import file_of
from nni_manager.config.platforms import BY_V1, PLATFORMS, THIS_MACHINE
from nni_manager.config.schema import Key
from nni_manager.config.translation import Translation, put
from nni_manager.config.units import SECONDS_OF

# Other names of the same keys in some versions of NNI, on all platforms.
_ALIASES: dict[Keys, Keys] = {
    (*SERVICE, key): (key,)
    for key in ("trialCommand", "trialCodeDirectory", "trialGpuNumber", "nniManagerIp")
}
_HINTS = {
    "sharedStorage": "it is not supported; write the storage into trainingService",
    "name": "did you mean experimentName?",
    "authorName": "NNI's second schema has no such key; remove it",
    "trial": "it belongs to NNI's first schema; write trialCommand, trialCodeDirectory and trialGpuNumber",
    "multiPhase": "NNI removed this key; remove it",
    "multiThread": "NNI removed this key; remove it",
    "trainingService.maxTrialNumPerGpu": "did you mean maxTrialNumberPerGpu?",
    "trainingService.reuse": "did you mean reuseMode?",
}
# NNI reads the number with Python's float. Source: NNI v3.0, nni.experiment.config.utils.parse_time.
_NUMBER = r"\+?(?:[0-9]{1,9}(?:\.[0-9]{0,6})?|\.[0-9]{1,6})(?:[eE][-+]?[0-9]{1,2})?"
DURATION_PATTERN = rf"^\s*({_NUMBER})\s*([smhdSMHD])\s*$"


@cache
def keys_of_v2(platform: str | None) -> tuple[Key, ...]:
    """The keys of v2 files for a platform; None adds no keys."""
    known = [key for key in table.keys_on(platform) if not key.declared.only_v1]
    if platform is None:
        proper = (SERVICE, (*SERVICE, "platform"))
        return tuple(key for key in known if key.path[:1] != SERVICE or key.path in proper)
    return tuple(known)


def aliases_on(platform: str | None) -> dict[Keys, Keys]:
    """The other names of keys of v2 files for a platform."""
    return _ALIASES if platform is None else {**_ALIASES, **file_of(platform).aliases}


def implicit_keys(platform: str) -> set[Keys]:
    """The required keys for which only v2 has a default."""
    return {("experimentName",), ("trialCodeDirectory",), *file_of(platform).implicit}


@cache
def _keys_only_in_v2() -> frozenset[str]:
    """The folded keys that only v2 files have."""
    of_v1 = {v1[0] for key in table.keys_on(None) for v1 in key.v1} - {*SERVICE}
    return frozenset(folded(key.path[0]) for key in keys_of_v2(None) if key.path[0] not in of_v1)


def is_v2(value: Mapping[Any, Any]) -> bool:
    """True if a file's content is in the v2 schema."""
    keys = {folded(key) for key in value if isinstance(key, str)}
    return bool(keys & _keys_only_in_v2()) and folded("trainingServicePlatform") not in keys


@cache
def _all_hints() -> dict[str, str]:
    """The hints for unknown keys, by dotted path. Only these import every platform's keys."""
    return _HINTS | {path: hint for name in PLATFORMS for path, hint in file_of(name).hints.items()}


def from_v2(document: Document) -> Document:
    """A v2 file with the proper name of each key, and with the schema's notations and NNI's defaults."""
    return _FromV2(document).translated()


class _FromV2(Translation):
    knows_any_case = True

    def __init__(self, document: Document) -> None:
        service = get(document.value, "trainingService")
        self.word = get(service, "platform")
        word = BY_V1[self.word].name if isinstance(self.word, str) and self.word in BY_V1 else self.word
        self.platform = word if isinstance(word, str) and word in PLATFORMS else None
        unused = frozenset[Keys]() if self.platform is None else file_of(self.platform).unused_keys(service)
        known = [key for key in keys_of_v2(self.platform) if key.path not in unused]
        leaves = {key.path: key.path for key in known if not key.is_mapping}
        sections = {key.path: key.path for key in known if key.is_mapping}
        aliases = aliases_on(self.platform)
        leaves |= {alias: to for alias, to in aliases.items() if to in leaves}
        super().__init__(document, document.dialect, leaves, sections)
        self.aliases = aliases
        self.durations = {key.path for key in known if key.declared.kind == "duration"}
        self.sources: dict[KeyPath, KeyPath] = {}
        self.value |= {"authorName": "unknown", "experimentName": Path(document.file).stem}

    def translated(self) -> Document:
        """The document in the schema's notation."""
        self.move(self.document.value)
        self.refuse_platform((*SERVICE, "platform"), self.word, PLATFORMS)
        if self.platform is not None:
            put(self.value, (*SERVICE, "platform"), self.platform)
        service = self.value["trainingService"]
        if isinstance(service, dict) and self.platform is not None:
            file = file_of(self.platform)
            if file.reuses_jobs:
                service.setdefault("reuseMode", True)
            file.apply_defaults(self, service)
        self.value.setdefault("trialCodeDirectory", ".")
        return self.document_of_v2()

    def put_value(self, v2: Keys, key_path: Keys, here: KeyPath, item: Any) -> None:
        """Move a value, unless it is null, which means that the key is absent, or another key takes precedence."""
        target = with_indices(v2, here)
        if target in self.sources:
            first = self.sources[target]
            is_inner = key_path[:1] == SERVICE and v2[:1] != SERVICE
            winner, other = (here, first) if is_inner else (first, here)
            self.warn(f"{ref(winner)} takes precedence over {ref(other)}")
            if not is_inner:
                return
        if item is None or (item == [] and (*key_path, EACH) in self.children):
            return
        if key_path == SERVICE and isinstance(item, list):
            cluster = next(name for name in PLATFORMS if name != THIS_MACHINE)
            if len(item) == 1:
                what, cluster = "one platform is no list", get(item[0], "platform") or cluster
            else:
                what = "several at once are not supported"
            self.refuse(here, f"{what}; write one, such as «trainingService: {{platform: {cluster}, ...}}»")
            self.refused.add(key_path)
            return
        self.sources[target] = here
        if key_path != v2:
            names = {**self.dialect.names, v2: key_path}
            self.dialect = dataclasses.replace(self.dialect, names=names)
        put(self.value, target, self._duration(here, item) if v2 in self.durations else item)

    def _duration(self, here: KeyPath, item: Any) -> str:
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
        # NNI rounds up, too. The inner rounding is for products such as 1.1 * 60.
        return f"{math.ceil(round(seconds, 6)) or 1}s"

    def answer(self, key_path: Keys, here: KeyPath, item: Any) -> str | None:
        """The hint for an unknown key."""
        if item is None or (self.platform is None and key_path[:1] == SERVICE):
            return ""
        hint = _all_hints().get(key_of(key_path))
        v2 = {v1: v2 for v2, v1 in table.names_in_v1(self.platform or THIS_MACHINE).items()}.get(key_path)
        is_one_key = v2 != SERVICE and (len(key_path) == 1 or key_path[0] in table.ALGORITHMS)
        if hint is None and v2 is not None and is_one_key:
            put(self.value, v2, item)  # prevents a second diagnostic that the key is missing
            return (
                f"it belongs to NNI's first schema; write {key_of(v2) if len(key_path) == 1 else v2[-1]} here"
            )
        if hint is None and len(key_path) == 1 and key_path[0].endswith("Config"):
            return "it belongs to NNI's first schema; write its keys into trainingService"
        return hint
