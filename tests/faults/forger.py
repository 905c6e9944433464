"""Forge attempts in every trial's folder of a workspace as another user, until this process is killed.

`python forger.py WORKSPACE` makes the folders of attempts world-writable, like the storage of a cluster, and prints the ids
of the trials with forged attempts. With `--uninvited` it leaves the modes of the workspace unchanged, and also prints the
first refusal.
"""

import argparse
import os
import time
from pathlib import Path

from fault_files import forge, forge_attempts
from strangers import NOBODY

from trial_keeper.wire.workspace import Workspace

# The forger must write before a starting keeper does, so its interval is shorter than the startup time of any keeper.
_POLL_INTERVAL_S = 0.005
_READY = "ready"


def main() -> None:
    """Forge attempts in each trial's folder as soon as the folder exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--uninvited", action="store_true")
    arguments = parser.parse_args()
    print(_READY, flush=True)
    if arguments.uninvited:
        _forge_uninvited(arguments.workspace)
    else:
        _forge_invited(Workspace(arguments.workspace))


def _forge_invited(workspace: Workspace) -> None:
    forged: set[str] = set()
    while True:
        for trial in workspace.trials.iterdir():
            if trial.name not in forged and (trial / "attempts").is_dir():
                refused = forge_attempts(workspace, trial.name)
                assert not refused, refused
                forged.add(trial.name)
                print(trial.name, flush=True)
        time.sleep(_POLL_INTERVAL_S)


def _forge_uninvited(workspace: Path) -> None:
    # The parent folders may be closed to other users. So this process opens them before it becomes the user NOBODY.
    above = os.open(workspace.parent, os.O_DIRECTORY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    done: set[str] = set()
    while True:
        try:
            trials = os.open(f"{workspace.name}/trials", os.O_DIRECTORY, dir_fd=above)
            for trial_id in set(os.listdir(trials)) - done:
                attempts = os.open(f"{trial_id}/attempts", os.O_DIRECTORY, dir_fd=trials)
                forge(attempts, workspace.name, trial_id)
                done.add(trial_id)
                print(trial_id, flush=True)
            os.close(trials)
        except FileNotFoundError:
            # The keeper or the manager has not made the folder yet.
            pass
        except PermissionError as error:
            if not done:
                print(error.strerror, flush=True)
                done.add("")
        time.sleep(_POLL_INTERVAL_S)


if __name__ == "__main__":
    main()
