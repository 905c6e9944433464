"""A job as a Framework and the secrets that it owns. Pure: the same input gives the same documents.

Each task's pod runs run.sh from the shared storage, which becomes the keeper: the process that Kubernetes sends its signals to.
The keeper is given the command of its role, in place of the trial's. Jobs of several tasks begin with FrameworkController's
barrier, which waits until all tasks have an address and writes those down for the commands.

Source: FrameworkController v1 (Framework, FrameworkBarrier); NNI v2.10 for names, labels, paths, ports and variables. Otherwise
than there, a task that fails is not run again in its pod, and no job of one task waits at a barrier.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nni_manager.config.model import AzureStorage, ClaimStorage, KubernetesConfig, NfsStorage, RoleConfig
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.errors import Bug
from nni_manager.training_services.run_script import finds_keeper
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import PREFIX, KeeperSettings

Document = dict[str, Any]
MOUNT = "/tmp/mount"
"""Where containers see the shared storage."""
CONTAINER = "framework"
TOKEN = "token"
_APP = "nni-kubernetes-trial"
_VOLUME, _BARRIER_VOLUME, _SHM_VOLUME = "nni-vol", "frameworkbarrier-volume", "shm"
_BARRIER_PATH = "/mnt/frameworkbarrier"
_BARRIER_IMAGE = "frameworkcontroller/frameworkbarrier"
_FIRST_PORT = 4000
_REUSED = "env-"
# What a keeper has, once its trial has had its own grace, to tell how that ended.
_LAST_WORDS_S = 15
# A node that does not end a pod within ten minutes is taken for lost. As no task is ever run again, none can run twice.
_NODE_LOST_S = 600
_NO_RETRIES = {"fancyRetryPolicy": False, "maxRetryCount": 0}


def framework_name(experiment_id: str, job_id: str) -> str:
    """The name of a job's Framework. Frameworks have small letters and digits only, so that two jobs may have the same."""
    kind = "env" if job_id.startswith(_REUSED) else "trial"
    return f"nniexp{experiment_id}{kind}{job_id.removeprefix(_REUSED)}".lower()


def labels_of(experiment_id: str, job_id: str) -> dict[str, str]:
    """What tells a job's objects from those of all others."""
    kind = "envId" if job_id.startswith(_REUSED) else "trialId"
    return {"app": _APP, "expId": experiment_id, kind: job_id}


def selector_of(experiment_id: str) -> str:
    """What chooses the objects of all jobs of an experiment."""
    return f"app={_APP},expId={experiment_id}"


def completion_of(roles: tuple[RoleConfig, ...]) -> Completion:
    """When the tasks of a job end its trial."""
    return Completion(
        tuple(
            TaskRole(role.name, role.tasks, _count(role.min_failed), _count(role.min_succeeded))
            for role in roles
        )
    )


def render_framework(config: KubernetesConfig, namespace: str, settings: KeeperSettings) -> Document:
    """The job. `settings` are those of its keepers, as containers see paths; the token is left to a secret."""
    name, labels = (
        framework_name(settings.experiment_id, settings.job_id),
        labels_of(settings.experiment_id, settings.job_id),
    )
    has_barrier = sum(role.tasks for role in config.roles) > 1
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
                "pod": {
                    "metadata": {"labels": labels},
                    "spec": _pod(config, role, name, settings, has_barrier=has_barrier),
                },
            },
        }
        for role in config.roles
    ]
    return {
        "apiVersion": "frameworkcontroller.microsoft.com/v1",
        "kind": "Framework",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"executionType": "Start", "retryPolicy": _NO_RETRIES, "taskRoles": roles},
    }


def render_secrets(
    config: KubernetesConfig, framework: Mapping[str, Any], token: str, logins: Mapping[Path, str]
) -> list[Document]:
    """What the pods need to know and nobody else; gone when the Framework is. `logins`: the content of each registry login."""
    name = framework["metadata"]["name"]
    owner = {key: framework[key] for key in ("apiVersion", "kind")} | {
        "name": name,
        "uid": framework["metadata"]["uid"],
    }

    def secret(secret_name: str, kind: str, key: str, text: str) -> Document:
        meta = {
            "name": secret_name,
            "namespace": framework["metadata"]["namespace"],
            "labels": framework["metadata"]["labels"],
            "ownerReferences": [owner],
        }
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": meta,
            "type": kind,
            "stringData": {key: text},
        }

    return [
        secret(name, "Opaque", TOKEN, token),
        *(
            secret(login_name, "kubernetes.io/dockerconfigjson", ".dockerconfigjson", logins[path])
            for path, login_name in _logins(config, name).items()
        ),
    ]


def render_run_script() -> str:
    """The content of run.sh: becomes the keeper that the container has."""
    return f"""\
#!/bin/bash
# Started once per task; the TRIAL_KEEPER_* variables say what it is for.
{finds_keeper()}
exec "${{keeper[@]}}"
"""


def as_in_containers(settings: KeeperSettings) -> KeeperSettings:
    """The same settings with the paths that containers see."""
    return replace(settings, workspace=f"{MOUNT}/{settings.experiment_id}", mount=MOUNT, relay_output=True)


# ---- parts


def _count(wanted: int | None) -> int:
    return -1 if wanted is None else wanted


def _logins(config: KubernetesConfig, name: str) -> dict[Path, str]:
    """The secret of each registry login, in the order of the roles."""
    paths = dict.fromkeys(role.registry_login for role in config.roles if role.registry_login is not None)
    return {path: f"{name}-registry-{number}" for number, path in enumerate(paths)}


def _pod(
    config: KubernetesConfig, role: RoleConfig, name: str, settings: KeeperSettings, *, has_barrier: bool
) -> Document:
    volumes: list[Document] = [{"name": _VOLUME, **_volume(config)}]
    mounts = [{"name": _VOLUME, "mountPath": MOUNT}]
    barrier = {"name": _BARRIER_VOLUME, "mountPath": _BARRIER_PATH}
    if has_barrier:
        volumes.append({"name": _BARRIER_VOLUME, "emptyDir": {}})
        mounts.append(barrier)
    if role.shm_mb is not None:
        volumes.append(
            {"name": _SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{role.shm_mb}Mi"}}
        )
        mounts.append({"name": _SHM_VOLUME, "mountPath": "/dev/shm"})
    resources = {"cpu": f"{role.cpu}", "memory": f"{role.memory_mb}Mi"}
    if role.gpu:
        resources["nvidia.com/gpu"] = f"{role.gpu}"
    container = {
        "name": CONTAINER,
        "image": role.image,
        "command": ["bash", "-c", _as_it_is(_script(settings, has_barrier=has_barrier))],
        "env": _environment(config, role, name, settings),
        "ports": [{"containerPort": _port(config, role)}],
        "resources": {"requests": resources, "limits": resources},
        # The last lines of a container that fails, for people.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    spec: Document = {
        "containers": [container],
        "restartPolicy": "Never",
        "hostNetwork": False,
        "terminationGracePeriodSeconds": int(settings.grace_s) + _LAST_WORDS_S,
        "volumes": volumes,
    }
    if has_barrier:
        spec["initContainers"] = [
            {"name": "frameworkbarrier", "image": _BARRIER_IMAGE, "volumeMounts": [barrier]}
        ]
    if config.service_account is not None:
        spec["serviceAccountName"] = config.service_account
    if role.registry_login is not None:
        spec["imagePullSecrets"] = [{"name": _logins(config, name)[role.registry_login]}]
    return spec


def _volume(config: KubernetesConfig) -> Document:
    match config.storage:
        case NfsStorage(server, path):
            return {"nfs": {"server": server, "path": path}}
        case ClaimStorage(_, str() as name):
            return {"persistentVolumeClaim": {"claimName": name}}
        case ClaimStorage() | AzureStorage():
            raise Bug("cannot mount this storage: nobody refused it in time; please report it")


def _script(settings: KeeperSettings, *, has_barrier: bool) -> str:
    run = shlex.quote(f"{settings.workspace}/run.sh")
    lines = [
        f"[ -r {run} ] || {{ echo cannot read {run} in this container >&2; exit {int(KeeperExit.WORKSPACE)}; }}"
    ]
    if has_barrier:
        lines.append(f". {_BARRIER_PATH}/injector.sh")
    # The keeper takes the shell's place: Kubernetes tells the first process alone that it has to end.
    return "\n".join([*lines, f"exec bash {run}"])


def _environment(
    config: KubernetesConfig, role: RoleConfig, name: str, settings: KeeperSettings
) -> list[Document]:
    environ = replace(settings, command=role.command).to_environ()
    del environ[f"{PREFIX}TOKEN"]
    environ |= {f"FB_{each.name.upper()}_PORT": f"{_port(config, each)}" for each in config.roles}
    if role.gpu == 0:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    reference = {"secretKeyRef": {"name": name, "key": TOKEN}}
    return [
        *({"name": each, "value": _as_it_is(value)} for each, value in environ.items()),
        {"name": f"{PREFIX}TOKEN", "valueFrom": reference},
    ]


def _port(config: KubernetesConfig, role: RoleConfig) -> int:
    return _FIRST_PORT + config.roles.index(role)


def _as_it_is(text: str) -> str:
    """Kubernetes fills in `$(NAME)`, and makes one dollar of two; what a user writes belongs to the shell."""
    return text.replace("$", "$$")
