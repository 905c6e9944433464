"""Serializes the cluster's snapshots into the JSON of OpenPAI's REST API. Pure.

Times become milliseconds since the epoch. Task roles have their mangled names, as in OpenPAI.

Source: microsoft/pai v1.8.1, REST server: models/v2/job/k8s.js, models/v2/utils/frameworkConverter.js.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nni_manager.local_openpai.core.exits import ExitSpec
from nni_manager.local_openpai.core.queue import summed
from nni_manager.local_openpai.jobs import (
    AttemptSummary,
    JobDetail,
    JobEventRecord,
    JobSummary,
    ResourceCounts,
    RetryCounts,
    StorageView,
    TaskAttempt,
    TaskDetail,
    TaskExit,
    TaskRoleDetail,
    Trigger,
    VirtualClusterView,
)

Document = dict[str, Any]

# The name of the only node.
NODE_NAME = "localhost"


def list_item(job: JobSummary) -> Document:
    """A job as an item of a list."""
    return {
        "debugId": job.debug_id,
        "name": job.name,
        "username": job.user,
        **_progress(job),
        "tags": list(job.tags),
        "appExitCode": job.exit_code,
        "virtualCluster": job.virtual_cluster,
        "totalGpuNumber": job.total_gpus,
        "totalTaskNumber": job.total_tasks,
        "totalTaskRoleNumber": job.total_task_roles,
        "jobPriority": job.priority,
    }


def detail(picture: JobDetail) -> Document:
    """A job with one of its attempts."""
    job, attempt = picture.job, picture.attempt
    return {
        "debugId": job.debug_id,
        "name": job.name,
        "tags": list(job.tags),
        "jobPriority": job.priority,
        "jobStatus": {
            "username": job.user,
            **_progress(job),
            **_attempt(attempt),
            "appId": job.debug_id,
            "appProgress": 0 if attempt.completed_at_s is None else 1,
            "appTrackingUrl": "",
            "virtualCluster": job.virtual_cluster,
            "totalGpuNumber": job.total_gpus,
            "totalTaskNumber": job.total_tasks,
            "totalTaskRoleNumber": job.total_task_roles,
        },
        "taskRoles": {
            role.mangled_name: _task_role(role, job, attempt.attempt_id) for role in picture.task_roles
        },
    }


def task_history(
    job: JobSummary, attempt_id: int, role: str, task: TaskDetail, attempts: Iterable[TaskAttempt]
) -> Document:
    """A task with all its attempts, in the given order."""
    return {
        "username": job.user,
        "jobName": job.name,
        "debugId": job.debug_id,
        "jobAttemptId": attempt_id,
        "taskRoleName": role,
        **_task_progress(task),
        "attempts": [_container(each, job, attempt_id, role, task.index) for each in attempts],
    }


def event(picture: JobEventRecord, job: JobSummary) -> Document:
    """An event of a job."""
    has_task = picture.role is not None
    return {
        "uid": picture.uid,
        "frameworkName": job.framework_name,
        "podUid": picture.container_id,
        "taskroleName": picture.role,
        "taskName": f"{job.debug_id}-{picture.role}-{picture.index}" if has_task else None,
        "taskIndex": picture.index,
        "type": picture.type.value,
        "reason": picture.reason,
        "message": picture.message,
        "firstTimestamp": _ms(picture.at_s),
        "lastTimestamp": _ms(picture.at_s),
        "count": 1,
        "sourceComponent": "local-openpai",
        "sourceHost": NODE_NAME,
    }


def virtual_cluster(view: VirtualClusterView, total: ResourceCounts) -> Document:
    """A virtual cluster; `total` is the capacity of all of them. Shares are in percent."""
    share, used = _share(view.capacity, total), _share(view.used, total)
    return {
        "capacity": share,
        "usedCapacity": used,
        "maxCapacity": share,
        "dedicated": False,
        "resourcesUsed": _resources(view.used),
        "resourcesGuaranteed": _resources(view.capacity),
        "resourcesTotal": _resources(view.capacity),
        "waitingJobs": view.waiting_jobs,
    }


def node(views: Iterable[VirtualClusterView]) -> Document:
    """The only machine, as an item of a list of nodes."""
    views = list(views)
    total, used = total_of(views), summed(view.used for view in views)
    return {NODE_NAME: {"total": _resources(total), "available": _resources(total - used)}}


def total_of(views: Iterable[VirtualClusterView]) -> ResourceCounts:
    """The capacity of all virtual clusters."""
    return summed(view.capacity for view in views)


def storage(view: StorageView) -> Document:
    """A storage as an item of a list."""
    return {"name": view.name, "share": True, "volumeName": view.name, "default": view.is_default}


def storage_detail(view: StorageView) -> Document:
    """One storage. Its type is unknown, since OpenPAI has no type for a folder of the machine."""
    return {
        **storage(view),
        "type": "unknown",
        "data": {"path": view.path},
        "readOnly": view.is_read_only,
        "secretName": None,
        "mountOptions": [],
        "mounted": view.is_mounted,
    }


def _progress(job: JobSummary) -> Document:
    return {
        "state": job.state.value,
        "subState": job.sub_state.value,
        "executionType": job.execution_type.value,
        "retries": job.retries.total,
        "retryDetails": _retries(job.retries),
        "retryDelayTime": None,
        "submissionTime": _ms(job.submitted_at_s),
        "createdTime": _ms(job.created_at_s),
        "launchedTime": _ms(job.launched_at_s),
        "completedTime": _ms(job.completed_at_s),
    }


def _attempt(attempt: AttemptSummary) -> Document:
    end, trigger = attempt.exit, attempt.trigger or Trigger("")
    return {
        "attemptId": attempt.attempt_id,
        "attemptState": attempt.state.value,
        "appCreatedTime": _ms(attempt.created_at_s),
        "appLaunchedTime": _ms(attempt.launched_at_s),
        "appCompletedTime": _ms(attempt.completed_at_s),
        "appExitCode": end and end.code,
        "appExitSpec": end and _spec(end.spec),
        "appExitDiagnostics": end and end.diagnostics,
        "appExitMessages": end and _messages(end),
        "appExitTriggerMessage": trigger.message or None,
        "appExitTriggerTaskRoleName": trigger.role,
        "appExitTriggerTaskIndex": trigger.index,
        "appExitType": end and end.spec.type,
    }


def _messages(end: TaskExit) -> Document:
    runtime = None
    if end.container_exit_code is not None:
        runtime = {
            "exitCode": end.container_exit_code,
            "originUserExitCode": end.origin_user_exit_code,
            **({"matchedUserLogString": end.matched_log} if end.matched_log else {}),
        }
    return {"container": end.diagnostics or None, "runtime": runtime, "launcher": None}


def _task_role(role: TaskRoleDetail, job: JobSummary, attempt_id: int) -> Document:
    return {
        "taskRoleStatus": {"name": role.mangled_name},
        "taskStatuses": [
            {
                **_task_progress(task),
                **_container(task.attempt, job, attempt_id, role.mangled_name, task.index),
            }
            for task in role.tasks
        ],
    }


def _task_progress(task: TaskDetail) -> Document:
    return {
        "taskIndex": task.index,
        "taskUid": task.task_uid,
        "taskState": task.state.value,
        "retries": task.retries.total,
        "accountableRetries": task.retries.user,
        "createdTime": _ms(task.created_at_s),
        "launchedTime": _ms(task.launched_at_s),
        "completedTime": _ms(task.completed_at_s),
    }


def _container(attempt: TaskAttempt, job: JobSummary, attempt_id: int, role: str, index: int) -> Document:
    end = attempt.exit
    return {
        "attemptId": attempt.attempt_id,
        "attemptState": attempt.state.value,
        "currentAttemptCreatedTime": _ms(attempt.created_at_s),
        "currentAttemptLaunchedTime": _ms(attempt.launched_at_s),
        "currentAttemptCompletedTime": _ms(attempt.completed_at_s),
        "containerId": attempt.container_id,
        "containerIp": attempt.container_ip,
        "containerNodeName": attempt.node_name,
        "containerPorts": {label: ",".join(map(str, ports)) for label, ports in attempt.ports.items()},
        # A bit mask of the GPUs.
        "containerGpus": sum(1 << gpu for gpu in attempt.gpus) if attempt.gpus else None,
        "containerLog": f"/api/v2/jobs/{job.framework_name}/attempts/{attempt_id}/taskRoles/{role}"
        f"/taskIndex/{index}/attempts/{attempt.attempt_id}/logs",
        "containerExitCode": end and end.code,
        "containerExitSpec": end and _spec(end.spec),
        "containerExitDiagnostics": end and end.diagnostics,
    }


def _spec(spec: ExitSpec) -> Document:
    return {
        "code": spec.code,
        "phrase": spec.phrase,
        "issuer": spec.issuer,
        "causer": spec.causer,
        "type": spec.type,
        "stage": spec.stage,
        "behavior": spec.behavior.value,
        "reaction": spec.reaction,
    }


def _retries(retries: RetryCounts) -> Document:
    return {"user": retries.user, "platform": retries.platform, "resource": retries.resource}


def _resources(counts: ResourceCounts) -> Mapping[str, int]:
    return {
        "cpu": counts.cpu,
        "vCores": counts.cpu,
        "memory": counts.memory_mb,
        "gpu": counts.gpu,
        "GPUs": counts.gpu,
    }


def _share(part: ResourceCounts, whole: ResourceCounts) -> float:
    """The share of GPUs if there are any, else of CPUs."""
    of, all_of_it = (part.gpu, whole.gpu) if whole.gpu else (part.cpu, whole.cpu)
    return 100 * of / all_of_it if all_of_it else 0.0


def _ms(at_s: float | None) -> int | None:
    return None if at_s is None else round(at_s * 1000)
