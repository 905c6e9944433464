"""Command lines as NNI's users write them: its commands, its options with underscores, and prefixes of long options.

They are translated before click reads them, so the help pages show one name of each. Source: NNI v1.9, v2.10 and v3.0, nnictl.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import click

from nni_manager.errors import UserError

_COMMANDS = {
    "algo reg": "algo register",
    "algo unreg": "algo unregister",
    "config show": "experiment show",
}
_OPTIONS = {"--meta-path": "--meta"}
_IN_A_CHECKOUT = "run `nnictl create --config examples/digits/config.yml` in a checkout"
_ADVICE = {
    "hello": f"there is no example in the package; {_IN_A_CHECKOUT}",
    "jupyter-extension": "there is no extension of JupyterLab; `nnictl webui url` prints a link to the web page",
    "package": "it is `nnictl algo` since NNI 2.0; `nnictl algo --help` shows the usage",
    "ss_gen": "search spaces are not generated from code; write a search space file, or annotations and useAnnotation: true",
    "trainingservice register": "install the package that provides the platform with pip in this Python; "
    "`nnictl trainingservice list` then shows it",
    "trainingservice unregister": "uninstall the package that provides the platform with pip",
    "webui nas": "architecture search is not a part of trial-keeper; use the package nni for it",
}

# What other tools call a command, or the place where they have it.
_SYNONYMS = {
    "best": "trial ls --best 5",
    "cancel": "stop",
    "list": "experiment list",
    "logs": "log trial",
    "ls": "experiment list",
    "ps": "experiment list",
    "rm": "experiment delete",
    "run": "create",
    "start": "create",
    "trial list": "trial ls",
    "trial log": "log trial",
    "trial stop": "trial kill",
}
# Groups whose commands are for few users: named only if no other group has the command.
_SPECIAL_GROUPS = ("algo", "openpai", "platform", "tensorboard")


class CommandOfNni(UserError):
    """cannot run this command of NNI; the message says what to write"""


def translated(cli: click.Group, arguments: Sequence[str]) -> list[str]:
    """Return the command line in our spelling. Unknown words stay as they are; click reports them.

    Raises:
        CommandOfNni: NNI has the command, and we do not; the message says what to write.
    """
    words, group = list(arguments), cli
    for count, word in enumerate(words, 1):
        path, rest = " ".join(words[:count]), words[count:]
        if path in _COMMANDS:
            return translated(cli, [*_COMMANDS[path].split(), *rest])
        found = group.commands.get(word)
        if found is None and path in _ADVICE:
            raise CommandOfNni(f"cannot run nnictl {path}: {_ADVICE[path]}")
        if found is None:
            break
        if not isinstance(found, click.Group):
            rest = ["--all" if path == "stop" and each == "all" else each for each in rest]
            return words[:count] + _with_known_options(found, rest)
        group = found
    return words


def elsewhere(cli: click.Group, group: str, word: str) -> list[str]:
    """The commands that a word which is no command of a group may mean, such as `experiment export` for `export`.

    `group`: its path, empty for the program itself.
    """
    for name in (f"{group} {word}".strip(), word):
        if name in _SYNONYMS:
            return [_SYNONYMS[name]]
    paths = [*_paths(cli)]
    names = {path.rpartition(" ")[2] for path in paths}
    # click itself suggests commands of the group that are nearly the word.
    if word not in names and not group and not difflib.get_close_matches(word, cli.commands):
        word = next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.8)), word)
    found = [path for path in paths if path.rpartition(" ")[2] == word]
    usual = [path for path in found if path.partition(" ")[0] not in _SPECIAL_GROUPS]
    return usual or found


def _paths(group: click.Group, above: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _paths(command, f"{above}{name} ")
        else:
            yield above + name


def _with_known_options(command: click.Command, words: list[str]) -> list[str]:
    options = [name for each in command.params for name in each.opts if name.startswith("--")] + ["--help"]
    end = words.index("--") if "--" in words else len(words)
    return [_known(word, options) if word.startswith("--") else word for word in words[:end]] + words[end:]


def _known(word: str, options: Sequence[str]) -> str:
    """The option in our spelling, with its value."""
    name, equals, value = word.partition("=")
    if name in options:
        return word
    dashed = name.replace("_", "-")
    dashed = _OPTIONS.get(dashed, dashed)
    starting = [each for each in options if each.startswith(dashed)]
    known = [dashed] if dashed in options else starting
    return f"{known[0]}{equals}{value}" if len(known) == 1 else word
