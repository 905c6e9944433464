"""nnictl log: what managers and trials wrote."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nni_manager.cli import output
from nni_manager.cli.experiments import KnownExperiment, resolve
from nni_manager.cli.options import Command, example, experiment_argument
from nni_manager.errors import UserMistake
from trial_keeper.wire.own_files import NotOwnFile, open_inside

if TYPE_CHECKING:
    from trial_keeper.wire.messages import AttemptKey


@click.group()
def log() -> None:
    """Look at logs.

    \b
    Example:
      nnictl log stderr
      nnictl log trial --trial-id aB3dE
    """
    return


def _log_options(command: Command) -> Command:
    for option in (
        click.option("--path", "-p", "path_only", is_flag=True, help="Print where the file is, not what is in it."),
        click.option("--tail", "-T", type=click.IntRange(1), metavar="N", help="Only the last N lines."),
        click.option("--head", "-H", type=click.IntRange(1), metavar="N", help="Only the first N lines."),
        experiment_argument,
    ):  # fmt: skip
        command = option(command)
    return command


@log.command("stdout", epilog=example("nnictl log stdout", "nnictl log stdout GvTf2bVe --tail 20"))
@_log_options
def log_stdout(experiment_id: str | None, head: int | None, tail: int | None, path_only: bool) -> None:
    """Print what the manager wrote to its stdout."""
    folder = resolve(experiment_id).folder
    _print_log(folder.manager_stdout, folder.manager_log, head, tail, path_only)


@log.command("stderr", epilog=example("nnictl log stderr", "nnictl log stderr GvTf2bVe --path"))
@_log_options
def log_stderr(experiment_id: str | None, head: int | None, tail: int | None, path_only: bool) -> None:
    """Print what the manager wrote to its stderr."""
    folder = resolve(experiment_id).folder
    _print_log(folder.manager_stderr, folder.manager_log, head, tail, path_only)


def _print_log(path: Path, manager_log: Path, head: int | None, tail: int | None, path_only: bool) -> None:
    if head is not None and tail is not None:
        raise UserMistake("cannot use --head and --tail together; leave one out")
    if path_only:
        output.plain(str(path))
        return
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if not lines:
        output.warning(f"{path} is empty; what the manager decided is in {manager_log}")
    shown = lines[:head] if head is not None else lines[-tail:] if tail is not None else lines
    sys.stdout.buffer.writelines(shown)


@log.command(
    "trial",
    epilog=example("nnictl log trial --trial-id aB3dE", "nnictl log trial GvTf2bVe -T aB3dE --stream stderr"),
)
@experiment_argument
@click.option(
    "--trial-id", "-T", metavar="TRIAL", help="Which trial; without it, where each trial's files are."
)
@click.option("--stream", type=click.Choice(["stdout", "stderr", "trial.log"]), default="stdout",
              show_default=True, help="trial.log is what the trial's keeper did.")  # fmt: skip
@click.option("--path", "-p", "path_only", is_flag=True, help="Print where the file is, not what is in it.")
def log_trial(experiment_id: str | None, trial_id: str | None, stream: str, path_only: bool) -> None:
    """Print what a trial wrote, in its newest attempt."""
    from nni_manager.cli import watch

    known = resolve(experiment_id)
    if trial_id is None:
        for each in known.trials():
            output.plain(f"trial {each['id']}: {each['logPath']}")
        return
    asked = known.trial(trial_id)
    path = _trial_log(known, trial_id, stream)
    if path is None:
        why = f" ({watch.why(asked)})" if asked["message"].strip() else ""
        raise UserMistake(
            f"cannot show {stream} of trial {trial_id}: it is {asked['state']} and has written nothing{why}; "
            f"see what the manager did in {known.folder.manager_log}"
        )
    if path_only:
        output.plain(str(path))
        return
    roots = (known.folder.collected_logs, known.folder.workspace.root)
    root = next(root for root in roots if path.is_relative_to(root))
    try:
        with open(open_inside(root, path), "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    except NotOwnFile as error:
        raise UserMistake(
            f"cannot show {path}: the trial has put something else in its place ({error.strerror}); look at it with care"
        ) from error
    sys.stdout.flush()
    output.trial_warning(asked)


def _trial_log(known: KnownExperiment, trial_id: str, word: str) -> Path | None:
    """The fuller one of what was collected and what lies in the workspace, of the newest attempt that left either."""
    from nni_manager.store.store import log_path
    from trial_keeper.wire.messages import AttemptKey, Stream

    stream = {"stdout": Stream.STDOUT, "stderr": Stream.STDERR, "trial.log": Stream.KEEPER}[word]
    workspace, collected = known.folder.workspace, known.folder.collected_logs
    keys: list[AttemptKey] = workspace.attempts_of(trial_id)
    for attempt in (collected / trial_id).glob("[0-9]*"):
        keys += [AttemptKey(trial_id, int(attempt.name), task.name) for task in attempt.iterdir()]
    for key in sorted(set(keys), key=lambda key: (-key.attempt, key.task)):
        there = [log_path(collected, key, stream), workspace.attempt(key).stream(stream)]
        files = [path for path in there if path.is_file() or path.is_symlink()]
        if files:
            return max(files, key=lambda path: path.lstat().st_size)
    return None
