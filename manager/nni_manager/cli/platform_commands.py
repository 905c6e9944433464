"""nnictl platform and trainingservice: leftovers on a cluster's shared storage, and the list of platforms."""

from __future__ import annotations

import shutil
from pathlib import Path

from nni_manager.cli.options import config_option, confirm, example, group, json_option, yes_option
from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment, known_experiments
from nni_manager.errors import NniManagerError, UserError
from trial_keeper.wire.safe_open import is_safe_name
from trial_keeper.wire.workspace import Workspace

platform = group(
    "platform",
    "Clean up leftovers of experiments on a cluster.",
    "nnictl platform clean --config config.yml",
)

trainingservice = group(
    "trainingservice", "List the platforms on which experiments can run.", "nnictl trainingservice list"
)


@trainingservice.command(
    "list", epilog=example("nnictl trainingservice list", "nnictl trainingservice list --json")
)
@json_option
def list_platforms(as_json: bool) -> None:
    """List the platforms: the built-in ones, and those of installed packages.

    An experiment file names one in trainingService.platform. The code of an installed package is not loaded before.
    """
    from nni_manager.config.platforms import PLATFORMS, installed_platforms

    rows = [{"name": row.name, "title": row.title, "origin": "built in"} for row in PLATFORMS.values()]
    for row in installed_platforms():
        hidden = " (not used: a built-in platform has this name)" if row.name in dict.keys(PLATFORMS) else ""
        rows.append(
            {
                "name": row.name,
                "title": row.title,
                "origin": row.distribution + hidden,
                "package": row.package,
            }
        )
    if as_json:
        output.print_json(rows)
        return
    output.print_table(
        ["name", "title", "origin"], [[row["name"], row["title"], row["origin"]] for row in rows]
    )


@platform.command(
    epilog=example("nnictl platform clean --config config.yml", "nnictl platform clean -c config.yml --yes")
)
@config_option("An experiment file that names the cluster; `clean FILE` is the same.")
@yes_option
def clean(config_path: Path, is_agreed: bool) -> int:
    """Remove leftovers of ended experiments from the shared storage.

    These are code, output and logs of the trials of your ended experiments.

    Results and collected logs stay in the experiments' own folders, so the experiments can still be viewed and resumed. Files
    of running experiments, and of experiments unknown to this user, are kept.
    """
    from nni_manager.config.reader import read_experiment_file
    from nni_manager.training_services.platform import platform_of

    config = read_experiment_file(config_path, reads_code=False)
    storage = platform_of(config).storage_here()
    if storage is None and not config.cluster.is_this_machine:
        raise UserError(
            f"cannot clean up for {config_path.name}: the share of its experiments is not mounted on this machine; "
            "`nnictl experiment delete ID` removes the files of one experiment"
        )
    if storage is None:
        output.info(
            "Local experiments keep all files in their own folders; `nnictl experiment delete ID` removes one"
        )
        return 0
    known = {each.experiment_id: each for each in known_experiments()}
    cleanable = []
    for workspace in _workspaces_in(storage):
        reason = _reason_to_keep(known.get(workspace.root.name), workspace)
        if reason is None:
            cleanable.append(workspace)
        elif reason:
            output.warning(f"{workspace.root} is kept: {reason}")
    if not cleanable:
        output.info(f"There is nothing to clean in {storage}")
        return 0
    names = ", ".join(workspace.root.name for workspace in cleanable)
    if not is_agreed and not confirm(f"Remove the files that trials of {names} left in {storage}?"):
        output.info("Nothing was removed")
        return 1
    return max(map(_clean, cleanable))


def _workspaces_in(storage: Path) -> list[Workspace]:
    return [
        Workspace(folder)
        for folder in sorted(storage.iterdir())
        if is_safe_name(folder.name) and not folder.is_symlink() and Workspace(folder).manager_json.is_file()
    ]


def _reason_to_keep(known: KnownExperiment | None, workspace: Workspace) -> str | None:
    """The reason why the workspace cannot be cleaned; None if it can be cleaned; empty if it is clean already."""
    if not _left_in(workspace):
        return ""
    if known is None or known.folder.workspace.root.resolve() != workspace.root.resolve():
        return "no experiment of this user on this machine owns it, but another user or machine may; if not, remove the folder"
    name = known.experiment_id
    if known.manager is not None:
        return f"experiment {name} is running; run `nnictl stop {name}` first"
    try:
        is_terminal = known.stored.status()["isTerminal"]
    except NniManagerError as error:
        return str(error)
    return (
        None
        if is_terminal
        else f"trials of experiment {name} may still run; run `nnictl resume {name}` and `nnictl stop {name}` first"
    )


def _left_in(workspace: Workspace) -> list[Path]:
    trials = sorted(workspace.trials.iterdir()) if workspace.trials.is_dir() else []
    return [*trials, *workspace.code_snapshots()]


def _clean(workspace: Workspace) -> int:
    left = _left_in(workspace)
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    stuck = [path for path in left if path.exists()]
    if stuck:
        output.error(
            f"cannot remove all of {workspace.root}: {len(stuck)} of {len(left)} entries remain, such as {stuck[0]}; "
            "remove them as the user that containers run as"
        )
        return 1
    output.info(f"Removed {len(left)} folders and files from {workspace.root}")
    return 0
