"""The environment variables that a cluster sets in a container: `PAI_*`, `FC_*`, and those of a pod.

Exactly one class reads each family. All may be absent (this machine), only `FC_*` may be there (FrameworkController without
OpenPAI), both, or only a pod's (any other operator of Kubernetes). `task_identity` returns what the rest of the keeper
needs: which task of which job this is, and which attempt.

There are two kinds of names. OpenPAI passes FrameworkController a *mangled* role name: lower-cased, with everything
outside a–z and 0–9 removed. Variables of the REST server (`PAI_RESOURCE_*`, `PAI_TASK_ROLE_LIST`, …) have the name of the job
file; variables set inside the container (`PAI_HOST_IP_*`, `PAI_PORT_LIST_*`, …) have the mangled one. This module returns
everything under the name of the job file.

Gaps are normal: without gang allocation a task starts before the others have an address. A value that is present and
cannot be parsed is an error, since a wrong guess of the task could count a metric twice.

Source: OpenPAI 1.8 rest-server and openpai-runtime; FrameworkController v1; Kubernetes, Job v1; kubeflow.org/v1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trial_keeper.errors import SettingsInvalid

# A role becomes part of a folder's name on the shared storage. The first character rules out "..", hidden folders and
# options; 200 leaves room for the index in the 255 bytes of a file name.
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
# Eighteen digits exceed any count here, and stay below Python's conversion limit.
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
_HIGHEST_PORT = 65535
_LEFT_TO_THE_CLUSTER = "let the cluster alone set PAI_* and FC_*, not the image or the job's commands"


@dataclass(frozen=True, slots=True)
class EnvironmentResources:
    """The resources of one task of a role. Memory is in MB of 1024 × 1024 bytes, as in the job file."""

    gpu: int
    cpu: int
    memory_mb: int
    shm_mb: int
    """Shared memory; 0 if the job file does not set it (OpenPAI then mounts 512 MB)."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host, and the port on which its task's first `http` service may listen."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class TaskAddress:
    """The location of a task of the job, as far as it was known when this container started."""

    role: str
    index: int
    host_ip: str | None
    ports: Mapping[str, tuple[int, ...]] = field(hash=False)
    """By label of the job file; OpenPAI always requests `ssh` and `http`."""


@dataclass(frozen=True, slots=True)
class EnvironmentTaskRole:
    """One role of the job. None means that the cluster did not set the value."""

    name: str
    instances: int | None
    resources: EnvironmentResources | None
    min_failed_tasks: int | None
    """This many failed tasks end the job as failed; −1 means never."""
    min_succeeded_tasks: int | None
    """This many succeeded tasks end the job as succeeded; −1 means only when all have."""
    hosts: tuple[Address, ...]

    @property
    def mangled_name(self) -> str:
        """The role's name inside FrameworkController."""
        return mangled(self.name)


@dataclass(frozen=True, slots=True)
class PaiEnvironment:
    """The `PAI_*` variables of one container. None or an empty collection means that the cluster did not set the value."""

    job_name: str
    """`user~job`, the name in the REST API."""
    user: str | None
    virtual_cluster: str | None
    role: str
    """This task's role, under its name in the job file."""
    index: int
    task_roles: tuple[EnvironmentTaskRole, ...]
    """In the order of the job file."""
    tasks: tuple[TaskAddress, ...]
    """Those with an address or a port, this one included; by role, then index."""
    host_ip: str | None
    ports: Mapping[str, tuple[int, ...]] = field(hash=False)
    """This task's own, by label."""
    work_dir: str | None

    @property
    def own_role(self) -> EnvironmentTaskRole:
        """The role this task belongs to."""
        return next(role for role in self.task_roles if role.mangled_name == mangled(self.role))

    @property
    def resources(self) -> EnvironmentResources | None:
        """The resources of this task."""
        return self.own_role.resources

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PaiEnvironment | None:
        """Parse OpenPAI's variables; None outside OpenPAI (neither job, nor role, nor index is set).

        Raises:
            SettingsInvalid: a variable is malformed, or only a part of job, role and index is set.
        """
        job_name = environ.get("PAI_JOB_NAME") or environ.get("PAI_FRAMEWORK_NAME")
        role = environ.get("PAI_CURRENT_TASK_ROLE_NAME")
        index_name = _first_set(environ, "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "PAI_TASK_INDEX")
        if not (job_name or role or index_name):
            return None
        if not job_name:
            raise _incomplete("PAI_JOB_NAME")
        if not role:
            raise _incomplete("PAI_CURRENT_TASK_ROLE_NAME")
        if not index_name:
            raise _incomplete("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX")
        index = _whole_number(index_name, environ[index_name])
        task_roles = _task_roles(environ, role)
        tasks = _task_addresses(environ, task_roles)
        own = [task for task in tasks if task.index == index and mangled(task.role) == mangled(role)]
        return cls(
            job_name=job_name,
            user=environ.get("PAI_USER_NAME") or environ.get("PAI_USERNAME") or None,
            virtual_cluster=environ.get("PAI_VIRTUAL_CLUSTER") or None,
            role=role,
            index=index,
            task_roles=task_roles,
            tasks=tasks,
            host_ip=environ.get("PAI_CURRENT_CONTAINER_IP") or environ.get("PAI_CONTAINER_HOST_IP") or None,
            ports=_own_ports(environ) or (own[0].ports if own else {}),
            work_dir=environ.get("PAI_WORK_DIR") or None,
        )


@dataclass(frozen=True, slots=True)
class FrameworkControllerEnvironment:
    """The `FC_*` variables of one container. None means that the cluster did not set the value."""

    framework: str
    """The Framework object's name; under OpenPAI the MD5 of `user~job`."""
    role: str
    """This task's role, under the Framework's name for it (mangled, when OpenPAI made the Framework)."""
    index: int
    framework_attempt: int
    """Counts from 0; the task attempts of a retried job restart at 0."""
    task_attempt: int
    """Counts from 0."""
    namespace: str | None
    pod: str | None
    config_map: str | None
    framework_uid: str | None
    framework_attempt_uid: str | None
    config_map_uid: str | None
    role_uid: str | None
    task_uid: str | None
    task_attempt_uid: str | None
    pod_uid: str | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> FrameworkControllerEnvironment | None:
        """Parse FrameworkController's variables; None outside it (neither framework, nor role, nor index is set).

        Raises:
            SettingsInvalid: a variable is malformed, or only a part of framework, role and index is set.
        """
        names = ("FC_FRAMEWORK_NAME", "FC_TASKROLE_NAME", "FC_TASK_INDEX")
        if not any(environ.get(name) for name in names):
            return None
        for name in names:
            if not environ.get(name):
                raise _incomplete(name)
        return cls(
            framework=environ["FC_FRAMEWORK_NAME"],
            role=environ["FC_TASKROLE_NAME"],
            index=_whole_number("FC_TASK_INDEX", environ["FC_TASK_INDEX"]),
            framework_attempt=_optional_number(environ, "FC_FRAMEWORK_ATTEMPT_ID") or 0,
            task_attempt=_optional_number(environ, "FC_TASK_ATTEMPT_ID") or 0,
            namespace=environ.get("FC_FRAMEWORK_NAMESPACE") or None,
            pod=environ.get("FC_POD_NAME") or None,
            config_map=environ.get("FC_CONFIGMAP_NAME") or None,
            framework_uid=environ.get("FC_FRAMEWORK_UID") or None,
            framework_attempt_uid=environ.get("FC_FRAMEWORK_ATTEMPT_INSTANCE_UID") or None,
            config_map_uid=environ.get("FC_CONFIGMAP_UID") or None,
            role_uid=environ.get("FC_TASKROLE_UID") or None,
            task_uid=environ.get("FC_TASK_UID") or None,
            task_attempt_uid=environ.get("FC_TASK_ATTEMPT_INSTANCE_UID") or None,
            pod_uid=environ.get("FC_POD_UID") or None,
        )


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """A pod's own variables, under any operator. The manager sets the first two with the downward API."""

    pod: str
    node: str | None
    completion_index: int | None
    """The pod's index in an Indexed Job."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PodEnvironment | None:
        """Parse the pod's variables; None if its name is not set.

        Raises:
            SettingsInvalid: a variable is malformed.
        """
        if not environ.get("POD_NAME"):
            return None
        return cls(
            environ["POD_NAME"],
            environ.get("NODE_NAME") or None,
            _optional_number(environ, "JOB_COMPLETION_INDEX"),
        )

    @property
    def index(self) -> int:
        """The task's index in its role: the Indexed Job's completion index, or the number that ends a Kubeflow pod's name.

        Raises:
            SettingsInvalid: neither is there.
        """
        if self.completion_index is not None:
            return self.completion_index
        ending = self.pod.rpartition("-")[2]
        if not ending.isdecimal():
            raise SettingsInvalid(
                f"cannot tell which task pod {_shown(self.pod)} is: its name does not end with a number, and "
                "JOB_COMPLETION_INDEX is not set; start the job through nnictl"
            )
        return _whole_number("POD_NAME", ending)


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """Which task of which job this container is, and which attempt at it."""

    job: str | None
    """The job's name on the cluster; None outside any cluster."""
    role: str
    index: int
    framework_attempt: int
    """Number of earlier starts of the whole job; from 0."""
    task_attempt: int
    """Number of earlier starts of this task within the current framework attempt; from 0."""

    def __post_init__(self) -> None:
        if not _FOLDER_NAME.fullmatch(self.role):
            raise SettingsInvalid(
                f"cannot use task role {_shown(self.role)} as a folder name; rename it in the job with "
                "letters, digits, '_', '.' and '-', at most 200, the first of them not '.' or '-'"
            )

    @property
    def task(self) -> str:
        """The task's name within its job, and the name of its folder in the workspace."""
        return f"{self.role}-{self.index}"


def task_identity(environ: Mapping[str, str], role: str | None = None) -> TaskIdentity:
    """The identity of this container; role "main", index 0, first attempt if there is no cluster.

    OpenPAI's names have precedence, as they are those of the job file. The attempts are FrameworkController's, as OpenPAI does
    not repeat them. In any other pod, `role` is the manager's setting.

    Raises:
        SettingsInvalid: a variable is malformed, the two families contradict each other, or the role cannot
            be the name of a folder.
    """
    pai = PaiEnvironment.from_environ(environ)
    fc = FrameworkControllerEnvironment.from_environ(environ)
    if pai and fc and (mangled(pai.role), pai.index) != (mangled(fc.role), fc.index):
        raise SettingsInvalid(
            f"cannot tell which task this is: OpenPAI says {_shown(pai.role)} {pai.index}, "
            f"FrameworkController says {_shown(fc.role)} {fc.index}; {_LEFT_TO_THE_CLUSTER}"
        )
    attempts = (fc.framework_attempt, fc.task_attempt) if fc else (0, 0)
    if pai:
        return TaskIdentity(pai.job_name, pai.role, pai.index, *attempts)
    if fc:
        return TaskIdentity(fc.framework, fc.role, fc.index, *attempts)
    pod = PodEnvironment.from_environ(environ) if role is not None else None
    if role is not None and pod is not None:
        return TaskIdentity(None, role, pod.index, 0, 0)
    return TaskIdentity(None, "main", 0, 0, 0)


def mangled(role: str) -> str:
    """A role's name inside FrameworkController; empty when the name has no letter a–z and no digit."""
    return re.sub("[^a-z0-9]", "", role.lower())


def _task_roles(environ: Mapping[str, str], own_role: str) -> tuple[EnvironmentTaskRole, ...]:
    listed = _first_set(environ, "PAI_TASK_ROLE_LIST", "PAI_JOB_TASK_ROLE_LIST")
    names = environ[listed].split(",") if listed else [own_role]
    if listed and not all(names):
        raise _unreadable(listed, environ[listed], "role names with commas between them")
    if mangled(own_role) not in map(mangled, names):
        raise _unreadable(
            "PAI_CURRENT_TASK_ROLE_NAME", own_role, f"one of the job's roles {', '.join(names)}"
        )
    counted = _instances(environ)
    return tuple(
        EnvironmentTaskRole(
            name=name,
            instances=_optional_number(environ, f"PAI_TASK_ROLE_TASK_COUNT_{name}")
            or counted.get(mangled(name)),
            resources=_resources(environ, f"PAI_RESOURCE_{name}"),
            min_failed_tasks=_optional_number(environ, f"PAI_MIN_FAILED_TASK_COUNT_{name}", at_least=-1),
            min_succeeded_tasks=_optional_number(
                environ, f"PAI_MIN_SUCCEEDED_TASK_COUNT_{name}", at_least=-1
            ),
            hosts=_hosts(environ, f"PAI_TASK_ROLE_{mangled(name)}_HOST_LIST"),
        )
        for name in names
    )


def _instances(environ: Mapping[str, str]) -> dict[str, int]:
    """Number of tasks by mangled role, from `role:index,role:index`."""
    name, counted = "PAI_TASK_ROLE_INSTANCES", dict[str, int]()
    for entry in _list(environ, name):
        role, colon, index = entry.rpartition(":")
        if not (role and colon and _WHOLE_NUMBER.fullmatch(index)):
            raise _unreadable(name, environ[name], "role:index with commas between them")
        counted[role] = counted.get(role, 0) + 1
    return counted


def _resources(environ: Mapping[str, str], name: str) -> EnvironmentResources | None:
    if not environ.get(name):
        return None
    numbers = environ[name].split(",")
    if len(numbers) != 4 or not all(_WHOLE_NUMBER.fullmatch(number) for number in numbers):
        raise _unreadable(name, environ[name], "gpu,cpu,memoryMB,shmMB in whole numbers")
    gpu, cpu, memory_mb, shm_mb = (_whole_number(name, number) for number in numbers)
    return EnvironmentResources(gpu=gpu, cpu=cpu, memory_mb=memory_mb, shm_mb=shm_mb)


def _hosts(environ: Mapping[str, str], name: str) -> tuple[Address, ...]:
    addresses = []
    for entry in _list(environ, name):
        # From the right: an IPv6 address contains colons.
        host, _, port = entry.rpartition(":")
        if not host:
            raise _unreadable(name, environ[name], "host:port with commas between them")
        addresses.append(Address(host, _port(name, port)))
    return tuple(addresses)


def _task_addresses(
    environ: Mapping[str, str], task_roles: tuple[EnvironmentTaskRole, ...]
) -> tuple[TaskAddress, ...]:
    order = {role.mangled_name: place for place, role in enumerate(task_roles)}
    ips: dict[tuple[int, int], str] = {}
    ports: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for name, value in environ.items():
        # A mangled role holds no underscore, so the name splits in one way only.
        match = re.fullmatch(
            r"PAI_(?:HOST_IP|PORT_LIST)_([a-z0-9]+)_([0-9]{1,18})(?:_(\w+))?", name, re.ASCII
        )
        if not match or not value or match[1] not in order:
            continue
        task = order[match[1]], int(match[2])
        if name.startswith("PAI_HOST_IP_") and not match[3]:
            ips[task] = value
        elif name.startswith("PAI_PORT_LIST_") and match[3]:
            ports.setdefault(task, {})[match[3]] = _ports(name, value)
    return tuple(
        TaskAddress(task_roles[task[0]].name, task[1], ips.get(task), ports.get(task, {}))
        for task in sorted(ips.keys() | ports.keys())
    )


def _own_ports(environ: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Own ports by label, from `label:port,port;label:port;` (OpenPAI writes a semicolon after each)."""
    name = "PAI_CONTAINER_HOST_PORT_LIST"
    found = {}
    for entry in filter(None, environ.get(name, "").split(";")):
        label, colon, numbers = entry.partition(":")
        if not (label and colon):
            raise _unreadable(name, environ[name], "label:port,port; for each label")
        found[label] = _ports(name, numbers)
    return found


def _ports(name: str, value: str) -> tuple[int, ...]:
    return tuple(_port(name, port) for port in value.split(","))


def _port(name: str, value: str) -> int:
    port = _whole_number(name, value)
    if not 0 < port <= _HIGHEST_PORT:
        raise _unreadable(name, value, f"a port from 1 to {_HIGHEST_PORT}")
    return port


def _list(environ: Mapping[str, str], name: str) -> list[str]:
    return environ[name].split(",") if environ.get(name) else []


def _optional_number(environ: Mapping[str, str], name: str, at_least: int = 0) -> int | None:
    return _whole_number(name, environ[name], at_least) if environ.get(name) else None


def _whole_number(name: str, value: str, at_least: int = 0) -> int:
    if not _WHOLE_NUMBER.fullmatch(value) or int(value) < at_least:
        raise _unreadable(name, value, f"a whole number from {at_least}")
    return int(value)


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _unreadable(name: str, value: str, expected: str) -> SettingsInvalid:
    return SettingsInvalid(f"cannot read {name}: {_shown(value)} is not {expected}; {_LEFT_TO_THE_CLUSTER}")


def _incomplete(name: str) -> SettingsInvalid:
    family = name.partition("_")[0]
    return SettingsInvalid(
        f"cannot read {name}: it is not set while others of {family}_* are; unset those outside a cluster, "
        "or pass the container's whole environment on to the keeper"
    )


def _shown(value: str) -> str:
    # A very long value would hide the message.
    return repr(value if len(value) <= 80 else value[:77] + "...")
