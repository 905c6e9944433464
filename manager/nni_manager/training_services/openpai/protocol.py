"""A job as OpenPAI's job protocol, version 2, describes it: `parse` makes it of a text, all defaults filled in.

A `JobProtocol` keeps the document it was read from, and with it all that is not modelled here; `export` writes that again.

Source: microsoft/openpai-protocol schemas/v2/schema.yaml, as microsoft/pai v1.8.1's REST server understands it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nni_manager.training_services.openpai.document import Document, read_document
from nni_manager.training_services.openpai.mistakes import Path, ProtocolInvalid, ProtocolMistake
from nni_manager.training_services.openpai.scalars import javascript_text
from nni_manager.training_services.openpai.schema import RUNTIME_PLUGINS
from nni_manager.training_services.openpai.validation import mangled, mistakes_of, warnings_of

DEFAULT_VIRTUAL_CLUSTER = "default"
# Every task gets one port of each of these besides those it asks for.
DEFAULT_PORTS: Mapping[str, int] = {"ssh": 1, "http": 1}
DEFAULT_SHM_MB = 512


@dataclass(frozen=True, slots=True)
class PluginCall:
    """One use of a runtime plugin. `task_roles` is None where it is for all of them; `path` is its place in the job."""

    plugin: str
    parameters: Mapping[str, Any]
    failure_is_ignored: bool
    task_roles: tuple[str, ...] | None
    path: Path


@dataclass(frozen=True, slots=True)
class Prerequisite:
    """Something task roles build on. `values` is the whole mapping, which templates may refer to."""

    name: str
    type: str
    uri: str | tuple[str, ...] | None
    auth: Mapping[str, Any] | None
    require: tuple[str, ...]
    plugin_call: PluginCall | None
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """How many tasks of a role must have failed, or succeeded, for the job to be over. Negative: never for that reason."""

    min_failed: int
    min_succeeded: int


@dataclass(frozen=True, slots=True)
class Resources:
    """What one task gets; `shm_mb` is None where the job says nothing of it (DEFAULT_SHM_MB then)."""

    gpu: int
    cpu: int
    memory_mb: int
    shm_mb: int | None
    infiniband: bool
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TaskRole:
    """Tasks that are alike. `data`, `output`, `script` name the prerequisites that templates call `$data` and so on."""

    name: str
    instances: int
    completion: Completion
    task_retry_count: int
    docker_image: str
    prerequisites: tuple[str, ...]
    data: str | None
    output: str | None
    script: str | None
    resources: Resources
    commands: tuple[str, ...]

    @property
    def mangled_name(self) -> str:
        """Its name inside a cluster."""
        return mangled(self.name)


@dataclass(frozen=True, slots=True)
class RoleDeployment:
    """What a deployment puts before and behind the commands of one role."""

    pre_commands: tuple[str, ...]
    post_commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage and where tasks see it."""

    name: str
    mount_path: str


@dataclass(frozen=True, slots=True)
class JobStatusChangeNotification:
    """Of which changes of state the owner wants to hear."""

    running: bool = False
    succeeded: bool = False
    stopped: bool = False
    failed: bool = False
    retried: bool = False


@dataclass(frozen=True)
class JobProtocol:
    """A job that can run. Two are equal that say the same, however they are written.

    `deployment` is the one `defaults` chooses, by role; `deployment_index` says which of the job's it is.
    `storages`: None mounts nothing, empty the user's default storages.
    `warnings` say what will not do what its author may think; they begin with no "cannot".
    """

    name: str
    job_retry_count: int
    virtual_cluster: str
    parameters: Mapping[str, Any]
    secrets: Mapping[str, Any]
    prerequisites: tuple[Prerequisite, ...]
    task_roles: tuple[TaskRole, ...]
    deployment: Mapping[str, RoleDeployment]
    deployment_index: int | None
    gang_allocation: bool
    storages: tuple[Storage, ...] | None
    plugin_calls: tuple[PluginCall, ...]
    notification: JobStatusChangeNotification
    extras: Mapping[str, Any]
    warnings: tuple[ProtocolMistake, ...] = field(compare=False)
    document: Document = field(repr=False, compare=False)

    def prerequisite(self, name: str, kind: str | None = None) -> Prerequisite:
        """The prerequisite of that name and, unless None, type. Of several names without a type, the last."""
        return next(
            each for each in reversed(self.prerequisites) if each.name == name and kind in (None, each.type)
        )


def parse(text: str, file: str = "") -> JobProtocol:
    """The job that `text` (YAML or JSON) describes. `file` is its name, for messages.

    Raises:
        ProtocolInvalid: it cannot run; with all that is wrong.
    """
    document = read_document(text, file)
    mistakes = mistakes_of(document)
    if mistakes:
        raise ProtocolInvalid(mistakes)
    return _job(document)


def _job(document: Document) -> JobProtocol:
    job: Mapping[str, Any] = document.value
    defaults, extras = job.get("defaults", {}), job.get("extras", {})
    virtual_cluster = defaults.get("virtualCluster")
    calls = tuple(
        _plugin_call(call["plugin"], call.get("parameters"), call, ("extras", RUNTIME_PLUGINS, index))
        for index, call in enumerate(extras.get(RUNTIME_PLUGINS, []))
    )
    deployments = job.get("deployments", [])
    names = [deployment["name"] for deployment in deployments]
    chosen = names.index(defaults["deployment"]) if "deployment" in defaults else None
    notification = extras.get("jobStatusChangeNotification", {})
    return JobProtocol(
        name=job["name"],
        job_retry_count=job.get("jobRetryCount", 0),
        virtual_cluster=DEFAULT_VIRTUAL_CLUSTER
        if virtual_cluster is None
        else javascript_text(virtual_cluster),
        parameters=job.get("parameters", {}),
        secrets=job.get("secrets", {}),
        prerequisites=tuple(
            _prerequisite(item, index) for index, item in enumerate(job.get("prerequisites", []))
        ),
        task_roles=tuple(_task_role(name, role) for name, role in job["taskRoles"].items()),
        deployment={} if chosen is None else _deployment(deployments[chosen]),
        deployment_index=chosen,
        gang_allocation=extras.get("gangAllocation") is not False,
        storages=_storages(extras, calls),
        plugin_calls=calls,
        notification=JobStatusChangeNotification(
            **{change: notification.get(change) is True for change in JobStatusChangeNotification.__slots__}
        ),
        extras=extras,
        warnings=tuple(warnings_of(document)),
        document=document,
    )


def _prerequisite(item: Mapping[str, Any], index: int) -> Prerequisite:
    uri, plugin = item.get("uri"), item.get("plugin", "")
    call = None
    if plugin.startswith(RUNTIME_PLUGINS):
        # Everything else, the name as well, is a parameter of the plugin.
        parameters = {
            key: value for key, value in item.items() if key not in ("type", "plugin", "failurePolicy")
        }
        call = _plugin_call(
            plugin.removeprefix(f"{RUNTIME_PLUGINS}."), parameters, item, ("prerequisites", index)
        )
    return Prerequisite(
        name=item["name"],
        type=item["type"],
        uri=tuple(uri) if isinstance(uri, list) else uri,
        auth=item.get("auth"),
        require=tuple(item.get("require", ())),
        plugin_call=call,
        values=item,
    )


def _plugin_call(
    plugin: str, parameters: Mapping[str, Any] | None, item: Mapping[str, Any], path: Path
) -> PluginCall:
    roles = item.get("taskroles") if path[0] == "extras" else None
    return PluginCall(
        plugin=plugin,
        parameters=parameters or {},
        failure_is_ignored=item.get("failurePolicy", "fail").lower() == "ignore",
        task_roles=None if roles is None else tuple(roles),
        path=path,
    )


def _task_role(name: str, role: Mapping[str, Any]) -> TaskRole:
    instances, completion = role.get("instances", 1), role.get("completion", {})
    resources, options = role["resourcePerInstance"], role.get("extraContainerOptions", {})
    return TaskRole(
        name=name,
        instances=instances,
        # Nothing and 0 are the default alike; OpenPAI's pages speak of -1 for minSucceededInstances, its server takes all.
        completion=Completion(
            completion.get("minFailedInstances") or 1, completion.get("minSucceededInstances") or instances
        ),
        task_retry_count=role.get("taskRetryCount", 0),
        docker_image=role["dockerImage"],
        prerequisites=tuple(role.get("prerequisites", ())),
        data=role.get("data"),
        output=role.get("output"),
        script=role.get("script"),
        resources=Resources(
            gpu=resources["gpu"],
            cpu=resources["cpu"],
            memory_mb=resources["memoryMB"],
            shm_mb=options.get("shmMB"),
            infiniband=options.get("infiniband", False),
            ports={**DEFAULT_PORTS, **resources.get("ports", {})},
        ),
        commands=tuple(role["commands"]),
    )


def _deployment(deployment: Mapping[str, Any]) -> Mapping[str, RoleDeployment]:
    return {
        name: RoleDeployment(tuple(role.get("preCommands", ())), tuple(role.get("postCommands", ())))
        for name, role in deployment["taskRoles"].items()
    }


def _storages(extras: Mapping[str, Any], calls: tuple[PluginCall, ...]) -> tuple[Storage, ...] | None:
    written = extras.get("storages")
    if written is None:
        # The plugin of old, which OpenPAI's server turns into this key.
        old = [call for call in calls if call.plugin == "teamwise_storage"]
        if not old:
            return None
        written = [{"name": name} for call in old for name in call.parameters.get("storageConfigNames") or ()]
    return tuple(Storage(item["name"], item.get("mountPath") or f"/mnt/{item['name']}") for item in written)
