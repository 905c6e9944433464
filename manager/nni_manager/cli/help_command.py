"""nnictl help: the documentation's pages, and the help of commands."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from nni_manager.cli.options import example
from nni_manager.client import output
from nni_manager.errors import UserError

_INSTALLED = Path(__file__).parents[1] / "docs"
# In a checkout, the pages are beside the packages.
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[3] / "docs"
_FOR_DEVELOPERS = ("internals",)
_MOST_PAGES = 3


def _topics() -> dict[str, Path]:
    return {page.stem: page for page in sorted(_FOLDER.glob("*.md")) if page.stem not in _FOR_DEVELOPERS}


def _complete(_: click.Context, __: click.Parameter, prefix: str) -> list[str]:
    return [topic for topic in _topics() if topic.startswith(prefix)]


@click.command("help", epilog=example("nnictl help", "nnictl help tuners", "nnictl help trial ls"))
@click.argument("words", metavar="[TOPIC|COMMAND]", nargs=-1, shell_complete=_complete)
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show a page of the documentation, or a command's help.

    Without a topic, list all pages.
    """
    topics = _topics()
    if not words:
        output.plain("Pages of the documentation; `nnictl help TOPIC` shows one:")
        output.plain()
        output.print_list(
            ["topic", "content"], [[topic, _first_sentence(page)] for topic, page in topics.items()]
        )
        return
    page = topics.get(words[0].removeprefix("docs/").removesuffix(".md")) if len(words) == 1 else None
    if page is not None:
        _show(page.read_text(encoding="utf-8"))
        return
    root = context.find_root()
    command: click.Command | None = root.command
    for word in words:
        command = command.commands.get(word) if isinstance(command, click.Group) else None
    if command is None:
        name = " ".join(words)
        near = difflib.get_close_matches(name, [*topics, *_commands(root.command)], n=1)
        meant = near or _pages_with(name, topics)
        hint = f"did you mean {' or '.join(f'`nnictl help {each}`' for each in meant)}? " if meant else ""
        raise UserError(f"cannot find a page or a command {name!r}; {hint}`nnictl help` lists all pages")
    with click.Context(command, info_name=" ".join(words), parent=root) as shown:
        output.plain(command.get_help(shown))


def _pages_with(words: str, topics: Mapping[str, Path]) -> list[str]:
    """The topics of up to three pages that have these words, those that have them most often first."""
    wanted = words.casefold()
    counts = {
        topic: page.read_text(encoding="utf-8").casefold().count(wanted) for topic, page in topics.items()
    }
    return sorted((topic for topic in counts if counts[topic]), key=lambda topic: -counts[topic])[
        :_MOST_PAGES
    ]


def _commands(group: click.Command, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items() if isinstance(group, click.Group) else ():
        yield f"{path}{name}"
        yield from _commands(command, f"{path}{name} ")


def _first_sentence(page: Path) -> str:
    """The first sentence below the title of a page, as plain text."""
    _, first, *_ = page.read_text(encoding="utf-8").split("\n\n", 2)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("`", "")
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0].rstrip(".:")


def _show(text: str) -> None:
    if not sys.stdout.isatty():
        output.plain(text.rstrip())
        return
    # Imported here: the import takes 100 ms.
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False)
    with console.pager(styles=True, links=False):
        console.print(Markdown(text, hyperlinks=False))
