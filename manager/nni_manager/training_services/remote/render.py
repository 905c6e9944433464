"""The commands that run on a machine, and the names of things there. Pure functions."""

from __future__ import annotations

import hashlib
import shlex

from nni_manager.training_services.remote.section import DEFAULT_PORT, RemoteMachine
from nni_manager.training_services.run_script import keeper_lookup_snippet

NO_KEEPER = 127
"""The exit code of `server_command` if the machine has no trial-keeper. Source: bash(1), command not found."""


def key_of(machine: RemoteMachine) -> str:
    """The name of a machine's folder in its home, which several machines may share."""
    return hashlib.sha256(machine.address.encode()).hexdigest()[:8]


def path_prefix(machine: RemoteMachine) -> str:
    """The start of a shell command that puts the folder `pythonPath` first on PATH."""
    return "" if machine.python_path is None else f'export PATH={_expanded(machine.python_path)}:"$PATH"; '


def server_command(machine: RemoteMachine) -> str:
    """The command that serves the manager on the machine. Any login shell can run it."""
    return _in_bash(
        f"{path_prefix(machine)}command -v trial-keeper > /dev/null || exit {NO_KEEPER}; exec trial-keeper serve-machine"
    )


def ssh_command(machine: RemoteMachine, command: str) -> str:
    """The call of ssh with which a person runs a command on the machine."""
    port = "" if machine.port == DEFAULT_PORT else f"-p {machine.port} "
    user = "" if machine.user is None else f"{machine.user}@"
    return f"ssh {port}{user}{machine.host} {command}"


def folder_of(machine: RemoteMachine, experiment_id: str) -> str:
    """The experiment's folder on the machine, for people."""
    return f"~/.cache/trial-keeper/{key_of(machine)}/{experiment_id}"


def run_script() -> str:
    """The content of run.sh: the keeper on PATH, where the machine's own server was found."""
    return f"""\
#!/bin/bash
# Started once per job; the TRIAL_KEEPER_* variables are the keeper's settings.
{keeper_lookup_snippet()}
exec "${{keeper[@]}}"
"""


def _in_bash(command: str) -> str:
    return f"exec bash -c {shlex.quote(command)}"


def _expanded(path: str) -> str:
    """The quoted path, with the home in place of a leading ~."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
