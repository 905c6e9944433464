"""The documentation matches the program."""

import re
from pathlib import Path

import click
import pytest

from nni_manager.cli import main

ROOT = Path(__file__).parents[2]


def text_of(name):
    return (ROOT / name).read_text()


def all_commands(group=main.cli, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("command", list(all_commands()), ids=" ".join)
def test_every_nnictl_command_is_in_the_nnictl_page_and_the_changelog(command):
    *group, name = command
    # The page describes most commands in a row of their own. The commands of `openpai` share one row, because they have their own
    # pages.
    mention = (
        rf"`nnictl openpai …`.*`{name}`" if group == ["openpai"] else rf"^\| `nnictl {' '.join(command)}\b"
    )
    words = " ".join(command)
    is_listed = re.search(mention, text_of("docs/nnictl.md"), re.MULTILINE)
    assert is_listed, f"add a row that starts with `nnictl {words}` to docs/nnictl.md"
    # The changelog may join the commands of a group, as in `trial ls|kill`.
    mention = rf"`{' '.join(group)} [\w|]*\b{name}\b" if group else rf"`{name}`"
    is_in_changelog = re.search(mention, text_of("CHANGELOG.md"))
    assert is_in_changelog, f"name the command `{words}`, without nnictl, in CHANGELOG.md"


def test_every_key_that_has_no_effect_is_marked_in_the_documentation():
    (row,) = [
        line for line in text_of("docs/experiment-file.md").splitlines() if "| `nniManagerIp` |" in line
    ]
    assert "without effect" in row


def test_the_documentation_describes_the_bash_options_of_commands_and_how_to_ignore_a_failure():
    page = text_of("docs/experiment-file.md")
    assert "bash -e -o pipefail -c" in page
    assert "|| true" in page
