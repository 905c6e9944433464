"""nnictl openpai: the OpenPAI of this machine."""

from __future__ import annotations

import dataclasses
import http
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.options import FILE, example, group, json_option
from nni_manager.client import output
from nni_manager.errors import UserError

if TYPE_CHECKING:
    from nni_manager.local_openpai.daemon import Service, StateFolder


openpai = group(
    "openpai",
    "Run OpenPAI on this machine, and manage jobs on any OpenPAI cluster.",
    "nnictl openpai start",
    "nnictl openpai jobs",
)


_REVOKED = "somebody has revoked it, or logged out with it; `nnictl openpai start` makes a new one"
_state_dir = click.option(
    "--state-dir",
    type=FILE,
    metavar="DIR",
    help="Folder of the service's jobs and accounts.  [default: ~/.local/state/trial-keeper/openpai]",
)


@openpai.command(
    epilog=example(
        "nnictl openpai start",
        "nnictl openpai start --port 9999 --storage /mnt/team --storage data=/srv/data",
    )
)
@click.option(
    "--port", "-p", type=click.IntRange(1, 65535), metavar="N", help="Port of the API.  [default: 9186]"
)
@click.option(
    "--storage", "storages", metavar="[NAME=]DIR", multiple=True,
    help="A folder that jobs find as storage NAME (confignfs-data), below /mnt. Repeatable.",
)  # fmt: skip
@click.option(
    "--virtual-cluster", "virtual_clusters", metavar="NAME=CPUS,MB,GPUS", multiple=True,
    help="Resources that its jobs share. Repeatable.  [default: default, with all of this machine]",
)  # fmt: skip
@click.option(
    "--sandbox", type=click.Choice(["process", "podman"]), help="How tasks run.  [default: process]"
)
@click.option("--notification-url", metavar="URL", help="URL that receives changes of jobs.")
@click.option("--notification-file", metavar="FILE", help="File to which changes of jobs are appended.")
@click.option(
    "--allow-origin", "allowed_origins", metavar="URL", multiple=True,
    help="Origin whose pages may use the API from a browser. Repeatable.",
)  # fmt: skip
@_state_dir
@json_option
def start(
    port: int | None,
    storages: tuple[str, ...],
    virtual_clusters: tuple[str, ...],
    sandbox: str | None,
    notification_url: str | None,
    notification_file: str | None,
    allowed_origins: tuple[str, ...],
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Start OpenPAI on this machine in the background, and print how to use it.

    Options that are not given keep their values of the last start. If it runs already, print how to use it.
    """
    from nni_manager.local_openpai import daemon
    from nni_manager.local_openpai.settings import absolute, new_storage_of, origin_of, virtual_cluster_of

    changes: dict[str, Any] = {
        "port": port,
        "storages": dict(map(new_storage_of, storages)),
        "virtual_clusters": dict(map(virtual_cluster_of, virtual_clusters)),
        "sandbox": sandbox,
        "notification_url": notification_url,
        "notification_file": notification_file and absolute(notification_file),
        "allowed_origins": list(map(origin_of, allowed_origins)),
    }
    state = _state(state_dir)
    found = daemon.running(state)
    options = found.process.options if found else daemon.last_options(state)
    wanted = dataclasses.replace(options, **{name: value for name, value in changes.items() if value})
    if found is None:
        _show(daemon.start(state, wanted), as_json, "Started OpenPAI on this machine")
        return
    if not found.token_is_valid:
        made = "Made a new token for OpenPAI on this machine, because the last one was revoked"
        _show(daemon.with_valid_token(found, wanted), as_json, made)
        return
    if wanted != options:
        output.warning(
            "options have no effect: OpenPAI runs already; run `nnictl openpai stop-service` first"
        )
    _show(found, as_json, "OpenPAI runs on this machine already")


@openpai.command("stop-service", epilog=example("nnictl openpai stop-service"))
@_state_dir
def stop_service(state_dir: Path | None) -> None:
    """Stop OpenPAI on this machine. Running tasks continue, and the next start finds them."""
    from nni_manager.local_openpai import daemon

    state = _state(state_dir)
    ended = daemon.stop(state)
    if ended is None:
        output.info(f"OpenPAI does not run in {state.path}")
        return
    output.info(
        "Stopped OpenPAI on this machine; running tasks continue, and `nnictl openpai start` finds them"
    )


@openpai.command(epilog=example("nnictl openpai status", "nnictl openpai status --json"))
@_state_dir
@json_option
def status(state_dir: Path | None, as_json: bool) -> int:
    """Print how to use OpenPAI on this machine, if it runs. The exit code is 1 if it does not run."""
    from nni_manager.local_openpai import daemon

    state = _state(state_dir)
    found = daemon.running(state)
    if found is not None:
        _show(found, as_json, "OpenPAI runs on this machine")
        return 0
    if as_json:
        output.print_json({"isRunning": False, "stateDir": str(state.path)})
    else:
        output.info(f"OpenPAI does not run in {state.path}; `nnictl openpai start` starts it")
    return 1


@openpai.command(epilog=example("nnictl openpai user", "nnictl openpai user --set-password"))
@click.option(
    "--set-password", is_flag=True, help="Ask for a password, or read it from stdin, and store its hash."
)
@_state_dir
@json_option
def user(set_password: bool, state_dir: Path | None, as_json: bool) -> None:
    """Print your account on OpenPAI on this machine, or set its password.

    A token is enough for nnictl. Clients that log in by name and password need a password.
    """
    from nni_manager.local_openpai import daemon

    state = _state(state_dir)
    found = daemon.running(state)
    if found is None:
        raise UserError(f"cannot find OpenPAI in {state.path}; start it with `nnictl openpai start`")
    if not found.token_is_valid:
        raise UserError(f"cannot use the token of {found.credentials.user}: {_REVOKED}")
    name = found.credentials.user
    if set_password:
        if sys.stdin.isatty():
            password = click.prompt(
                f"New password of {name}", hide_input=True, confirmation_prompt=True, err=True
            )
        else:
            password = sys.stdin.readline().rstrip("\n")
        status, answer = daemon.ask(found, "PUT", f"/users/{name}/password", {"newPassword": password})
        if status != http.HTTPStatus.OK:
            raise UserError(f"cannot set the password of {name}: {answer.get('message', f'status {status}')}")
    if as_json:
        output.print_json({"user": name, "host": found.process.address, "passwordWasSet": set_password})
    elif set_password:
        output.info(f"Set the password of {name}; clients log in at http://{found.process.address}")
    else:
        output.plain(f"user      {name}")
        output.plain(
            "password  `nnictl openpai user --set-password` sets one, for clients that log in by password"
        )


def _state(state_dir: Path | None) -> StateFolder:
    from nni_manager.local_openpai.daemon import StateFolder

    return (
        StateFolder.of_user()
        if state_dir is None
        else StateFolder(Path(os.path.expanduser(state_dir)).absolute())
    )


def _show(service: Service, as_json: bool, headline: str) -> None:
    process, credentials = service.process, service.credentials
    if not service.token_is_valid:
        output.warning(f"the token of {credentials.user} is not valid: {_REVOKED}")
    storages = process.options.storages
    if as_json:
        output.print_json(
            {
                "isRunning": True,
                "host": process.address,
                "user": credentials.user,
                "token": credentials.token,
                "tokenIsValid": service.token_is_valid,
                "storages": dict(storages),
                "sandbox": process.options.sandbox,
                "stateDir": str(service.state.path),
                "pid": process.pid,
                "version": process.version,
            }
        )
        return
    storage, path = next(iter(storages.items()))
    output.info(headline)
    output.plain(f"host   http://{process.address}")
    output.plain(f"user   {credentials.user}")
    output.plain(f"token  {credentials.token}")
    output.plain("       for clients that log in by password: `nnictl openpai user --set-password`")
    for name, folder in storages.items():
        output.plain(f"storage {name}: {folder}, for tasks at /mnt/{name}")
    if process.options.sandbox == "process" and shutil.which("podman"):
        output.plain(
            "tasks  are processes, whatever their image; podman is installed: restart with --sandbox podman to run their images"
        )
    output.plain()
    output.plain("For an experiment file:")
    output.plain(output.RULE)
    output.plain("trainingServicePlatform: pai")
    output.plain("trial:")
    output.plain(f"  nniManagerNFSMountPath: {path}")
    output.plain(f"  containerNFSMountPath: /mnt/{storage}")
    output.plain(f"  paiStorageConfigName: {storage}")
    output.plain("paiConfig:")
    output.plain(f"  userName: {credentials.user}")
    if service.state.path == _state(None).path:
        # `local` finds the service. Tasks also get this environment's Python, and storages if the kernel cannot mount them.
        output.plain("  host: local")
    else:
        output.plain(f"  token: {credentials.token}")
        output.plain(f"  host: http://{process.address}")
    output.plain(output.RULE)
