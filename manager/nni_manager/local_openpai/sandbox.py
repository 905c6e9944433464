"""Real containers for tasks with podman or docker: the commands that create, use and remove one. Pure except for
`container_tool`, which searches for the tool.

The container's first process is idle. Each script is started separately, so that it has its own output and exit code.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nni_manager.errors import UserError
from nni_manager.local_openpai.core.plan import RolePlan
from nni_manager.training_services.openpai.protocol import DEFAULT_SHM_MB

RUNTIME_IN_CONTAINER = "/usr/local/pai"
# As PID 1, Debian's bash reaps orphans and ignores SIGTERM.
_IDLE = ["bash", "-c", "while :; do sleep 3600; done"]
# `set -m` starts the script in a process group of its own; `_STOP` reads the id of the group from the file.
_RUN = f'set -m; PAI_WORK_DIR=$PWD bash "$0" & echo $! > {RUNTIME_IN_CONTAINER}/group; wait $!'
_STOP = f"kill -TERM -- -$(< {RUNTIME_IN_CONTAINER}/group)"
_DEFAULT_REGISTRY = "https://index.docker.io/v1/"


class SandboxMissing(UserError):
    """cannot run tasks in containers: neither podman nor docker is installed; install one, or run tasks as processes"""


CLUSTER_LABEL = "trial-keeper.cluster"
"""The label of each container. Its value is the folder of containers of the cluster that created it."""


def container_tool() -> str:
    """The container tool: podman, else docker.

    Raises:
        SandboxMissing: neither is installed.
    """
    for tool in ("podman", "docker"):
        if shutil.which(tool) is not None:
            return tool
    raise SandboxMissing


def end_command(tool: str, container_id: str) -> list[str]:
    """The command that removes a container, running or not."""
    return [tool, "rm", "--force", _name(container_id)]


def sandbox_commands(
    tool: str,
    container_id: str,
    role: RolePlan,
    folder: Path,
    mounts: Iterable[Mapping[str, Any]],
    gpus: tuple[int, ...],
) -> dict[str, list[str]]:
    """The commands for a container, by name. Its scripts are in `folder`/runtime, its variables in `folder`/environ.

    `begin` creates the container, and `end` removes the container. `run` runs the script whose path inside the container is
    appended, and `stop` stops that script.
    """
    volumes = [f"{folder / 'runtime'}:{RUNTIME_IN_CONTAINER}"]
    volumes += [
        f"{mount['path']}:{mount['mount_path']}{':ro' if mount['is_read_only'] else ''}" for mount in mounts
    ]
    has_login = role.image_auth is not None
    begin = [tool, *(["--config", str(folder)] if has_login and tool == "docker" else [])]
    # As in OpenPAI, the image's entry point does not run.
    begin += ["run", "--detach", "--name", _name(container_id), "--network", "host", "--entrypoint", ""]
    begin += ["--label", f"{CLUSTER_LABEL}={folder.parent}"]
    # The first process ignores SIGTERM, and the scripts' grace period is over.
    begin += ["--stop-timeout", "0"]
    begin += ["--authfile", str(folder / "config.json")] if has_login and tool == "podman" else []
    begin += ["--env-file", str(folder / "environ"), "--shm-size", f"{role.shm_mb or DEFAULT_SHM_MB}m"]
    begin += [argument for volume in volumes for argument in ("--volume", volume)]
    begin += [argument for gpu in gpus for argument in ("--device", f"nvidia.com/gpu={gpu}")]
    inside = [tool, "exec", _name(container_id), "bash", "-c"]
    return {
        "begin": [*begin, role.image, *_IDLE],
        "run": [*inside, _RUN],
        "stop": [*inside, _STOP],
        "end": end_command(tool, container_id),
    }


def registry_logins(auth: Mapping[str, str]) -> str:
    """The registry credentials in the format of podman and docker."""
    login = base64.b64encode(f"{auth.get('username', '')}:{auth.get('password', '')}".encode()).decode()
    return json.dumps({"auths": {auth.get("registryuri") or _DEFAULT_REGISTRY: {"auth": login}}})


def _name(container_id: str) -> str:
    return f"openpai-{container_id}"
