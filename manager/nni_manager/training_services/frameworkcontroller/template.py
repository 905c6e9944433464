"""Renders a job from the user's own Framework. Pure, as `operator` is.

The template keeps its roles, images, volumes, resources and other pod fields. The job's name and labels and the shared storage
are added; the keeper, with its variables, replaces each role's command. Unset fields are set where the default of Kubernetes or
FrameworkController does not suit a trial.
"""

from __future__ import annotations

import json

from nni_manager.config.model import MOUNT, VOLUME, KubernetesConfig, RoleConfig
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.render import (
    command_of,
    environment_of,
    grace_of,
    volume_of,
)
from trial_keeper.settings import PREFIX, KeeperSettings

# Exports the role's command, exactly as Kubernetes expands it, as a line of bash.
_EXPORTS_COMMAND = f"""export {PREFIX}COMMAND="$(printf '%q ' "$@")\""""


def template_of(config: KubernetesConfig) -> Document | None:
    """Returns the experiment's template; None if it has none."""
    found: Document | None = None if config.template_text is None else json.loads(config.template_text)
    return found


def pods_of(template: Document) -> list[Document]:
    """Returns the pod specs of the template's roles."""
    return [role["task"]["pod"]["spec"] for role in template["spec"]["taskRoles"]]


def with_labels(metadata: Document | None, labels: dict[str, str]) -> Document:
    """Returns the user's labels and annotations, merged with the job's labels."""
    given = metadata or {}
    notes = {"annotations": given["annotations"]} if given.get("annotations") else {}
    return {"labels": {**(given.get("labels") or {}), **labels}, **notes}


def with_keeper(
    pod: Document,
    config: KubernetesConfig,
    role: RoleConfig,
    name: str,
    settings: KeeperSettings,
    *,
    environ: dict[str, str],
    before: tuple[str, ...],
) -> Document:
    """Returns the user's pod, in which the keeper runs the command of its only container. See `render.pod_spec`."""
    (container,) = pod["containers"]
    own = [each for each in container.get("env") or () if isinstance(each, dict)]
    names = {each.get("name") for each in own} | {f"{PREFIX}COMMAND"}
    ours = environment_of(role, name, settings, environ)
    made = {
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **container,
        "command": [*command_of(settings, (_EXPORTS_COMMAND, *before)), "bash"],
        "args": [*container["command"], *(container.get("args") or ())],
        # The user's variables come first, because later ones may refer to them. They take precedence.
        "env": [*own, *(each for each in ours if each["name"] not in names)],
        "volumeMounts": [*(container.get("volumeMounts") or ()), {"name": VOLUME, "mountPath": MOUNT}],
    }
    account = {} if config.service_account is None else {"serviceAccountName": config.service_account}
    return {
        **account,
        "restartPolicy": "Never",
        **pod,
        "containers": [made],
        "terminationGracePeriodSeconds": max(
            pod.get("terminationGracePeriodSeconds") or 0, grace_of(settings)
        ),
        "volumes": [*(pod.get("volumes") or ()), {"name": VOLUME, **volume_of(config.storage, name)}],
    }
