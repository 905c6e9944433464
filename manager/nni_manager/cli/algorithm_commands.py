"""nnictl algo: built-in and registered tuners and assessors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.options import FILE, example, group, json_anyway, json_option
from nni_manager.client import output
from nni_manager.errors import UserError

if TYPE_CHECKING:
    from nni_manager.config.registered_algorithms import RegisteredAlgorithm

algo = group("algo", "List tuners and assessors, and register your own.", "nnictl algo list")


@algo.command("list", epilog=example("nnictl algo list", "nnictl algo list --json"))
@json_option
def list_algorithms(as_json: bool) -> None:
    """List built-in and registered tuners, advisors and assessors."""
    rows = list(_algorithms())
    if as_json:
        output.print_json(rows)
        return
    output.print_table(
        ["kind", "name", "source", "class"],
        [[row["kind"], row["name"], row["source"], row.get("className", "")] for row in rows],
    )


@algo.command(epilog=example("nnictl algo show TPE", "nnictl algo show demotuner"))
@click.argument("name")
@json_anyway
def show(name: str) -> None:
    """Print a tuner or an assessor as JSON, with the classArgs of a built-in one."""
    rows = list(_algorithms())
    # A registered one may differ from a built-in one in the case alone.
    found = [row for row in rows if row["name"] == name]
    found = found or [
        row for row in rows if row["name"].lower() == name.lower() and row["source"] == "built in"
    ]
    if not found:
        raise UserError(f"cannot find a tuner or an assessor {name!r}; `nnictl algo list` lists them")
    for row in found:
        if row["source"] == "built in":
            row["classArgs"] = _class_args(row["kind"], row["name"])
    output.print_json(found[0] if len(found) == 1 else found)


@algo.command(epilog=example("nnictl algo register --meta demo_tuner.yml"))
@click.option("--meta", "-m", "meta", metavar="FILE", required=True, type=FILE,
              help="YAML with algoType, builtinName, className and, if the module is not installed, codeDirectory.")  # fmt: skip
def register(meta: Path) -> None:
    """Register your tuner or assessor under a name.

    Experiment files use the name as builtinTunerName or builtinAssessorName. The class must be importable; its output is
    discarded.
    """
    from nni_manager.config import registered_algorithms as registered
    from nni_manager.config.algorithms import ASSESSOR_ARGS, CLASS_ARGS

    algorithm = registered.read_meta(meta)
    _check_import(algorithm, meta)
    registered.register(algorithm, {*CLASS_ARGS, *ASSESSOR_ARGS})
    output.info(f"Registered {algorithm.kind} {algorithm.name} ({algorithm.class_name})")


def _check_import(algorithm: RegisteredAlgorithm, meta: Path) -> None:
    """Import the class and its validator as the manager does, in a process of their own.

    Raises:
        UserError: the import fails.
    """
    from nni_manager.config.model import UserClass
    from nni_manager.tuner.user_process import UserCodeFailed, UserProcess

    folder = algorithm.code_dir
    # Python also imports from its working directory, which is another one later.
    process = UserProcess(algorithm.kind, UserClass(algorithm.class_name, str(folder or sys.prefix)), None)
    try:
        for path in filter(None, (algorithm.class_name, algorithm.validator)):
            try:
                process.call("find", path)
            except UserCodeFailed as error:
                cause = str(error).strip().splitlines()[-1]
                where = "" if folder is None else f" from {folder}"
                remedy = f", or name the folder of its module as codeDirectory in {meta.name}"
                raise UserError(
                    f"cannot register {algorithm.kind} {algorithm.name!r}: {path} cannot be imported{where} ({cause}); fix it"
                    f"{remedy if folder is None else ''}"
                ) from error
    finally:
        process.close()


@algo.command(epilog=example("nnictl algo unregister demotuner"))
@click.argument("name")
def unregister(name: str) -> None:
    """Unregister a tuner or an assessor. Your code and the experiments that use it are kept."""
    from nni_manager.config import registered_algorithms as registered

    for gone in registered.unregister(name):
        output.info(f"Unregistered {gone.kind} {gone.name}")


def _algorithms() -> Iterator[dict[str, Any]]:
    from nni_manager.config.algorithms import ADVISORS, ASSESSOR_ARGS, CLASS_ARGS
    from nni_manager.config.registered_algorithms import registered_algorithms

    tuners = [name for name in CLASS_ARGS if name not in ADVISORS]
    for kind, names in (("tuner", tuners), ("advisor", ADVISORS), ("assessor", ASSESSOR_ARGS)):
        for name in sorted(names, key=str.lower):
            yield {"kind": kind, "name": name, "source": "built in"}
    for each in registered_algorithms():
        row = {"kind": each.kind, "name": each.name, "source": "registered", "className": each.class_name}
        optional = {"classArgsValidator": each.validator, "codeDirectory": each.code_dir}
        yield row | {name: str(value) for name, value in optional.items() if value is not None}


def _class_args(kind: str, name: str) -> dict[str, Any]:
    """The JSON Schema of each argument, with its default."""
    from nni_manager.config.algorithms import ASSESSOR_ARGS, CLASS_ARGS

    schema = (ASSESSOR_ARGS if kind == "assessor" else CLASS_ARGS)[name].model_json_schema()
    arguments: dict[str, Any] = schema.get("properties", {})
    return {
        name: {key: value for key, value in each.items() if key != "title"}
        for name, each in arguments.items()
    }
