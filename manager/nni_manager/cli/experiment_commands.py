"""nnictl experiment: look at experiments."""

from __future__ import annotations

from typing import Any

import click

from nni_manager.cli import output
from nni_manager.cli.experiments import known_experiments, resolve, spoilt_lines, stored_status
from nni_manager.cli.options import example, experiment_argument, json_anyway, json_option


@click.group()
def experiment() -> None:
    """Look at experiments.

    \b
    Example:
      nnictl experiment list --all
    """
    return


@experiment.command("list", epilog=example("nnictl experiment list", "nnictl experiment list --all --json"))
@click.option("--all", "-a", "all_of_them", is_flag=True, help="Also those that do not run.")
@json_option
def list_experiments(all_of_them: bool, as_json: bool) -> None:
    """List the experiments of this user."""
    lines = [known.line() for known in known_experiments() if all_of_them or known.is_served]
    if all_of_them:
        lines = sorted(lines + spoilt_lines(), key=lambda line: str(line["id"]))
    if as_json:
        output.print_json(lines)
        return
    if not lines:
        others = "" if all_of_them else "; `nnictl experiment list --all` shows those that ended"
        output.info(f"There is no {'' if all_of_them else 'running '}experiment{others}")
        return
    headings = ["id", "status", "port", "platform", "started", "ended", "name"]
    rows = [
        [
            line["id"],
            _status_word(line),
            str(line["port"] or line["viewPort"] or ""),
            line.get("platform", ""),
            output.moment(line.get("startTime")),
            output.moment(line.get("endTime")),
            line.get("experimentName", ""),
        ]
        for line in lines
    ]
    output.print_table(headings, rows)
    for line in lines:
        if "problem" in line:
            output.warning(f"experiment {line['id']}: {line['problem']}")
        elif _has_died(line):
            how = "left while its trials were ending" if line["status"] == "STOPPING" else "died"
            output.warning(
                f"the manager of experiment {line['id']} {how}; `nnictl resume {line['id']}` goes on with it"
            )


def _has_died(line: dict[str, Any]) -> bool:
    return not line["managerIsRunning"] and line["status"] not in ("DONE", "ERROR", "STOPPED", "UNREADABLE")


def _status_word(line: dict[str, Any]) -> str:
    status = str(line["status"])
    if line["viewPort"] is not None and not line["managerIsRunning"]:
        return f"VIEWED (was {status})" if _has_died(line) else f"VIEWED ({status})"
    return f"NOT RUNNING (was {status})" if _has_died(line) else status


@experiment.command(epilog=example("nnictl experiment show", "nnictl experiment show GvTf2bVe"))
@experiment_argument
@json_anyway
def show(experiment_id: str | None) -> None:
    """Print an experiment's profile as JSON: limits, search space, tuner, trial, and how each running trial is heard."""
    output.print_json(resolve(experiment_id).profile())


@experiment.command(epilog=example("nnictl experiment status", "nnictl experiment status GvTf2bVe"))
@experiment_argument
@json_anyway
def status(experiment_id: str | None) -> None:
    """Print an experiment's status as JSON, and what stopped it, if anything did."""
    known = resolve(experiment_id)
    client = known.client()
    if client is not None:
        output.print_json(client.get("/check-status"))
        return
    stored = stored_status(known.folder)
    output.print_json({"status": stored["status"], "errors": stored["errors"]})
    if not stored["isOver"]:
        name = known.experiment_id
        output.warning(
            f"the manager of experiment {name} does not run, this is its last status; `nnictl resume {name}` goes on"
        )
