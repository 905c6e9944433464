"""Renders a job as a Framework. Pure: the same input gives the same document.

Pods of multi-task jobs start with FrameworkController's barrier. It waits until all tasks have an address, and writes the
addresses down for the commands.

Source: FrameworkController v1 (Framework, FrameworkBarrier); NNI v2.10 for names, ports and variables. Unlike NNI, a
failed task is not restarted in its pod, and single-task jobs have no barrier.
"""

from __future__ import annotations

from nni_manager.config.model import KubernetesConfig, RoleConfig
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.frameworkcontroller.template import (
    has_own_barrier,
    template_of,
    with_keeper,
    with_labels,
)
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.render import labels_of, pod_spec, short_name
from trial_keeper.settings import KeeperSettings

CONTAINER = "framework"
_BARRIER_VOLUME = "frameworkbarrier-volume"
_BARRIER_PATH = "/mnt/frameworkbarrier"
_BARRIER_IMAGE = "frameworkcontroller/frameworkbarrier"
_FIRST_PORT = 4000
# A node that does not end a pod within ten minutes counts as lost. Tasks are never retried, so none can run twice.
_NODE_LOST_S = 600
_NO_RETRIES = {"fancyRetryPolicy": False, "maxRetryCount": 0}


def framework_name(experiment_id: str, job_id: str) -> str:
    """Returns the name of a job's Framework: lower-case letters and digits, so names of two jobs may collide."""
    return f"nniexp{experiment_id}{short_name(job_id)}".lower()


def completion_of(roles: tuple[RoleConfig, ...]) -> Completion:
    """Returns the rule by which the tasks of a job end its trial."""
    return Completion(
        tuple(
            TaskRole(role.name, role.tasks, _count(role.min_failed), _count(role.min_succeeded))
            for role in roles
        )
    )


def waits_at_barrier(config: KubernetesConfig) -> bool:
    """True if the tasks of a job wait for each other."""
    return sum(role.tasks for role in config.roles) > 1


def render_framework(config: KubernetesConfig, namespace: str, settings: KeeperSettings) -> Document:
    """Returns the job's Framework. `settings` are its keepers', with paths as containers see them; a secret holds the token."""
    name = framework_name(settings.experiment_id, settings.job_id)
    labels = labels_of(settings.experiment_id, settings.job_id)
    template = template_of(config) or {"spec": {}}
    given = template["spec"].get("taskRoles") or [{"task": {"pod": {}}} for _ in config.roles]
    roles = [
        {
            "name": role.name,
            "taskNumber": role.tasks,
            "frameworkAttemptCompletionPolicy": {
                "minFailedTaskCount": _count(role.min_failed),
                "minSucceededTaskCount": _count(role.min_succeeded),
            },
            "task": {
                "retryPolicy": _NO_RETRIES,
                "podGracefulDeletionTimeoutSec": _NODE_LOST_S,
                **own["task"],
                "pod": {
                    "metadata": with_labels(own["task"]["pod"].get("metadata"), labels),
                    "spec": _pod(config, role, name, settings, own["task"]["pod"].get("spec")),
                },
            },
        }
        for role, own in zip(config.roles, given, strict=True)
    ]
    return {
        "apiVersion": "frameworkcontroller.microsoft.com/v1",
        "kind": "Framework",
        "metadata": {"name": name, "namespace": namespace, **with_labels(template.get("metadata"), labels)},
        "spec": {
            "executionType": "Start",
            "retryPolicy": _NO_RETRIES,
            **template["spec"],
            "taskRoles": roles,
        },
    }


def _pod(
    config: KubernetesConfig,
    role: RoleConfig,
    name: str,
    settings: KeeperSettings,
    given: Document | None,
) -> Document:
    """Returns the pod of a role; `given` is the template's pod spec, or None."""
    has_barrier = waits_at_barrier(config) and not (given and has_own_barrier(given))
    environ = {f"FB_{each.name.upper()}_PORT": f"{_port(config, each)}" for each in config.roles}
    before = (f". {_BARRIER_PATH}/injector.sh",) if has_barrier else ()
    if given is None:
        spec = pod_spec(
            *(config, role, name, settings),
            container=CONTAINER,
            environ=environ,
            port=_port(config, role),
            before=before,
        )
    else:
        spec = with_keeper(given, config, role, name, settings, environ=environ, before=before)
    if has_barrier:
        barrier = {"name": _BARRIER_VOLUME, "mountPath": _BARRIER_PATH}
        spec["volumes"].append({"name": _BARRIER_VOLUME, "emptyDir": {}})
        spec["containers"][0]["volumeMounts"].append(barrier)
        spec["initContainers"] = [
            {"name": "frameworkbarrier", "image": _BARRIER_IMAGE, "volumeMounts": [barrier]},
            *(spec.get("initContainers") or ()),
        ]
    return spec


def _count(wanted: int | None) -> int:
    return -1 if wanted is None else wanted


def _port(config: KubernetesConfig, role: RoleConfig) -> int:
    return _FIRST_PORT + config.roles.index(role)
