"""nnictl experiment save and load: an experiment as a file, and a file as an experiment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from nni_manager.cli.options import example, named_experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import resolve, stored_status
from nni_manager.errors import UserMistake


@click.command(
    epilog=example(
        "nnictl experiment save GvTf2bVe",
        "nnictl experiment save GvTf2bVe --path digits.tar.gz --saveCodeDir",
    )
)
@named_experiment_argument
@click.option("--path", "-p", "target", metavar="FILE|DIR", type=click.Path(path_type=Path),
              help="Where the archive is written.  [default: ID-DATE.tar.gz here]")  # fmt: skip
@click.option(
    "--saveCodeDir",
    "-s",
    "has_code",
    is_flag=True,
    help="Also the code folder, without what .nniignore names.",
)
def save(experiment_id: str, target: Path | None, has_code: bool) -> None:
    """Write an experiment that is over to one file: results, logs, what its tuner knows. Logins and keys are not in it."""
    from nni_manager.cli import archive

    known = resolve(experiment_id)
    name = known.experiment_id
    if known.manager is not None:
        raise UserMistake(f"cannot save experiment {name}: it runs; `nnictl stop {name}` first")
    state = stored_status(known.folder)
    if not state["isOver"]:
        raise UserMistake(
            f"cannot save experiment {name}: its manager died while it was {state['status']}, and its trials may run; "
            f"`nnictl resume {name}` and `nnictl stop {name}` first"
        )
    path = Path.cwd() / (target or archive.default_target(name))
    if path.is_dir():
        path /= archive.default_target(name)
    if path.exists():
        raise UserMistake(f"cannot write {path}: it is there already; name another file, or remove it")
    with known.folder.owned():  # nobody resumes it meanwhile
        warnings = archive.save(known.folder, path, has_code=has_code)
    for warning in warnings:
        output.warning(warning)
    output.info(
        f"Saved experiment {name} to {path}; `nnictl experiment load --path {path.name}` makes it anew"
    )


@click.command(
    epilog=example(
        "nnictl experiment load --path digits.tar.gz",
        "nnictl experiment load -p digits.tar.gz --codeDir ~/digits --logDir /data/experiments",
    )
)
@click.option("--path", "-p", "source", metavar="FILE", required=True, type=click.Path(path_type=Path))
@click.option("--codeDir", "-c", "code_dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="The code folder. Code that was saved is unpacked there if it is empty.")  # fmt: skip
@click.option("--logDir", "-l", "log_dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Where the experiment's folder is made.  [default: ~/nni-experiments]")  # fmt: skip
@click.option("--searchSpacePath", "-s", "space_path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the search space there, to be looked at.")  # fmt: skip
@click.option("--storage", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Where this machine has the shared storage (nniManagerNFSMountPath).")  # fmt: skip
def load(
    source: Path, code_dir: Path | None, log_dir: Path | None, space_path: Path | None, storage: Path | None
) -> None:
    """Make an experiment of an archive. It can be viewed, and resumed: that runs the command that the archive names.

    For OpenPAI the login is taken from OPENPAI_TOKEN or OPENPAI_PASSWORD.
    """
    from nni_manager.cli import archive

    token, password = os.environ.get("OPENPAI_TOKEN"), os.environ.get("OPENPAI_PASSWORD")
    logs = _absolute(log_dir) or Path.home() / "nni-experiments"
    places = archive.Places(logs, _absolute(code_dir), _absolute(storage), token, password)
    folder, config = archive.load(source, places)
    if space_path is not None:
        space_path.write_text(
            json.dumps(config.search_space_raw, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
    name = folder.experiment_id
    output.info(f"Loaded experiment {name} ({stored_status(folder)['status']}) into {folder.path}")
    if config.tuner.name == "CmaEs":
        output.warning(
            "what CMA-ES knew of its own is a program and was left out: it learns from the results anew, and goes on "
            "otherwise than it would have"
        )
    runs = [f"`{config.trial_command}` in {config.code_dir}" if config.trial_command else "its job file"]
    for own in (config.tuner.own, None if config.assessor is None else config.assessor.own):
        if own is not None:
            runs.append(f"{own.class_name} of {own.code_dir or 'an installed module'}")
            if own.code_dir is not None and not Path(own.code_dir).is_dir():
                output.warning(
                    f"there is no folder {own.code_dir} here: put the code of {own.class_name} there"
                )
    # Which cluster an archive names is to be looked at: that one gets the login.
    where = "" if config.pai is None or config.pai.is_local else f", on OpenPAI {config.pai.host}"
    output.info(
        f"`nnictl view {name}` shows it; `nnictl resume {name}` goes on with it and runs {' and '.join(runs)}{where}"
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else Path(os.path.abspath(path.expanduser()))


COMMANDS = (save, load)
