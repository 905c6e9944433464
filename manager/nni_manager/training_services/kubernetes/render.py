"""The common parts of jobs of all operators: names, labels, pods, secrets, run.sh. Pure.

Each task's pod executes run.sh from the shared storage. It execs the keeper, which thus receives the signals of Kubernetes.
The keeper runs the command of its role instead of the trial's command.

Source: Kubernetes, Pod v1 and Secret v1; NNI v2.10 for names, labels, paths and variables.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from nni_manager.training_services.kubernetes import section
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.pod_template import with_labels, with_template
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import PREFIX, KeeperSettings

TOKEN = "token"
_APP = "nni-kubernetes-trial"
_SHM_VOLUME = "shm"
_REUSED = "env-"
# Values known only to the cluster, for keepers and trials.
_POD_FIELDS = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
TERMINATION_MARGIN_S = 15
"""Seconds that a keeper has after its trial's grace to report how the trial ended."""
# The suffix of the secret with which pods mount the storage.
_STORAGE_SECRET = "-storage"


@dataclass(frozen=True, slots=True)
class SecretContent:
    """A secret that a job's resource owns. Its name is that resource's name plus `suffix`; `kind` is its type."""

    suffix: str
    kind: str
    texts: Mapping[str, str] = field(repr=False)


# ---- names


def short_name(job_id: str, between: str = "") -> str:
    """Returns the part of resource names that identifies a job within its experiment, as NNI writes it."""
    kind = "env" if job_id.startswith(_REUSED) else "trial"
    return f"{kind}{between}{job_id.removeprefix(_REUSED)}"


def labels_of(experiment_id: str, job_id: str) -> dict[str, str]:
    """Returns the labels that identify a job's objects."""
    kind = "envId" if job_id.startswith(_REUSED) else "trialId"
    return {"app": _APP, "expId": experiment_id, kind: job_id}


def job_of(document: Document) -> str:
    """Returns the id of the job that an object's labels name; empty if none."""
    labels = document["metadata"].get("labels") or {}
    return next((labels[each] for each in ("trialId", "envId") if each in labels), "")


def selector_of(experiment_id: str) -> str:
    """Returns the selector of the objects of all jobs of an experiment."""
    return f"app={_APP},expId={experiment_id}"


# ---- the keeper's start


def as_in_containers(settings: KeeperSettings) -> KeeperSettings:
    """Returns the settings with paths as containers see them."""
    return replace(
        settings,
        workspace=f"{section.MOUNT}/{settings.experiment_id}",
        mount=section.MOUNT,
        relay_output=True,
    )


# ---- pods


def pod_spec(
    config: section.KubernetesConfig,
    role: section.RoleConfig,
    name: str,
    settings: KeeperSettings,
    *,
    container: str,
    environ: Mapping[str, str] | None = None,
    port: int | None = None,
    before: tuple[str, ...] = (),
) -> Document:
    """Returns the pod of each task of a role, with one container named `container`. `name` is that of the job's resource.

    `environ`: the operator's additions to the keeper's variables. `before`: lines of shell that run before the keeper.
    """
    volumes: list[Document] = [{"name": section.VOLUME, **volume_of(config.storage, name)}]
    mounts = [{"name": section.VOLUME, "mountPath": section.MOUNT}]
    if role.shm_mb is not None:
        shm = {"medium": "Memory", "sizeLimit": f"{role.shm_mb}Mi"}
        volumes.append({"name": _SHM_VOLUME, "emptyDir": shm})
        mounts.append({"name": _SHM_VOLUME, "mountPath": "/dev/shm"})
    resources = {"cpu": f"{role.cpu}", "memory": f"{role.memory_mb}Mi"}
    if role.gpu:
        resources["nvidia.com/gpu"] = f"{role.gpu}"
    spec: Document = {
        "containers": [
            {
                "name": container,
                "image": role.image,
                "command": command_of(settings, before),
                "env": environment_of(role, name, settings, environ or {}),
                **({} if port is None else {"ports": [{"containerPort": port}]}),
                "resources": {"requests": resources, "limits": resources},
                # The last lines of a failed container, for people.
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


def pod_template(
    config: section.KubernetesConfig,
    role: section.RoleConfig,
    name: str,
    settings: KeeperSettings,
    labels: dict[str, str],
    *,
    container: str,
) -> Document:
    """Returns the template of a role's pods, with what the user's own template adds. See `pod_spec`."""
    given: Document = json.loads(config.template_text or "{}")
    pod = pod_spec(config, role, name, settings, container=container)
    return {
        "metadata": with_labels(given.get("metadata"), labels),
        "spec": with_template(pod, given) if given else pod,
    }


def volume_of(storage: section.KubernetesStorage, name: str) -> Document:
    """Returns the volume source of the shared storage. `name` is that of the job's resource; it prefixes the secret's name."""
    match storage:
        case section.NfsStorage(server, path):
            return {"nfs": {"server": server, "path": path}}
        case section.ClaimStorage(_, claim):
            return {"persistentVolumeClaim": {"claimName": claim}}
        case section.AzureStorage(_, share):
            return {"azureFile": {"secretName": f"{name}{_STORAGE_SECRET}", "shareName": share}}


def command_of(settings: KeeperSettings, before: tuple[str, ...] = ()) -> list[str]:
    """Returns a container's command: the lines of `before`, then the keeper."""
    run = shlex.quote(f"{settings.workspace}/run.sh")
    reads = f"[ -r {run} ] || {{ echo cannot read {run} in this container >&2; exit {int(KeeperExit.WORKSPACE)}; }}"
    # exec: Kubernetes sends the termination signal to the container's first process only.
    return ["bash", "-c", with_escaped_dollars("\n".join([reads, *before, f"exec bash {run}"]))]


def environment_of(
    role: section.RoleConfig, name: str, settings: KeeperSettings, environ: Mapping[str, str]
) -> list[Document]:
    """Returns the variables of a task of the role. The token comes from the secret named after the resource."""
    own = replace(settings, command=role.command, role=role.name).to_environ()
    del own[f"{PREFIX}TOKEN"]
    own |= environ
    if role.gpu == 0:
        own["CUDA_VISIBLE_DEVICES"] = ""
    token = {"secretKeyRef": {"name": name, "key": TOKEN}}
    return [
        *({"name": each, "value": with_escaped_dollars(value)} for each, value in own.items()),
        {"name": f"{PREFIX}TOKEN", "valueFrom": token},
        *(
            {"name": each, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for each, path in _POD_FIELDS.items()
        ),
    ]


def grace_of(settings: KeeperSettings) -> int:
    """Returns a pod's termination grace period in seconds."""
    return int(settings.grace_s) + TERMINATION_MARGIN_S


def with_escaped_dollars(text: str) -> str:
    """Escapes dollars: Kubernetes expands `$(NAME)` and turns `$$` into `$`, but the user's text is for the shell."""
    return text.replace("$", "$$")


# ---- secrets


def azure_secret(account: str, key: str) -> SecretContent:
    """Returns the secret that Kubernetes needs for an azureFile volume."""
    texts = {"azurestorageaccountname": account, "azurestorageaccountkey": key}
    return SecretContent(_STORAGE_SECRET, "Opaque", texts)


def job_secrets(
    config: section.KubernetesConfig, token: str, logins: Mapping[Path, str]
) -> list[SecretContent]:
    """Returns the secrets that pods of every job need, the token last. `logins`: the content of each registry login."""
    return [
        *(
            SecretContent(suffix, "kubernetes.io/dockerconfigjson", {".dockerconfigjson": logins[path]})
            for path, suffix in _login_names(config, "").items()
        ),
        SecretContent("", "Opaque", {TOKEN: token}),
    ]


def render_secrets(owner: Document, contents: Iterable[SecretContent]) -> list[Document]:
    """Returns a job's secrets. Kubernetes deletes them with `owner`, the job's resource as stored on the cluster."""
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


def _login_names(config: section.KubernetesConfig, name: str) -> dict[Path, str]:
    """Returns the secret's name for each registry login, in the order of the roles."""
    paths = dict.fromkeys(role.registry_login for role in config.roles if role.registry_login is not None)
    return {path: f"{name}-registry-{number}" for number, path in enumerate(paths)}
