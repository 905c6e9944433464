"""Command lines as NNI's users write them: its commands, its options with underscores, and prefixes of long options.

They are translated before click reads them, so the help pages show one name of each. Source: NNI v1.9, v2.10 and v3.0, nnictl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import click

from nni_manager.errors import UserError

_COMMANDS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("algo", "reg"): ("algo", "register"),
    ("algo", "unreg"): ("algo", "unregister"),
    ("config", "show"): ("experiment", "show"),
}
_OPTIONS = {"--meta-path": "--meta"}
_ADVICE: Mapping[tuple[str, ...], str] = {
    (
        "hello",
    ): "there is no example in the package; run `nnictl create --config examples/digits/config.yml` in a checkout",
    (
        "jupyter-extension",
    ): "there is no extension of JupyterLab; `nnictl webui url` prints a link to the web page",
    ("package",): "it is `nnictl algo` since NNI 2.0; `nnictl algo --help` shows the usage",
    (
        "ss_gen",
    ): "search spaces are not generated from code; write a search space file, or annotations and useAnnotation: true",
    (
        "trainingservice",
    ): "the platforms are built in; write local, openpai, frameworkcontroller or kubeflow into the experiment file",
    ("webui", "nas"): "architecture search is not a part of trial-keeper; use the package nni for it",
}


class CommandOfNni(UserError):
    """cannot run this command of NNI; the message says what to write"""


def translated(cli: click.Group, arguments: Sequence[str]) -> list[str]:
    """Return the command line in our spelling. What nobody knows stays as it is, so that click reports it.

    Raises:
        CommandOfNni: NNI has the command, and we do not; the message says what to write.
    """
    words, path, command = list(arguments), [], cli
    for index, word in enumerate(words):
        if word.startswith("-"):
            continue
        path.append(word)
        ours = _COMMANDS.get(tuple(path))
        if ours is not None:
            return translated(cli, _replaced(words, index, len(path), ours))
        found = command.commands.get(word)
        if found is None:
            advice = next((text for name, text in _ADVICE.items() if tuple(path[: len(name)]) == name), None)
            if advice is not None:
                raise CommandOfNni(f"cannot run nnictl {' '.join(path)}: {advice}")
            return words
        if not isinstance(found, click.Group):
            rest = ["--all" if path == ["stop"] and each == "all" else each for each in words[index + 1 :]]
            return words[: index + 1] + _with_known_options(found, rest)
        command = found
    return words


def _replaced(words: list[str], last: int, count: int, ours: Sequence[str]) -> list[str]:
    """Replace the last `count` words that are no options, the last of them at `last`."""
    names = [index for index, word in enumerate(words[: last + 1]) if not word.startswith("-")][-count:]
    kept = [word for index, word in enumerate(words) if index not in names]
    return [*ours, *kept]


def _with_known_options(command: click.Command, words: list[str]) -> list[str]:
    options = [name for each in command.params for name in each.opts if name.startswith("--")] + ["--help"]
    end = words.index("--") if "--" in words else len(words)
    return [_known(word, options) if word.startswith("--") else word for word in words[:end]] + words[end:]


def _known(word: str, options: Iterable[str]) -> str:
    """The option in our spelling, with its value."""
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    dashed = _OPTIONS.get(dashed, dashed)
    starting = {each for each in options if each.startswith(dashed)}
    known = (
        name
        if name in options
        else dashed
        if dashed in starting
        else starting.pop()
        if len(starting) == 1
        else name
    )
    return f"{known}{equals}{value}"
