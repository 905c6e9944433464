"""nnictl trial: shows and stops trials."""

from __future__ import annotations

import os
import sys

import click

from nni_manager.cli import nni_output, options
from nni_manager.client import output
from nni_manager.client.experiments import resolve
from nni_manager.errors import UserError

trial = options.group("trial", "Show and stop trials.", "nnictl trial ls")


@trial.command(
    "ls",
    epilog=options.example("nnictl trial ls", "nnictl trial ls GvTf2bVe --tail 5", "nnictl trial ls --json"),
)
@options.experiment_argument
@click.option("--head", type=click.IntRange(1), metavar="N", help="Only the first N trials.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Only the last N trials.")
@options.json_option
@click.option("--nni-json", is_flag=True, help="Print the JSON of NNI's own nnictl; --head and --tail are then "
              "the N largest and smallest results.")  # fmt: skip
def list_trials(
    experiment_id: str | None, head: int | None, tail: int | None, as_json: bool, nni_json: bool
) -> None:
    """List the trials of an experiment, in the order of their creation.

    With NNICTL_COMPAT=1 in the environment, the output is that of --nni-json unless it goes to a terminal.
    """
    from nni_manager.client import watch

    if head is not None and tail is not None:
        raise UserError("cannot use --head and --tail together; leave one out")
    if as_json and nni_json:
        raise UserError("cannot use --json and --nni-json together; leave one out")
    known = resolve(experiment_id)
    options.warn_of_dead_manager(known)
    if nni_json or (not as_json and options.prefers_nni_output() and not sys.stdout.isatty()):
        nni_output.print_trials(known.get("/trial-jobs"), head, tail)
        return
    trials = known.get("/trials") if as_json else known.trial_list()
    shown = trials[:head] if head is not None else trials[-tail:] if tail is not None else trials
    if as_json:
        output.print_json_lines(shown)
        return
    if not shown:
        output.info(f"Experiment {known.experiment_id} has no trials yet")
        return
    rows = [[str(each["sequenceId"]), each["id"], each["state"], *watch.trial_cells(each)] for each in shown]
    headings = ["no.", "trial", "state", "value", "time", "parameters"]
    output.print_table(headings, rows, right=("no.", "value", "time"))
    garbage = {} if known.problem else known.stored.read(lambda reader: reader.corrupt_bytes())
    for each in shown:
        if each["id"] in garbage:
            output.warning(
                f"trial {each['id']}: {garbage[each['id']]} bytes of its metrics are not valid records and are ignored; "
                "check what else writes to $NNI_SYS_DIR/.nni/metrics, or was killed during a report"
            )
        output.trial_warning(each)


@trial.command(
    epilog=options.example("nnictl trial show --trial-id aB3dE", "nnictl trial show GvTf2bVe -T aB3")
)
@options.experiment_argument
@options.trial_option("The trial to show.")
@options.json_anyway
def show(experiment_id: str | None, trial_id: str) -> None:
    """Print one trial as JSON: parameters, result, how it ended, and the resources it used."""
    known = resolve(experiment_id)
    output.print_json(known.trial(known.trial_id(trial_id)))


@trial.command(
    epilog=options.example("nnictl trial kill --trial-id aB3dE", "nnictl trial kill GvTf2bVe -T aB3dE")
)
@options.experiment_argument
@options.trial_option("The trial to stop.")
def kill(experiment_id: str | None, trial_id: str) -> None:
    """Stop one trial; the experiment continues."""
    known = resolve(experiment_id)
    trial_id = known.trial_id(trial_id)
    client = known.client()
    if client is None:
        name = known.experiment_id
        raise UserError(
            f"cannot stop trial {trial_id}: experiment {name} is not running; "
            f"if its trials still run, `nnictl resume {name}` finds them"
        )
    client.delete("/trial-jobs", trial_id)
    output.info(f"Stopping trial {trial_id}; `nnictl trial ls {known.experiment_id}` shows when it has ended")


@trial.command(
    epilog=options.example(
        "nnictl trial codegen --trial-id aB3dE", "nnictl trial codegen -T aB3dE > train.py"
    )
)
@options.experiment_argument
@options.trial_option("The trial whose values are filled in.")
def codegen(experiment_id: str | None, trial_id: str) -> None:
    """Print annotated code with the values of a trial filled in (useAnnotation: true).

    If there are several files, a line with its name precedes each.
    """
    from nni_manager.config.annotated_code import files_with_values

    known = resolve(experiment_id)
    annotated = known.folder.annotated_code
    if not annotated.is_dir():
        raise UserError(
            f"cannot generate code of experiment {known.experiment_id}: it has no annotated code; its parameters are in "
            f"`nnictl trial ls {known.experiment_id}`"
        )
    files = files_with_values(annotated, known.trial(known.trial_id(trial_id))["parameters"])
    for path, text in files.items():
        heading = f"# ---- {path}\n" if len(files) > 1 else ""
        sys.stdout.buffer.write(os.fsencode(heading) + text)
