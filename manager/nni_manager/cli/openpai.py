"""nnictl openpai: the OpenPAI of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli import output
from nni_manager.errors import UserMistake

if TYPE_CHECKING:
    from nni_manager.local_openpai.service import Service, StateFolder


@click.group()
def openpai() -> None:
    """Jobs on OpenPAI, and an OpenPAI on this machine.

    \b
    Example:
      nnictl openpai start
      nnictl openpai jobs
    """
    return


_state_dir = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the service keeps its jobs and accounts.  [default: ~/.local/state/trial-keeper/openpai]",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Storage(click.ParamType[Any]):
    """NAME=PATH of a folder that is there, or PATH alone."""

    name = "[NAME=]DIR"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Name and absolute path."""
        from nni_manager.local_openpai.service import DEFAULT_STORAGE

        name, equals, path = str(value).partition("=")
        if not equals:
            name, path = DEFAULT_STORAGE, str(value)
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise UserMistake(
                f"cannot use --storage {value}: there is no folder {folder}; make it, or name another"
            )
        return name, str(folder)


@openpai.command(
    epilog="\b\nExample:\n  nnictl openpai start\n  nnictl openpai start --port 9999 --storage /mnt/team --storage data=/srv/data"
)
@click.option(
    "--port", "-p", type=click.IntRange(1, 65535), metavar="N", help="Port of the API.  [default: 9186]"
)
@click.option(
    "--storage", "storages", type=_Storage(), multiple=True,
    help="A folder that jobs find as storage NAME (confignfs-data), below /mnt. Can be given several times.",
)  # fmt: skip
@click.option(
    "--sandbox", type=click.Choice(["process", "podman"]), help="What runs a task.  [default: process]"
)
@_state_dir
@_json
def start(
    port: int | None,
    storages: tuple[tuple[str, str], ...],
    sandbox: str | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Start it in the background, and print how to use it.

    What is not given is as it was the last time. If it runs already, that is printed.
    """
    from nni_manager.local_openpai import service

    state = _state(state_dir)
    found = service.running(state)
    if found is None:
        begun = service.start(state, port, dict(storages) or None, sandbox)
        _show(begun, as_json, "Started OpenPAI on this machine")
        return
    options = found.process.options
    asked = {"--port": (port, options.port), "--sandbox": (sandbox, options.sandbox)}
    other = [name for name, (wanted, actual) in asked.items() if wanted not in (None, actual)]
    if storages and dict(storages) != dict(options.storages):
        other.append("--storage")
    for name in other:
        output.warning(f"{name} has no effect: it runs already; `nnictl openpai stop-service` first")
    _show(found, as_json, "OpenPAI runs on this machine already")


@openpai.command("stop-service", epilog="\b\nExample:\n  nnictl openpai stop-service")
@_state_dir
def stop_service(state_dir: Path | None) -> None:
    """End it. Tasks that run go on, and the next start finds them."""
    from nni_manager.local_openpai import service

    state = _state(state_dir)
    ended = service.stop(state)
    if ended is None:
        output.info(f"OpenPAI does not run in {state.path}")
        return
    output.info(
        "Stopped OpenPAI on this machine; tasks that run go on, and `nnictl openpai start` finds them"
    )


@openpai.command(epilog="\b\nExample:\n  nnictl openpai status\n  nnictl openpai status --json")
@_state_dir
@_json
def status(state_dir: Path | None, as_json: bool) -> int:
    """Print how to use it, if it runs; the exit code is 1 if it does not."""
    from nni_manager.local_openpai import service

    state = _state(state_dir)
    found = service.running(state)
    if found is not None:
        _show(found, as_json, "OpenPAI runs on this machine")
        return 0
    if as_json:
        output.print_json({"isRunning": False, "stateDir": str(state.path)})
    else:
        output.info(f"OpenPAI does not run in {state.path}; `nnictl openpai start` starts it")
    return 1


def _state(state_dir: Path | None) -> StateFolder:
    from nni_manager.local_openpai.service import StateFolder

    return StateFolder.of_user() if state_dir is None else StateFolder(state_dir.expanduser().absolute())


def _show(service: Service, as_json: bool, headline: str) -> None:
    process, credentials = service.process, service.credentials
    storages = process.options.storages
    if as_json:
        output.print_json(
            {
                "isRunning": True,
                "host": process.address,
                "user": credentials.user,
                "token": credentials.token,
                "storages": dict(storages),
                "sandbox": process.options.sandbox,
                "stateDir": str(service.state.path),
                "pid": process.pid,
            }
        )
        return
    storage, path = next(iter(storages.items()))
    output.info(headline)
    output.plain(f"host   http://{process.address}")
    output.plain(f"user   {credentials.user}")
    output.plain(f"token  {credentials.token}")
    for name, folder in storages.items():
        output.plain(f"storage {name}: {folder}, for tasks at /mnt/{name}")
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
    output.plain(f"  token: {credentials.token}")
    output.plain(f"  host: http://{process.address}")
    output.plain(output.RULE)
