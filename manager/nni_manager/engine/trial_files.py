"""The workspace as the manager uses it: what it writes for a trial, and what it reads when no keeper can tell."""

import errno
import json
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import nni_sdk
from nni_manager.domain.trial import Trial
from nni_manager.store.folders import OPEN_TO_ALL
from nni_manager.training_services.base import Placement
from trial_keeper.wire.messages import AttemptKey, Offsets, StopTrial, Stream, TrialEnded
from trial_keeper.wire.own_files import NotOwnFile, open_inside
from trial_keeper.wire.workspace import (
    DocumentInvalid,
    ManagerDocument,
    TrialDocument,
    Workspace,
    exit_from_bytes,
    replace_file,
    stop_to_bytes,
)

_READ_BYTES = 256 * 1024
# A message of 4 KiB and a few numbers, with room.
_LONGEST_EXIT_BYTES = 64 * 1024
# Shared storage may show the last bytes late: twice the 3 s that NFS clients were seen to lag.
STORAGE_LAG_S = 6.0

Read = Callable[[Path, int, int], bytes]
"""What gives up to so many bytes of a file from an offset on; none when there is no such file, or none that can be shown now."""


def write_experiment(workspace: Workspace, document: ManagerDocument, run_script: str) -> None:
    """What every job needs. Trials of an earlier manager may be running, and reading it."""
    _write_sdk(workspace.sdk / "nni_sdk")
    replace_file(workspace.run_sh, run_script.encode())
    replace_file(workspace.manager_json, document.to_bytes())


def _write_sdk(folder: Path) -> None:
    """The nni_sdk of this manager, for trials whose Python has none. A file that is right already is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in Path(nni_sdk.__file__).parent.glob("*.py"):
        content, copy = source.read_bytes(), folder / source.name
        if not copy.is_file() or copy.read_bytes() != content:
            replace_file(copy, content)


def write_trial(
    workspace: Workspace, trial: Trial, command: str, placement: Placement, code_snapshot: str | None
) -> None:
    """What the job of one trial needs. Written again, it is the same. Source for parameter.cfg: NNI v3.0 SDK.

    Raises:
        OSError: the storage does not take it, or somebody else has made the trial's folder.
    """
    folder = workspace.trial(trial.trial_id)
    owners = {
        workspace.root.stat().st_uid,
        os.geteuid(),
    }  # the first is another where the storage's server says so
    _make_own(folder.path, owners)
    _make_own(folder.attempts, owners)
    if placement.code_dir is None:
        # The container's user is another one, and makes the attempts' folders.
        folder.attempts.chmod(OPEN_TO_ALL)
    parameters = {
        "parameter_id": trial.sequence_id,
        "parameter_source": "customized" if trial.is_customized else "algorithm",
        "parameters": trial.parameters,
        "parameter_index": 0,
    }
    replace_file(folder.parameter_cfg, json.dumps(parameters).encode())
    document = TrialDocument(
        trial.trial_id,
        trial.sequence_id,
        command,
        placement.code_dir or "",
        placement.gpu_indices,
        code_snapshot if placement.code_dir is None else None,
    )
    replace_file(folder.trial_json, document.to_bytes())


def _make_own(folder: Path, owners: Collection[int]) -> None:
    """Make a folder, unless it is there from an earlier try. In one of another user, that user says what jobs run."""
    try:
        folder.mkdir()
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise FileExistsError(
                errno.EEXIST, "another user made this, so nothing is written there; remove it", str(folder)
            ) from None


def write_stop(workspace: Workspace, stop: StopTrial) -> None:
    """Ask the keepers of a trial that no stream reaches to stop it. Its folder is there.

    Raises:
        OSError: the storage does not take it.
    """
    replace_file(workspace.trial(stop.trial_id).stop_json, stop_to_bytes(stop))


# ---- what keepers leave there. It may be a trial's own work: whatever lies there, looking at it neither waits nor leads outside.


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look showed of one attempt.

    `has_begun`: its command runs, or has ended. `pieces` are bytes from the offsets that were asked for on. `ended` is None as
    long as no whole exit.json is shown.
    """

    key: AttemptKey
    has_begun: bool
    pieces: tuple[tuple[Stream, int, bytes], ...]
    ended: TrialEnded | None


def newest_attempts(
    workspace: Workspace, trial_id: str, folders_in: Callable[[Path], list[str]] | None = None
) -> list[AttemptKey]:
    """The newest attempt of each task of a trial; empty when no keeper ever began one.

    Raises:
        OSError: the storage does not show them.
    """
    return list({key.task: key for key in workspace.attempts_of(trial_id, folders_in)}.values())


def see_attempt(
    workspace: Workspace,
    key: AttemptKey,
    offsets: Offsets,
    *,
    is_over: bool = False,
    read: Read | None = None,
) -> Seen:
    """Look at an attempt's files: what they hold from these offsets on, at most 256 KiB of each.

    Nothing beyond the sizes in exit.json counts. `is_over`: nobody writes there any more, so what is shown is all there is.
    `read`: how files are read that are not on this machine.

    Raises:
        OSError: the storage does not let this process read there, or fails.
    """
    # First: a file that is read after the end was told has all that the end promises, or shows it later.
    read = read or partial(_read, workspace)
    folder = workspace.attempt(key)
    ended = _exit_of(key, read(folder.exit_json, 0, _LONGEST_EXIT_BYTES))
    pieces = []
    for stream, offset in offsets.items():
        end = None if ended is None else ended.final_sizes.get(stream)
        longest = _READ_BYTES if end is None else min(_READ_BYTES, end - offset)
        data = read(folder.stream(stream), offset, longest) if longest > 0 else b""
        if ended is None and not is_over:
            # An NFS client sends what was written in any order; what is not there yet is read as zeros.
            data = data.partition(b"\0")[0]
        if data:
            pieces.append((stream, offset, data))
    # The first thing a keeper writes about an attempt whose command runs.
    has_begun = bool(ended or pieces or read(folder.stream(Stream.KEEPER), 0, 1))
    return Seen(key, has_begun, tuple(pieces), ended)


def _exit_of(key: AttemptKey, content: bytes) -> TrialEnded | None:
    try:
        ended = exit_from_bytes(content) if content else None
    except DocumentInvalid:
        return None
    # One that speaks of another attempt is none of this one's.
    return ended if ended is not None and ended.key == key else None


def _read(workspace: Workspace, path: Path, offset: int, longest: int) -> bytes:
    try:
        descriptor = open_inside(workspace.root, path)
        try:
            return os.pread(descriptor, longest, offset)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotOwnFile):
        return b""
    except OSError as error:
        if error.errno == errno.ESTALE:  # another file has taken its place
            return b""
        error.filename = str(path)  # not only the last part of it
        raise
