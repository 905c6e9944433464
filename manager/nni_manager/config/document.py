"""Reads a YAML or JSON file into plain values, and knows the line of each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nni_manager.config.mistakes import MOST_MISTAKES, ConfigInvalid, Mistake, folded, key_of

PathInFile = Sequence[str | int]

# An experiment file has some kB. More takes PyYAML longer than anybody waits (100 kB a second).
MOST_BYTES = 512 * 1024
# Aliases make a short text a large value. A text of the largest size has about as many values of its own.
MOST_VALUES = 100_000
# A search space has some ten. Whoever walks a value does so with a call for each level, and PyYAML looks at all brackets that
# are open for each that opens.
MOST_LEVELS = 100
# The largest double has 1,024 bits; Python refuses to write down what is much longer.
_MOST_BITS = 1024
_TOO_DEEP = f"more than {MOST_LEVELS} levels deep"
# The lines of a larger JSON file are not looked up, as that takes longer than reading it.
_MOST_BYTES_WITH_LINES = 256 * 1024


class _Loader(yaml.SafeLoader):
    """YAML's safe types, and numbers such as 1e-4, which YAML 1.1 reads as text for want of a dot. Nothing without bounds."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803 - PyYAML's name
        """Open a list or a mapping in brackets."""
        if self.flow_level >= MOST_LEVELS:
            raise yaml.scanner.ScannerError(None, None, _TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """A whole number that can be written down."""
        value = self.construct_yaml_int(node)
        if value.bit_length() > _MOST_BITS:
            raise yaml.constructor.ConstructorError(
                None, None, "no number has so many digits", node.start_mark
            )
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that would be read as a number."""


_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def as_yaml(value: Any) -> str:
    """A mapping as YAML text, in its order, that `read_yaml` reads as the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content as plain values (`value`), and the mistakes of form that did not hinder reading it.

    `file` is the path as given, for messages.
    """

    file: str
    value: Any
    root: yaml.Node | None
    mistakes: tuple[Mistake, ...] = ()

    def mistake(self, path: PathInFile, message: str) -> Mistake:
        """A mistake at this path, or at the nearest place above it that is in the file."""
        line, column = self._place(path)
        return Mistake(self.file, line, column, key_of(path), message)

    def _place(self, path: PathInFile) -> tuple[int | None, int | None]:
        node, mark = self.root, None
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            mark, node = found
        return (None, None) if mark is None else (mark.line + 1, mark.column + 1)


def read_yaml(path: Path) -> Document:
    """The YAML document in `path`: one, of safe types only.

    Raises:
        ConfigInvalid: it cannot be read or is not one YAML document; exactly one mistake.
    """
    text, loader = _text(path), None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise _refused(path, f"cannot read {path.name}: it is empty; write the experiment's keys into it")
        repeated = _repeated_keys(root, str(path))
        return Document(str(path), loader.construct_document(root), root, tuple(repeated))
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "not YAML"
        # PyYAML's own words for a tab are about tokens; the user sees white space.
        mark = error.problem_mark or error.context_mark
        remedy = "indent with spaces" if "'\\t'" in problem else "mend the YAML there"
        if "mapping values" in problem and mark is not None:
            line = text.splitlines()[mark.line]
            if ":" in line[: mark.column]:
                problem = "the value in this line has a colon and a blank, which begin another value in YAML"
                remedy = "put the whole value in single quotes"
            else:
                remedy = _remedy_for_a_lost_line(line)
        for found, (said, way_out) in _IN_PLAIN_WORDS.items():
            if found in problem:
                problem, remedy = said, way_out
        place = (None, None) if mark is None else (mark.line + 1, mark.column + 1)
        raise _refused(path, f"cannot read {path.name}: {problem}; {remedy}", *place) from error
    except yaml.YAMLError as error:
        raise _refused(path, f"cannot read {path.name}: {_one_line(error)}; mend the YAML there") from error
    except ValueError as error:
        # A scalar that looks like a date or number and is none, such as 2024-99-99.
        raise _refused(path, f"cannot read {path.name}: {error}; put such text in quotes") from error
    except RecursionError as error:
        raise _refused(path, f"cannot read {path.name}: it is nested too deeply; make it flatter") from error
    finally:
        if loader is not None:
            loader.dispose()


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Document:
    """The JSON document in `path`. NaN and Infinity are refused: they are not JSON.

    Raises:
        ConfigInvalid: it cannot be read or is not JSON; exactly one mistake.
    """
    text = _text(path, most_bytes)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        message = f"cannot read {path.name}: not JSON at column {error.colno}, {error.msg}; mend it there"
        raise _refused(path, message, error.lineno, error.colno) from error
    except ValueError as error:
        raise _refused(path, f"cannot read {path.name}: {error}; write a finite number") from error
    except RecursionError as error:
        raise _refused(path, f"cannot read {path.name}: it is nested too deeply; make it flatter") from error
    if _is_too_deep(value):
        raise _refused(path, f"cannot read {path.name}: it is nested too deeply; make it flatter")
    if len(text) > _MOST_BYTES_WITH_LINES:
        return Document(str(path), value, None)
    try:
        # JSON is YAML but for tabs between tokens; inside strings JSON allows none, so columns stay right.
        root = yaml.compose(text.replace("\t", " "), Loader=_Loader)
        return Document(str(path), value, root, tuple(_repeated_keys(root, str(path))) if root else ())
    except (yaml.YAMLError, RecursionError):
        # The text is valid JSON: only the line numbers of later messages are lost.
        return Document(str(path), value, None)


# Copies from web pages lose lines that hold nothing but the name of a section.
_SECTION_OF = {
    "builtinTunerName": "tuner",
    "builtinAssessorName": "assessor",
    "builtinAdvisorName": "advisor",
    "optimize_mode": "classArgs",
    "command": "trial",
    "codeDir": "trial",
    "userName": "paiConfig",
    "operator": "kubeflowConfig",
    "platform": "trainingService",
}


# What PyYAML finds, in words of its own parts, and what its user sees.
_IN_PLAIN_WORDS = {
    "<block end>, but found '<block mapping start>'": (
        "this line is indented like none above it",
        "give the keys of one section the same indentation",
    ),
    "<block end>, but found '<scalar>'": (
        "text follows a closing quote or bracket",
        "put the whole value in quotes of the other kind",
    ),
    "<block end>, but found '-'": (
        "an item of a list stands among keys",
        "write `key: value` here, or indent the item below the key of its list",
    ),
    "found another document": ("a second document begins here, after ---", "keep one experiment in a file"),
}


def _remedy_for_a_lost_line(line: str) -> str:
    key = line.partition(":")[0].strip()
    section = _SECTION_OF.get(key)
    if section is None:
        return "what is indented more than the line above lies within it, and that line has a value; mend the indentation"
    return f"the line above has a value, so {key} cannot lie within it; is the line `{section}:` missing between the two?"


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            message = f"cannot read {path.name}: it has more than {most_bytes:,} bytes; keep what the experiment needs"
            raise _refused(path, message)
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise _absent(path, "there is no such file; check the path") from error
    except IsADirectoryError as error:
        raise _absent(path, "it is a folder; name the file in it") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"cannot read {path.name}: byte {error.start} is not UTF-8; save the file as UTF-8"
        raise _refused(path, message, line) from error
    except OSError as error:
        raise _absent(path, f"{error.strerror}; check the file") from error


def _refused(path: Path, message: str, line: int | None = None, column: int | None = None) -> ConfigInvalid:
    return ConfigInvalid([Mistake(str(path), line, column, "", message)])


def _absent(path: Path, why: str) -> ConfigInvalid:
    # There is no file in which to have a place.
    return ConfigInvalid([Mistake("", None, None, "", f"cannot read {path}: {why}")])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _child(node: yaml.Node | None, step: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    """Where the child `step` is: its key's mark (an item's own in a list), and its node."""
    if isinstance(node, yaml.MappingNode):
        # By any of the spellings that are taken, but rather by this one.
        for spelling in (str, folded):
            for key, value in node.value:
                if spelling(str(step)) == spelling(str(key.value)):
                    return key.start_mark, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark, node.value[step]
    return None


def _repeated_keys(root: yaml.Node, file: str) -> list[Mistake]:
    """A mistake for each key written twice in one mapping, where YAML and JSON silently keep the last.

    Raises:
        yaml.constructor.ConstructorError: an anchor contains itself, or aliases make too large a value.
    """
    mistakes: list[Mistake] = []
    # How many values a node is, with those that its aliases stand for.
    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def visit(node: yaml.Node, path: tuple[str | int, ...]) -> int:
        if id(node) in open_:
            raise yaml.constructor.ConstructorError(None, None, "an anchor contains itself", node.start_mark)
        if id(node) in sizes:
            return sizes[id(node)]
        open_.add(id(node))
        if len(open_) > MOST_LEVELS:
            raise yaml.constructor.ConstructorError(None, None, _TOO_DEEP, node.start_mark)
        size = 1
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name = str(key.value)
                here = (*path, name)
                if name in lines and len(mistakes) < MOST_MISTAKES:
                    message = (
                        f"cannot use {key_of(here)}: it is in line {lines[name]} already; keep one of the two"
                    )
                    mark = key.start_mark
                    mistakes.append(Mistake(file, mark.line + 1, mark.column + 1, key_of(here), message))
                lines.setdefault(name, key.start_mark.line + 1)
                # A key may be a list, too, and hold aliases.
                size += visit(key, here) + visit(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                size += visit(item, (*path, index))
        if size > MOST_VALUES:
            problem = f"its aliases make more than {MOST_VALUES:,} values of it"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        open_.remove(id(node))
        sizes[id(node)] = size
        return size

    visit(root, ())
    return mistakes
