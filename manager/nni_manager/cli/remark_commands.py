"""nnictl trial tag, trial note, experiment tag and experiment note: what people remark on trials and experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from nni_manager.cli import options
from nni_manager.cli.experiment_commands import experiment
from nni_manager.cli.trial_commands import trial
from nni_manager.client import output
from nni_manager.support.plain_text import escaped

if TYPE_CHECKING:
    from nni_manager.domain.remarks import Remarks, RemarksChange

Command = Callable[..., None]


def _tag_options(command: Command) -> Command:
    for option in (
        click.option("--remove", "removed", multiple=True, metavar="TAG",
                     help="Remove this tag; may be repeated. A tag that is not there is no error."),
        click.option("--add", "added", multiple=True, metavar="TAG",
                     help="Add this tag; may be repeated. Letters, digits and - _ . : / are allowed."),
    ):  # fmt: skip
        command = option(command)
    return command


_text_option = click.option(
    "--text", metavar="TEXT", help='The new note, which may have several lines; --text "" removes the note.'
)


@trial.command(
    epilog=options.example(
        "nnictl trial tag --trial-id aB3dE --add keep --add lr/high",
        "nnictl trial tag GvTf2bVe -T aB3 --remove keep",
        "nnictl trial tag --trial-id aB3dE",
    )
)
@options.experiment_argument
@options.trial_option("The trial to tag.")
@_tag_options
@options.json_option
def tag(
    experiment_id: str | None,
    trial_id: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    as_json: bool,
) -> None:
    """Add tags to a trial, remove some, or print them; also after the experiment has ended.

    `nnictl trial ls --tag TAG` lists the trials with a tag.
    """
    _tag(experiment_id, trial_id, added, removed, as_json=as_json)


@trial.command(
    epilog=options.example(
        'nnictl trial note --trial-id aB3dE --text "converges late, try more epochs"',
        "nnictl trial note GvTf2bVe -T aB3",
        'nnictl trial note --trial-id aB3dE --text ""',
    )
)
@options.experiment_argument
@options.trial_option("The trial that the note is about.")
@_text_option
def note(experiment_id: str | None, trial_id: str, text: str | None) -> None:
    """Set the note of a trial, or print it; also after the experiment has ended."""
    _note(experiment_id, trial_id, text)


@experiment.command(
    "tag",
    epilog=options.example(
        "nnictl experiment tag --add baseline",
        "nnictl experiment tag GvTf2bVe --add paper --remove baseline",
        "nnictl experiment tag GvTf2bVe",
    ),
)
@options.experiment_argument
@_tag_options
@options.json_option
def tag_experiment(
    experiment_id: str | None, added: tuple[str, ...], removed: tuple[str, ...], as_json: bool
) -> None:
    """Add tags to an experiment, remove some, or print them; also after it has ended.

    `nnictl experiment list --tag TAG` lists the experiments with a tag.
    """
    _tag(experiment_id, None, added, removed, as_json=as_json)


@experiment.command(
    "note",
    epilog=options.example(
        'nnictl experiment note --text "with the cleaned labels"',
        "nnictl experiment note GvTf2bVe",
        'nnictl experiment note GvTf2bVe --text ""',
    ),
)
@options.experiment_argument
@_text_option
def note_experiment(experiment_id: str | None, text: str | None) -> None:
    """Set the note of an experiment, or print it; also after it has ended."""
    _note(experiment_id, None, text)


def _tag(
    experiment_id: str | None,
    trial_id: str | None,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    from nni_manager.domain.remarks import RemarksChange

    change = RemarksChange.of(added, removed)
    whose, remarks = _read_or_change(experiment_id, trial_id, change if added or removed else None)
    if as_json:
        output.print_json(remarks.tags)
        return
    output.info(f"{whose} has the tags {', '.join(remarks.tags)}" if remarks.tags else f"{whose} has no tags")


def _note(experiment_id: str | None, trial_id: str | None, text: str | None) -> None:
    from nni_manager.domain.remarks import RemarksChange

    change = RemarksChange.of(note=text)
    whose, remarks = _read_or_change(experiment_id, trial_id, change if text is not None else None)
    if text is not None:
        output.info(f"{whose}: the note is {'stored' if remarks.note else 'removed'}")
    elif remarks.note:
        for line in remarks.note.split("\n"):
            output.plain(escaped(line))
    else:
        output.note(f"{whose} has no note")


def _read_or_change(
    experiment_id: str | None, trial_id: str | None, change: RemarksChange | None
) -> tuple[str, Remarks]:
    """Whose remarks these are, as the start of a sentence, and the remarks, after the change if there is one."""
    from nni_manager.client.remarks import change_remarks, remarks_of

    known = options.experiment(experiment_id)
    if trial_id is None:
        whose = f"Experiment {known.experiment_id}"
    else:
        trial_id = known.trial_id(trial_id)
        whose = f"Trial {trial_id}"
    if change is None:
        return whose, remarks_of(known, trial_id)
    return whose, change_remarks(known, change, trial_id)
