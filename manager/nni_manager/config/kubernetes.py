"""The Kubernetes parts of NNI's v1 experiment files: FrameworkController and Kubeflow.

Source: NNI v2.0, nnictl's schema; NNI v2.10 for namespace, reuse, pvc and configPath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from nni_manager.config.diagnostics import Place
from nni_manager.config.framework_template import FrameworkTemplate
from nni_manager.config.model import (
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    KubernetesStorage,
    NfsStorage,
    Platform,
    RoleConfig,
)
from nni_manager.config.schema import Schema, flag, mapping, must_be, whole
from nni_manager.config.v1 import ExperimentV1, LocalExperimentV1, PaiExperimentV1, Size, TrialV1

# RFC 1123 label: Kubernetes requires it of names.
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
# A ClusterTrainingRuntime, or a TrainingRuntime in the namespace of the jobs.
_RUNTIME = r"^(TrainingRuntime/)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
DEFAULT_RUNTIME = "torch-distributed"
_AZURE_NAME = r"^[0-9a-zA-Z-]{3,63}$"
_ROLE = '{name: worker, taskNum: 1, command: "python3 train.py", gpuNum: 0, cpuNum: 1, memoryMB: 8192, image: ...}'
_REPLICA = '{replicas: 1, command: "python3 train.py", gpuNum: 0, cpuNum: 1, memoryMB: 8192, image: ...}'


class _PodV1(Schema):
    """The container settings of one role."""

    command: str = must_be("a shell command", "python3 train.py", min_length=1)
    gpu_num: int = whole(0, 99999, "0", v2="gpuNumber")
    cpu_num: int = whole(1, 99999, "1", v2="cpuNumber")
    memory_mb: Size = must_be(
        "a whole number of MB, or a size such as 8gb", "8192", alias="memoryMB", v2="memorySize"
    )
    image: str = must_be(
        "the name of an image", "registry.example.com/me/train:1", min_length=1, v2="dockerImage"
    )
    private_registry_auth_path: str | None = must_be(
        "the path of a Docker login file", "~/.docker/config.json", None, min_length=1
    )
    shm_mb: Size | None = must_be(
        "a whole number of MB, or a size such as 1gb", "1024", None, alias="shmMB", v2="sharedMemorySize"
    )


class CompletionPolicyV1(Schema):
    """`frameworkAttemptCompletionPolicy` of a task role: the number of tasks that end the job; -1 disables the rule."""

    answers: ClassVar[dict[str, str]] = {
        "minSucceedTaskCount": "its name in NNI's first schema is minSucceededTaskCount; use that name"
    }
    min_failed_task_count: int = must_be("-1 or a whole number of at least 1", "1", ge=-1, le=99999)
    min_succeeded_task_count: int = must_be(
        "-1 or a whole number of at least 1", "-1", ge=-1, le=99999, v2="minSucceedTaskCount"
    )


class TaskRoleV1(_PodV1):
    """An item of `trial.taskRoles`."""

    name: str = must_be(
        "a name of at most 63 lower-case letters and digits", "worker", pattern=r"^[a-z0-9]{1,63}$"
    )
    task_num: int = whole(1, 10000, "1", v2="taskNumber")
    framework_attempt_completion_policy: CompletionPolicyV1 = mapping(
        "{minFailedTaskCount: 1, minSucceededTaskCount: -1}"
    )


class ReplicaV1(_PodV1):
    """`trial.worker`, `trial.ps` and `trial.master`."""

    replicas: int = whole(1, 10000, "1")


_OF_ROLES = "each role has its own value; write it into the roles"
_IN_ROLES = dict.fromkeys(("command", "gpuNum", "cpuNum", "memoryMB", "image", "shmMB"), _OF_ROLES)


class FrameworkControllerTrialV1(Schema):
    """`trial` on FrameworkController."""

    answers: ClassVar[dict[str, str]] = (
        TrialV1.answers
        | _IN_ROLES
        | dict.fromkeys(
            ("worker", "ps", "master"),
            "it applies to trainingServicePlatform: kubeflow; write an item of taskRoles with this name",
        )
    )
    code_dir: str = must_be("a folder", ".", min_length=1, v2="/trialCodeDirectory")
    task_roles: list[TaskRoleV1] | None = must_be("a list of roles", f"[{_ROLE}]", None, min_length=1)


class KubeflowTrialV1(Schema):
    """`trial` on Kubeflow. The reader checks which roles the operator has."""

    answers: ClassVar[dict[str, str]] = (
        TrialV1.answers
        | _IN_ROLES
        | {
            "taskRoles": "it applies to trainingServicePlatform: frameworkcontroller; write worker, ps and master"
        }
    )
    code_dir: str = must_be("a folder", ".", min_length=1, v2="/trialCodeDirectory")
    worker: ReplicaV1 | None = mapping(_REPLICA, None)
    ps: ReplicaV1 | None = mapping(_REPLICA, None)
    master: ReplicaV1 | None = mapping(_REPLICA, None)


class NfsV1(Schema):
    """`nfs`: an export of an NFS server, which containers mount."""

    server: str = must_be("the address of an NFS server", "10.10.10.10", min_length=1)
    path: str = must_be("the path that the server exports", "/var/nfs/nni", min_length=1)


class KeyVaultV1(Schema):
    """`keyVault`: the Azure vault that stores the key of the storage account."""

    vault_name: str = must_be(
        "the name of a vault", "my-vault", pattern=r"^[0-9a-zA-Z-]{1,127}$", v2="keyVaultName"
    )
    name: str = must_be(
        "the name of a secret in the vault", "storage-key", pattern=r"^[0-9a-zA-Z-]{1,127}$", v2="keyVaultKey"
    )


class AzureStorageV1(Schema):
    """`azureStorage`: a file share of a storage account."""

    account_name: str = must_be(
        "the name of a storage account", "mystorage", pattern=r"^[0-9a-zA-Z-]{3,31}$", v2="azureAccount"
    )
    azure_share: str = must_be("the name of a file share", "nni", pattern=_AZURE_NAME)


class PvcV1(Schema):
    """`pvc`: a PersistentVolumeClaim; `path` is the mount point of its volume on this machine."""

    path: str = must_be("a folder of this machine", "/mnt/nni-volume", min_length=1)
    name: str | None = must_be("the name of a claim", "nni", None, pattern=_LABEL, v2="claimName")


class StorageV1(Schema):
    """The shared storage for code and output of trials. The reader checks which parts a storage has."""

    storage: Literal["nfs", "azureStorage", "pvc"] | None = must_be(
        "one of nfs, azureStorage, pvc", "nfs", None, v2="storage.storageType"
    )
    nfs: NfsV1 | None = mapping("{server: 10.10.10.10, path: /var/nfs/nni}", None, v2="storage")
    key_vault: KeyVaultV1 | None = mapping("{vaultName: my-vault, name: storage-key}", None, v2="storage")
    azure_storage: AzureStorageV1 | None = mapping(
        "{accountName: mystorage, azureShare: nni}", None, v2="storage"
    )
    pvc: PvcV1 | None = mapping("{path: /mnt/nni-volume}", None, v2="storage")
    upload_retry_count: int | None = whole(1, 99999, "3", None, v2="storage.uploadRetryCount")
    reuse: bool = flag("true", False, v2="reuseMode")
    namespace: str | None = must_be("the name of a namespace", "default", None, pattern=_LABEL)


class FrameworkControllerSectionV1(StorageV1):
    """`frameworkcontrollerConfig`."""

    service_account_name: str | None = must_be(
        "the name of a service account", "frameworkbarrier", None, min_length=1
    )
    config_path: str | None = must_be("the path of a Framework template", "framework.yml", None, min_length=1)


class KubeflowSectionV1(StorageV1):
    """`kubeflowConfig`."""

    operator: Literal["tf-operator", "pytorch-operator", "trainjob", "job"] = must_be(
        "one of tf-operator, pytorch-operator, trainjob, job", "pytorch-operator"
    )
    api_version: Literal["v1", "v1beta2", "v1beta1", "v1alpha2", "v1alpha1"] | None = must_be(
        "one of v1, v1beta2, v1beta1, v1alpha2, v1alpha1", "v1", None
    )
    runtime: str | None = must_be(
        "the name of a training runtime", DEFAULT_RUNTIME, None, pattern=_RUNTIME, max_length=253
    )
    queue_name: str | None = must_be("the name of a queue of Kueue", "team-a", None, pattern=_LABEL)


class FrameworkControllerExperimentV1(ExperimentV1):
    """The experiment file for FrameworkController."""

    trial: FrameworkControllerTrialV1 = mapping(f"{{codeDir: ., taskRoles: [{_ROLE}]}}", v2="trainingService")
    frameworkcontroller_config: FrameworkControllerSectionV1 = mapping(
        "{storage: nfs, nfs: {server: 10.10.10.10, path: /var/nfs/nni}}", v2="trainingService"
    )


class KubeflowExperimentV1(ExperimentV1):
    """The experiment file for Kubeflow."""

    trial: KubeflowTrialV1 = mapping(f"{{codeDir: ., worker: {_REPLICA}}}", v2="trainingService")
    kubeflow_config: KubeflowSectionV1 = mapping(
        "{operator: pytorch-operator, apiVersion: v1, storage: nfs, nfs: {server: 10.10.10.10, path: /var/nfs/nni}}",
        v2="trainingService",
    )


AnyExperimentV1: TypeAlias = (
    LocalExperimentV1 | PaiExperimentV1 | FrameworkControllerExperimentV1 | KubeflowExperimentV1
)
EXPERIMENTS: Mapping[Platform, type[AnyExperimentV1]] = {
    "local": LocalExperimentV1,
    "pai": PaiExperimentV1,
    "frameworkcontroller": FrameworkControllerExperimentV1,
    "kubeflow": KubeflowExperimentV1,
}
"""The schema of a whole v1 file, by its platform."""

# ---- checks across several keys

Refuse: TypeAlias = Callable[..., None]
"""Records an error. Arguments: the place, the reason with the remedy, and the verb of the message (default: "use")."""
REPLICAS = ("worker", "ps", "master")
SECTION = {"frameworkcontroller": "frameworkcontrollerConfig", "kubeflow": "kubeflowConfig"}
STORAGE_PARTS: dict[str, tuple[str, ...]] = {
    "nfs": ("nfs",),
    "azureStorage": ("azureStorage", "keyVault"),
    "pvc": ("pvc",),
}
_EXAMPLES = {
    "nfs": "nfs: {server: 10.10.10.10, path: /var/nfs/nni}",
    "azureStorage": "azureStorage: {accountName: mystorage, azureShare: nni}",
    "keyVault": "keyVault: {vaultName: my-vault, name: storage-key}",
    "pvc": "pvc: {path: /mnt/nni-volume}",
}
_KUBEFLOW_V1 = ("v1", "v1beta2", "v1beta1", "v1alpha2")


class _Operator(NamedTuple):
    """The roles of an operator's jobs, the first of which is required, and its API versions, newest first."""

    roles: tuple[str, ...]
    versions: tuple[str, ...]


_OPERATORS = {
    "tf-operator": _Operator(("worker", "ps"), _KUBEFLOW_V1),
    "pytorch-operator": _Operator(("master", "worker"), _KUBEFLOW_V1),
    "trainjob": _Operator(("worker",), ("v1alpha1",)),
    "job": _Operator(("worker",), ("v1",)),
}
_ALL_VERSIONS = frozenset(version for each in _OPERATORS.values() for version in each.versions)


def refuse_contradictions(
    platform: str, trial: Mapping[str, Any], section: Mapping[str, Any], refuse: Refuse
) -> None:
    """Refuse missing keys, and keys that contradict others. The schema diagnoses values of a wrong type."""
    name = SECTION[platform]
    if section:
        _refuse_storage(name, section, refuse)
    if platform == "kubeflow":
        _refuse_what_operator_lacks(trial, section, refuse)
    elif trial and trial.get("taskRoles") is None and section.get("configPath") is None:
        why = f"it must be a list of roles; write e.g. taskRoles: [{_ROLE}], or name a template in {name}.configPath"
        refuse(("trial", "taskRoles"), why, "do without")
    elif isinstance(trial.get("taskRoles"), list):
        _refuse_repeated_names(trial["taskRoles"], refuse)


def _refuse_storage(name: str, section: Mapping[str, Any], refuse: Refuse) -> None:
    given = [part for parts in STORAGE_PARTS.values() for part in parts if section.get(part) is not None]
    kind = kind_of_storage(section) if section.get("storage") is None else section["storage"]
    if kind is None:
        why = f"trials require a storage that all machines share; write e.g. storage: nfs and {_EXAMPLES['nfs']}"
        refuse((name, "storage"), why, "do without")
        return
    if not isinstance(kind, str) or kind not in STORAGE_PARTS:
        return  # the schema reports an unknown kind
    for part in STORAGE_PARTS[kind]:
        if part not in given:
            why = f"storage {kind} requires it; write e.g. {_EXAMPLES[part]}"
            refuse((name, part), why, "do without")
    for part in given:
        if part not in STORAGE_PARTS[kind]:
            inner = section[part]
            place = (name, part, *(list(inner)[:1] if isinstance(inner, Mapping) else ()))
            refuse(place, f"storage {kind} does not use it; remove it, or change the storage")


def kind_of_storage(section: Mapping[str, Any]) -> str | None:
    """The storage that a section names, or the first that it describes; None without one."""
    named = section.get("storage")
    described = (
        kind for kind, parts in STORAGE_PARTS.items() if any(section.get(part) is not None for part in parts)
    )
    return named if isinstance(named, str) else next(described, None)


def _refuse_what_operator_lacks(trial: Mapping[str, Any], section: Mapping[str, Any], refuse: Refuse) -> None:
    operator = section.get("operator")
    if not isinstance(operator, str) or operator not in _OPERATORS:
        return
    roles, versions = _OPERATORS[operator]
    name, version = SECTION["kubeflow"], section.get("apiVersion")
    if isinstance(version, str) and version in _ALL_VERSIONS and version not in versions:
        why = f"{operator} supports {', '.join(versions)}, not {version}; write apiVersion: {versions[0]}"
        refuse((name, "apiVersion"), why)
    if operator != "trainjob" and section.get("runtime") is not None:
        refuse((name, "runtime"), "only operator: trainjob uses it; remove it, or change the operator")
    if not trial:
        return
    if trial.get(roles[0]) is None:
        why = f"{operator} requires this role; write e.g. {roles[0]}: {_REPLICA}"
        refuse(("trial", roles[0]), why, "do without")
    for role in REPLICAS:
        if trial.get(role) is not None and role not in roles:
            why = f"{operator} supports only {' and '.join(roles)}; remove it, or change the operator"
            refuse(("trial", role), why)
    master = trial.get("master") if "master" in roles else None
    if isinstance(master, Mapping) and isinstance(count := master.get("replicas"), int) and count > 1:
        why = f"a PyTorchJob has one master, not {count}; write replicas: 1, and increase the replicas of worker"
        refuse(("trial", "master", "replicas"), why)


def _refuse_repeated_names(roles: list[Any], refuse: Refuse) -> None:
    names = [role.get("name") if isinstance(role, Mapping) else None for role in roles]
    for index, name in enumerate(names):
        if isinstance(name, str) and name in names[:index]:
            why = f"another role has the name {name!r}; rename one of the two"
            refuse(("trial", "taskRoles", index, "name"), why)


def paths_in(trial: Mapping[str, Any], section: Mapping[str, Any], name: str) -> Iterator[tuple[Place, Any]]:
    """Key path and value of every path on this machine, except codeDir."""
    listed = trial.get("taskRoles")
    roles: dict[Place, Any] = {
        ("taskRoles", i): role for i, role in enumerate(listed if isinstance(listed, list) else ())
    }
    roles |= {(key,): trial.get(key) for key in REPLICAS}
    for place, role in roles.items():
        if isinstance(role, Mapping):
            yield ("trial", *place, "privateRegistryAuthPath"), role.get("privateRegistryAuthPath")
    pvc = section.get("pvc")
    yield (name, "pvc", "path"), pvc.get("path") if isinstance(pvc, Mapping) else None
    yield (name, "configPath"), section.get("configPath")


def kubernetes_of(
    file: FrameworkControllerExperimentV1 | KubeflowExperimentV1,
    paths: Mapping[Place, Path],
    template: FrameworkTemplate | None,
) -> KubernetesConfig:
    """The job description of a file without diagnostics. `paths` are those of `paths_in`, absolute."""

    def role(place: Place, name: str, tasks: int, pod: _PodV1) -> RoleConfig:
        policy = pod.framework_attempt_completion_policy if isinstance(pod, TaskRoleV1) else None
        return RoleConfig(
            name=name,
            tasks=tasks,
            command=pod.command,
            image=pod.image,
            gpu=pod.gpu_num,
            cpu=pod.cpu_num,
            memory_mb=pod.memory_mb,
            shm_mb=pod.shm_mb,
            registry_login=paths.get(("trial", *place, "privateRegistryAuthPath")),
            min_failed=None if policy is None else policy.min_failed_task_count,
            min_succeeded=None if policy is None else policy.min_succeeded_task_count,
        )

    if isinstance(file, KubeflowExperimentV1):
        kubeflow = file.kubeflow_config
        replicas = {name: getattr(file.trial, name) for name in REPLICAS}
        return KubernetesConfig(
            kubeflow.operator,
            _storage(kubeflow, paths, SECTION["kubeflow"]),
            tuple(
                role((name,), name, pod.replicas, pod) for name, pod in replicas.items() if pod is not None
            ),
            api_version=kubeflow.api_version or _OPERATORS[kubeflow.operator].versions[0],
            namespace=kubeflow.namespace,
            runtime=(kubeflow.runtime or DEFAULT_RUNTIME) if kubeflow.operator == "trainjob" else None,
            queue=kubeflow.queue_name,
        )
    section = file.frameworkcontroller_config
    name = SECTION["frameworkcontroller"]
    tasks = enumerate(file.trial.task_roles or ())
    return KubernetesConfig(
        "frameworkcontroller",
        _storage(section, paths, name),
        tuple(role(("taskRoles", index), pod.name, pod.task_num, pod) for index, pod in tasks)
        if template is None
        else template.roles,
        service_account=section.service_account_name,
        namespace=section.namespace,
        template=paths.get((name, "configPath")),
        template_text=None if template is None else template.text,
    )


def _storage(section: StorageV1, paths: Mapping[Place, Path], name: str) -> KubernetesStorage:
    if section.nfs is not None:
        return NfsStorage(section.nfs.server, section.nfs.path)
    if section.pvc is not None:
        return ClaimStorage(paths[name, "pvc", "path"], section.pvc.name)
    # `_refuse_storage` has refused an incomplete storage.
    assert section.azure_storage is not None
    assert section.key_vault is not None
    azure, vault = section.azure_storage, section.key_vault
    tries_again = 1 if section.upload_retry_count is None else section.upload_retry_count
    return AzureStorage(azure.account_name, azure.azure_share, vault.vault_name, vault.name, tries_again)
