"""The environment of a task: the variables of OpenPAI and of FrameworkController. Pure.

A role has two names, that of the job file and the mangled one. OpenPAI uses one name in some variables and the other in the
rest, so scripts that compose names fail. Here every variable of a role is set under both.

Source: microsoft/pai v1.8.1 (src/rest-server/src/models/v2/job/k8s.js), microsoft/openpai-runtime v0.1.12 (src/init.d),
FrameworkController v1.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

from nni_manager.local_openpai.core.job import Allocation, Task
from nni_manager.local_openpai.core.plan import JobPlan, RolePlan

FAMILIES = ("PAI_", "FC_", "NNI_")
"""Prefixes of an outer platform's variables, which tasks do not inherit."""
CONTAINER_ID = "FC_POD_UID"
"""The variable that identifies a container's processes: all of them inherit it, and its value is unique."""
_NAMESPACE = "default"


def task_variables(
    plan: JobPlan, job_attempt_id: int, task: Task, tasks: Sequence[Task], work_dir: str
) -> dict[str, str]:
    """All variables of this task. `tasks` are all of the job; those without an allocation have empty addresses and ports."""
    own = plan.role(task.role)
    return {
        **dict(_of_framework(plan, job_attempt_id, task, own)),
        **dict(_of_job(plan)),
        **dict(_of_addresses(plan, tasks)),
        **dict(_of_task(task, own)),
        "PAI_WORK_DIR": work_dir,
    }


def _both(name: str, role: RolePlan) -> tuple[str, ...]:
    """A variable's name in both spellings; `{}` is the placeholder for the role."""
    return tuple(dict.fromkeys((name.format(role.name), name.format(role.mangled_name))))


def _of_job(plan: JobPlan) -> Iterator[tuple[str, str]]:
    for name in ("PAI_FRAMEWORK_NAME", "PAI_JOB_NAME"):
        yield name, plan.framework_name
    for name in ("PAI_USER_NAME", "PAI_USERNAME"):
        yield name, plan.user
    yield "PAI_DEFAULT_FS_URI", ""
    yield "PAI_VIRTUAL_CLUSTER", plan.virtual_cluster
    for name in ("PAI_TASK_ROLE_COUNT", "PAI_TASK_ROLES_NUM", "PAI_JOB_TASK_ROLE_COUNT"):
        yield name, str(len(plan.roles))
    for name in ("PAI_TASK_ROLE_LIST", "PAI_JOB_TASK_ROLE_LIST"):
        yield name, ",".join(role.name for role in plan.roles)
    for name in ("PAI_TASKS_NUM", "PAI_JOB_TASK_COUNT"):
        yield name, str(plan.total_tasks)
    for role in plan.roles:
        need = role.need
        values = {
            "PAI_TASK_ROLE_TASK_COUNT_{}": str(role.tasks),
            "PAI_RESOURCE_{}": f"{need.gpu},{need.cpu},{need.memory_mb},{role.shm_mb}",
            "PAI_MIN_FAILED_TASK_COUNT_{}": str(role.completion.min_failed),
            "PAI_MIN_SUCCEEDED_TASK_COUNT_{}": str(role.completion.min_succeeded),
        }
        for name, value in values.items():
            yield from ((spelled, value) for spelled in _both(name, role))


def _of_addresses(plan: JobPlan, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    yield (
        "PAI_TASK_ROLE_INSTANCES",
        ",".join(f"{plan.role(task.role).mangled_name}:{task.index}" for task in tasks),
    )
    hosts: dict[str, list[str]] = {}
    for task in tasks:
        if task.allocation is None:
            continue
        role, allocation = plan.role(task.role), task.allocation
        for name in _both(f"PAI_HOST_IP_{{}}_{task.index}", role):
            yield name, allocation.host_ip
        for label, ports in allocation.ports.items():
            listed = ",".join(map(str, ports))
            for name in (
                *_both(f"PAI_PORT_LIST_{{}}_{task.index}_{label}", role),
                *_both(f"PAI_{{}}_{task.index}_{label}_PORT", role),
            ):
                yield name, listed
        hosts.setdefault(role.name, []).append(f"{allocation.host_ip}:{_first(allocation, 'http')}")
    for role in plan.roles:
        if role.name in hosts:
            yield from (
                (name, ",".join(hosts[role.name])) for name in _both("PAI_TASK_ROLE_{}_HOST_LIST", role)
            )


def _of_task(task: Task, role: RolePlan) -> Iterator[tuple[str, str]]:
    allocation = task.allocation
    assert allocation is not None
    yield "PAI_CURRENT_TASK_ROLE_NAME", role.name
    for name in ("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "PAI_TASK_INDEX"):
        yield name, str(task.index)
    for name in ("PAI_CURRENT_CONTAINER_IP", "PAI_CONTAINER_HOST_IP"):
        yield name, allocation.host_ip
    for name in ("PAI_CURRENT_CONTAINER_PORT", "PAI_CONTAINER_HOST_PORT"):
        yield name, _first(allocation, "http")
    yield "PAI_CONTAINER_SSH_PORT", _first(allocation, "ssh")
    listed = {label: ",".join(map(str, ports)) for label, ports in allocation.ports.items()}
    for label, ports in listed.items():
        yield f"PAI_CONTAINER_HOST_{label}_PORT_LIST", ports
    yield "PAI_CONTAINER_HOST_PORT_LIST", "".join(f"{label}:{ports};" for label, ports in listed.items())
    gpus = ",".join(map(str, allocation.gpus))
    yield "NVIDIA_VISIBLE_DEVICES", gpus or "none"
    # Hides GPUs where no container runtime does; empty hides all.
    yield "CUDA_VISIBLE_DEVICES", gpus


def _of_framework(
    plan: JobPlan, job_attempt_id: int, task: Task, role: RolePlan
) -> Iterator[tuple[str, str]]:
    attempt_uid = _uid(plan, job_attempt_id, "configmap")
    yield "FC_FRAMEWORK_NAMESPACE", _NAMESPACE
    yield "FC_FRAMEWORK_NAME", plan.debug_id
    yield "FC_TASKROLE_NAME", role.mangled_name
    yield "FC_TASK_INDEX", str(task.index)
    yield "FC_CONFIGMAP_NAME", f"{plan.debug_id}-attempt"
    yield "FC_POD_NAME", f"{plan.debug_id}-{role.mangled_name}-{task.index}"
    yield "FC_FRAMEWORK_UID", _uid(plan)
    yield "FC_FRAMEWORK_ATTEMPT_ID", str(job_attempt_id)
    yield "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID", f"{job_attempt_id}_{attempt_uid}"
    yield "FC_CONFIGMAP_UID", attempt_uid
    yield "FC_TASKROLE_UID", _uid(plan, job_attempt_id, role.name)
    yield "FC_TASK_UID", task.task_uid
    yield "FC_TASK_ATTEMPT_ID", str(task.attempt_id)
    yield CONTAINER_ID, task.container_id
    yield "FC_TASK_ATTEMPT_INSTANCE_UID", f"{task.attempt_id}_{task.container_id}"


def _first(allocation: Allocation, label: str) -> str:
    ports = allocation.ports.get(label, ())
    return str(ports[0]) if ports else ""


def _uid(plan: JobPlan, *parts: object) -> str:
    """A deterministic id."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, (plan.framework_name, *parts)))))


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a task inherits from the machine, as a container does from its image."""
    return {name: value for name, value in environ.items() if not name.startswith(FAMILIES)}
