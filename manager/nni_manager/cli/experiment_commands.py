"""nnictl experiment: list, show, export and delete experiments."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli import nni_output, options
from nni_manager.cli.tracker_export import write_runs
from nni_manager.client import output, results
from nni_manager.client.experiments import (
    KnownExperiment,
    Managers,
    known_experiments,
    managers_once,
    match_prefix,
    resolve,
)
from nni_manager.client.results import finite, flat_columns, parsed
from nni_manager.domain.message_summary import outline
from nni_manager.domain.provenance import PROVENANCE, code_at
from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.store import leftover_jobs
from nni_manager.store.registry import Registry, corrupt_entries, latest_first
from nni_manager.trackers import TRACKERS

if TYPE_CHECKING:
    from nni_manager.domain.objectives import Objectives
    from nni_manager.store.reader import StoreReader

_TARGETS = {
    "html": "report.html",
    "mlflow": "sqlite:///mlflow.db",
    "tensorboard": "FOLDER",
    "wandb": "FOLDER",
}
"""The value of --filename, by the types that have no text to print."""
Record = dict[str, Any]
"""A result in the format of an export."""

experiment = options.group(
    "experiment",
    "List, export, save, load and delete experiments.",
    "nnictl experiment list --all",
)


@experiment.command(
    "list",
    epilog=options.example(
        "nnictl experiment list",
        "nnictl experiment list --all --json",
        "nnictl experiment list --all --tag baseline",
    ),
)
@click.option("--all", "-a", "all_of_them", is_flag=True, help="Also list experiments that are not running.")
@click.option("--tag", "tags", multiple=True, metavar="TAG",
              help="Only experiments with this tag; if repeated, with all of them.")  # fmt: skip
@options.json_option
def list_experiments(all_of_them: bool, tags: tuple[str, ...], as_json: bool) -> None:
    """List the experiments of this user, the latest first. If one has tags, they are in the last column.

    Lines are separated by tabs if the output goes to a pipe or a file.
    """
    found = known_experiments()
    managers = managers_once()
    lines = [_line(known, managers) for known in found if all_of_them or known.is_served]
    if all_of_them:
        lines += corrupt_entries(Registry.of_user())
    else:
        options.warn_of_dead_managers((known for known in found if not known.is_served), managers)
    lines = latest_first(map(dict, results.with_tags(lines, tags)))
    if as_json:
        output.print_json(lines)
        return
    if not lines:
        others = "" if all_of_them else "; `nnictl experiment list --all` shows those that ended"
        which = f" with {'tag' if len(tags) == 1 else 'tags'} {', '.join(tags)}" if tags else ""
        output.info(f"There is no {'' if all_of_them else 'running '}experiment{which}{others}")
        return
    headings = ["id", "status", "trials", "best", "time", "port", "platform", "started", "name"]
    if any(line.get("tags") for line in lines):
        headings.append("tags")
    rows = [
        [
            line["id"],
            _status_word(line),
            str(line.get("trialCount", "")),
            f"front of {line['frontCount']}"
            if line.get("frontCount")
            else output.number(line.get("bestValue")),
            "" if "durationS" not in line else output.duration(line["durationS"]),
            str(line["port"] or line["viewPort"] or ""),
            line.get("platform", ""),
            output.moment(line.get("startTime")),
            line.get("experimentName", ""),
            *([" ".join(line.get("tags", ()))] if "tags" in headings else []),
        ]
        for line in lines
    ]
    output.print_list(headings, rows, right=("trials", "best", "time"))
    for line in lines:
        if "problem" in line:
            output.warning(f"experiment {line['id']}: {line['problem']}")
        elif _has_died(line):
            how = "exited while its trials were ending" if line["status"] == "STOPPING" else "died"
            output.warning(
                f"the manager of experiment {line['id']} {how}; `nnictl resume {line['id']}` resumes it"
            )


def _line(known: KnownExperiment, managers: Managers) -> dict[str, Any]:
    line = known.line()
    is_starting = _has_died(line) and known.manager_is_starting(managers)
    return line | {"status": "STARTING"} if is_starting else line


def _has_died(line: dict[str, Any]) -> bool:
    known = ("DONE", "ERROR", "STOPPED", "UNREADABLE", "STARTING")
    return not line["managerIsRunning"] and line["status"] not in known


def _status_word(line: dict[str, Any]) -> str:
    status = str(line["status"])
    if line["viewPort"] is not None and not line["managerIsRunning"]:
        return f"VIEWED (was {status})" if _has_died(line) else f"VIEWED ({status})"
    if status == "DONE" and line.get("trialCount") and not line["succeededCount"]:
        return f"DONE, 0 of {line['trialCount']} succeeded"
    if (
        status == "DONE"
        and line.get("trialCount")
        and line.get("bestValue") is None
        and not line.get("frontCount")
    ):
        return "DONE, no result counts"
    return f"NOT RUNNING (was {status})" if _has_died(line) else status


@experiment.command(epilog=options.example("nnictl experiment show", "nnictl experiment show GvTf2bVe"))
@options.experiment_argument
@options.json_anyway
def show(experiment_id: str | None) -> None:
    """Print an experiment's profile as JSON: limits, search space, tuner, and settings of trials.

    It also names how the data of each running trial reaches the manager.
    """
    output.print_json(options.experiment(experiment_id).get("/experiment"))


@experiment.command(epilog=options.example("nnictl experiment status", "nnictl experiment status GvTf2bVe"))
@options.experiment_argument
@options.json_anyway
def status(experiment_id: str | None) -> int:
    """Print an experiment's status as JSON, with the error that stopped it, if any.

    "leftovers" is what it may have left on its cluster, with the commands that remove it. The exit code is 1 if its manager has
    died: the status is then the last one.
    """
    known = options.experiment(experiment_id)
    shown = known.get("/check-status")
    shown.pop("isTerminal", None)
    left = list(leftover_jobs.read(known.folder).values())
    errors = [error.strip() for error in shown["errors"]]
    # JSON has a traceback on one line, which a person cannot read; a program reads the whole error.
    for_person = sys.stdout.isatty()
    if for_person:
        shown["errors"] = list(map(outline, errors))
    output.print_json(shown | {"managerIsRunning": known.manager is not None, "leftovers": left})
    for error in errors:
        if for_person and "\n" in error:
            output.warning(error)
    return 1 if options.warn_of_dead_manager(known) else 0


@experiment.command(
    epilog=options.example(
        "nnictl experiment export --type csv --filename results.csv",
        "nnictl experiment export --type csv --all",
        "nnictl experiment export GvTf2bVe --type json --intermediate > results.json",
        "nnictl experiment export GvTf2bVe --type html --filename report.html",
        "nnictl experiment export --type mlflow --filename sqlite:///mlflow.db",
    )
)
@options.experiment_argument
@click.option(
    "--filename",
    "-f",
    "target",
    metavar="FILE",
    type=click.Path(),
    help="Write to this file instead of stdout; a folder for tensorboard and wandb, a tracking URI for mlflow.",
)
@click.option("--type", "-t", "kind", type=click.Choice(["json", "csv", "html", *TRACKERS]), default="json",
              show_default=True, help="html: a report with table, charts and configuration, without secrets. mlflow, "
              "tensorboard, wandb: a run for each trial; wandb: an offline directory for `wandb sync`.")  # fmt: skip
@click.option(
    "--intermediate", "-i", "has_intermediates", is_flag=True, help="Also export intermediate results."
)
@click.option(
    "--provenance",
    "-p",
    "has_provenance",
    is_flag=True,
    help="Also export what ran: git commit, digest of the code, host, Python, and the digest of the packages.",
)
@click.option("--all", "-a", "all_trials", is_flag=True,
              help="With csv: all trials, also without a result, with their number, state and duration.")  # fmt: skip
@click.option(
    "--nni-columns",
    is_flag=True,
    help="With csv: the columns of NNI's own nnictl. Also with NNICTL_COMPAT=1 in the environment.",
)
def export(
    experiment_id: str | None,
    target: str | None,
    kind: str,
    has_intermediates: bool,
    has_provenance: bool,
    all_trials: bool,
    nni_columns: bool,
) -> None:
    """Print parameters and final results of the trials, or write a report that a browser shows without a manager."""
    for option, is_given in {"--nni-columns": nni_columns, "--all": all_trials}.items():
        if is_given and kind != "csv":
            raise UserError(f"cannot use {option} with --type {kind}; add --type csv")
    options.exclude(
        {"--all": all_trials, "--nni-columns": nni_columns},
        {"--all": all_trials, "--intermediate": has_intermediates},
        {"--all": all_trials, "--nni-columns": nni_columns, "--provenance": has_provenance},
    )
    if kind in _TARGETS:
        given = {"--intermediate": has_intermediates, "--provenance": has_provenance}
        if extra := next((option for option, is_given in given.items() if is_given), None):
            reason = ", which has all of that" if kind == "html" else ""
            raise UserError(f"cannot use {extra} with --type {kind}{reason}; remove {extra}")
        if not target:
            raise UserError(f"cannot write --type {kind} to stdout; add --filename {_TARGETS[kind]}")
        known = options.experiment(experiment_id)
        if kind == "html":
            _write_report(known, Path(target))
        else:
            write_runs(known, kind, target)
        return
    known = options.experiment(experiment_id)
    objectives = known.stored.config().all_objectives
    records = known.stored.read(
        lambda reader: list(
            records_of(
                reader,
                objectives,
                has_intermediates=has_intermediates,
                has_provenance=has_provenance,
            )
        )
    )
    if kind == "json":
        text = to_json(records)
    elif all_trials:
        values = {each["trialJobId"]: each["value"] for each in records}
        trials, further = known.trial_list(), {}
        if objectives.has_several:
            front = {each["trialJobId"] for each in records if each["onFront"]}
            further["onFront"] = {each["id"]: each["id"] in front for each in trials}
        names, rows = results.all_trials(trials, values, objectives.metrics, further)
        text = table_of(names, [row | {"tags": " ".join(row["tags"])} for row in rows])
    elif nni_columns or options.prefers_nni_output():
        text = nni_output.to_csv(records)
    else:
        text = to_csv(records, objectives.metrics)
    if not records:
        name = known.experiment_id
        output.warning(
            f"experiment {name} has no result yet; `nnictl trial ls {name}` shows the state of its trials"
        )
    # Bytes: a terminal's encoding may lack characters of a parameter's name. A name may have half a surrogate pair.
    content = text.encode(errors="backslashreplace")
    if target is None:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    with output.naming(target):
        Path(target).write_bytes(content)
    output.info(f"Wrote the results of {len(records)} trials to {target}")


def _write_report(known: KnownExperiment, target: Path) -> None:
    from nni_manager.web.report import report_of  # the imports take 0.3 s

    content = report_of(known.folder)
    with output.naming(target):
        target.write_bytes(content)
    output.info(
        f"Wrote a report of {known.experiment_id} to {target} ({len(content) / 1e6:.1f} MB); a browser opens it"
    )


def records_of(
    reader: StoreReader, objectives: Objectives, *, has_intermediates: bool, has_provenance: bool = False
) -> Iterator[Record]:
    """A record for each trial with a counted final result, in order of creation, with the keys of NNI's export.

    A result that is not JSON stays text. NaN and infinities are kept here; each format converts them. `tags` and `note` are
    present if the trial has any; `onFront`, whether it is on the Pareto front, if there are several objectives.
    """
    found = list(reader.results())
    judged = ((trial_id, final) for trial_id, _, final in found)
    front = set(objectives.ranked(judged)) if objectives.has_several else set()
    remarks = {trial_id: each.to_json() for trial_id, each in reader.all_remarks().items()}
    intermediates: dict[str, list[Any]] = {}
    provenance = _provenance_of(reader) if has_provenance else {}
    if has_intermediates:
        for page in reader.metric_pages(False, 0, 2**62):
            for row in page:
                intermediates.setdefault(row.trial_id, []).append(parsed(row.value))
    for trial_id, parameters, final in found:
        record: Record = {"trialJobId": trial_id, "parameter": parameters, "value": parsed(final)}
        if objectives.has_several:
            record["onFront"] = trial_id in front
        if has_intermediates:
            record["intermediate"] = intermediates.get(trial_id, [])
        record |= provenance.get(trial_id, {})
        yield record | {name: value for name, value in remarks.get(trial_id, {}).items() if value}


def _provenance_of(reader: StoreReader) -> dict[str, Record]:
    """What ran, by trial: the newest attempt's environment. Values that are not recorded are None."""
    code, environments = reader.code(), reader.environments()
    found: dict[str, Record] = {}
    for row in reader.trial_list():
        version = code_at(code, row["started_at_s"])
        newest = environments[row["trial_id"]][-1] if row["trial_id"] in environments else None
        values = (
            version and version.git_commit,
            version and version.is_dirty,
            version and version.digest,
            *((newest.host, newest.node, newest.python, newest.packages) if newest else (None,) * 4),
        )
        known = (None if each == "" else each for each in values)
        found[row["trial_id"]] = dict(zip(PROVENANCE, known, strict=True))
    return found


def to_json(records: Sequence[Record]) -> str:
    """A JSON list with one record per line. NaN and infinities become null, because JSON does not have them."""
    lines = [json.dumps(finite(record), ensure_ascii=False, allow_nan=False) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def to_csv(records: Sequence[Record], metrics: Sequence[str] = ("default",)) -> str:
    """A CSV table with a column for each parameter, named as in `flat_columns`. Values that are not text are JSON.

    `metrics`: those that a result must have; the number of the first one is in the column `value`.
    Columns `tags` (separated by spaces) and `note` are present if a trial has any.
    """
    optional = ("onFront", "intermediate", *PROVENANCE, "tags", "note")
    further = [name for name in optional if any(name in each for each in records)]
    results_of = [(each["trialJobId"], each["parameter"], each["value"]) for each in records]
    names, rows = flat_columns(results_of, further, metrics)
    for row, each in zip(rows, records, strict=True):
        row |= {name: each[name] for name in further if name in each}
        if "tags" in each:
            row["tags"] = " ".join(each["tags"])
    return table_of([*names, *further], rows)


def table_of(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A CSV table. Values that are not text are JSON; a missing value is an empty cell."""
    text = io.StringIO()
    # Lines end with CRLF (RFC 4180). With another line end, csv would not quote a cell with a carriage return.
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([_cell(row[name]) if name in row else "" for name in names] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@experiment.command(
    epilog=options.example(
        "nnictl experiment delete GvTf2bVe",
        "nnictl experiment delete GvTf2bVe --yes",
        "nnictl experiment delete --all",
    )
)
@click.argument("experiment_id", metavar="[ID]", required=False, shell_complete=options.complete_experiment)
@click.option("--all", "-a", "all_of_them", is_flag=True, help="Delete all experiments that are not running.")
@click.option(
    "--force",
    is_flag=True,
    help="Also delete an unreadable experiment, or one whose trials run without a manager.",
)
@options.yes_option
def delete(experiment_id: str | None, all_of_them: bool, force: bool, is_agreed: bool) -> int:
    """Delete an experiment and all its data, also on the shared storage. Your code is kept."""
    if (experiment_id is None) == (not all_of_them):
        raise UserError(
            "cannot delete: exactly one of ID and --all is needed; give an ID, or --all for all experiments that are not running"
        )
    if force and experiment_id in Registry.of_user().spoilt():
        # The corrupt entry does not name the folder, so only the entry can be removed.
        Registry.of_user().remove(experiment_id)
        output.info(f"Removed the unreadable entry of experiment {experiment_id}")
        return 0
    chosen = known_experiments() if experiment_id is None else [_to_delete(experiment_id, force)]
    if all_of_them:
        reasons = {known.experiment_id: _reason_to_keep(known, force) for known in chosen}
        for kept in filter(None, reasons.values()):
            output.warning(kept)
        chosen = [known for known in chosen if reasons[known.experiment_id] is None]
    elif (reason := _reason_to_keep(chosen[0], force)) is not None:
        raise UserError(reason)
    if not chosen:
        output.info("There is no experiment to delete")
        return 0
    names = ", ".join(known.experiment_id for known in chosen)
    what = f"experiment {names}" if len(chosen) == 1 else f"{len(chosen)} experiments ({names})"
    if not is_agreed and not options.confirm(f"Delete {what} with all results and logs?"):
        output.info("Nothing was deleted")
        return 1
    problems = [problem for problem in map(_delete, chosen) if problem is not None]
    for problem in problems:
        output.error(problem)
    return 1 if problems else 0


def _to_delete(given: str, force: bool) -> KnownExperiment:
    if not force:
        return resolve(given)
    matching = match_prefix(given, known_experiments())
    return matching[0] if len(matching) == 1 else resolve(given)


def _reason_to_keep(known: KnownExperiment, force: bool) -> str | None:
    """The reason why the experiment cannot be deleted, as a sentence; None if it can."""
    name = known.experiment_id
    if known.is_served:
        how = "running" if known.manager is not None else "viewed"
        return f"cannot delete experiment {name}: it is {how}; run `nnictl stop {name}` first"
    if force:
        return None
    from nni_manager.client.remains import has_ended, processes_left, remains_of, why_unreadable

    if why := why_unreadable(known):
        if left := processes_left(known.folder):
            return f"cannot delete experiment {name}: {left}, its files are unreadable ({why}); run `nnictl stop {name}` first"
        return f"cannot delete experiment {name}: its files are unreadable ({why}); use --force"
    if has_ended(known):
        return None
    remains = remains_of(known.folder)
    if remains:
        return (
            f"cannot delete experiment {name}: its manager exited in state {known.stored.status()['status']}, and {remains}; "
            f"run `nnictl stop {name}` first, or use --force"
        )
    return None


def _delete(known: KnownExperiment) -> str | None:
    """Delete the experiment; return the reason if it cannot be removed completely, else None."""
    workspace = known.folder.workspace.root
    with contextlib.ExitStack() as stack:
        # Holding the lease keeps managers from starting. If the lock cannot be opened, no manager holds it.
        with contextlib.suppress(OSError):
            stack.enter_context(known.folder.owned())
        from nni_manager.client import tensorboards
        from nni_manager.client.remains import processes_left
        from nni_manager.training_services.platform import platform_of

        if still := processes_left(known.folder):
            output.warning(
                f"experiment {known.experiment_id} is deleted although {still}; end them with `kill -9`"
            )
        with contextlib.suppress(NniManagerError):  # without its configuration, its share is unknown
            if why := platform_of(known.stored.config()).remove_from_share(known.folder.workspace):
                output.warning(why)
        for each in tensorboards.started(known.folder):
            try:
                each.stop()
            except RetryableError as error:
                output.warning(str(error))
        known.folder.remove()
    left = [path for path in (workspace, known.folder.path) if path.exists()]
    if left:
        return (
            f"cannot delete all of experiment {known.experiment_id}: {' and '.join(map(str, left))} cannot be removed; check "
            "who owns the files there, remove them as that user, and try again"
        )
    Registry.of_user().remove(known.experiment_id)
    output.info(f"Deleted experiment {known.experiment_id}")
    return None
