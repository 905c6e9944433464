"""nnictl config: validates, describes and converts experiment files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.options import FILE, example, group, json_option
from nni_manager.client import output
from nni_manager.errors import UserError

if TYPE_CHECKING:
    from nni_manager.config.json_schema import Version
    from nni_manager.config.model import ExperimentSpec

_SCHEMAS = {"v1": "NNI v1 schema", "v2": "NNI v2 schema"}


config = group("config", "Validate and convert experiment files.", "nnictl config check config.yml")


@config.command(epilog=example("nnictl config check config.yml", "nnictl config check config.yml --json"))
@click.argument("file", type=FILE)
@json_option
def check(file: Path, as_json: bool) -> int:
    """Validate an experiment file and report all errors.

    Also validates the search space, annotations and paths that the file names. On the platform local, GPUs or a program that
    this machine lacks are a warning. Starts nothing and contacts no cluster. The exit code is 1 if there is an error.
    """
    from nni_manager.config.diagnostics import ConfigInvalid
    from nni_manager.config.reader import read_experiment_file
    from nni_manager.training_services.platform import platform_of

    try:
        found = read_experiment_file(file)
    except ConfigInvalid as error:
        if not as_json:
            raise
        diagnostics = [dataclasses.asdict(each) for each in error.diagnostics]
        output.print_json(_verdict(file, diagnostics, []))
        return 1
    warnings = list(found.warnings)
    try:
        platform_of(found).check_offline()
    except UserError as error:
        warnings.append(str(error))
    if as_json:
        output.print_json(_verdict(file, [], warnings) | {"schema": found.file_schema} | _summary(found))
        return 0
    summary = _summary(found)
    output.info(f"{file} is valid ({_SCHEMAS[found.file_schema]})")
    output.info(
        f"experiment {found.experiment_name} on {summary['platform']}, tuner {summary['tuner']}, "
        f"search space of {', '.join(summary['searchSpace'])}"
    )
    for warning in warnings:
        output.warning(warning)
    return 0


def _verdict(file: Path, diagnostics: list[dict[str, Any]], warnings: list[str]) -> dict[str, Any]:
    is_valid = not diagnostics
    former_names = {"isRight": is_valid, "mistakes": diagnostics}  # used until 0.7; removed in 0.8
    verdict = {"file": str(file), "isValid": is_valid, "diagnostics": diagnostics, "warnings": warnings}
    return verdict | former_names


def _summary(found: ExperimentSpec) -> dict[str, Any]:
    return {
        "experimentName": found.experiment_name,
        "platform": found.training_service,
        "tuner": found.tuner.name,
        "assessor": None if found.assessor is None else found.assessor.name,
        "searchSpace": list(found.search_space.parameters),
        "codeDir": str(found.code_dir),
    }


@config.command(
    epilog=example("nnictl config schema > experiment.schema.json", "nnictl config schema --version v2")
)
@click.option(
    "--version",
    type=click.Choice(["v1", "v2"]),
    help="NNI's first schema (trainingServicePlatform) or its second (trainingService); both without it.",
)
def schema(version: Version | None) -> None:
    """Print the JSON schema of experiment files.

    An editor, such as VS Code with the YAML extension, completes and validates a file whose first line is

    \b
      # yaml-language-server: $schema=experiment.schema.json
    """
    from nni_manager.config.json_schema import json_schema

    output.print_json(json_schema(version))


@config.command(
    epilog=example(
        "nnictl config convert config.yml", "nnictl config convert config.yml --output config_v2.yml"
    )
)
@click.argument("file", type=FILE)
@click.option("--output", "-o", "to", type=FILE, metavar="FILE", help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def convert(file: Path, to: Path | None, force: bool) -> None:
    """Convert an experiment file from the NNI v1 schema to v2.

    Keys that v2 does not have are reported on stderr. Comments are not kept.
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
        # 0600: the converted file may hold a login.
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
        with output.naming(path), open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(
            f"cannot write {path}: the file exists already; name another file, or replace it with --force"
        ) from error
