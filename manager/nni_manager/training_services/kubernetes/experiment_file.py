"""The experiment file for Kubernetes: the keys, checks and settings that all operators share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from nni_manager.config.diagnostics import KeyPath, ref
from nni_manager.config.dialect import SERVICE, Keys
from nni_manager.config.experiment_schema import (
    COMMAND,
    IMAGE,
    ExperimentKeys,
    ServiceKeys,
    Size,
    keeper_source,
    size,
)
from nni_manager.config.keys import get
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.reading import Reading
from nni_manager.config.schema import Schema, example_of, fields_of, line, mapping, must_be, text, whole
from nni_manager.config.translation import Translation
from nni_manager.support.keeper_bundle import KeeperSource
from nni_manager.training_services.kubernetes.section import (
    AzureStorage,
    ClaimStorage,
    KubernetesStorage,
    NfsStorage,
    RoleConfig,
)

STORAGE: Keys = (*SERVICE, "storage")
# RFC 1123 label: Kubernetes requires it of names.
LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_AZURE_NAME = r"^[0-9a-zA-Z-]{3,63}$"
_VAULT_NAME = r"^[0-9a-zA-Z-]{1,127}$"
POD = 'command: "python3 train.py", gpuNumber: 0, cpuNumber: 1, memorySize: 8192, dockerImage: ...}'
EXAMPLE_OF_NFS = "server: 10.10.10.10, path: /var/nfs/nni"
# The keys of each kind of storage.
_STORAGE_KEYS = {
    "nfs": ("server", "path"),
    "azureStorage": ("azureAccount", "azureShare", "keyVaultName", "keyVaultKey", "uploadRetryCount"),
    "pvc": ("path", "claimName"),
}


_REQUIRED_BY_NFS, _REQUIRED_BY_AZURE = "required by `nfs`", "required by `azureStorage`"
_OF_ROLES = "without effect: each role has its own"


class PodKeys(Schema):
    """The container settings of one role."""

    # fmt: off
    command: str = text("a shell command", "python3 train.py", about=COMMAND)
    gpu_number: int = whole(0, 99999, "0", v1="gpuNum", about="the GPUs of each task")
    cpu_number: int = whole(1, 99999, "1", v1="cpuNum", about="the CPUs of each task")
    memory_size: Size = size("8192", v1="memoryMB", about="the memory of each task")
    docker_image: str = line("the name of an image", IMAGE, v1="image",
        about="the image of the containers, [with or without the keeper](images.md)",
        unset="required; in the second schema NNI's image, which has no keeper")
    private_registry_auth_path: str | None = line("the path of a Docker login file", "~/.docker/config.json", None, kind="file",
        since="0.6", about="the login for the image's registry")
    shared_memory_size: Size | None = size("1024", None, what="a whole number of MB, or a size such as 1gb", v1="shmMB",
        since="0.6", unset="the cluster's", about="the shared memory of each task")
    # fmt: on


class StorageKeys(Schema):
    """The shared storage for code and output of trials.

    This schema accepts the keys of all storage types; `KubernetesFile` checks which belong to each.
    """

    python_name = "K8sStorageConfig"
    # fmt: off
    storage_type: Literal["nfs", "azureStorage", "pvc"] | None = must_be("one of nfs, azureStorage, pvc", "nfs", None,
        v1="storage", unset="the one that is described", about="the kind of [storage](frameworkcontroller.md#storage)")
    server: str | None = line("the address of an NFS server", "10.10.10.10", None, v1="nfs.server", unset=_REQUIRED_BY_NFS,
        about="the server that exports the folder")
    path: str | None = line("the path that the server exports, or the mount point of the claim's volume on this machine",
        "/var/nfs/nni", None, v1="nfs.path pvc.path", unset="required by `nfs` and `pvc`",
        about="the folder that all tasks share")
    claim_name: str | None = must_be("the name of a claim", "nni", None, pattern=LABEL, v1="pvc.name", since="0.6",
        unset="required by `pvc`", about="the PersistentVolumeClaim that containers mount")
    azure_account: str | None = must_be("the name of a storage account", "mystorage", None, pattern=r"^[0-9a-zA-Z-]{3,31}$",
        v1="azureStorage.accountName", unset=_REQUIRED_BY_AZURE, about="the account of the share")
    azure_share: str | None = must_be("the name of a file share", "nni", None, pattern=_AZURE_NAME,
        v1="azureStorage.azureShare", unset=_REQUIRED_BY_AZURE, about="the share; it is created if it is missing")
    key_vault_name: str | None = must_be("the name of a vault", "my-vault", None, pattern=_VAULT_NAME, v1="keyVault.vaultName",
        unset=_REQUIRED_BY_AZURE, about="the vault with the account's key")
    key_vault_key: str | None = must_be("the name of a secret in the vault", "storage-key", None, pattern=_VAULT_NAME,
        v1="keyVault.name", unset=_REQUIRED_BY_AZURE, about="the account's key in the vault")
    upload_retry_count: int | None = whole(1, 99999, "3", None, since="0.6", unset="`1`",
        about="how often an upload to the share is retried")
    # fmt: on


class KubernetesServiceKeys(ServiceKeys):
    """The keys of `trainingService` that all operators share."""

    # fmt: off
    storage: StorageKeys | None = mapping("{storageType: nfs, server: 10.10.10.10, path: /var/nfs/nni}", None, v1=".",
        unset="required", about="the storage that this machine and all tasks share")
    keeper: KeeperSource = keeper_source()
    namespace: str | None = must_be("the name of a namespace", "default", None, pattern=LABEL, unset="that of the login",
        about="the namespace of the jobs")
    # fmt: on


class KubernetesExperimentKeys(ExperimentKeys):
    """The experiment file for Kubernetes. `trialCommand` and `trialGpuNumber` have no effect: each role has its own."""

    trial_command: Any = must_be("a shell command", "python3 train.py", None, v1="", about=_OF_ROLES)
    trial_gpu_number: Any = must_be("a number of GPUs", "0", None, v1="", about=_OF_ROLES)


def _refuse_storage(storage: Any, refuse: Callable[..., None]) -> None:
    given = storage if isinstance(storage, Mapping) else {}
    kind = given.get("storageType") or _kind_of(given)
    if kind is None:
        example = ref(STORAGE, "{storageType: nfs, server: 10.10.10.10, path: /var/nfs/nni}")
        why = f"trials require a storage that all machines share; write e.g. {example}"
        refuse((*STORAGE, "storageType"), why, "do without")
    elif isinstance(kind, str) and kind in _STORAGE_KEYS:  # the schema reports an unknown kind
        for name in _STORAGE_KEYS[kind]:
            field = fields_of(StorageKeys)[name]
            if given.get(name) is None and name != "uploadRetryCount":
                what = f"it must be {field.description}" if name != "path" else f"storage {kind} requires it"
                key_path = (*STORAGE, name)
                refuse(key_path, f"{what}; write e.g. {ref(key_path, example_of(field))}", "do without")


def _kind_of(storage: Mapping[str, Any]) -> str | None:
    """The kind of a storage without `storageType`: the first with a key that no other kind has, or else with any key."""
    given = {
        kind: [key for key in keys if key in storage and key != "uploadRetryCount"]
        for kind, keys in _STORAGE_KEYS.items()
    }
    with_own_key = (kind for kind, keys in given.items() if set(keys) - {"path"})
    return next(with_own_key, next((kind for kind, keys in given.items() if keys), None))


class KubernetesFile(PlatformFile, ABC):
    """The part of one operator."""

    parts_by_kind: ClassVar = {"nfs": ("nfs",), "azureStorage": ("azureStorage", "keyVault"), "pvc": ("pvc",)}
    key_of_kind = (*STORAGE, "storageType")
    examples_of_values_v1: ClassVar = {STORAGE: f"storage: nfs and nfs: {{{EXAMPLE_OF_NFS}}}"}
    examples_v1: ClassVar = {
        "nfs": EXAMPLE_OF_NFS,
        "azureStorage": "accountName: mystorage, azureShare: nni",
        "keyVault": "vaultName: my-vault, name: storage-key",
        "pvc": "path: /mnt/nni-volume, name: nni",
    }
    storage_in_v1 = "nfs on Kubernetes"
    hints_v1: ClassVar = dict.fromkeys(
        (f"trial.{key}" for key in ("command", "gpuNum", "cpuNum", "memoryMB", "image", "shmMB")),
        "each role has its own value; write it into the roles",
    )
    aliases: ClassVar = {
        (*STORAGE, "storage"): (*STORAGE, "storageType"),
        (*STORAGE, "keyVault"): (*STORAGE, "keyVaultName"),
        (*STORAGE, "keyVaultSecret"): (*STORAGE, "keyVaultKey"),
    }
    hints: ClassVar = {
        f"trainingService.storage.{key}": f"it applies to «trainingService.storage.storageType: {kind}»; remove it, or change "
        "«trainingService.storage.storageType»"
        for kind, keys in _STORAGE_KEYS.items()
        for key in keys
    }

    @classmethod
    def kind_in_v1(cls, section: Any) -> str | None:
        """The storage that a section names, or the first that it describes; None without one."""
        named = get(section, "storage")
        if named is not None:
            return named if isinstance(named, str) and named in cls.parts_by_kind else None
        described = (
            kind
            for kind, parts in cls.parts_by_kind.items()
            if any(get(section, part) is not None for part in parts)
        )
        return next(described, None)

    @classmethod
    def unused_keys(cls, service: Any) -> frozenset[Keys]:
        """The keys of other kinds of storage; none if the kind is not known."""
        storage = get(service, "storage")
        kind = get(storage, "storageType") or get(storage, "storage")
        if not isinstance(kind, str) or kind not in _STORAGE_KEYS:
            return frozenset()
        others = {name for keys in _STORAGE_KEYS.values() for name in keys} - {*_STORAGE_KEYS[kind]}
        return frozenset((*STORAGE, name) for name in others)

    @classmethod
    def is_path(cls, key: str, mapping: Mapping[str, Any]) -> bool:
        """True also for the mount point of a claim's volume."""
        is_claim = "pvc" in (mapping.get("storageType"), mapping.get("storage"))
        return (is_claim and key == "path") or super().is_path(key, mapping)

    @classmethod
    @abstractmethod
    def roles_in(cls, service: Mapping[str, Any]) -> dict[KeyPath, Any]:
        """The roles as written, by their paths within `trainingService`."""

    @classmethod
    def apply_defaults(cls, file: Translation, service: dict[str, Any]) -> None:
        """Set the images and the code folder."""
        roles = {key_path: role for key_path, role in cls.roles_in(service).items() if isinstance(role, dict)}
        for key_path, role in roles.items():
            if "dockerImage" not in role:
                file.set_default_image(role, (*SERVICE, *key_path))
        for key in ("trialCommand", "trialGpuNumber"):
            if key in file.value:
                file.warn(
                    f"{ref((key,))} has no effect on {service['platform']}: each role has its own value"
                )
        _set_code_directory(file, roles)

    # ---- one file

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self.paths: dict[KeyPath, Path] = {}

    def check(self) -> None:
        """Check the storage, what the operator needs, and the paths of the file."""
        _refuse_storage(self.service.get("storage"), self.reading.refuse)
        self.check_roles()
        self.reading.refuse_placeholders()
        for key_path, written in self.paths_in_file():
            path = self.reading.absolute(key_path, written)
            if path is not None:
                self.paths[key_path] = path
                self.reading.refuse_absent(key_path, path)

    @abstractmethod
    def check_roles(self) -> None:
        """Refuse missing keys, and keys that contradict others. The schema diagnoses values of a wrong type."""

    def paths_in_file(self) -> Iterator[tuple[KeyPath, Any]]:
        """Key path and value of every path on this machine, except the code folder."""
        for key_path, role in self.roles_in(self.service).items():
            if isinstance(role, Mapping):
                yield (*SERVICE, *key_path, "privateRegistryAuthPath"), role.get("privateRegistryAuthPath")
        storage = self.service.get("storage")
        if isinstance(storage, Mapping) and (storage.get("storageType") or _kind_of(storage)) == "pvc":
            yield (*STORAGE, "path"), storage.get("path")

    def role(self, key_path: KeyPath, name: str, tasks: int, pod: PodKeys) -> RoleConfig:
        """The settings of a role at `key_path`."""
        return self.same_named(
            RoleConfig,
            pod,
            name=name,
            tasks=tasks,
            image=pod.docker_image,
            gpu=pod.gpu_number,
            cpu=pod.cpu_number,
            memory_mb=pod.memory_size,
            shm_mb=pod.shared_memory_size,
            registry_login=self.paths.get((*SERVICE, *key_path, "privateRegistryAuthPath")),
        )

    def storage_of_jobs(self, storage: StorageKeys | None) -> KubernetesStorage:
        """The storage that containers mount."""
        # `_refuse_storage` has refused an incomplete storage.
        assert storage is not None
        if (claim := self.paths.get((*STORAGE, "path"))) is not None:
            assert storage.claim_name is not None
            return ClaimStorage(claim, storage.claim_name)
        if storage.server is not None and storage.path is not None:
            return NfsStorage(storage.server, storage.path)
        account, share = storage.azure_account, storage.azure_share
        vault, secret = storage.key_vault_name, storage.key_vault_key
        assert account is not None
        assert share is not None
        assert vault is not None
        assert secret is not None
        retries = 1 if storage.upload_retry_count is None else storage.upload_retry_count
        return AzureStorage(account, share, vault, secret, retries)


def _set_code_directory(file: Translation, roles: Mapping[KeyPath, dict[str, Any]]) -> None:
    """Use the code folder of the roles for all, if they have the same and the experiment has none."""
    given = {key_path: role["codeDirectory"] for key_path, role in roles.items() if "codeDirectory" in role}
    folders = {folder for folder in given.values() if isinstance(folder, str)}
    if "trialCodeDirectory" not in file.value and len(folders) == 1:
        (key_path, file.value["trialCodeDirectory"]), *_ = given.items()
        names = {**file.dialect.names, ("trialCodeDirectory",): (*SERVICE, str(key_path[0]), "codeDirectory")}
        file.dialect = dataclasses.replace(file.dialect, names=names)
        return
    for key_path, folder in given.items():
        if folder != file.value.get("trialCodeDirectory", "."):
            key = ref((*SERVICE, *key_path, "codeDirectory"))
            file.warn(f"{key} has no effect: every role runs the code of «trialCodeDirectory»")
