"""nnictl tensorboard: runs TensorBoard on the logs of trials."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import click

from nni_manager.cli import options
from nni_manager.cli.options import complete_trial, example, experiment_argument, group, port_option
from nni_manager.client import output, tensorboards
from nni_manager.errors import RetryableError

# TensorBoard imports many large packages, sometimes from a cold disk.
_READY_TIMEOUT_S = 60.0
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
@port_option(str(tensorboards.PORT))
def start(experiment_id: str | None, trial_ids: tuple[str, ...], port: int | None) -> None:
    """Start TensorBoard on this machine in the background, and print its address.

    All users of this machine can open it.
    """
    from nni_manager.client import preflight

    known = options.experiment(experiment_id)
    trials = [known.trial_id(each) for each in trial_ids]
    folders = tensorboards.log_folders(known.folder, trials)
    port = next(iter(preflight.usable_ports(port, tensorboards.HOST, 1)))
    child, _ = tensorboards.start(known.folder, trials, folders, port)
    try:
        _wait_until_ready(child, port, tensorboards.log_of(known.folder))
    except BaseException:
        child.kill()
        child.wait()
        raise
    output.info(f"TensorBoard of experiment {known.experiment_id}: http://{tensorboards.HOST}:{port}")
    output.info(f"`nnictl tensorboard stop {known.experiment_id}` ends it")


@tensorboard.command(epilog=example("nnictl tensorboard stop", "nnictl tensorboard stop GvTf2bVe"))
@experiment_argument
def stop(experiment_id: str | None) -> None:
    """Stop every TensorBoard of an experiment."""
    known = options.experiment(experiment_id)
    count = sum(each.stop() for each in tensorboards.started(known.folder))
    output.info(
        f"Ended {count} TensorBoard{'' if count == 1 else 's'} of experiment {known.experiment_id}"
        if count
        else f"There is no TensorBoard of experiment {known.experiment_id}"
    )


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
            if probe.connect_ex((tensorboards.HOST, port)) == 0:
                return
        time.sleep(_POLL_S)
    raise RetryableError(
        f"cannot start TensorBoard: it does not listen on port {port} after {_READY_TIMEOUT_S:.0f} s; see {log}"
    )
