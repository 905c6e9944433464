"""Starts TensorBoard on the logs of an experiment's trials, and finds and stops what was started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from nni_manager.errors import RetryableError, UserError
from nni_manager.store.folders import ExperimentFolder
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.processes import ProcessIdentity, terminate
from trial_keeper.wire.small_files import replace_file

HOST = "127.0.0.1"
PORT = 6006
"""The first port that a new TensorBoard tries."""
_ENDED_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TensorBoard:
    """One TensorBoard. `trials` and `folders`: the trials that it shows, and their log folders; empty: all trials."""

    record: Path
    process: ProcessIdentity
    port: int
    trials: tuple[str, ...]
    folders: tuple[str, ...]

    def stop(self) -> bool:
        """End the process if it still runs, and forget it. True: it still ran.

        Raises:
            RetryableError: the process ignores SIGTERM.
        """
        descriptor = self.process.open_pidfd()
        if descriptor is not None and not terminate(descriptor, _ENDED_TIMEOUT_S):
            pid = self.process.pid
            raise RetryableError(
                f"cannot end TensorBoard: process {pid} ignores SIGTERM; end it with `kill -9 {pid}`"
            )
        self.record.unlink(missing_ok=True)
        return descriptor is not None


def log_of(folder: ExperimentFolder) -> Path:
    """The path of the output of the newest TensorBoard."""
    return folder.log / "tensorboard.log"


def log_folders(folder: ExperimentFolder, trial_ids: Sequence[str]) -> list[str]:
    """The log folders of these trials, which a TensorBoard can show.

    Raises:
        UserError: TensorBoard is not installed, or a trial has written no logs for it.
    """
    if find_spec("tensorboard") is None:
        raise UserError(
            f"cannot start TensorBoard: it is not installed for {sys.executable}; run `{sys.executable} -m pip install "
            "tensorboard`"
        )
    return [str(_logs_of(folder, trial_id)) for trial_id in trial_ids]


def start(
    folder: ExperimentFolder, trial_ids: Sequence[str], folders: Sequence[str], port: int
) -> tuple[subprocess.Popen[bytes], TensorBoard | None]:
    """Start TensorBoard on these folders of these trials, or on all trials if there are none. It is not ready yet.

    The result has None for a TensorBoard that has exited already.
    """
    if trial_ids:
        pairs = (f"{trial_id}:{path}" for trial_id, path in zip(trial_ids, folders, strict=True))
        where = ["--logdir_spec", ",".join(pairs)]
    else:
        where = ["--logdir", str(folder.workspace.trials)]
    with log_of(folder).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *where, "--host", HOST, "--port", str(port)],
            # Python imports modules from its working directory, so that must not be a folder which trials and archives write.
            cwd=sys.prefix,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    identity = ProcessIdentity.of(child.pid)
    if identity is None:
        return child, None
    fields = {
        "process": identity._asdict(),
        "port": port,
        "trials": list(trial_ids),
        "folders": list(folders),
    }
    record = folder.path / f"tensorboard-{child.pid}.json"
    replace_file(record, json.dumps(fields).encode(), 0o600)
    return child, TensorBoard(record, identity, port, tuple(trial_ids), tuple(folders))


def started(folder: ExperimentFolder) -> list[TensorBoard]:
    """What was started and not stopped. Its process may have ended by itself. An unreadable record is removed."""
    found = []
    for record in sorted(folder.path.glob("tensorboard-*.json")):
        try:
            fields = json.loads(record.read_bytes())
            process = ProcessIdentity.from_json(fields["process"])
            trials, folders = fields.get("trials", ()), fields.get("folders", ())
            found.append(TensorBoard(record, process, int(fields["port"]), tuple(trials), tuple(folders)))
        except (OSError, ValueError, TypeError, KeyError):
            record.unlink(missing_ok=True)
    return found


def _logs_of(folder: ExperimentFolder, trial_id: str) -> Path:
    workspace = folder.workspace
    folders = (
        workspace.attempt(key).output / "tensorboard" for key in reversed(workspace.attempts_of(trial_id))
    )
    found = next((each for each in folders if each.is_dir()), None)
    if found is None:
        raise UserError(
            f"cannot show trial {trial_id} in TensorBoard: it has written nothing to $NNI_OUTPUT_DIR/tensorboard; name that "
            "folder as the log folder in your training code"
        )
    return found
