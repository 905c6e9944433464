"""nnictl trial: shows and stops trials."""

from __future__ import annotations

import os
import sys

import click

from nni_manager.cli import nni_output, options
from nni_manager.client import output
from nni_manager.client.results import with_tags
from nni_manager.errors import UserError

trial = options.group("trial", "Show and stop trials.", "nnictl trial ls")


@trial.command(
    "ls",
    epilog=options.example(
        "nnictl trial ls",
        "nnictl trial ls --best 5",
        "nnictl trial ls GvTf2bVe --state failed --tail 5",
        "nnictl trial ls --tag keep --columns no.,trial,value,tags",
        "nnictl trial ls --sort time --descending --columns no.,value,time,lr",
        "nnictl trial ls --json",
    ),
)
@options.experiment_argument
@click.option("--state", "-s", "states", multiple=True, metavar="STATE",
              help="Only trials in this state, such as failed; may be repeated.")  # fmt: skip
@click.option("--tag", "tags", multiple=True, metavar="TAG",
              help="Only trials with this tag; if repeated, with all of them.")  # fmt: skip
@click.option(
    "--best",
    type=options.COUNT,
    metavar="N",
    help="Only the N trials with the best values, best first; with several objectives only those on the Pareto front.",
)
@click.option(
    "--sort",
    "column",
    metavar="COLUMN",
    help="Sort by a column, a parameter or an entry of results; default: no.",
)
@click.option("--descending", is_flag=True, help="With --sort: the highest first.")
@click.option("--columns", metavar="NAMES", help="The columns to print, separated by commas: no., trial, state, value, "
              "time, started, ended, tags, note, parameters, and names of parameters and of entries of results.")  # fmt: skip
@click.option("--head", type=options.COUNT, metavar="N", help="Only the first N trials.")
@click.option("--tail", type=options.COUNT, metavar="N", help="Only the last N trials.")
@options.json_option
@click.option("--nni-json", is_flag=True, help="Print the JSON of NNI's own nnictl; --head and --tail are then "
              "the N largest and smallest results.")  # fmt: skip
def list_trials(
    experiment_id: str | None,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    best: int | None,
    column: str | None,
    descending: bool,
    columns: str | None,
    head: int | None,
    tail: int | None,
    as_json: bool,
    nni_json: bool,
) -> None:
    """List the trials of an experiment, in the order of their creation.

    Lines are separated by tabs if the output goes to a pipe or a file. With NNICTL_COMPAT=1 in the environment, they are then
    those of --nni-json.
    """
    from nni_manager.cli import trial_table
    from nni_manager.domain.objectives import MAXIMIZE

    options.exclude(
        {"--head": head, "--tail": tail, "--best": best},
        {"--best": best, "--sort": column},
        {"--json": as_json, "--nni-json": nni_json, "--columns": columns},
        {"--nni-json": nni_json, "--state": states, "--best": best, "--sort": column},
        {"--nni-json": nni_json, "--tag": tags},
    )
    if descending and column is None:
        raise UserError("cannot use --descending without --sort; add --sort COLUMN")
    known = options.experiment(experiment_id)
    options.warn_of_dead_manager(known)
    if nni_json or (not as_json and options.prefers_nni_output() and not sys.stdout.isatty()):
        nni_output.print_trials(known.get("/trial-jobs"), head, tail)
        return
    trials = known.get("/trials") if as_json else known.trial_list()
    objectives = MAXIMIZE if known.problem else known.stored.config().all_objectives
    metrics = [each.metric for each in objectives.all] if objectives.has_several else []
    given = [name.strip() for name in (column or "", *(columns or "").split(","))]
    named = [name for name in given if name and not trial_table.is_built_in(name)]
    finals: list[tuple[str, str]] = []
    # Results are read only where they are shown: they can be large.
    if not known.problem and (best is not None or named or (metrics and not as_json)):
        finals = known.stored.read(lambda reader: list(reader.finals()))
        trials = trials if as_json and column is None else trial_table.with_metrics(trials, finals)
    shown = with_tags(trial_table.in_states(trials, states), tags)
    if best is not None:
        shown = trial_table.best(shown, finals, best, objectives)
    elif column is not None:
        shown = trial_table.sorted_by(shown, column, is_descending=descending)
    shown = shown[:head] if head is not None else shown[-tail:] if tail is not None else shown
    if as_json:
        output.print_json_lines([{name: each[name] for name in each if name != "metrics"} for each in shown])
        return
    if not shown:
        is_failed = options.warn_of_error(known)
        what = "such trials" if trials else "trials" if is_failed else "trials yet"
        output.info(f"Experiment {known.experiment_id} has no {what}")
        return
    trial_table.show(shown, trial_table.columns_of(columns, trials, metrics))
    garbage = {} if known.problem else known.stored.read(lambda reader: reader.corrupt_bytes())
    for each in shown:
        if each["id"] in garbage:
            output.warning(
                f"trial {each['id']}: {garbage[each['id']]} bytes of its metrics are not valid records and are ignored; "
                "check what else writes to $NNI_SYS_DIR/.nni/metrics, or was killed during a report"
            )
        output.trial_warning(each)
    options.warn_of_error(known)


@trial.command(
    epilog=options.example("nnictl trial show --trial-id aB3dE", "nnictl trial show GvTf2bVe -T aB3")
)
@options.experiment_argument
@options.trial_option("The trial to show.")
@options.json_anyway
def show(experiment_id: str | None, trial_id: str) -> None:
    """Print one trial as JSON: parameters, result, how it ended, the resources it used, and what ran.

    `provenance` has the version of the code, and each attempt's host, Python, and the digest of its packages.
    """
    known = options.experiment(experiment_id)
    output.print_json(known.trial(known.trial_id(trial_id)))


@trial.command(
    epilog=options.example(
        "nnictl trial packages --trial-id aB3dE", "nnictl trial packages GvTf2bVe -T aB3 > requirements.txt"
    )
)
@options.experiment_argument
@options.trial_option("The trial whose packages are printed.")
def packages(experiment_id: str | None, trial_id: str) -> None:
    """Print the Python packages with which a trial ran, as `pip freeze` does: NAME==VERSION.

    They are those of the newest attempt whose training code used nni_sdk.
    """
    known = options.experiment(experiment_id)
    sys.stdout.write("".join(f"{line}\n" for line in known.packages(known.trial_id(trial_id))))


@trial.command(
    epilog=options.example("nnictl trial kill --trial-id aB3dE", "nnictl trial kill GvTf2bVe -T aB3dE")
)
@options.experiment_argument
@options.trial_option("The trial to stop.")
def kill(experiment_id: str | None, trial_id: str) -> None:
    """Stop one trial; the experiment continues."""
    known = options.experiment(experiment_id)
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

    known = options.experiment(experiment_id)
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
