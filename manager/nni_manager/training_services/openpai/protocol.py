"""Model of OpenPAI's job protocol, version 2. `parse` reads a job from text and fills in all defaults.

A `JobProtocol` keeps its source document, including keys that are not modelled here; `export` writes it again.

Source: microsoft/openpai-protocol schemas/v2/schema.yaml, as microsoft/pai v1.8.1's REST server interprets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import PurePosixPath
from typing import Any

from nni_manager.training_services.openpai.document import JobDocument, read_document
from nni_manager.training_services.openpai.job_checks import Path, ProtocolDiagnostic, ProtocolInvalid
from nni_manager.training_services.openpai.scalars import javascript_text
from nni_manager.training_services.openpai.schema import CHANGES, RUNTIME_PLUGINS
from nni_manager.training_services.openpai.validation import diagnostics_of, mangled, warnings_of
from trial_keeper.frozen_dataclass import dataclass

# Every task gets one port of each of these labels, besides those it requests.
DEFAULT_PORTS: Mapping[str, int] = {"ssh": 1, "http": 1}
DEFAULT_SHM_MB = 512


@dataclass(frozen=True, slots=True)
class PluginCall:
    """One use of a runtime plugin. `task_roles` None: all of them. `path` is its path in the job."""

    plugin: str
    parameters: Mapping[str, Any]
    failure_is_ignored: bool
    task_roles: Sequence[str] | None
    path: Path


@dataclass(frozen=True, slots=True)
class Prerequisite:
    """A dependency of task roles. `values` is the whole mapping, which templates may refer to."""

    name: str
    type: str
    plugin_call: PluginCall | None
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobCompletion:
    """The counts of failed and succeeded tasks of a role that end the job. A negative count never ends the job."""

    min_failed: int
    min_succeeded: int


@dataclass(frozen=True, slots=True)
class TaskResources:
    """The resources of one task. `shm_mb` None: not specified (DEFAULT_SHM_MB)."""

    gpu: int
    cpu: int
    memory_mb: int
    shm_mb: int | None
    infiniband: bool
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ProtocolTaskRole:
    """Identical tasks. `data`, `output`, `script` name the prerequisites that templates call `$data` and so on."""

    name: str
    instances: int
    completion: JobCompletion
    task_retry_count: int
    docker_image: str
    prerequisites: tuple[str, ...]
    data: str | None
    output: str | None
    script: str | None
    resources: TaskResources
    commands: tuple[str, ...]

    @property
    def mangled_name(self) -> str:
        """The role's name inside a cluster."""
        return mangled(self.name)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage and its mount path in tasks."""

    name: str
    mount_path: str


@dataclass(frozen=True)
class JobProtocol:
    """A valid job. Jobs with equal content are equal, regardless of notation.

    `deployment` is the one that `defaults` selects: its commands by role; `deployment_index` is its index in the job.
    `notify_of`: the state changes of which OpenPAI notifies the owner.
    `storages`: None mounts nothing; empty mounts the user's default storages.
    `warnings` report parts of the job without the likely intended effect; they never start with "cannot".
    """

    name: str
    job_retry_count: int
    virtual_cluster: str
    parameters: Mapping[str, Any]
    secrets: Mapping[str, Any]
    prerequisites: tuple[Prerequisite, ...]
    task_roles: tuple[ProtocolTaskRole, ...]
    deployment: Mapping[str, Mapping[str, Any]]
    deployment_index: int | None
    gang_allocation: bool
    storages: tuple[Storage, ...] | None
    plugin_calls: tuple[PluginCall, ...]
    notify_of: tuple[str, ...]
    extras: Mapping[str, Any]
    warnings: tuple[ProtocolDiagnostic, ...] = field(compare=False)
    document: JobDocument = field(repr=False, compare=False)

    def prerequisite(self, name: str, kind: str | None = None) -> Prerequisite:
        """Returns the last prerequisite with that name and, unless `kind` is None, that type."""
        return next(
            each for each in reversed(self.prerequisites) if each.name == name and kind in (None, each.type)
        )

    def storage_at(self, mount: str) -> Storage | None:
        """Returns the storage that containers mount at this path or above it; None: unknown here, only the cluster has it."""
        path = PurePosixPath(mount)
        seen = {PurePosixPath(storage.mount_path): storage for storage in self.storages or ()}
        return next((seen[each] for each in (path, *path.parents) if each in seen), None)


def parse(text: str, file: str = "") -> JobProtocol:
    """Parses the job in `text` (YAML or JSON). `file` is its name, for messages.

    Raises:
        ProtocolInvalid: the job is invalid; has all diagnostics.
    """
    document = read_document(text, file)
    diagnostics = diagnostics_of(document)
    if diagnostics:
        raise ProtocolInvalid(diagnostics)
    return _job(document)


def _job(document: JobDocument) -> JobProtocol:
    job: Mapping[str, Any] = document.value
    defaults, extras = job.get("defaults", {}), job.get("extras", {})
    virtual_cluster = defaults.get("virtualCluster")
    calls = tuple(
        PluginCall(
            call["plugin"],
            call.get("parameters") or {},
            _ignores_failure(call),
            call.get("taskroles"),
            ("extras", RUNTIME_PLUGINS, index),
        )
        for index, call in enumerate(extras.get(RUNTIME_PLUGINS, []))
    )
    deployments = job.get("deployments", [])
    names = [deployment["name"] for deployment in deployments]
    chosen = names.index(defaults["deployment"]) if "deployment" in defaults else None
    notification = extras.get("jobStatusChangeNotification", {})
    return JobProtocol(
        name=job["name"],
        job_retry_count=job.get("jobRetryCount", 0),
        virtual_cluster=javascript_text("default" if virtual_cluster is None else virtual_cluster),
        parameters=job.get("parameters", {}),
        secrets=job.get("secrets", {}),
        prerequisites=tuple(
            _prerequisite(item, index) for index, item in enumerate(job.get("prerequisites", []))
        ),
        task_roles=tuple(_task_role(name, role) for name, role in job["taskRoles"].items()),
        deployment={} if chosen is None else deployments[chosen]["taskRoles"],
        deployment_index=chosen,
        gang_allocation=extras.get("gangAllocation") is not False,
        storages=_storages(extras, calls),
        plugin_calls=calls,
        notify_of=tuple(change for change in CHANGES if notification.get(change) is True),
        extras=extras,
        warnings=tuple(warnings_of(document)),
        document=document,
    )


def _prerequisite(item: Mapping[str, Any], index: int) -> Prerequisite:
    prefix, _, plugin = item.get("plugin", "").rpartition(".")
    if prefix != RUNTIME_PLUGINS:
        return Prerequisite(item["name"], item["type"], None, item)
    # All other keys, including the name, are parameters of the plugin.
    parameters = {key: value for key, value in item.items() if key not in ("type", "plugin", "failurePolicy")}
    call = PluginCall(plugin, parameters, _ignores_failure(item), None, ("prerequisites", index))
    return Prerequisite(item["name"], item["type"], call, item)


def _ignores_failure(item: Mapping[str, Any]) -> bool:
    return str(item.get("failurePolicy", "fail")).lower() == "ignore"


def _task_role(name: str, role: Mapping[str, Any]) -> ProtocolTaskRole:
    instances, completion = role.get("instances", 1), role.get("completion", {})
    resources, options = role["resourcePerInstance"], role.get("extraContainerOptions", {})
    return ProtocolTaskRole(
        name=name,
        instances=instances,
        # null and 0 mean the default. OpenPAI's documentation says -1 for minSucceededInstances; its server uses all instances.
        completion=JobCompletion(
            completion.get("minFailedInstances") or 1, completion.get("minSucceededInstances") or instances
        ),
        task_retry_count=role.get("taskRetryCount", 0),
        docker_image=role["dockerImage"],
        prerequisites=tuple(role.get("prerequisites", ())),
        data=role.get("data"),
        output=role.get("output"),
        script=role.get("script"),
        resources=TaskResources(
            gpu=resources["gpu"],
            cpu=resources["cpu"],
            memory_mb=resources["memoryMB"],
            shm_mb=options.get("shmMB"),
            infiniband=options.get("infiniband", False),
            ports={**DEFAULT_PORTS, **resources.get("ports", {})},
        ),
        commands=tuple(role["commands"]),
    )


def _storages(extras: Mapping[str, Any], calls: tuple[PluginCall, ...]) -> tuple[Storage, ...] | None:
    written = extras.get("storages")
    if written is None:
        # A deprecated plugin, which OpenPAI's server turns into this key.
        old = [call for call in calls if call.plugin == "teamwise_storage"]
        if not old:
            return None
        written = [{"name": name} for call in old for name in call.parameters.get("storageConfigNames") or ()]
    return tuple(Storage(item["name"], item.get("mountPath") or f"/mnt/{item['name']}") for item in written)
