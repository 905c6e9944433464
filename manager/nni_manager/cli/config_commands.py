"""nnictl config: experiment files checked, described and converted, without an experiment."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.options import example
from nni_manager.client import output
from nni_manager.errors import UserMistake

if TYPE_CHECKING:
    from nni_manager.config.model import ExperimentConfig

_SCHEMAS = {"v1": "NNI's first schema", "v2": "NNI's second schema"}
_FILE = click.Path(path_type=Path)


@click.group()
def config() -> None:
    """Check experiment files, and convert them.

    \b
    Example:
      nnictl config check config.yml
    """
    return


@config.command(epilog=example("nnictl config check config.yml", "nnictl config check config.yml --json"))
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check(file: Path, as_json: bool) -> int:
    """Say whether an experiment file is right, or every mistake in it.

    The search space, annotations and paths it names are looked at, too. Nothing is started, and no cluster is asked. The exit
    code is 1 when there is a mistake.
    """
    from nni_manager.config.mistakes import ConfigInvalid
    from nni_manager.config.reader import read_experiment_file, schema_of

    try:
        found = read_experiment_file(file)
    except ConfigInvalid as error:
        if not as_json:
            raise
        mistakes = [dataclasses.asdict(mistake) for mistake in error.mistakes]
        output.print_json({"file": str(file), "isRight": False, "mistakes": mistakes, "warnings": []})
        return 1
    warnings = [*found.warnings, *_what_keeps_it_from_running(found)]
    if as_json:
        verdict = {"file": str(file), "isRight": True, "mistakes": [], "warnings": warnings}
        output.print_json(verdict | {"schema": schema_of(file)} | _summary(found))
        return 0
    summary = _summary(found)
    output.info(f"{file} is right, in {_SCHEMAS[schema_of(file)]}")
    output.info(
        f"experiment {found.experiment_name} on {summary['platform']}, tuner {summary['tuner']}, "
        f"search space of {', '.join(summary['searchSpace'])}"
    )
    for warning in warnings:
        output.warning(warning)
    return 0


def _summary(found: ExperimentConfig) -> dict[str, Any]:
    return {
        "experimentName": found.experiment_name,
        "platform": found.training_service,
        "tuner": found.tuner.name,
        "assessor": None if found.assessor is None else found.assessor.name,
        "searchSpace": list(found.search_space.parameters),
        "codeDir": str(found.code_dir),
    }


def _what_keeps_it_from_running(found: ExperimentConfig) -> list[str]:
    from nni_manager.errors import UserMistake
    from nni_manager.services import refuse_nameless_claim

    try:
        refuse_nameless_claim(found)
    except UserMistake as mistake:
        return [str(mistake)]
    return []


@config.command(
    epilog=example("nnictl config schema > experiment.schema.json", "nnictl config schema --version v2")
)
@click.option(
    "--version",
    type=click.Choice(["v1", "v2"]),
    help="NNI's first schema (trainingServicePlatform) or its second (trainingService); both without it.",
)
def schema(version: str | None) -> None:
    """Print the JSON schema of experiment files.

    Editors complete and check a file with it, such as VS Code with the extension YAML, when its first line is

    \b
      # yaml-language-server: $schema=experiment.schema.json
    """
    from nni_manager.config.json_schema import json_schema

    output.print_json(json_schema("v1" if version == "v1" else "v2" if version == "v2" else None))


@config.command(
    epilog=example(
        "nnictl config convert config.yml", "nnictl config convert config.yml --output config_v2.yml"
    )
)
@click.argument("file", type=_FILE)
@click.option(
    "--output", "-o", "to", type=_FILE, metavar="FILE", help="Where to write it; without, to stdout."
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def convert(file: Path, to: Path | None, force: bool) -> None:
    """Print an experiment file of NNI's first schema in the second.

    What has no place there is named on stderr. Comments are not kept.
    """
    from nni_manager.config.convert import convert as converted_from

    made = converted_from(file, None if to is None else to.parent)
    if to is None:
        output.plain(made.text.rstrip("\n"))
    else:
        _write(to, made.text, force)
        output.info(f"Wrote {to}; `nnictl config check {to}` checks it")
    for dropped in made.dropped:
        output.warning(f"dropped {dropped}")


def _write(path: Path, text: str, force: bool) -> None:
    try:
        # A file may hold a login, as the one it was made of.
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserMistake(
            f"cannot write {path}: it is there already; name another file, or replace it with --force"
        ) from error
