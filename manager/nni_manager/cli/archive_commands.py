"""nnictl experiment save and load: archives of experiments."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import click

from nni_manager.cli.experiment_commands import experiment
from nni_manager.cli.options import FILE, example, named_experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import resolve
from nni_manager.errors import UserError
from nni_manager.support.plain_text import escaped


@experiment.command(
    epilog=example(
        "nnictl experiment save GvTf2bVe",
        "nnictl experiment save GvTf2bVe --path digits.tar.gz --saveCodeDir",
    )
)
@named_experiment_argument
@click.option("--path", "-p", "target", metavar="FILE|DIR", type=FILE,
              help="Path of the archive.  [default: ID-DATE.tar.gz here]")  # fmt: skip
@click.option(
    "--saveCodeDir",
    "-s",
    "has_code",
    is_flag=True,
    help="Also save the code folder, without the files that .nniignore names.",
)
def save(experiment_id: str, target: Path | None, has_code: bool) -> None:
    """Save an ended experiment to one file: results, logs and tuner state. Logins and keys are left out."""
    from nni_manager.cli import archive

    known = resolve(experiment_id)
    name = known.experiment_id
    if known.manager is not None:
        raise UserError(f"cannot save experiment {name}: it is running; run `nnictl stop {name}` first")
    state = known.stored.status()
    if not state["isTerminal"]:
        raise UserError(
            f"cannot save experiment {name}: its manager exited in state {state['status']}, and its trials may still run; "
            f"run `nnictl resume {name}` and `nnictl stop {name}` first"
        )
    path = Path.cwd() / (target or archive.default_target(name))
    if path.is_dir():
        path /= archive.default_target(name)
    if path.exists():
        raise UserError(f"cannot write {path}: the file exists already; name another file, or remove it")
    # No manager can start during the save.
    with known.folder.owned(is_brief=True), output.naming(path):
        warnings = archive.save(known.folder, path, has_code=has_code)
    for warning in warnings:
        output.warning(warning)
    output.info(
        f"Saved experiment {name} to {path}; `nnictl experiment load --path {shlex.quote(str(path))}` restores it"
    )


@experiment.command(
    epilog=example(
        "nnictl experiment load --path digits.tar.gz",
        "nnictl experiment load -p digits.tar.gz --codeDir ~/digits --logDir /data/experiments",
    )
)
@click.option("--path", "-p", "source", metavar="FILE", required=True, type=FILE)
@click.option("--codeDir", "-c", "code_dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="The code folder. If it is empty, the saved code is unpacked there.")  # fmt: skip
@click.option("--logDir", "-l", "log_dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Parent of the experiment's folder.  [default: ~/nni-experiments]")  # fmt: skip
@click.option("--searchSpacePath", "-s", "space_path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Also write the search space to this file.")  # fmt: skip
@click.option("--storage", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Mount point of the shared storage on this machine (nniManagerNFSMountPath).")  # fmt: skip
@click.option("--no-limits", "is_unlimited", is_flag=True,
              help="Also load a large archive, which may fill disk and memory. For trusted archives only.")  # fmt: skip
def load(
    source: Path,
    code_dir: Path | None,
    log_dir: Path | None,
    space_path: Path | None,
    storage: Path | None,
    is_unlimited: bool,
) -> None:
    """Create an experiment from an archive.

    It can be viewed and resumed; a resume runs the command that the archive names. For OpenPAI, the login is read from
    OPENPAI_TOKEN or OPENPAI_PASSWORD.
    """
    from nni_manager.cli import archive, archive_reader
    from nni_manager.client.stored import StoredDocuments
    from nni_manager.training_services.platform import Locations

    logs = _absolute(log_dir) or Path.home() / "nni-experiments"
    locations = Locations(logs, _absolute(code_dir), _absolute(storage))
    limits = archive_reader.NO_LIMITS if is_unlimited else archive_reader.LIMITS
    loaded = archive.load(source, locations, limits)
    folder, config = loaded.folder, loaded.config
    if space_path is not None:
        # UTF-8 cannot encode a lone surrogate, so it is written as a JSON escape.
        text = json.dumps(config.search_space_raw, indent=2, ensure_ascii=False) + "\n"
        with output.naming(space_path):
            space_path.write_text(text, "utf-8", "backslashreplace")
    name = folder.experiment_id
    output.info(f"Loaded experiment {name} ({StoredDocuments(folder).status()['status']}) into {folder.path}")
    if not loaded.has_its_code:
        output.warning(
            f"the archive's code was not unpacked, because {config.code_dir} is not empty: trials would run the code there; name "
            "an empty folder with --codeDir to unpack the archive's code"
        )
    if config.objective:
        output.warning(
            f"trials run the function {escaped(config.objective)}, which archives do not contain: resume the experiment from "
            f"Python with Experiment.resume({name!r}, objective=FUNCTION)"
        )
    if config.tuner.name == "CmaEs":
        output.warning(
            "the state of CMA-ES was left out, because reading it could run code: the tuner relearns from the results, and may "
            "suggest other trials"
        )
    # Escape control characters: a carriage return in a command would hide the text before it.
    code = escaped(str(config.code_dir))
    runs = [f"`{escaped(config.trial_command)}` in {code}" if config.trial_command else "its job file"]
    for own in (config.tuner.own, None if config.assessor is None else config.assessor.own):
        if own is not None:
            name_of_class = escaped(own.class_name)
            place = escaped(str(own.code_dir or "an installed module"))
            runs.append(f"{name_of_class} of {place}")
            if own.code_dir is not None and not Path(own.code_dir).is_dir():
                output.warning(f"there is no folder {place}; put the code of {name_of_class} there")
    # Name the cluster of the archive, because it receives the user's login.
    receiver = config.cluster.receiver_of_login
    where = f", on {escaped(receiver)}" if receiver else ""
    output.info(
        f"`nnictl view {name}` shows it; `nnictl resume {name}` resumes it and runs {' and '.join(runs)}{where}"
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else Path(os.path.abspath(os.path.expanduser(path)))
