"""Commands that change a running experiment: nnictl update, nnictl trial retry, nnictl experiment import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli import options
from nni_manager.cli.experiment_commands import experiment
from nni_manager.cli.options import FILE, example, experiment_argument, group, trial_option
from nni_manager.cli.trial_commands import trial
from nni_manager.client import imported, output
from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.manager_client import ManagerClient
from nni_manager.errors import UserError

if TYPE_CHECKING:
    from nni_manager.config.diagnostics import KeyPath
    from nni_manager.config.document import Document

# The largest request body that the manager accepts.
_MAX_IMPORTED_BYTES = 4 * 1024 * 1024

_file = click.option(
    "--filename", "-f", "path", metavar="FILE", required=True, type=FILE, help="A JSON file."
)


def _running(experiment_id: str | None, what: str) -> tuple[KnownExperiment, ManagerClient]:
    known = options.experiment(experiment_id)
    client = known.client()
    if client is None:
        name = known.experiment_id
        raise UserError(
            f"cannot {what} experiment {name}: it is not running; run `nnictl resume {name}`, then try again"
        )
    return known, client


def _refuse(document: Document, problems: Sequence[tuple[KeyPath, str]]) -> None:
    from nni_manager.config.diagnostics import ConfigInvalid

    diagnostics = [
        *document.diagnostics,
        *(document.diagnostic(key_path, message) for key_path, message in problems),
    ]
    if diagnostics:
        raise ConfigInvalid(diagnostics)


# ---- update


update = group(
    "update",
    "Change a running experiment. The change is stored: a resumed experiment keeps it.",
    "nnictl update trialnum --value 100",
)


@update.command(
    epilog=example(
        "nnictl update searchspace --filename space.json", "nnictl update searchspace GvTf2bVe -f space.json"
    )
)
@experiment_argument
@_file
def searchspace(experiment_id: str | None, path: Path) -> None:
    """Use another search space for new trials. Earlier results that lie in it still count."""
    from nni_manager.config.document import read_json, read_yaml
    from nni_manager.config.search_space import read_search_space

    document = (read_yaml if path.suffix in (".yml", ".yaml") else read_json)(path)
    _refuse(document, read_search_space(document.value)[1])
    client = _put(experiment_id, "SEARCH_SPACE", "searchSpace", document.value)
    summary = client.summary()
    count, limit = summary["trialCount"], summary["maxTrialNum"]
    if limit is not None and count >= limit:
        name = summary["id"]
        output.warning(
            f"no trial will use it: experiment {name} has had {count} of {limit} trials; "
            f"`nnictl update trialnum {name} --value N` with a higher number lets it propose more"
        )


def _add_limit(name: str, update_type: str, key: str, kind: type, value: str, help_text: str) -> None:
    examples = example(f"nnictl update {name} --value {value}", f"nnictl update {name} GvTf2bVe -v {value}")

    @update.command(name, help=help_text, epilog=examples)
    @experiment_argument
    @click.option(
        "--value",
        "-v",
        required=True,
        type=kind,
        metavar="N" if kind is int else "TIME",
        help="The new value.",
    )
    def change(experiment_id: str | None, value: Any) -> None:
        _put(experiment_id, update_type, key, value)


_RAISED = "A higher limit continues an experiment that is DONE because of it."
for _limit in (
    ("concurrency", "TRIAL_CONCURRENCY", "trialConcurrency", int, "4",
     "Set how many trials run at a time. Surplus trials run to their end."),
    ("trialnum", "MAX_TRIAL_NUM", "maxTrialNum", int, "100",
     f"Set the largest number of trials. {_RAISED}"),
    ("duration", "MAX_EXEC_DURATION", "maxExecDuration", str, "2h",
     f"Set the time, such as 90m, after which no trial starts. {_RAISED}"),
    ("trialduration", "MAX_TRIAL_DURATION", "maxTrialDuration", str, "30m",
     "Set the longest duration of a trial, such as 30m."),
):  # fmt: skip
    _add_limit(*_limit)


def _put(experiment_id: str | None, update_type: str, key: str, value: Any) -> ManagerClient:
    _, client = _running(experiment_id, "update")
    client.put("/experiment", {"params": {key: value}}, update_type=update_type)
    output.info(f"Update {key} success!")
    return client


# ---- trial, experiment


@trial.command(epilog=example("nnictl trial add params.json", "nnictl trial add params.yml GvTf2bVe"))
@click.argument("path", metavar="FILE", type=FILE)
@experiment_argument
def add(path: Path, experiment_id: str | None) -> None:
    """Start trials with parameters of your own, before the tuner's next ones.

    FILE has the parameters of one trial, such as {"lr": 0.1}, or a list of them. Values outside the search space are used, with a
    warning.
    """
    from nni_manager.client.added_trial import add_trial
    from nni_manager.config.diagnostics import shown
    from nni_manager.config.document import read_json, read_yaml

    _, client = _running(experiment_id, "start a trial of")
    document = (read_yaml if path.suffix in (".yml", ".yaml") else read_json)(path)
    trials = document.value if isinstance(document.value, list) else [document.value]
    wrong = [(index, each) for index, each in enumerate(trials) if not isinstance(each, dict)]
    example_of = 'write the parameters as a mapping, such as {"lr": 0.1}'
    mistakes = [
        ((index,), f"cannot start a trial: {shown(each)} is no mapping; {example_of}")
        for index, each in wrong
    ]
    _refuse(
        document, mistakes if trials else [((), f"cannot start a trial: the list is empty; {example_of}")]
    )
    for parameters in trials:
        started = add_trial(client, parameters)
        output.info(
            f"Trial {started['trialJobId']} (no. {started['sequenceId']}): {output.parameters(parameters)}"
        )


@trial.command(
    epilog=example(
        "nnictl trial retry --trial-id aB3dE",
        "nnictl trial retry GvTf2bVe -T aB3dE",
        "nnictl trial retry -T aB3dE --from-checkpoint",
    )
)
@experiment_argument
@trial_option("A trial that has ended without success.")
@click.option("--from-checkpoint", is_flag=True, help="The new trial continues from the newest checkpoint that the old one "
              "saved with nni_sdk.save_checkpoint().")  # fmt: skip
def retry(experiment_id: str | None, trial_id: str, from_checkpoint: bool) -> None:
    """Start a new trial with the parameters of a failed or stopped one, even if the experiment is DONE."""
    known, client = _running(experiment_id, "start a trial of")
    trial_id = known.trial_id(trial_id)
    query = {"from": "checkpoint"} if from_checkpoint else {}
    started = client.post("/trials", trial_id, "retry", **query)
    what = "continues from the checkpoint" if from_checkpoint else "has the parameters"
    output.info(
        f"Trial {started['trialJobId']} (no. {started['sequenceId']}) {what} of trial {trial_id}; "
        f"`nnictl trial ls {known.experiment_id}` shows both"
    )


@experiment.command(
    "import",
    epilog=example(
        "nnictl experiment import --filename results.json",
        "nnictl experiment import GvTf2bVe -f results.json",
    ),
)
@experiment_argument
@_file
def import_results(experiment_id: str | None, path: Path) -> None:
    """Import prior results into the tuner.

    The file has a list of {"parameter": {...}, "value": 0.93}. Results without a finite number are skipped. If any entry is
    invalid, all errors are reported and nothing is imported.
    """
    from nni_manager.config.document import read_json
    from nni_manager.config.prior_results import read_results
    from nni_manager.config.search_space import parse_search_space

    known, client = _running(experiment_id, "import results into")
    document = read_json(path, _MAX_IMPORTED_BYTES)
    current = client.get("/configuration")
    space, tuner = parse_search_space(current["searchSpace"]), current["tuner"]["name"]
    objectives = known.stored.config().all_objectives
    _refuse(document, read_results(document.value, space, tuner, objectives)[1])
    counts = imported.import_results(client, document.value)
    results = "1 result" if counts["imported"] == 1 else f"{counts['imported']} results"
    output.info(f"Imported {results} into experiment {known.experiment_id}")
    if counts["used"] < counts["imported"]:
        output.warning(
            f"the tuner {tuner} uses {counts['used'] or 'none'} of them; "
            "`nnictl help changing-a-running-experiment` lists the tuners that can"
        )
