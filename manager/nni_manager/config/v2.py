"""NNI's v2 experiment files: each is read as the v1 file that says the same, and mistakes are told in v2's words.

What v1 cannot say is answered here. Source: NNI v2.10, nni/experiment/config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from nni_manager.config.document import Document, PathInFile
from nni_manager.config.mistakes import Mistake, key_of, remedy_for_unknown, shown
from nni_manager.config.model import LOCAL_HOST

_Place = tuple[str, ...]


def _places(table: Mapping[str, str]) -> dict[_Place, _Place]:
    return {tuple(v2.split(".")): tuple(v1.split(".")) for v2, v1 in table.items()}


_EVERYWHERE = _places(
    {
        "experimentName": "experimentName",
        "experimentWorkingDirectory": "logDir",
        "searchSpaceFile": "searchSpacePath",
        "trialCommand": "trial.command",
        "trialCodeDirectory": "trial.codeDir",
        "trialConcurrency": "trialConcurrency",
        "trialGpuNumber": "trial.gpuNum",
        "maxExperimentDuration": "maxExecDuration",
        "maxTrialNumber": "maxTrialNum",
        "maxTrialDuration": "maxTrialDuration",
        "maxTrialRetry": "maxTrialRetry",
        "nniManagerIp": "nniManagerIp",
        "useAnnotation": "useAnnotation",
        "debug": "debug",
        "logLevel": "logLevel",
        "tunerGpuIndices": "tuner.gpuIndices",
        "tuner.name": "tuner.builtinTunerName",
        "tuner.classArgs": "tuner.classArgs",
        "tuner.className": "tuner.className",
        "tuner.codeDirectory": "tuner.codeDir",
        "assessor.name": "assessor.builtinAssessorName",
        "assessor.classArgs": "assessor.classArgs",
        "assessor.className": "assessor.className",
        "assessor.codeDirectory": "assessor.codeDir",
        "advisor.name": "advisor.builtinAdvisorName",
        "advisor.classArgs": "advisor.classArgs",
        "trainingService.platform": "trainingServicePlatform",
        "reuseIdleTimeout": "reuseIdleTimeout",
        "maxTrialsPerJob": "maxTrialsPerJob",
        "warmImports": "warmImports",
    }
)
_LOCAL = _places(
    {
        "trainingService.gpuIndices": "localConfig.gpuIndices",
        "trainingService.maxTrialNumberPerGpu": "localConfig.maxTrialNumPerGpu",
        "trainingService.useActiveGpu": "localConfig.useActiveGpu",
        "trainingService.reuseMode": "localConfig.reuse",
    }
)
_OPENPAI = _places(
    {
        "trainingService.host": "paiConfig.host",
        "trainingService.username": "paiConfig.userName",
        "trainingService.token": "paiConfig.token",
        "trainingService.trialCpuNumber": "trial.cpuNum",
        "trainingService.trialMemorySize": "trial.memoryMB",
        "trainingService.dockerImage": "trial.image",
        "trainingService.virtualCluster": "trial.virtualCluster",
        "trainingService.localStorageMountPoint": "trial.nniManagerNFSMountPath",
        "trainingService.containerStorageMountPoint": "trial.containerNFSMountPath",
        "trainingService.storageConfigName": "trial.paiStorageConfigName",
        "trainingService.openpaiConfigFile": "trial.paiConfigPath",
        "trainingService.reuseMode": "paiConfig.reuse",
    }
)
_PLATFORM = {"openpai": "pai"}
_SECTIONS = ("tuner", "advisor", "assessor", "trainingService")
_NOT_YET = {
    "sharedStorage": "name the storage where the training service has it",
    "trainingService.openpaiConfig": "write it into a file and name that in openpaiConfigFile",
}
# Only files of v2 have them.
_SIGNS = frozenset(
    {"trainingService", "trialCommand", "trialCodeDirectory", "searchSpaceFile", "searchSpace"}
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([tgmk]?)i?b?", re.IGNORECASE)
_MB = {"t": 1024 * 1024, "g": 1024, "m": 1, "": 1, "k": 1 / 1024}


def is_v2(value: Mapping[Any, Any]) -> bool:
    """Whether a file's content is v2's."""
    keys = {to_camel(key) if isinstance(key, str) and "_" in key else key for key in value}
    return bool(keys & _SIGNS) and "trainingServicePlatform" not in keys


@dataclass(frozen=True, slots=True)
class DocumentV2(Document):
    """A v2 file whose `value` is that of the v1 file which says the same."""

    names: Mapping[_Place, _Place] = field(default_factory=dict)
    """Where v2 has what v1 has there."""

    def mistake(self, path: PathInFile, message: str) -> Mistake:
        """A mistake at this path of the v1 file, told as one of this file."""
        place = tuple(map(str, path))
        message = _in_words_of_v2(message, self.names)
        for length in range(len(place), 0, -1):
            if (there := self.names.get(place[:length])) is not None:
                message = message.replace(f"e.g. {place[length - 1]}: ", f"e.g. {there[-1]}: ")
                path = (*there, *path[length:])
                break
        return self.said(path, message)

    def said(self, path: PathInFile, message: str) -> Mistake:
        """A mistake at this path of this file."""
        line, column = self._place(path)
        return Mistake(self.file, line, column, key_of(path), message)


def as_v1(document: Document) -> DocumentV2:
    """The v1 file that says what this v2 file says; its `mistakes` have what no v1 file can say."""
    found = dict(_flat(document.value))
    service = document.value.get("trainingService", document.value.get("training_service"))
    platform = found.get(("trainingService", "platform"))
    table = _EVERYWHERE | (_OPENPAI if platform == "openpai" else _LOCAL if platform == "local" else {})
    names = {v1: v2 for v2, v1 in table.items()}
    value: dict[str, Any] = {"authorName": "unknown", "experimentName": Path(document.file).stem, "trial": {}}
    translated = DocumentV2(document.file, value, document.root, document.mistakes, names)
    mistakes = list(document.mistakes)
    if service is not None and not isinstance(service, Mapping):
        mistakes.append(
            translated.said(
                ("trainingService",),
                "cannot use trainingService: several at once are not in this version yet; write one, "
                "such as trainingService: {platform: openpai, ...}",
            )
        )
    for place, item in found.items():
        key = key_of(place)
        if place == ("searchSpace",) or (key == "trainingService" and not isinstance(item, Mapping)):
            continue
        if key in _NOT_YET:
            mistakes.append(
                translated.said(place, f"cannot use {key}: it is not in this version yet; {_NOT_YET[key]}")
            )
        elif place in table:
            _put(value, table[place], item)
        elif item is not None and (platform in ("local", "openpai") or place[0] != "trainingService"):
            known = [key_of(name) for name in table if name[:-1] == place[:-1]]
            remedy = remedy_for_unknown(key, known, verb="remove it or use")
            mistakes.append(translated.said(place, f"cannot use {key}: there is no such key here; {remedy}"))
    value["trainingServicePlatform"] = _PLATFORM.get(str(platform), platform)
    value["trial"].setdefault("codeDir", ".")
    if platform == "openpai":
        mistakes += _as_openpai_has_it(translated, value)
    if "searchSpace" in {place[0] for place in found}:
        value["searchSpace"] = found["searchSpace",]
    return DocumentV2(document.file, value, document.root, tuple(mistakes), names)


def _as_openpai_has_it(document: DocumentV2, value: dict[str, Any]) -> list[Mistake]:
    trial, cluster = value["trial"], value.setdefault("paiConfig", {})
    cluster.setdefault("reuse", True)
    host = cluster.get("host")
    if isinstance(host, str) and "://" not in host and host.lower() != LOCAL_HOST:
        cluster["host"] = f"https://{host}"
    size = trial.get("memoryMB")
    if size is None:
        return []
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None:
        trial["memoryMB"] = 100  # any that v1 takes: what is wrong is told here
        place = ("trainingService", "trialMemorySize")
        text = f"cannot use {key_of(place)}: {shown(size)} is not a size; write e.g. trialMemorySize: 8gb"
        return [document.said(place, text)]
    trial["memoryMB"] = int(float(found[1]) * _MB[found[2].lower()])
    return []


def _flat(value: Mapping[Any, Any]) -> Iterator[tuple[_Place, Any]]:
    """Keys and values, with those of sections one level down, in v2's camelCase."""
    for key, item in value.items():
        name = to_camel(key) if isinstance(key, str) and "_" in key else str(key)
        if name in _SECTIONS and isinstance(item, Mapping):
            for inner, of_inner in item.items():
                yield (
                    (name, to_camel(inner) if isinstance(inner, str) and "_" in inner else str(inner)),
                    of_inner,
                )
        else:
            yield (name,), item


def _put(value: dict[str, Any], place: _Place, item: Any) -> None:
    for step in place[:-1]:
        value = value.setdefault(step, {})
    value[place[-1]] = item


def _in_words_of_v2(message: str, names: Mapping[_Place, _Place]) -> str:
    words = {key_of(v1): key_of(v2) for v1, v2 in names.items() if v1 != v2}
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({pattern})(?![\w])", lambda found: words[found[0]], message)
