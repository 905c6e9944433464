"""Serializes the cluster's snapshots into the JSON of OpenPAI's REST API. Pure.

Times become milliseconds since the epoch. Task roles have their mangled names, as in OpenPAI.

Source: microsoft/pai v1.8.1, REST server: models/v2/job/k8s.js, models/v2/utils/frameworkConverter.js.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, astuple
from datetime import datetime, timezone
from typing import Any

from nni_manager.local_openpai.core.exits import ExitSpec, TaskExit
from nni_manager.local_openpai.core.job import JobAttempt, Task
from nni_manager.local_openpai.core.policies import Trigger
from nni_manager.local_openpai.core.queue import ResourceCounts, VirtualCluster, summed
from nni_manager.local_openpai.jobs import JobDetail, JobEvent, JobSummary
from nni_manager.local_openpai.settings import StorageSettings

Document = dict[str, Any]

# The name of the only node.
NODE_NAME = "localhost"
GROUP = "default"
"""The name of the only group."""


def list_item(job: JobSummary) -> Document:
    """A job as an item of a list."""
    return {**_identity(job), **_status(job), "appExitCode": job.exit_code}


def detail(found: JobDetail) -> Document:
    """A job with one of its attempts."""
    job, attempt = found.job, found.attempt
    return {
        **_identity(job),
        "jobStatus": {
            **_status(job),
            **_attempt(attempt),
            "appId": job.debug_id,
            "appProgress": 0 if attempt.completed_at_s is None else 1,
            "appTrackingUrl": "",
        },
        "taskRoles": {
            role: {
                "taskRoleStatus": {"name": role},
                "taskStatuses": [
                    {**_task(task), **_task_attempt(task, job, attempt.attempt_id, role)} for task in tasks
                ],
            }
            for role, tasks in found.tasks.items()
        },
    }


def task_history(job: JobSummary, attempt_id: int, role: str, attempts: list[Task]) -> Document:
    """A task with all its attempts, the newest first."""
    return {
        "username": job.user,
        "jobName": job.name,
        "debugId": job.debug_id,
        "jobAttemptId": attempt_id,
        "taskRoleName": role,
        **_task(attempts[0]),
        "attempts": [_task_attempt(each, job, attempt_id, role) for each in attempts],
    }


def event(stored: JobEvent, job: JobSummary) -> Document:
    """An event of a job."""
    has_task = stored.role is not None
    at = f"{datetime.fromtimestamp(stored.at_s, timezone.utc):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
    return {
        "uid": str(stored.event_id),
        "frameworkName": job.framework_name,
        "podUid": stored.container_id,
        "taskroleName": stored.role,
        "taskName": f"{job.debug_id}-{stored.role}-{stored.index}" if has_task else None,
        "taskIndex": stored.index,
        "type": stored.type.value,
        "reason": stored.reason,
        "message": stored.message,
        # The only times that OpenPAI writes as text.
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "sourceComponent": "local-openpai",
        "sourceHost": NODE_NAME,
    }


def job_attempt(found: JobDetail, index: int) -> Document:
    """An attempt of a job in the shape of OpenPAI's job history."""
    job, attempt, end = found.job, found.attempt, found.attempt.exit
    is_terminal = attempt.completed_at_s is not None
    document = detail(found)
    status = document["jobStatus"]
    return {
        "jobName": job.name,
        "frameworkName": job.framework_name,
        "uid": job.debug_id,
        "userName": job.user,
        "state": status["attemptState"],
        "originState": job.sub_state.value,
        "maxAttemptCount": job.attempt_id + 1,
        "attemptIndex": index,
        "jobStartedTime": status["createdTime"],
        "attemptStartedTime": status["appCreatedTime"],
        "attemptCompletedTime": status["appCompletedTime"],
        "exitCode": status["appExitCode"],
        "exitPhrase": end.spec.phrase if is_terminal and end else None,
        "exitType": status["appExitType"],
        "exitDiagnostics": {"diagnosticsSummary": end.diagnostics, **_messages(end)}
        if is_terminal and end
        else None,
        **{name: value for name, value in status.items() if name.startswith(("appExit", "total"))},
        "taskRoles": document["taskRoles"],
        "isLatest": index == job.attempt_id,
    }


def group(clusters: Collection[VirtualCluster]) -> Document:
    """The only group, in which all users are."""
    names = [cluster.name for cluster in clusters]
    acls = {"admin": False, "virtualClusters": names, "storageConfigs": []}
    description = "All users of this machine's OpenPAI"
    return {"groupname": GROUP, "description": description, "externalName": "", "extension": {"acls": acls}}


def kubernetes_list(kind: str, items: list[Document]) -> Document:
    """A list in Kubernetes' form; `kind` is Node or Pod."""
    return {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": items}


def kubernetes_node(clusters: Collection[VirtualCluster]) -> Document:
    """This machine as a node of Kubernetes."""
    total = summed(cluster.capacity for cluster in clusters)
    amounts = {"cpu": str(total.cpu), "memory": f"{total.memory_mb}Mi", "nvidia.com/gpu": str(total.gpu)}
    return {
        "metadata": {"name": NODE_NAME, "labels": {}},
        "spec": {},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def kubernetes_pods(found: JobDetail) -> list[Document]:
    """The tasks of a job as pods of Kubernetes."""
    return [
        {
            "metadata": {
                "name": f"{found.job.debug_id}-{role}-{task.index}",
                "namespace": "default",
                "uid": task.container_id,
                "labels": {"jobName": found.job.name, "userName": found.job.user},
            },
            "spec": {"nodeName": NODE_NAME},
            "status": {"phase": _PHASES.get(task.state.value, "Unknown")},
        }
        for role, tasks in found.tasks.items()
        for task in tasks
    ]


# Kubernetes' phases of a pod for the states of a task.
_PHASES = {
    "WAITING": "Pending",
    "RUNNING": "Running",
    "STOPPING": "Running",
    "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
    "STOPPED": "Failed",
}


def virtual_clusters(clusters: Collection[VirtualCluster]) -> Document:
    """All virtual clusters, by name. Shares are in percent of the capacity of all of them."""
    total = summed(cluster.capacity for cluster in clusters)
    return {cluster.name: _virtual_cluster(cluster, total) for cluster in clusters}


def _virtual_cluster(cluster: VirtualCluster, total: ResourceCounts) -> Document:
    share = _share(cluster.capacity, total)
    return {
        "capacity": share,
        "usedCapacity": _share(cluster.used, total),
        "maxCapacity": share,
        "dedicated": False,
        "resourcesUsed": _resources(cluster.used),
        "resourcesGuaranteed": _resources(cluster.capacity),
        "resourcesTotal": _resources(cluster.capacity),
        "waitingJobs": cluster.waiting_jobs,
    }


def node(clusters: Collection[VirtualCluster]) -> Document:
    """The only machine, as an item of a list of nodes."""
    total = summed(cluster.capacity for cluster in clusters)
    free = total - summed(cluster.used for cluster in clusters)
    return {NODE_NAME: {"total": _resources(total), "available": _resources(free)}}


def storage(settings: StorageSettings) -> Document:
    """A storage as an item of a list."""
    return {
        "name": settings.name,
        "share": True,
        "volumeName": settings.name,
        "default": settings.is_default,
    }


def storage_detail(settings: StorageSettings, *, is_mounted: bool) -> Document:
    """One storage. Its type is unknown, since OpenPAI has no type for a folder of the machine.

    `is_mounted`: True if the storage is mounted at the requested paths; False if only its own path works.
    """
    return {
        **storage(settings),
        "type": "unknown",
        "data": {"path": str(settings.path)},
        "readOnly": settings.is_read_only,
        "secretName": "",
        "mountOptions": [],
        "mounted": is_mounted,
    }


def _identity(job: JobSummary) -> Document:
    return {
        "debugId": job.debug_id,
        "name": job.name,
        "tags": list(job.tags),
        "jobPriority": job.priority,
    }


def _status(job: JobSummary) -> Document:
    return {
        "username": job.user,
        "state": job.state.value,
        "subState": job.sub_state.value,
        "executionType": job.execution_type.value,
        "retries": job.retries.total,
        "retryDetails": asdict(job.retries),
        "retryDelayTime": None,
        "submissionTime": _ms(job.submitted_at_s),
        "createdTime": _ms(job.submitted_at_s),
        "launchedTime": _ms(job.launched_at_s),
        "completedTime": _ms(job.completed_at_s),
        "virtualCluster": job.virtual_cluster,
        "totalGpuNumber": job.total_gpus,
        "totalTaskNumber": job.total_tasks,
        "totalTaskRoleNumber": job.total_task_roles,
    }


def _attempt(attempt: JobAttempt) -> Document:
    # The exit may be decided before the attempt has completed.
    end, trigger = (None, None) if attempt.completed_at_s is None else (attempt.exit, attempt.trigger)
    trigger = trigger or Trigger("")
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


def _task(task: Task) -> Document:
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


def _task_attempt(task: Task, job: JobSummary, job_attempt_id: int, role: str) -> Document:
    end = task.exit
    host_ip, ports, gpus = astuple(task.allocation) if task.allocation else (None, {}, ())
    return {
        "attemptId": task.attempt_id,
        "attemptState": task.attempt_state.value,
        "currentAttemptCreatedTime": _ms(task.attempt_created_at_s),
        "currentAttemptLaunchedTime": _ms(task.attempt_launched_at_s),
        "currentAttemptCompletedTime": _ms(task.attempt_completed_at_s),
        "containerId": task.container_id,
        "containerIp": host_ip,
        "containerNodeName": host_ip,
        "containerPorts": {label: ",".join(map(str, numbers)) for label, numbers in ports.items()},
        # A bit mask of the GPUs, as text.
        "containerGpus": str(sum(1 << gpu for gpu in gpus)) if gpus else None,
        "containerLog": f"/api/v2/jobs/{job.framework_name}/attempts/{job_attempt_id}/taskRoles/{role}"
        f"/taskIndex/{task.index}/attempts/{task.attempt_id}/logs",
        "containerExitCode": end and end.code,
        "containerExitSpec": end and _spec(end.spec),
        "containerExitDiagnostics": end and end.diagnostics,
    }


def _spec(spec: ExitSpec) -> Document:
    explained = {name: value for name, value in asdict(spec.explanation).items() if value}
    return {**asdict(spec), "behavior": spec.behavior.value, "reaction": spec.reaction, **explained}


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
    amount, total = (part.gpu, whole.gpu) if whole.gpu else (part.cpu, whole.cpu)
    return 100 * amount / total if total else 0.0


def _ms(at_s: float | None) -> int | None:
    return None if at_s is None else round(at_s * 1000)
