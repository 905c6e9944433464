"""Reads experiment files in NNI's first schema (NNI 1.x) as files of the second.

Source: NNI v1.9 and v2.0, ExperimentConfig reference and nnictl's schema; NNI v2.10 for namespace, reuse, pvc and configPath.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from nni_manager.config import keys as table
from nni_manager.config.diagnostics import Place, key_of, shown
from nni_manager.config.dialect import Dialect, Keys
from nni_manager.config.document import Document
from nni_manager.config.experiment_schema import REPLICA, ROLE
from nni_manager.config.translation import Translation, put

_PLATFORM = "trainingServicePlatform"
_PLATFORM_OF: dict[str, str] = {v1: v2 for v2, v1 in table.PLATFORMS.items()}
# The sections of each platform, besides `trial`.
SECTIONS: dict[str, tuple[str, ...]] = {
    "local": ("localConfig",),
    "pai": ("paiConfig",),
    "frameworkcontroller": ("frameworkcontrollerConfig",),
    "kubeflow": ("kubeflowConfig",),
    "remote": ("machineList", "remoteConfig"),
    "paiYarn": ("paiYarnConfig",),
    "dlts": ("dltsConfig",),
    "aml": ("amlConfig",),
    "adl": ("adlConfig",),
    "dlc": ("dlcConfig",),
    "hybrid": ("hybridConfig", "machineList", "remoteConfig", "paiConfig", "amlConfig", "localConfig"),
}
# ---- hints for unknown keys that users often write, by dotted path: the reason and the replacement

_FOR_CLUSTERS = "it applies only to jobs on a cluster; remove it"
_FOR_ROLES = f"it applies to {_PLATFORM}: {{}}; remove it, and write command directly into trial"
_JOB_FILE = "write it into an OpenPAI job file, and set trial.paiConfigPath to that file"
_OF_ROLES = "each role has its own value; write it into the roles"
_ON_ALL = {
    "sharedStorage": "storage is set per platform; remove it, and write the storage of the platform "
    "(trial.nniManagerNFSMountPath on OpenPAI, nfs on Kubernetes)",
    "tensorboard": "TensorBoard is not started automatically; remove it, and run TensorBoard on the files in $NNI_OUTPUT_DIR",
    "webuiPort": "the port is an option of nnictl; remove it, and use `nnictl create --port N`",
    "trainingService": f"it belongs to NNI's second schema, but {_PLATFORM} to the first; use one schema",
    "searchSpace": "it belongs to NNI's second schema; write it into a JSON file, and set searchSpacePath to that file",
    "tuner.gpuNum": "only trials use GPUs; remove it, or write gpuIndices, which has no effect",
    "assessor.gpuNum": "only trials use GPUs; remove it",
    "tuner.checkpointDir": "results are stored with the experiment; remove it",
    "assessor.checkpointDir": "results are stored with the experiment; remove it",
    "trial.nasMode": "architecture search is not supported; remove it, and write its options as a choice",
    "trial.dataDir": "OpenPAI no longer has HDFS; read data from the storage at trial.containerNFSMountPath, and remove it",
    "trial.outputDir": "OpenPAI no longer has HDFS; write to $NNI_OUTPUT_DIR on the shared storage, and remove it",
    "trial.gpuType": "a virtual cluster determines the GPU type; remove it, and set trial.virtualCluster",
    "trial.authFile": f"only OpenPAI's job files can contain a registry login; {_JOB_FILE}",
    "trial.portList": f"only OpenPAI's job files can request ports; {_JOB_FILE}",
    "trial.shmMB": f"only OpenPAI's job files can request shared memory (extraContainerOptions); {_JOB_FILE}",
    **dict.fromkeys((f"trial.{role}" for role in table.REPLICAS), _FOR_ROLES.format("kubeflow")),
    "trial.taskRoles": _FOR_ROLES.format("frameworkcontroller"),
    "trial.taskRoles.*.frameworkAttemptCompletionPolicy.minSucceedTaskCount": "its name in NNI's first schema is "
    "minSucceededTaskCount; use that name",
}
_IN_ROLES = {
    f"trial.{key}": _OF_ROLES for key in ("command", "gpuNum", "cpuNum", "memoryMB", "image", "shmMB")
}
_ON_PLATFORM: dict[str | None, dict[str, str]] = {
    "local": {
        f"trial.{key}": _FOR_CLUSTERS
        for key in ("cpuNum", "memoryMB", "image", "virtualCluster", "nniManagerNFSMountPath", "containerNFSMountPath",
                    "paiStorageConfigName", "paiConfigPath", "shmMB")
    },
    "openpai": {
        "trial.paiStoragePlugin": "its name is now paiStorageConfigName; write the name of an OpenPAI storage under that key",
        "localConfig": "OpenPAI assigns machines and GPUs; remove it, and write reuse into paiConfig",
    },
    "frameworkcontroller": _IN_ROLES | {
        f"trial.{role}": f"it applies to {_PLATFORM}: kubeflow; write an item of taskRoles with this name"
        for role in table.REPLICAS
    },
    "kubeflow": _IN_ROLES | {
        "trial.taskRoles": f"it applies to {_PLATFORM}: frameworkcontroller; write worker, ps and master"
    },
}  # fmt: skip


@cache
def _hints(platform: str) -> Mapping[str, str]:
    of_v2 = {
        key_of(
            v2
        ): f"it belongs to NNI's second schema; write {v1[-1] if v2[0] == v1[0] else key_of(v1)} here"
        for v2, v1 in table.names_in_v1("local").items()
        if v2[-1] != v1[-1] and v2[0] != "trainingService"
    }
    of_platforms = {
        section: f"it applies to another platform; write {_PLATFORM}: {v1}, or remove it"
        for v1 in table.PLATFORMS.values()
        for section in SECTIONS[v1]
    } | {
        section: f"{why}, and remove it"
        for unsupported, why in table.UNSUPPORTED.items()
        if unsupported != "hybrid"
        for section in SECTIONS[unsupported]
    }
    return of_v2 | of_platforms | _ON_ALL | _ON_PLATFORM[platform]


def dialect_of_v1(platform: str, storage: str | None = None) -> Dialect:
    """The names of keys in v1 files for a platform, by its name in v2."""
    return Dialect(
        table.names_in_v1(platform, storage),
        {table.STORAGE: "storage: nfs and nfs: {server: 10.10.10.10, path: /var/nfs/nni}"},
        {"openpai": "pai"},
    )


def from_v1(document: Document) -> Document:
    """The equivalent of a v1 file in the second schema; its dialect has the keys of v1."""
    return _FromV1(document).translated()


class _FromV1(Translation):
    def __init__(self, document: Document) -> None:
        self.word = table.get(document.value, _PLATFORM)
        self.platform = _PLATFORM_OF.get(self.word, "local") if isinstance(self.word, str) else "local"
        self.section = SECTIONS[table.PLATFORMS[self.platform]][0]
        on_kubernetes = self.platform in table.KUBERNETES
        self.storage = _kind_of_storage(table.get(document.value, self.section)) if on_kubernetes else None
        known = table.keys_on(self.platform)
        super().__init__(
            document,
            dialect_of_v1(self.platform, self.storage),
            {
                v1: key.path
                for key in known
                if not key.is_mapping
                for v1 in key.v1
                if not table.is_of_other_storage(v1, self.storage)
            },
            {
                v1: key.path
                for key in known
                if key.is_mapping and key.path not in (table.SERVICE, table.STORAGE)
                for v1 in key.v1
            },
        )

    def translated(self) -> Document:
        """The document in the second schema."""
        if isinstance(self.word, str) and self.word in table.UNSUPPORTED:
            self.refused |= {(section,) for section in ("trial", *SECTIONS[self.word])}
        self.move(self.document.value)
        if isinstance(self.word, str):
            put(self.value, (*table.SERVICE, "platform"), self.platform)
        self.refuse_platform((_PLATFORM,), self.word, _PLATFORM_OF)
        given = {self.known_name(key, ()) for key in self.document.value}
        for section in sorted({"trial", self.section} - {"localConfig"} - given):
            why = f"it must be a mapping; write e.g. {self._example((section,))}"
            self.refuse((section,), why, "do without")
            self.refused.add((section,))
        if self.storage is not None:
            put(self.value, (*table.STORAGE, "storageType"), self.storage)
        return self.document_of_v2()

    def answer(self, place: Keys, here: Place, item: Any) -> str | None:
        """The hint for an unknown key."""
        if place[0] == self.section and table.is_of_other_storage(place, self.storage):
            why = f"storage {self.storage} does not use it; remove it, or change the storage"
            return "" if item is None else why
        return _hints(self.platform).get(key_of(place))

    def refuse_section(self, place: Keys, here: Place, item: Any) -> None:
        """Refuse a section that is not a mapping, unless it is optional and null."""
        if item is not None or (len(place) == 1 and place != ("localConfig",)):
            self.refuse(here, f"{shown(item)} is not a mapping; write e.g. {self._example(place)}")
            self.refused.add(place)

    def _example(self, place: Keys) -> str:
        roles = {
            "frameworkcontroller": ("taskRoles", f"[{ROLE}]"),
            "kubeflow": ("worker", REPLICA),
        }
        if place == ("trial",) and self.platform in roles:
            role, example = roles[self.platform]
            inner = f"codeDir: ., {self.dialect.example((*table.SERVICE, role), example)}"
        else:
            inner = _EXAMPLES[place[-1]]
        return f"{place[-1]}: {{{inner}}}"


_NFS = "server: 10.10.10.10, path: /var/nfs/nni"
_EXAMPLES = {
    "trial": 'command: "python3 train.py", codeDir: .',
    "localConfig": "maxTrialNumPerGpu: 1",
    "paiConfig": "userName: ada, token: ..., host: openpai.example.com",
    "frameworkcontrollerConfig": f"storage: nfs, nfs: {{{_NFS}}}",
    "kubeflowConfig": f"operator: pytorch-operator, apiVersion: v1, storage: nfs, nfs: {{{_NFS}}}",
    "nfs": _NFS,
    "azureStorage": "accountName: mystorage, azureShare: nni",
    "keyVault": "vaultName: my-vault, name: storage-key",
    "pvc": "path: /mnt/nni-volume",
}


def _kind_of_storage(section: Any) -> str | None:
    """The storage that a section names, or the first that it describes; None without one."""
    named = table.get(section, "storage")
    described = (
        kind
        for kind, parts in table.STORAGE_PARTS.items()
        if any(table.get(section, part) is not None for part in parts)
    )
    if named is None:
        return next(described, None)
    return named if isinstance(named, str) and named in table.STORAGE_PARTS else None
