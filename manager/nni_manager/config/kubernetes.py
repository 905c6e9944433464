"""The Kubernetes parts of an experiment file: checks across several keys, and the settings of its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from nni_manager.config.diagnostics import Place, ref
from nni_manager.config.experiment_schema import (
    DEFAULT_RUNTIME,
    REPLICA,
    ROLE,
    FrameworkControllerExperimentKeys,
    KubeflowExperimentKeys,
    ReplicaKeys,
    StorageKeys,
    TaskRoleKeys,
)
from nni_manager.config.framework_template import FrameworkTemplate
from nni_manager.config.keys import REPLICAS, SERVICE, STORAGE, STORAGE_KEYS
from nni_manager.config.model import (
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    KubernetesStorage,
    NfsStorage,
    RoleConfig,
)
from nni_manager.config.schema import example_of, fields_of

Refuse: TypeAlias = Callable[..., None]
"""Records an error. Arguments: the place, the reason with the remedy, and the verb of the message (default: "use")."""
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


def refuse_contradictions(platform: str, service: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse missing keys, and keys that contradict others. The schema diagnoses values of a wrong type."""
    _refuse_storage(service.get("storage"), refuse)
    if platform == "kubeflow":
        _refuse_what_operator_lacks(service, refuse)
    elif service.get("taskRoles") is None and service.get("configPath") is None:
        written = ref((*SERVICE, "taskRoles"), f"[{ROLE}]")
        template = ref((*SERVICE, "configPath"))
        why = f"it must be a list of roles; write e.g. {written}, or name a template in {template}"
        refuse((*SERVICE, "taskRoles"), why, "do without")
    elif isinstance(service.get("taskRoles"), list):
        _refuse_repeated_names(service["taskRoles"], refuse)


def _refuse_storage(storage: Any, refuse: Refuse) -> None:
    given = storage if isinstance(storage, Mapping) else {}
    kind = given.get("storageType") or kind_of_storage(given)
    if kind is None:
        example = ref(STORAGE, "{storageType: nfs, server: 10.10.10.10, path: /var/nfs/nni}")
        why = f"trials require a storage that all machines share; write e.g. {example}"
        refuse((*STORAGE, "storageType"), why, "do without")
    elif isinstance(kind, str) and kind in STORAGE_KEYS:  # the schema reports an unknown kind
        for name in STORAGE_KEYS[kind]:
            field = fields_of(StorageKeys)[name]
            if given.get(name) is None and name != "claimName":
                what = f"it must be {field.description}" if name != "path" else f"storage {kind} requires it"
                place = (*STORAGE, name)
                refuse(place, f"{what}; write e.g. {ref(place, example_of(field))}", "do without")


def kind_of_storage(storage: Mapping[str, Any]) -> str | None:
    """The kind of a storage without `storageType`, by the first of its keys; None without one."""
    return next((kind for kind, keys in STORAGE_KEYS.items() if any(key in storage for key in keys)), None)


def _refuse_what_operator_lacks(service: Mapping[str, Any], refuse: Refuse) -> None:
    operator = service.get("operator")
    if not isinstance(operator, str) or operator not in _OPERATORS:
        return
    roles, versions = _OPERATORS[operator]
    version = service.get("apiVersion")
    if isinstance(version, str) and version in _ALL_VERSIONS and version not in versions:
        place = (*SERVICE, "apiVersion")
        why = f"{operator} supports {', '.join(versions)}, not {version}; write {ref(place, versions[0])}"
        refuse(place, why)
    if operator != "trainjob" and service.get("runtime") is not None:
        why = "only «trainingService.operator: trainjob» uses it; remove it, or change the operator"
        refuse((*SERVICE, "runtime"), why)
    if service.get(roles[0]) is None:
        place = (*SERVICE, roles[0])
        refuse(place, f"{operator} requires this role; write e.g. {ref(place, REPLICA)}", "do without")
    for role in REPLICAS:
        if service.get(role) is not None and role not in roles:
            why = f"{operator} supports only {' and '.join(roles)}; remove it, or change the operator"
            refuse((*SERVICE, role), why)
    master = service.get("master") if "master" in roles else None
    if isinstance(master, Mapping) and isinstance(count := master.get("replicas"), int) and count > 1:
        example = "«trainingService.master.replicas: 1»"
        why = (
            f"a PyTorchJob has one master, not {count}; write {example}, and increase the replicas of worker"
        )
        refuse((*SERVICE, "master", "replicas"), why)


def _refuse_repeated_names(roles: list[Any], refuse: Refuse) -> None:
    names = [role.get("name") if isinstance(role, Mapping) else None for role in roles]
    for index, name in enumerate(names):
        if isinstance(name, str) and name in names[:index]:
            why = f"another role has the name {name!r}; rename one of the two"
            refuse((*SERVICE, "taskRoles", index, "name"), why)


def paths_in(service: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Key path and value of every path on this machine, except the code folder."""
    listed = service.get("taskRoles")
    roles: dict[Place, Any] = {
        ("taskRoles", i): role for i, role in enumerate(listed if isinstance(listed, list) else ())
    }
    roles |= {(key,): service.get(key) for key in REPLICAS}
    for place, role in roles.items():
        if isinstance(role, Mapping):
            yield (*SERVICE, *place, "privateRegistryAuthPath"), role.get("privateRegistryAuthPath")
    storage = service.get("storage")
    if isinstance(storage, Mapping) and (storage.get("storageType") or kind_of_storage(storage)) == "pvc":
        yield (*STORAGE, "path"), storage.get("path")
    yield (*SERVICE, "configPath"), service.get("configPath")


def kubernetes_of(
    file: FrameworkControllerExperimentKeys | KubeflowExperimentKeys,
    paths: Mapping[Place, Path],
    template: FrameworkTemplate | None,
) -> KubernetesConfig:
    """The job description of a file without diagnostics. `paths` are those of `paths_in`, absolute."""

    def role(place: Place, name: str, tasks: int, pod: TaskRoleKeys | ReplicaKeys) -> RoleConfig:
        policy = pod.framework_attempt_completion_policy if isinstance(pod, TaskRoleKeys) else None
        return RoleConfig(
            name=name,
            tasks=tasks,
            command=pod.command,
            image=pod.docker_image,
            gpu=pod.gpu_number,
            cpu=pod.cpu_number,
            memory_mb=pod.memory_size,
            shm_mb=pod.shared_memory_size,
            registry_login=paths.get((*SERVICE, *place, "privateRegistryAuthPath")),
            min_failed=None if policy is None else policy.min_failed_task_count,
            min_succeeded=None if policy is None else policy.min_succeed_task_count,
        )

    if isinstance(file, KubeflowExperimentKeys):
        kubeflow = file.training_service
        replicas = {name: getattr(kubeflow, name) for name in REPLICAS}
        return KubernetesConfig(
            kubeflow.operator,
            _storage(kubeflow.storage, paths),
            tuple(
                role((name,), name, pod.replicas, pod) for name, pod in replicas.items() if pod is not None
            ),
            api_version=kubeflow.api_version or _OPERATORS[kubeflow.operator].versions[0],
            namespace=kubeflow.namespace,
            runtime=(kubeflow.runtime or DEFAULT_RUNTIME) if kubeflow.operator == "trainjob" else None,
            queue=kubeflow.queue_name,
        )
    service = file.training_service
    tasks = enumerate(service.task_roles or ())
    return KubernetesConfig(
        "frameworkcontroller",
        _storage(service.storage, paths),
        tuple(role(("taskRoles", index), pod.name, pod.task_number, pod) for index, pod in tasks)
        if template is None
        else template.roles,
        service_account=service.service_account_name,
        namespace=service.namespace,
        template=paths.get((*SERVICE, "configPath")),
        template_text=None if template is None else template.text,
    )


def _storage(storage: StorageKeys | None, paths: Mapping[Place, Path]) -> KubernetesStorage:
    # `_refuse_storage` has refused an incomplete storage.
    assert storage is not None
    if (claim := paths.get((*STORAGE, "path"))) is not None:
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
