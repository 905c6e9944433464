"""nnictl log: the output of managers and trials."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from nni_manager.cli.options import Command, example, experiment_argument, trial_option
from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment, resolve
from nni_manager.errors import NniManagerError, RetryableError, UserError

if TYPE_CHECKING:
    from nni_manager.engine.shared_files import SharedFiles
    from nni_manager.engine.trial_logs import LogLocation

# Too short to notice, and a poll costs only a few system calls.
_FOLLOW_INTERVAL_S = 0.2
_BLOCK_BYTES = 1 << 16


@click.group()
def log() -> None:
    """Show logs.

    \b
    Example:
      nnictl log stderr
      nnictl log trial --trial-id aB3dE
    """
    return


def _log_options(command: Command) -> Command:
    for option in (
        click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C."),
        click.option("--path", "-p", "path_only", is_flag=True, help="Print where the file is, not what is in it."),
        click.option("--tail", "-T", type=click.IntRange(1), metavar="N", help="Only the last N lines."),
        click.option("--head", "-H", type=click.IntRange(1), metavar="N", help="Only the first N lines."),
        experiment_argument,
    ):  # fmt: skip
        command = option(command)
    return command


@log.command(
    "stdout",
    epilog=example("nnictl log stdout", "nnictl log stdout GvTf2bVe --tail 20", "nnictl log stdout --follow"),
)
@_log_options
def log_stdout(
    experiment_id: str | None, head: int | None, tail: int | None, path_only: bool, follow: bool
) -> None:
    """Print the manager's stdout."""
    folder = resolve(experiment_id).folder
    _print_log(folder.manager_stdout, folder.manager_log, _Part(head, tail, follow), path_only)


@log.command("stderr", epilog=example("nnictl log stderr", "nnictl log stderr GvTf2bVe --path"))
@_log_options
def log_stderr(
    experiment_id: str | None, head: int | None, tail: int | None, path_only: bool, follow: bool
) -> None:
    """Print the manager's stderr."""
    folder = resolve(experiment_id).folder
    _print_log(folder.manager_stderr, folder.manager_log, _Part(head, tail, follow), path_only)


@dataclass(frozen=True, slots=True)
class _Part:
    """The selected lines of a log. None: no limit at that end."""

    head: int | None
    tail: int | None
    follows: bool

    def __post_init__(self) -> None:
        if self.head is not None and (self.tail is not None or self.follows):
            other = "--follow" if self.tail is None else "--tail"
            raise UserError(f"cannot use --head and {other} together; leave one out")

    def print_from(self, file: BinaryIO) -> None:
        """Print the lines, and leave the file position at their end."""
        out = sys.stdout.buffer
        if self.head is not None:
            out.writelines(itertools.islice(file, self.head))
        else:
            if self.tail is not None:
                _seek_last_lines(file, self.tail)
            shutil.copyfileobj(file, out)
        sys.stdout.flush()


def _seek_last_lines(file: BinaryIO, count: int) -> None:
    """Seek to the start of the last `count` lines. Reads backwards, because logs may have gigabytes."""
    at, missing = file.seek(0, os.SEEK_END), count
    is_end = True
    while at > 0:
        begin = max(0, at - _BLOCK_BYTES)
        file.seek(begin)
        block = file.read(at - begin)
        # The newline at the end of the file starts no further line.
        end = len(block) - 1 if is_end and block.endswith(b"\n") else len(block)
        is_end = False
        while missing and (end := block.rfind(b"\n", 0, end)) >= 0:
            missing -= 1
        if not missing:
            file.seek(begin + end + 1)
            return
        at = begin
    file.seek(0)


def _print_log(path: Path, manager_log: Path, part: _Part, path_only: bool) -> None:
    if path_only:
        output.plain(str(path))
        return
    if not path.exists() or path.stat().st_size == 0:
        output.warning(f"{path} is empty; what the manager decided is in {manager_log}")
    if not path.exists():
        return
    with path.open("rb") as file:
        part.print_from(file)
        while part.follows:
            time.sleep(_FOLLOW_INTERVAL_S)
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()


@log.command(
    "trial",
    epilog=example(
        "nnictl log trial --trial-id aB3dE",
        "nnictl log trial GvTf2bVe -T aB3dE --stream stderr --tail 20",
        "nnictl log trial -T aB3dE --follow",
    ),
)
@experiment_argument
@trial_option("Which trial; without it, where each trial's files are.", required=False)
@click.option("--stream", type=click.Choice(["stdout", "stderr", "trial.log"]), default="stdout",
              show_default=True, help="trial.log is what the trial's keeper did.")  # fmt: skip
@click.option("--head", "-H", type=click.IntRange(1), metavar="N", help="Only the first N lines.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Only the last N lines.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until the trial is over.")
@click.option("--path", "-p", "path_only", is_flag=True, help="Print where the file is, not what is in it.")
def log_trial(
    experiment_id: str | None,
    trial_id: str | None,
    stream: str,
    head: int | None,
    tail: int | None,
    follow: bool,
    path_only: bool,
) -> None:
    """Print the output of a trial's newest attempt."""
    known = resolve(experiment_id)
    if trial_id is None:
        for each in known.trials():
            output.plain(f"trial {each['id']}: {each['logPath']}")
        return
    part = _Part(head, tail, follow)
    asked = known.trial(known.trial_id(trial_id))
    with _shared_files(known) as shared:
        look = partial(_log_of, known, shared, asked["id"], stream)
        place = _wait_for_log(known, asked["id"], look) if follow else look()
        _print_trial(known, asked, stream, place, part, look, path_only=path_only)


def _print_trial(
    known: KnownExperiment,
    asked: dict[str, Any],
    stream: str,
    place: LogLocation | None,
    part: _Part,
    look: Callable[[], LogLocation | None],
    *,
    path_only: bool,
) -> None:
    from nni_manager.client import watch

    if place is None:
        why = f" ({watch.why(asked)})" if asked["message"].strip() else ""
        raise UserError(
            f"cannot show {stream} of trial {asked['id']}: it is {asked['state']} and has written nothing{why}; "
            f"see what the manager did in {known.folder.manager_log}"
        )
    if path_only:
        output.plain(str(place.path))
        return
    with _opened(place) as file:
        part.print_from(file)
        read_bytes = file.tell()
    if part.follows:
        _follow(known, asked["id"], look, place, read_bytes)
    output.trial_warning(known.trial(asked["id"]) if part.follows else asked)


@contextlib.contextmanager
def _shared_files(known: KnownExperiment) -> Iterator[SharedFiles]:
    """The experiment's files, including those on a share. If the share is unavailable, warn and use collected files only."""
    from nni_manager import training_service_factory
    from nni_manager.config.model import ExperimentSpec
    from nni_manager.engine.shared_files import SharedFiles
    from nni_manager.store.reader import StoreReader
    from nni_manager.training_services.retry_policy import ClientRetryPolicy

    with StoreReader(known.folder.database) as reader:
        config = ExperimentSpec.from_json(reader.experiment().config)
    share = None
    try:
        share = training_service_factory.share_of(config, known.folder.workspace, ClientRetryPolicy(tries=2))
    except NniManagerError as error:
        output.warning(f"only what was collected is shown: {error}")
    with contextlib.closing(share) if share is not None else contextlib.nullcontext():
        yield SharedFiles(known.folder.workspace, share)


def _follow(
    known: KnownExperiment,
    trial_id: str,
    look: Callable[[], LogLocation | None],
    place: LogLocation,
    read_bytes: int,
) -> None:
    """Print new output until the trial is terminal. A new attempt is printed from the start of its log."""
    is_over = False
    while not is_over:
        time.sleep(_FOLLOW_INTERVAL_S)
        # Check before reading the log: a terminal trial's output is complete.
        is_over = known.trial_is_over(trial_id)
        now = look() or place
        if now.attempt.key != place.attempt.key:
            output.warning(f"trial {trial_id}: attempt {now.attempt.number} ({now.attempt.key.task}) goes on")
            read_bytes = 0
        place = now
        # The collected log and the log in the workspace have the same bytes at the same offsets.
        with _opened(place) as file:
            file.seek(read_bytes)
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()
            read_bytes = file.tell()


def _wait_for_log(
    known: KnownExperiment, trial_id: str, look: Callable[[], LogLocation | None]
) -> LogLocation | None:
    while (place := look()) is None and not known.trial_is_over(trial_id):
        time.sleep(_FOLLOW_INTERVAL_S)
    return place or look()


@contextlib.contextmanager
def _opened(place: LogLocation) -> Iterator[BinaryIO]:
    with open(place.open(), "rb") as file:
        yield file


def _log_of(known: KnownExperiment, shared: SharedFiles, trial_id: str, word: str) -> LogLocation | None:
    """The location of this log in the newest attempt that has it; None: no attempt has it."""
    from nni_manager.engine.trial_logs import log_location
    from trial_keeper.wire.messages import Stream

    stream = {"stdout": Stream.STDOUT, "stderr": Stream.STDERR, "trial.log": Stream.KEEPER}[word]
    try:
        shared.fetch(trial_id, stream)
    except RetryableError as error:
        output.warning(str(error))
    return log_location(known.folder, trial_id, stream)
