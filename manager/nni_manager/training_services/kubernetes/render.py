"""The parts that jobs of all operators have in common: names, labels, pods, secrets, run.sh. Pure.

Each task's pod runs run.sh from the shared storage, which becomes the keeper: the process that Kubernetes sends its signals to.
The keeper is given the command of its role, in place of the trial's.

Source: Kubernetes, Pod v1 and Secret v1; NNI v2.10 for names, labels, paths and variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from nni_manager.config.model import (
    MOUNT,
    VOLUME,
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    KubernetesStorage,
    NfsStorage,
    RoleConfig,
)
from nni_manager.errors import Bug
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.storage import STORAGE_SECRET, SecretContent
from nni_manager.training_services.run_script import finds_keeper
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import PREFIX, KeeperSettings

TOKEN = "token"
_APP = "nni-kubernetes-trial"
_SHM_VOLUME = "shm"
_REUSED = "env-"
# What the cluster alone can say, and keepers and trials may want to know.
_OF_THE_POD = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
LAST_WORDS_S = 15
"""What a keeper has, once its trial has had its own grace, to tell how that ended."""


# ---- names


def short_name(job_id: str, between: str = "") -> str:
    """What tells a job from others of its experiment in the names of resources, as NNI writes it."""
    kind = "env" if job_id.startswith(_REUSED) else "trial"
    return f"{kind}{between}{job_id.removeprefix(_REUSED)}"


def labels_of(experiment_id: str, job_id: str) -> dict[str, str]:
    """What tells a job's objects from those of all others."""
    kind = "envId" if job_id.startswith(_REUSED) else "trialId"
    return {"app": _APP, "expId": experiment_id, kind: job_id}


def job_of(document: Document) -> str:
    """The job that an object belongs to, by its labels; empty for none."""
    labels = document["metadata"].get("labels") or {}
    return next((labels[each] for each in ("trialId", "envId") if each in labels), "")


def selector_of(experiment_id: str) -> str:
    """What chooses the objects of all jobs of an experiment."""
    return f"app={_APP},expId={experiment_id}"


# ---- what keepers are started with


def as_in_containers(settings: KeeperSettings) -> KeeperSettings:
    """The same settings with the paths that containers see."""
    return replace(settings, workspace=f"{MOUNT}/{settings.experiment_id}", mount=MOUNT, relay_output=True)


def render_run_script() -> str:
    """The content of run.sh: becomes the keeper that the container has."""
    return f"""\
#!/bin/bash
# Started once per task; the TRIAL_KEEPER_* variables say what it is for.
{finds_keeper()}
exec "${{keeper[@]}}"
"""


# ---- pods


def pod_spec(
    config: KubernetesConfig,
    role: RoleConfig,
    name: str,
    settings: KeeperSettings,
    *,
    container: str,
    environ: Mapping[str, str] | None = None,
    port: int | None = None,
    before: tuple[str, ...] = (),
) -> Document:
    """The pod of each task of a role, with one container of this name. `name` is that of the job's resource.

    `environ` is what its operator adds to the keeper's own variables, `before` are lines of a shell that run before the keeper.
    """
    volumes: list[Document] = [{"name": VOLUME, **volume_of(config.storage, name)}]
    mounts = [{"name": VOLUME, "mountPath": MOUNT}]
    if role.shm_mb is not None:
        shm = {"medium": "Memory", "sizeLimit": f"{role.shm_mb}Mi"}
        volumes.append({"name": _SHM_VOLUME, "emptyDir": shm})
        mounts.append({"name": _SHM_VOLUME, "mountPath": "/dev/shm"})
    resources = resources_of(role)
    spec: Document = {
        "containers": [
            {
                "name": container,
                "image": role.image,
                "command": command_of(settings, before),
                "env": environment_of(role, name, settings, environ or {}),
                **({} if port is None else {"ports": [{"containerPort": port}]}),
                "resources": {"requests": resources, "limits": resources},
                # The last lines of a container that fails, for people.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": mounts,
            }
        ],
        "restartPolicy": "Never",
        "hostNetwork": False,
        "terminationGracePeriodSeconds": grace_of(settings),
        "volumes": volumes,
    }
    if config.service_account is not None:
        spec["serviceAccountName"] = config.service_account
    if role.registry_login is not None:
        spec["imagePullSecrets"] = [{"name": _login_names(config, name)[role.registry_login]}]
    return spec


def volume_of(storage: KubernetesStorage, name: str) -> Document:
    """The source of the volume that is the shared storage. `name`: that of the job's resource, for secrets that it owns."""
    match storage:
        case NfsStorage(server, path):
            return {"nfs": {"server": server, "path": path}}
        case ClaimStorage(_, str() as claim):
            return {"persistentVolumeClaim": {"claimName": claim}}
        case AzureStorage(_, share):
            return {"azureFile": {"secretName": f"{name}{STORAGE_SECRET}", "shareName": share}}
        case ClaimStorage():
            raise Bug(f"cannot mount the storage of {name}: nobody refused it in time; please report it")


def resources_of(role: RoleConfig) -> dict[str, str]:
    """What a task of the role is granted, and limited to."""
    resources = {"cpu": f"{role.cpu}", "memory": f"{role.memory_mb}Mi"}
    return resources | {"nvidia.com/gpu": f"{role.gpu}"} if role.gpu else resources


def command_of(settings: KeeperSettings, before: tuple[str, ...] = ()) -> list[str]:
    """What a container runs: the keeper in the end, after the lines of `before`."""
    run = shlex.quote(f"{settings.workspace}/run.sh")
    reads = f"[ -r {run} ] || {{ echo cannot read {run} in this container >&2; exit {int(KeeperExit.WORKSPACE)}; }}"
    # The keeper takes the shell's place: Kubernetes tells the first process alone that it has to end.
    return ["bash", "-c", as_it_is("\n".join([reads, *before, f"exec bash {run}"]))]


def environment_of(
    role: RoleConfig, name: str, settings: KeeperSettings, environ: Mapping[str, str]
) -> list[Document]:
    """The variables of a task of the role; the token is taken from the secret that has the resource's name."""
    own = replace(settings, command=role.command, role=role.name).to_environ()
    del own[f"{PREFIX}TOKEN"]
    own |= environ
    if role.gpu == 0:
        own["CUDA_VISIBLE_DEVICES"] = ""
    token = {"secretKeyRef": {"name": name, "key": TOKEN}}
    return [
        *({"name": each, "value": as_it_is(value)} for each, value in own.items()),
        {"name": f"{PREFIX}TOKEN", "valueFrom": token},
        *(
            {"name": each, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for each, path in _OF_THE_POD.items()
        ),
    ]


def grace_of(settings: KeeperSettings) -> int:
    """How long a pod that is told to end may take, in seconds."""
    return int(settings.grace_s) + LAST_WORDS_S


def as_it_is(text: str) -> str:
    """Kubernetes fills in `$(NAME)`, and makes one dollar of two; what a user writes belongs to the shell."""
    return text.replace("$", "$$")


# ---- secrets


def job_secrets(config: KubernetesConfig, token: str, logins: Mapping[Path, str]) -> list[SecretContent]:
    """What the pods of every job need to know and nobody else, the token last. `logins`: the content of each registry login."""
    return [
        *(
            SecretContent(suffix, "kubernetes.io/dockerconfigjson", {".dockerconfigjson": logins[path]})
            for path, suffix in _login_names(config, "").items()
        ),
        SecretContent("", "Opaque", {TOKEN: token}),
    ]


def render_secrets(owner: Document, contents: Iterable[SecretContent]) -> list[Document]:
    """The secrets of a job, gone when its resource is. `owner` is that, as it is on the cluster."""
    meta = owner["metadata"]
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
        key: meta[key] for key in ("name", "uid")
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": f"{meta['name']}{each.suffix}",
                "namespace": meta["namespace"],
                "labels": meta["labels"],
                "ownerReferences": [reference],
            },
            "type": each.kind,
            "stringData": dict(each.texts),
        }
        for each in contents
    ]


def _login_names(config: KubernetesConfig, name: str) -> dict[Path, str]:
    """The secret of each registry login, in the order of the roles."""
    paths = dict.fromkeys(role.registry_login for role in config.roles if role.registry_login is not None)
    return {path: f"{name}-registry-{number}" for number, path in enumerate(paths)}
