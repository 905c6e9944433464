"""Attack the trials of a workspace on shared storage, as a user who shares only the group of the keepers' files.

`python storage_attacker.py WORKSPACE GATES` puts special files beside the attempts of each trial and makes GATES/TRIAL.start.
When the trial has made GATES/TRIAL.started, the attacker tries to change the files of the trial's attempt, prints the
successful changes, and makes GATES/TRIAL.go.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fault_files import FORGED_VALUE, SPECIAL, TASK, special_files
from strangers import NOBODY

from nni_sdk.records import encode
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.workspace import AttemptFolder, Workspace

# The attacker must act while a keeper starts, so the interval is short.
_POLL_INTERVAL_S = 0.005
_GROUP = 0


def main() -> None:
    """Attack each trial once. The process runs until it is killed."""
    workspace, gates = Workspace(Path(sys.argv[1])), Path(sys.argv[2])
    os.setgroups([])
    os.setresgid(_GROUP, _GROUP, _GROUP)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    print("ready", flush=True)
    while True:
        for trial_id in _listed(workspace.trials):
            start, go = gates / f"{trial_id}.start", gates / f"{trial_id}.go"
            if not start.exists():
                # The keeper may not have made the folder yet, or the file system may refuse the files.
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    attempts = os.open(workspace.trial(trial_id).attempts, os.O_DIRECTORY)
                    try:
                        special_files(attempts, (*SPECIAL, "lease"))
                    finally:
                        os.close(attempts)
                    start.touch()
            elif not go.exists() and (gates / f"{trial_id}.started").exists():
                for changed in _changes(workspace, trial_id):
                    print(f"changed {changed}", flush=True)
                print(f"attacked {trial_id}", flush=True)
                go.touch()
        time.sleep(_POLL_INTERVAL_S)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, PermissionError):
        return []


def _changes(workspace: Workspace, trial_id: str) -> list[str]:
    """Try each change on the attempts that a keeper has made; return the changes that succeeded."""
    changed = []
    for attempt in workspace.trial(trial_id).attempts.iterdir():
        if attempt.stat().st_uid == NOBODY:
            continue
        folder = AttemptFolder(attempt / TASK)
        for change in _CHANGES:
            try:
                change(folder, encode(0, trial_id, "FINAL", 0, FORGED_VALUE))
            except (PermissionError, FileNotFoundError):
                # Either the file system refuses the change, or the keeper has not made the folder yet.
                pass
            else:
                changed.append(f"{change.__name__} {trial_id}")
    return changed


def _replace(path: Path, content: bytes) -> None:
    mine = path.with_name("mine")
    mine.write_bytes(content)
    mine.rename(path)


def append_to_metrics(folder: AttemptFolder, forged: bytes) -> None:
    with folder.stream(Stream.METRICS).open("ab") as metrics:
        metrics.write(forged)


def replace_metrics(folder: AttemptFolder, forged: bytes) -> None:
    _replace(folder.stream(Stream.METRICS), forged)


def replace_attempt(folder: AttemptFolder, forged: bytes) -> None:
    folder.path.rename(folder.path.with_name("was"))


def put_a_file_for_a_rename(folder: AttemptFolder, forged: bytes) -> None:
    (folder.path / ".exit.json.new").write_bytes(b"{}")


def append_to_stdout(folder: AttemptFolder, forged: bytes) -> None:
    with folder.stream(Stream.STDOUT).open("ab") as stdout:
        stdout.write(b"forged\n")


def replace_log(folder: AttemptFolder, forged: bytes) -> None:
    _replace(folder.stream(Stream.KEEPER), b"forged\n")


def append_to_parameters(folder: AttemptFolder, forged: bytes) -> None:
    with folder.parameter_cfg.open("ab") as parameters:
        parameters.write(b" ")


def append_to_code(folder: AttemptFolder, forged: bytes) -> None:
    with (folder.code / "train.py").open("ab") as code:
        code.write(b"\n")


def put_a_module_beside_code(folder: AttemptFolder, forged: bytes) -> None:
    (folder.code / "json.py").write_bytes(b"")


def put_a_module_into_a_package(folder: AttemptFolder, forged: bytes) -> None:
    (folder.code / "package" / "json.py").write_bytes(b"")


_CHANGES: tuple[Callable[[AttemptFolder, bytes], None], ...] = (
    append_to_metrics,
    replace_metrics,
    put_a_file_for_a_rename,
    append_to_stdout,
    replace_log,
    append_to_parameters,
    append_to_code,
    put_a_module_beside_code,
    put_a_module_into_a_package,
    # This change is the last, because it renames the folder that the other changes use.
    replace_attempt,
)


if __name__ == "__main__":
    main()
