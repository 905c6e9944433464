"""Real containers for tasks, by podman or docker: the commands with which a supervisor begins, uses and ends one. Pure but for
the look for the tool.

The container's first process only waits; each script is started in it by itself, so that what a script says stays apart and an
exit code is its own.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nni_manager.errors import UserMistake
from nni_manager.local_openpai.core.plan import RolePlan
from nni_manager.training_services.openpai.protocol import DEFAULT_SHM_MB

RUNTIME_IN_CONTAINER = "/usr/local/pai"
# Debian's bash reaps orphans when it is the first process, and minds no SIGTERM.
_WAITS = ["bash", "-c", "while :; do sleep 3600; done"]
# Job control puts the script into a process group, whose number is told to whoever wants to stop it.
_RUNS = f'set -m; PAI_WORK_DIR=$PWD bash "$0" & echo $! > {RUNTIME_IN_CONTAINER}/group; wait $!'
_STOPS = f"kill -TERM -- -$(< {RUNTIME_IN_CONTAINER}/group)"
_DEFAULT_REGISTRY = "https://index.docker.io/v1/"


class SandboxMissing(UserMistake):
    """cannot run tasks in containers: there is neither podman nor docker here; install one, or run tasks as processes"""


@dataclass(frozen=True, slots=True)
class SandboxCommands:
    """Commands around one container. `run` is followed by the script, as the container sees it."""

    begin: list[str]
    run: list[str]
    stop: list[str]
    end: list[str]

    def to_spec(self) -> dict[str, Any]:
        """For the supervisor."""
        return asdict(self)


CLUSTER_LABEL = "trial-keeper.cluster"
"""The label of each container: where the cluster that made it keeps its containers' folders."""


def container_tool() -> str:
    """podman, or else docker.

    Raises:
        SandboxMissing: there is neither.
    """
    for tool in ("podman", "docker"):
        if shutil.which(tool) is not None:
            return tool
    raise SandboxMissing


def end_command(tool: str, container_id: str) -> list[str]:
    """Removes a container, whatever runs in it."""
    return [tool, "rm", "--force", _name(container_id)]


def sandbox_commands(
    tool: str,
    container_id: str,
    role: RolePlan,
    folder: Path,
    mounts: Iterable[Mapping[str, Any]],
    gpus: tuple[int, ...],
) -> SandboxCommands:
    """The commands for a container whose scripts are in `folder`/runtime, and its variables in `folder`/environ."""
    volumes = [f"{folder / 'runtime'}:{RUNTIME_IN_CONTAINER}"]
    volumes += [
        f"{mount['path']}:{mount['mount_path']}{':ro' if mount['is_read_only'] else ''}" for mount in mounts
    ]
    begin = [tool]
    if role.image_auth is not None:
        begin += ["--config", str(folder)] if tool == "docker" else []
    # As in OpenPAI, the image's own entry point does not run.
    begin += ["run", "--detach", "--name", _name(container_id), "--network", "host", "--entrypoint", ""]
    begin += ["--label", f"{CLUSTER_LABEL}={folder.parent}"]
    begin += ["--stop-timeout", "0"]  # its first process heeds no signal; scripts had their grace
    begin += (
        ["--authfile", str(folder / "config.json")]
        if role.image_auth is not None and tool == "podman"
        else []
    )
    begin += ["--env-file", str(folder / "environ"), "--shm-size", f"{role.shm_mb or DEFAULT_SHM_MB}m"]
    begin += [argument for volume in volumes for argument in ("--volume", volume)]
    begin += [argument for gpu in gpus for argument in ("--device", f"nvidia.com/gpu={gpu}")]
    inside = [tool, "exec", _name(container_id), "bash", "-c"]
    return SandboxCommands(
        begin=[*begin, role.image, *_WAITS],
        run=[*inside, _RUNS],
        stop=[*inside, _STOPS],
        end=end_command(tool, container_id),
    )


def registry_logins(auth: Mapping[str, str]) -> str:
    """What podman and docker read a login from."""
    login = base64.b64encode(f"{auth.get('username', '')}:{auth.get('password', '')}".encode()).decode()
    return json.dumps({"auths": {auth.get("registryuri") or _DEFAULT_REGISTRY: {"auth": login}}})


def _name(container_id: str) -> str:
    return f"openpai-{container_id}"
