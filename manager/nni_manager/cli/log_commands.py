"""nnictl log: the output of managers and trials."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from nni_manager.cli import options
from nni_manager.cli.options import COUNT, example, experiment_argument, group, trial_option
from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment
from nni_manager.errors import NniManagerError, RetryableError, UserError
from trial_keeper.frozen_dataclass import dataclass

if TYPE_CHECKING:
    from nni_manager.engine.shared_files import SharedFiles
    from nni_manager.engine.trial_logs import LogLocation

# Users do not notice this delay, and a poll needs only a few system calls.
_FOLLOW_INTERVAL_S = 0.2
_BLOCK_BYTES = 1 << 16
PRINTED_BY_NNI = re.compile(rb"^\[[^\]\n]+\] PRINT ", re.MULTILINE)
"""A line that a trial has printed, as NNI's own package writes it to trial.log. Source: NNI v3.0, nni/runtime/log.py."""
_SEARCHED_BYTES = 1 << 20


log = group("log", "Show logs.", "nnictl log stderr", "nnictl log trial --trial-id aB3dE")


_head = click.option("--head", "-H", type=COUNT, metavar="N", help="Only the first N lines.")
_path = click.option(
    "--path", "-p", "path_only", is_flag=True, help="Print the path of the file instead of its content."
)


def _add_manager_log(stream: str, *examples: str) -> None:
    what = "decisions" if stream == "manager" else stream

    @log.command(stream, help=f"Print the manager's {what}.", epilog=example(*examples))
    @experiment_argument
    @_head
    @click.option("--tail", "-T", type=COUNT, metavar="N", help="Only the last N lines.")
    @_path
    @click.option("--follow", "-f", is_flag=True, help="Also print new output, until Ctrl-C.")
    def command(
        experiment_id: str | None, head: int | None, tail: int | None, path_only: bool, follow: bool
    ) -> None:
        folder, selection = options.experiment(experiment_id).folder, _Selection(head, tail, follow)
        path = {
            "manager": folder.manager_log,
            "stdout": folder.manager_stdout,
            "stderr": folder.manager_stderr,
        }[stream]
        if path_only:
            output.plain(str(path))
            return
        if not path.exists() or path.stat().st_size == 0:
            state = "is empty" if path.exists() else "does not exist"
            other = "stderr" if stream == "manager" else "manager"
            why = "why a manager crashed" if stream == "manager" else "the manager's decisions"
            output.warning(f"{path} {state}; `nnictl log {other} {folder.experiment_id}` prints {why}")
        if not path.exists():
            return
        with path.open("rb") as file:
            selection.print_from(file)
            while selection.follows:
                time.sleep(_FOLLOW_INTERVAL_S)
                shutil.copyfileobj(file, sys.stdout.buffer)
                sys.stdout.flush()


_add_manager_log(
    "manager", "nnictl log manager", "nnictl log manager GvTf2bVe --tail 20", "nnictl log manager --follow"
)
_add_manager_log(
    "stdout", "nnictl log stdout", "nnictl log stdout GvTf2bVe --tail 20", "nnictl log stdout --follow"
)
_add_manager_log("stderr", "nnictl log stderr", "nnictl log stderr GvTf2bVe --path")


@dataclass(frozen=True, slots=True)
class _Selection:
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


@log.command(
    "trial",
    epilog=example(
        "nnictl log trial --trial-id aB3dE",
        "nnictl log trial GvTf2bVe -T aB3dE --stream stderr --tail 20",
        "nnictl log trial -T aB3dE --follow",
    ),
)
@experiment_argument
@trial_option("The trial. Without it, print the path of each trial's files.", required=False)
@click.option("--stream", type=click.Choice(["stdout", "stderr", "trial.log"]),
              help="Only this one; trial.log is the log of the trial's keeper.  [default: stdout, then stderr]")  # fmt: skip
@_head
@click.option("--tail", type=COUNT, metavar="N", help="Only the last N lines.")
@click.option("--follow", "-f", is_flag=True, help="Also print new output, until the trial has ended.")
@_path
def log_trial(
    experiment_id: str | None,
    trial_id: str | None,
    stream: str | None,
    head: int | None,
    tail: int | None,
    follow: bool,
    path_only: bool,
) -> None:
    """Print the output of a trial's newest attempt."""
    from nni_manager.client import watch

    known = options.experiment(experiment_id)
    if trial_id is None:
        for each in known.get("/trials"):
            output.plain(f"trial {each['id']}: {each['logPath']}")
        return
    selection = _Selection(head, tail, follow)
    trial = known.trial(known.trial_id(trial_id))
    # A path is for another program, which reads one file.
    streams = (stream,) if stream is not None else ("stdout",) if path_only else ("stdout", "stderr")
    with _shared_files(known) as shared:
        logs = [_TrialLog(known, shared, trial["id"], each) for each in streams]
        locations = _wait_for_locations(logs) if follow else [each.location() for each in logs]
        if not any(locations) and _files_are_gone(known, trial):
            folder = known.folder
            raise UserError(
                f"cannot show {' and '.join(streams)} of trial {trial['id']}: its files are gone, neither "
                f"{folder.workspace.trial(trial['id']).path} nor {folder.collected_logs / trial['id']} has them; "
                f"restore them from a copy, or see the manager's log: {folder.manager_log}"
            )
        if not any(locations):
            why = f" ({watch.why(trial)})" if trial["message"].strip() else ""
            raise UserError(
                f"cannot show {' and '.join(streams)} of trial {trial['id']}: it is {trial['state']} and has written nothing"
                f"{why}; see the manager's log: {known.folder.manager_log}"
            )
        if path_only:
            output.plain(str(next(filter(None, locations)).path))
            return
        positions = _print_all(logs, locations, selection)
        if follow:
            _follow(logs, locations, positions)
        may_be_redirected = logs[0].stream == "stdout" and not positions[0]
        if not (may_be_redirected and logs[0].print_redirected(selection)) and not any(positions):
            output.warning(
                f"trial {trial['id']} has written nothing to {' and '.join(streams)}; `--stream trial.log` shows its keeper's log"
            )
    output.trial_warning(known.trial(trial["id"]) if follow else trial)


def _files_are_gone(known: KnownExperiment, trial: Mapping[str, Any]) -> bool:
    """True if a trial has run and ended, and no file of an attempt is left."""
    from nni_manager.engine.trial_logs import attempts_of

    trial_id = trial["id"]
    if trial.get("startTime") is None or not known.stored.trial_is_terminal(trial_id):
        return False
    # A keeper that has registered an attempt has created its files.
    has_run = known.stored.read(lambda reader: bool(reader.attempts(trial_id)))
    return has_run and not attempts_of(known.folder, trial_id)


@contextlib.contextmanager
def _shared_files(known: KnownExperiment) -> Iterator[SharedFiles]:
    """The experiment's files, including those on a share. If the share is unavailable, warn and use collected files only."""
    from nni_manager.engine.shared_files import SharedFiles
    from nni_manager.training_services.platform import platform_of
    from nni_manager.training_services.retry_policy import ClientRetryPolicy

    config, share = known.stored.config(), None
    try:
        share = platform_of(config).share(known.folder.workspace, ClientRetryPolicy(tries=2))
    except NniManagerError as error:
        output.warning(f"only collected logs are shown: {error}")
    with contextlib.closing(share) if share is not None else contextlib.nullcontext():
        yield SharedFiles(known.folder.workspace, share)


@dataclass(frozen=True, slots=True)
class _TrialLog:
    """One log stream of the newest attempt that has this stream."""

    known: KnownExperiment
    shared: SharedFiles
    trial_id: str
    stream: str

    def location(self) -> LogLocation | None:
        """The location of the log; None: no attempt has this log."""
        from nni_manager.engine.trial_logs import log_location
        from trial_keeper.wire.messages import Stream

        stream = {"stdout": Stream.STDOUT, "stderr": Stream.STDERR, "trial.log": Stream.KEEPER}[self.stream]
        try:
            self.shared.fetch(self.trial_id, stream)
        except RetryableError as error:
            output.warning(str(error))
        return log_location(self.known.folder, self.trial_id, stream)

    def print_redirected(self, selection: _Selection) -> bool:
        """If stdout is empty because NNI's package has redirected it to trial.log, print that; True if it did."""
        other = dataclasses.replace(self, stream="trial.log").location()
        if other is None:
            return False
        with open(other.open(), "rb") as file:
            if not PRINTED_BY_NNI.search(file.read(_SEARCHED_BYTES)):
                return False
            output.warning(
                f"stdout of trial {self.trial_id} is empty: NNI's package has redirected it to {other.path}, which follows"
            )
            file.seek(0)
            selection.print_from(file)
        return True


def _wait_for_locations(logs: list[_TrialLog]) -> list[LogLocation | None]:
    """The locations once an attempt has one of the logs, or the trial is terminal."""
    while True:
        is_terminal = logs[0].known.stored.trial_is_terminal(logs[0].trial_id)
        locations = [each.location() for each in logs]
        if is_terminal or any(locations):
            return locations
        time.sleep(_FOLLOW_INTERVAL_S)


def _print_all(
    logs: list[_TrialLog], locations: list[LogLocation | None], selection: _Selection
) -> list[int]:
    """Print the logs one after the other, with headings if several have content; return the number of bytes read of each.

    A traceback is in stderr, which comes last.
    """
    has_several = (
        sum(location is not None and location.path.lstat().st_size > 0 for location in locations) > 1
    )
    positions = []
    for each, location in zip(logs, locations, strict=True):
        if location is None:
            positions.append(0)
            continue
        if has_several:
            output.plain(f"==> {each.stream} <==")
        with open(location.open(), "rb") as file:
            selection.print_from(file)
            positions.append(file.tell())
    return positions


def _follow(logs: list[_TrialLog], locations: list[LogLocation | None], positions: list[int]) -> None:
    """Print new output until the trial is terminal. A new attempt is printed from the start of its log."""
    is_terminal = False
    while not is_terminal:
        time.sleep(_FOLLOW_INTERVAL_S)
        # Check before reading the logs: a terminal trial's output is complete.
        is_terminal = logs[0].known.stored.trial_is_terminal(logs[0].trial_id)
        for number, each in enumerate(logs):
            before = locations[number]
            now = locations[number] = each.location() or before
            if now is None:
                continue
            if before is not None and now.attempt.key != before.attempt.key:
                attempt = f"attempt {now.attempt.number} ({now.attempt.key.task})"
                output.warning(f"trial {each.trial_id}: {each.stream} continues with {attempt}")
                positions[number] = 0
            # The collected log and the log in the workspace have the same bytes at the same offsets.
            with open(now.open(), "rb") as file:
                file.seek(positions[number])
                shutil.copyfileobj(file, sys.stdout.buffer)
                sys.stdout.flush()
                positions[number] = file.tell()
