"""Exports the runs of an experiment to a tracker, with progress."""

from __future__ import annotations

import sys

import click

from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment
from nni_manager.errors import UserError
from nni_manager.trackers import TRACKERS, exporter, without_logins

_NEXT = {
    "mlflow": "",
    "tensorboard": "; `tensorboard --logdir {target}` shows them",
    "wandb": "; `wandb sync {target}/wandb/offline-run-*` uploads them",
}


def write_runs(known: KnownExperiment, kind: str, target: str) -> None:
    """Write a run for each started trial to the folder or URI `target`.

    Raises:
        UserError: the tracker's library is missing, or the target cannot be used.
        RetryableError: the tracker's server cannot be reached.
    """
    from nni_manager.trackers import source  # most commands do not need SQLite

    export, shown = exporter(kind), without_logins(target)
    with source.opened(known) as experiment:
        label = f"Exporting {known.experiment_id} to {TRACKERS[kind]}"
        try:
            with click.progressbar(experiment.runs, label=label, file=sys.stderr) as runs:
                export(experiment, runs, target)
        except OSError as error:
            raise UserError(
                f"cannot export to {shown}: {error}; choose another folder with --filename"
            ) from error
    if experiment.waiting:
        output.note(f"{experiment.waiting} trials have not started; repeat the command to add them")
    output.info(f"Wrote {len(experiment.runs)} runs to {shown}{_NEXT[kind].format(target=shown)}")
