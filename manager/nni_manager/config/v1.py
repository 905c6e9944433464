"""Reads experiment files in NNI's first schema (NNI 1.x) as files of the second.

Source: NNI v1.9 and v2.0, ExperimentConfig reference and nnictl's schema; NNI v2.10 for namespace, reuse, pvc and configPath.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from nni_manager.config import keys as table
from nni_manager.config.diagnostics import KeyPath, key_of, shown
from nni_manager.config.dialect import SERVICE, Dialect, Keys
from nni_manager.config.document import Document
from nni_manager.config.platform_file import file_of
from nni_manager.config.platforms import BY_V1, PLATFORMS, THIS_MACHINE, UNSUPPORTED
from nni_manager.config.translation import Translation, put

_PLATFORM = "trainingServicePlatform"
# ---- hints for unknown keys that users often write, by dotted path: the reason and the replacement

_ON_ALL = {
    "tensorboard": "TensorBoard is not started automatically; remove it, and run TensorBoard on the files in $NNI_OUTPUT_DIR",
    "webuiPort": "the port is an option of nnictl; remove it, and use `nnictl create --port N`",
    "trainingService": f"it belongs to NNI's second schema, but {_PLATFORM} to the first; use one schema",
    "searchSpace": "it belongs to NNI's second schema; write it into a JSON file, and set searchSpacePath to that file",
    "tuner.gpuNum": "only trials use GPUs; remove it, or write gpuIndices, which has no effect",
    "assessor.gpuNum": "only trials use GPUs; remove it",
    "tuner.checkpointDir": "results are stored with the experiment; remove it",
    "assessor.checkpointDir": "results are stored with the experiment; remove it",
    "trial.nasMode": "architecture search is not supported; remove it, and write its options as a choice",
}


@cache
def _hints(platform: str) -> Mapping[str, str]:
    of_v2 = {
        key_of(
            v2
        ): f"it belongs to NNI's second schema; write {v1[-1] if v2[0] == v1[0] else key_of(v1)} here"
        for v2, v1 in table.names_in_v1(None).items()
        if v2[-1] != v1[-1] and v2[:1] != SERVICE
    }
    of_platforms = {
        row.section: f"it applies to another platform; write {_PLATFORM}: {row.v1}, or remove it"
        for row in PLATFORMS.values()
    } | {
        section: f"{each.reason}, and remove it"
        for unsupported, each in UNSUPPORTED.items()
        if unsupported != "hybrid"
        for section in each.sections
    }
    files = [file_of(name) for name in PLATFORMS]
    storages = ", ".join(dict.fromkeys(each.storage_in_v1 for each in files if each.storage_in_v1))
    of_storage = {
        "sharedStorage": f"storage is set per platform; remove it, and write the storage of the platform ({storages})"
    }
    elsewhere = {path: hint for each in files for path, hint in each.hints_v1_elsewhere.items()}
    return of_v2 | of_platforms | _ON_ALL | of_storage | elsewhere | dict(file_of(platform).hints_v1)


def dialect_of_v1(platform: str, kind: str | None = None) -> Dialect:
    """The names of keys in v1 files for a platform, by its name in v2. `kind`: see `names_in_v1`."""
    names = {row.name: row.v1 for row in PLATFORMS.values() if row.name != row.v1}
    return Dialect(table.names_in_v1(platform, kind), file_of(platform).examples_of_values_v1, names)


def from_v1(document: Document) -> Document:
    """The equivalent of a v1 file in the second schema; its dialect has the keys of v1."""
    return _FromV1(document).translated()


class _FromV1(Translation):
    def __init__(self, document: Document) -> None:
        self.word = table.get(document.value, _PLATFORM)
        found = BY_V1.get(self.word) if isinstance(self.word, str) else None
        row = found or PLATFORMS[THIS_MACHINE]
        self.platform, self.section, self.may_lack_section = row.name, row.section, row.may_lack_section
        self.file = file_of(self.platform)
        self.kind = self.file.kind_in_v1(table.get(document.value, self.section))
        known = table.keys_on(self.platform)
        super().__init__(
            document,
            dialect_of_v1(self.platform, self.kind),
            {
                v1: key.path
                for key in known
                if not key.is_mapping
                for v1 in key.v1
                if not table.is_of_other_kind(self.platform, v1, self.kind)
            },
            # The section itself is no mapping of v2: its keys are those of one or two mappings.
            {v1: key.path for key in known if key.is_mapping for v1 in key.v1 if v1 != (self.section,)},
        )

    def translated(self) -> Document:
        """The document in the second schema."""
        if isinstance(self.word, str) and self.word in UNSUPPORTED and self.word not in BY_V1:
            self.refused |= {(section,) for section in ("trial", *UNSUPPORTED[self.word].sections)}
        self.move(self.document.value)
        if isinstance(self.word, str):
            put(self.value, (*SERVICE, "platform"), self.platform)
        self.refuse_platform((_PLATFORM,), self.word, BY_V1)
        given = {self.known_name(key, ()) for key in self.document.value}
        needed = {"trial"} if self.may_lack_section else {"trial", self.section}
        for section in sorted(needed - given):
            why = f"it must be a mapping; write e.g. {self._example((section,))}"
            self.refuse((section,), why, "do without")
            self.refused.add((section,))
        if self.kind is not None:
            put(self.value, self.file.key_of_kind, self.kind)
        return self.document_of_v2()

    def answer(self, key_path: Keys, here: KeyPath, item: Any) -> str | None:
        """The hint for an unknown key."""
        if key_path[0] == self.section and table.is_of_other_kind(self.platform, key_path, self.kind):
            why = f"storage {self.kind} does not use it; remove it, or change the storage"
            return "" if item is None else why
        return _hints(self.platform).get(key_of(key_path))

    def refuse_section(self, key_path: Keys, here: KeyPath, item: Any) -> None:
        """Refuse a section that is not a mapping, unless it is optional and null."""
        is_optional = key_path == (self.section,) and self.may_lack_section
        if item is not None or (len(key_path) == 1 and not is_optional):
            self.refuse(here, f"{shown(item)} is not a mapping; write e.g. {self._example(key_path)}")
            self.refused.add(key_path)

    def _example(self, key_path: Keys) -> str:
        if key_path == ("trial",) and self.file.example_of_trial is not None:
            key, example = self.file.example_of_trial
            inner = f"codeDir: ., {self.dialect.example((*SERVICE, key), example)}"
        else:
            inner = {"trial": 'command: "python3 train.py", codeDir: .', **self.file.examples_v1}[
                key_path[-1]
            ]
        return f"{key_path[-1]}: {{{inner}}}"
