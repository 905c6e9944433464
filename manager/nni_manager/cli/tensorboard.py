"""nnictl tensorboard: runs TensorBoard on the logs of trials."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nni_manager.cli.options import Port, complete_trial, example, experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment, resolve
from nni_manager.errors import RetryableError, UserError

if TYPE_CHECKING:
    from trial_keeper.processes import ProcessIdentity

_HOST = "127.0.0.1"
# TensorBoard imports many large packages, sometimes from a cold disk.
_READY_TIMEOUT_S = 60.0
_ENDED_TIMEOUT_S = 10.0
_POLL_S = 0.1


class TensorBoardMissing(UserError):
    """cannot start TensorBoard: it is not installed; `pip install tensorboard`"""


class TensorBoardFailed(RetryableError):
    """cannot start TensorBoard; the last line of its output names the cause"""


@click.group()
def tensorboard() -> None:
    """Show the TensorBoard logs of trials.

    A trial writes them to `$NNI_OUTPUT_DIR/tensorboard`.

    \b
    Example:
      nnictl tensorboard start --trial-id aB3dE
    """
    return


@tensorboard.command(
    epilog=example(
        "nnictl tensorboard start", "nnictl tensorboard start GvTf2bVe -T aB3dE -T xY9zW --port auto"
    )
)
@experiment_argument
@click.option("--trial-id", "-T", "trial_ids", metavar="TRIAL", multiple=True, shell_complete=complete_trial,
              help="Only this trial; several are possible.  [default: all]")  # fmt: skip
@click.option("--port", "-p", type=Port(), default="6006", show_default=True, metavar="N|auto")
def start(experiment_id: str | None, trial_ids: tuple[str, ...], port: int | None) -> None:
    """Start TensorBoard on this machine in the background, and print its address.

    All users of this machine can open it.
    """
    from nni_manager.client import preflight

    known = resolve(experiment_id)
    if find_spec("tensorboard") is None:
        raise TensorBoardMissing(
            f"cannot start TensorBoard: it is not installed for {sys.executable}; run `{sys.executable} -m pip install "
            "tensorboard`"
        )
    where = _logs_of(known, trial_ids)
    if port is None:
        port = next(iter(preflight.free_ports(_HOST)))
    else:
        preflight.check_ports(port, _HOST, 1)
    log_path = known.folder.log / "tensorboard.log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *where, "--host", _HOST, "--port", str(port)],
            # Python imports modules from its working directory, so that must not be a folder which trials and archives write.
            cwd=sys.prefix,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _note(known, child.pid, port)
        _wait_until_ready(child, port, log_path)
    except BaseException:
        child.kill()
        child.wait()
        raise
    output.info(f"TensorBoard of experiment {known.experiment_id}: http://{_HOST}:{port}")
    output.info(f"`nnictl tensorboard stop {known.experiment_id}` ends it")


@tensorboard.command(epilog=example("nnictl tensorboard stop", "nnictl tensorboard stop GvTf2bVe"))
@experiment_argument
def stop(experiment_id: str | None) -> None:
    """Stop every TensorBoard of an experiment."""
    from trial_keeper.processes import terminate

    known = resolve(experiment_id)
    count = 0
    for note in _notes(known):
        process, _ = _noted(note)
        with contextlib.suppress(ProcessLookupError):
            if process is not None:
                # The pid may have been reused: check it again once the pidfd pins the process.
                descriptor = os.pidfd_open(process.pid)
                if not process.is_alive:
                    os.close(descriptor)
                elif terminate(descriptor, _ENDED_TIMEOUT_S):
                    count += 1
                else:
                    raise RetryableError(
                        f"cannot end TensorBoard: process {process.pid} ignores SIGTERM; end it with `kill -9 {process.pid}`"
                    )
        note.unlink(missing_ok=True)
    output.info(
        f"Ended {count} TensorBoard{'' if count == 1 else 's'} of experiment {known.experiment_id}"
        if count
        else f"There is no TensorBoard of experiment {known.experiment_id}"
    )


def _logs_of(known: KnownExperiment, trial_ids: tuple[str, ...]) -> list[str]:
    workspace = known.folder.workspace
    if not trial_ids:
        return ["--logdir", str(workspace.trials)]
    pairs = []
    for trial_id in map(known.trial_id, trial_ids):
        attempts = workspace.attempts_of(trial_id)
        folders = [workspace.attempt(key).output / "tensorboard" for key in reversed(attempts)]
        found = next((folder for folder in folders if folder.is_dir()), None)
        if found is None:
            raise UserError(
                f"cannot show trial {trial_id} in TensorBoard: it has written nothing to $NNI_OUTPUT_DIR/tensorboard; name that "
                "folder as the log folder in your training code"
            )
        pairs.append(f"{trial_id}:{found}")
    return ["--logdir_spec", ",".join(pairs)]


def _wait_until_ready(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import socket

    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            words = log.read_text(errors="replace").strip().splitlines()
            last = words[-1] if words else "it said nothing"
            raise TensorBoardFailed(
                f"cannot start TensorBoard: it ended with exit code {child.returncode}: {last}; see {log}"
            )
        with socket.socket() as probe:
            if probe.connect_ex((_HOST, port)) == 0:
                return
        time.sleep(_POLL_S)
    raise TensorBoardFailed(
        f"cannot start TensorBoard: nobody listens on port {port} after {_READY_TIMEOUT_S:.0f} s; see {log}"
    )


def _notes(known: KnownExperiment) -> list[Path]:
    return sorted(known.folder.path.glob("tensorboard-*.json"))


def _note(known: KnownExperiment, pid: int, port: int) -> None:
    from trial_keeper.processes import ProcessIdentity
    from trial_keeper.wire.workspace import replace_file

    process = ProcessIdentity.of(pid)
    if process is not None:  # it has not exited already
        content = json.dumps({"process": process._asdict(), "port": port}).encode()
        replace_file(known.folder.path / f"tensorboard-{pid}.json", content, 0o600)


def _noted(note: Path) -> tuple[ProcessIdentity | None, int]:
    from trial_keeper.processes import ProcessIdentity

    try:
        document = json.loads(note.read_bytes())
        return ProcessIdentity.from_json(document["process"]), int(document["port"])
    except (OSError, ValueError, TypeError, KeyError):
        return None, 0
