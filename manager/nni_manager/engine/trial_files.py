"""The workspace as the manager uses it: what it writes for a trial, and what it reads when no keeper can tell."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nni_sdk
from nni_manager.domain.trial import Trial
from nni_manager.store.folders import OPEN_TO_ALL
from nni_manager.training_services.base import Placement
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded
from trial_keeper.wire.own_files import NotOwnFile, open_inside
from trial_keeper.wire.workspace import (
    DocumentInvalid,
    ManagerDocument,
    TrialDocument,
    Workspace,
    exit_from_bytes,
    replace_file,
)

_READ_BYTES = 256 * 1024
# A message of 4 KiB and a few numbers, with room.
_LONGEST_EXIT_BYTES = 64 * 1024
# Shared storage may show the last bytes late: twice the 3 s that NFS clients were seen to lag.
STORAGE_LAG_S = 6.0


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
    """What the job of one trial needs. Source for parameter.cfg: NNI v3.0 SDK."""
    folder = workspace.trial(trial.trial_id)
    folder.attempts.mkdir(parents=True, exist_ok=True)
    if placement.code_dir is None:
        # The container's user is another one, and makes the attempts' folders.
        folder.attempts.chmod(OPEN_TO_ALL)
    parameters = {
        "parameter_id": trial.sequence_id,
        "parameter_source": "algorithm",
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


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a keeper left in the workspace for one attempt. `ended` is None when it died before it could tell."""

    key: AttemptKey
    ended: TrialEnded | None


def left_behind(workspace: Workspace, trial_id: str) -> list[LeftBehind]:
    """The newest attempt of each task of a trial; empty when no keeper ever began one."""
    newest = {key.task: key for key in workspace.attempts_of(trial_id)}
    return [_left_of(workspace, key) for key in newest.values()]


def _left_of(workspace: Workspace, key: AttemptKey) -> LeftBehind:
    try:
        with open(open_inside(workspace.root, workspace.attempt(key).exit_json), "rb") as file:
            ended = exit_from_bytes(file.read(_LONGEST_EXIT_BYTES))
    except (FileNotFoundError, NotOwnFile, DocumentInvalid):
        return LeftBehind(key, None)
    # One that speaks of another attempt is none of this one's.
    return LeftBehind(key, ended if ended.key == key else None)


def read_rest(
    workspace: Workspace, key: AttemptKey, stream: Stream, offset: int, size: int | None
) -> Iterator[tuple[int, bytes]]:
    """The bytes of a stream from `offset` on, up to `size` or to where the file ends; pairs of offset and bytes.

    When the storage does not show `size` bytes yet it is given some seconds.
    """
    gives_up_at_s = time.monotonic() + STORAGE_LAG_S
    try:
        descriptor = open_inside(workspace.root, workspace.attempt(key).stream(stream))
    except (FileNotFoundError, NotOwnFile):
        return  # the sizes that the keeper told, if it did, say that something is missing
    with open(descriptor, "rb") as file:
        file.seek(offset)
        while size is None or offset < size:
            data = file.read(_READ_BYTES if size is None else min(_READ_BYTES, size - offset))
            if data:
                yield offset, data
                offset += len(data)
            elif size is None or time.monotonic() > gives_up_at_s:
                return
            else:
                time.sleep(0.2)
