"""The environment of a task: the variables of OpenPAI and of FrameworkController. Pure.

A role has two names: the name in the job file and the mangled name. OpenPAI uses one of them in some variables and the other in
the rest, so scripts that compose variable names fail. Here every variable of a role is set under both names.

Source: microsoft/pai v1.8.1 (src/rest-server/src/models/v2/job/k8s.js), microsoft/openpai-runtime v0.1.12 (src/init.d),
FrameworkController v1.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

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
        **_of_framework(plan, job_attempt_id, task, own),
        **_of_job(plan),
        **_of_addresses(plan, tasks),
        **_of_task(task, own),
        "PAI_WORK_DIR": work_dir,
    }


def _both(name: str, role: RolePlan, value: str) -> dict[str, str]:
    """A variable in both spellings; `{}` is the placeholder for the role."""
    return {name.format(role.name): value, name.format(role.mangled_name): value}


def _of_job(plan: JobPlan) -> dict[str, str]:
    roles = ",".join(role.name for role in plan.roles)
    variables = {
        **dict.fromkeys(("PAI_FRAMEWORK_NAME", "PAI_JOB_NAME"), plan.framework_name),
        **dict.fromkeys(("PAI_USER_NAME", "PAI_USERNAME"), plan.user),
        "PAI_DEFAULT_FS_URI": "",
        "PAI_VIRTUAL_CLUSTER": plan.virtual_cluster,
        **dict.fromkeys(
            ("PAI_TASK_ROLE_COUNT", "PAI_TASK_ROLES_NUM", "PAI_JOB_TASK_ROLE_COUNT"), str(len(plan.roles))
        ),
        **dict.fromkeys(("PAI_TASK_ROLE_LIST", "PAI_JOB_TASK_ROLE_LIST"), roles),
        **dict.fromkeys(("PAI_TASKS_NUM", "PAI_JOB_TASK_COUNT"), str(plan.total_tasks)),
    }
    for role in plan.roles:
        need, completion = role.need, role.completion
        resources = f"{need.gpu},{need.cpu},{need.memory_mb},{role.shm_mb}"
        variables |= _both("PAI_TASK_ROLE_TASK_COUNT_{}", role, str(role.tasks))
        variables |= _both("PAI_RESOURCE_{}", role, resources)
        variables |= _both("PAI_MIN_FAILED_TASK_COUNT_{}", role, str(completion.min_failed))
        variables |= _both("PAI_MIN_SUCCEEDED_TASK_COUNT_{}", role, str(completion.min_succeeded))
    return variables


def _of_addresses(plan: JobPlan, tasks: Sequence[Task]) -> dict[str, str]:
    instances = (f"{plan.role(task.role).mangled_name}:{task.index}" for task in tasks)
    variables = {"PAI_TASK_ROLE_INSTANCES": ",".join(instances)}
    hosts: dict[str, list[str]] = {}
    for task in tasks:
        if task.allocation is None:
            continue
        role, allocation = plan.role(task.role), task.allocation
        variables |= _both(f"PAI_HOST_IP_{{}}_{task.index}", role, allocation.host_ip)
        for label, ports in _ports(allocation).items():
            variables |= _both(f"PAI_PORT_LIST_{{}}_{task.index}_{label}", role, ports)
            variables |= _both(f"PAI_{{}}_{task.index}_{label}_PORT", role, ports)
        hosts.setdefault(role.name, []).append(f"{allocation.host_ip}:{_first(allocation, 'http')}")
    for role in plan.roles:
        if role.name in hosts:
            variables |= _both("PAI_TASK_ROLE_{}_HOST_LIST", role, ",".join(hosts[role.name]))
    return variables


def _of_task(task: Task, role: RolePlan) -> dict[str, str]:
    allocation = task.allocation
    assert allocation is not None
    ports, gpus = _ports(allocation), ",".join(map(str, allocation.gpus))
    return {
        "PAI_CURRENT_TASK_ROLE_NAME": role.name,
        **dict.fromkeys(("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "PAI_TASK_INDEX"), str(task.index)),
        **dict.fromkeys(("PAI_CURRENT_CONTAINER_IP", "PAI_CONTAINER_HOST_IP"), allocation.host_ip),
        **dict.fromkeys(
            ("PAI_CURRENT_CONTAINER_PORT", "PAI_CONTAINER_HOST_PORT"), _first(allocation, "http")
        ),
        "PAI_CONTAINER_SSH_PORT": _first(allocation, "ssh"),
        **{f"PAI_CONTAINER_HOST_{label}_PORT_LIST": numbers for label, numbers in ports.items()},
        "PAI_CONTAINER_HOST_PORT_LIST": "".join(f"{label}:{numbers};" for label, numbers in ports.items()),
        "NVIDIA_VISIBLE_DEVICES": gpus or "none",
        # Hides GPUs from tasks without a container runtime; an empty value hides all.
        "CUDA_VISIBLE_DEVICES": gpus,
    }


def _of_framework(plan: JobPlan, job_attempt_id: int, task: Task, role: RolePlan) -> dict[str, str]:
    attempt_uid = _uid(plan, job_attempt_id, "configmap")
    return {
        "FC_FRAMEWORK_NAMESPACE": _NAMESPACE,
        "FC_FRAMEWORK_NAME": plan.debug_id,
        "FC_TASKROLE_NAME": role.mangled_name,
        "FC_TASK_INDEX": str(task.index),
        "FC_CONFIGMAP_NAME": f"{plan.debug_id}-attempt",
        "FC_POD_NAME": f"{plan.debug_id}-{role.mangled_name}-{task.index}",
        "FC_FRAMEWORK_UID": _uid(plan),
        "FC_FRAMEWORK_ATTEMPT_ID": str(job_attempt_id),
        "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID": f"{job_attempt_id}_{attempt_uid}",
        "FC_CONFIGMAP_UID": attempt_uid,
        "FC_TASKROLE_UID": _uid(plan, job_attempt_id, role.name),
        "FC_TASK_UID": task.task_uid,
        "FC_TASK_ATTEMPT_ID": str(task.attempt_id),
        CONTAINER_ID: task.container_id,
        "FC_TASK_ATTEMPT_INSTANCE_UID": f"{task.attempt_id}_{task.container_id}",
    }


def _ports(allocation: Allocation) -> dict[str, str]:
    return {label: ",".join(map(str, ports)) for label, ports in allocation.ports.items()}


def _first(allocation: Allocation, label: str) -> str:
    ports = allocation.ports.get(label, ())
    return str(ports[0]) if ports else ""


def _uid(plan: JobPlan, *parts: object) -> str:
    """A deterministic id."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, (plan.framework_name, *parts)))))


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a task inherits from the machine, as a container does from its image."""
    return {name: value for name, value in environ.items() if not name.startswith(FAMILIES)}
