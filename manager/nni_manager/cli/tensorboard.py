"""nnictl tensorboard: runs TensorBoard on the logs of trials."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import click

from nni_manager.cli.options import complete_trial, example, experiment_argument, group, port_option
from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment, resolve
from nni_manager.errors import RetryableError, UserError
from trial_keeper.processes import ProcessIdentity, terminate
from trial_keeper.wire.workspace import replace_file

_HOST = "127.0.0.1"
# TensorBoard imports many large packages, sometimes from a cold disk.
_READY_TIMEOUT_S = 60.0
_ENDED_TIMEOUT_S = 10.0
_POLL_S = 0.1


tensorboard = group(
    "tensorboard",
    "Show the TensorBoard logs of trials.\n\nA trial writes them to `$NNI_OUTPUT_DIR/tensorboard`.",
    "nnictl tensorboard start --trial-id aB3dE",
)


@tensorboard.command(
    epilog=example(
        "nnictl tensorboard start", "nnictl tensorboard start GvTf2bVe -T aB3dE -T xY9zW --port auto"
    )
)
@experiment_argument
@click.option("--trial-id", "-T", "trial_ids", metavar="TRIAL", multiple=True, shell_complete=complete_trial,
              help="Only this trial. Repeatable.  [default: all]")  # fmt: skip
@port_option("6006")
def start(experiment_id: str | None, trial_ids: tuple[str, ...], port: int | None) -> None:
    """Start TensorBoard on this machine in the background, and print its address.

    All users of this machine can open it.
    """
    from nni_manager.client import preflight

    known = resolve(experiment_id)
    if find_spec("tensorboard") is None:
        raise UserError(
            f"cannot start TensorBoard: it is not installed for {sys.executable}; run `{sys.executable} -m pip install "
            "tensorboard`"
        )
    where = _logs_of(known, trial_ids)
    port = next(iter(preflight.usable_ports(port, _HOST, 1)))
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
        identity = ProcessIdentity.of(child.pid)
        if identity is not None:  # it has not exited already
            record = json.dumps({"process": identity._asdict(), "port": port}).encode()
            replace_file(known.folder.path / f"tensorboard-{child.pid}.json", record, 0o600)
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
    known = resolve(experiment_id)
    count = 0
    for record in sorted(known.folder.path.glob("tensorboard-*.json")):
        process = _read_record(record)
        descriptor = None if process is None else process.open_pidfd()
        if process is not None and descriptor is not None:
            if not terminate(descriptor, _ENDED_TIMEOUT_S):
                raise RetryableError(
                    f"cannot end TensorBoard: process {process.pid} ignores SIGTERM; end it with `kill -9 {process.pid}`"
                )
            count += 1
        record.unlink(missing_ok=True)
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
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it wrote no error"
            raise RetryableError(
                f"cannot start TensorBoard: it ended with exit code {child.returncode}: {last}; see {log}"
            )
        with socket.socket() as probe:
            if probe.connect_ex((_HOST, port)) == 0:
                return
        time.sleep(_POLL_S)
    raise RetryableError(
        f"cannot start TensorBoard: it does not listen on port {port} after {_READY_TIMEOUT_S:.0f} s; see {log}"
    )


def _read_record(record: Path) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.from_json(json.loads(record.read_bytes())["process"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
