"""Reads a YAML or JSON file into plain values, with the line of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nni_manager.config.diagnostics import MAX_DIAGNOSTICS, ConfigInvalid, Diagnostic, folded, key_of

PathInFile = Sequence[str | int]

# Experiment files have some kB. PyYAML parses only 100 kB a second.
MAX_BYTES = 512 * 1024
# Aliases expand a short text to a large value. A file of MAX_BYTES has about this many values without aliases.
MAX_VALUES = 100_000
# A search space has about ten levels. Walkers recurse once per level, and PyYAML's cost per bracket grows with the depth.
MAX_LEVELS = 100
# The largest double has 1,024 bits; Python refuses to print much longer integers.
_MAX_BITS = 1024
_TOO_DEEP = f"more than {MAX_LEVELS} levels deep"
# Diagnostics of larger JSON files have no lines: finding them takes longer than reading the file.
_MAX_BYTES_WITH_LINES = 256 * 1024


class _Loader(yaml.SafeLoader):
    """Loads YAML's safe types, and numbers such as 1e-4, which YAML 1.1 reads as text. Depth and integers are bounded."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803 - PyYAML's name
        """Open a list or a mapping in brackets; refuse more than MAX_LEVELS."""
        if self.flow_level >= MAX_LEVELS:
            raise yaml.scanner.ScannerError(None, None, _TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. PyYAML expects that a scalar with an explicit tag, such as `!!int`, has the form of its type."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, IndexError, KeyError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"this is not a value of type {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """A whole number of at most 1,024 bits."""
        value = self.construct_yaml_int(node)
        if value.bit_length() > _MAX_BITS:
            raise yaml.constructor.ConstructorError(
                None, None, "no number has so many digits", node.start_mark
            )
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


class _Dumper(yaml.SafeDumper):
    """Dumps YAML; quotes text that would be read as a number."""


_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def as_yaml(value: Any) -> str:
    """A mapping as YAML text, in its order; `read_yaml` restores the same mapping."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content as plain values (`value`), with the syntax diagnostics that did not prevent reading.

    `file` is the path as given, for messages. `root` None: no positions are available.
    """

    file: str
    value: Any
    root: yaml.Node | None
    diagnostics: tuple[Diagnostic, ...] = ()

    def diagnostic(self, path: PathInFile, message: str) -> Diagnostic:
        """A diagnostic at this path, or at its nearest parent that is in the file."""
        line, column = self._place(path)
        return Diagnostic(self.file, line, column, key_of(path), message)

    def _place(self, path: PathInFile) -> tuple[int | None, int | None]:
        node, mark = self.root, None
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            mark, node = found
        return (None, None) if mark is None else (mark.line + 1, mark.column + 1)


def read_yaml(path: Path) -> Document:
    """The single YAML document in `path`, of safe types only.

    Raises:
        ConfigInvalid: it cannot be read or is not one YAML document; exactly one diagnostic.
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
        # PyYAML reports a tab as an invalid token; the message says what to change.
        mark = error.problem_mark or error.context_mark
        remedy = "indent with spaces" if "'\\t'" in problem else "fix the YAML there"
        if "mapping values" in problem and mark is not None:
            line = text.splitlines()[mark.line]
            if ":" in line[: mark.column]:
                problem = "the value in this line has a colon and a blank, which begin another value in YAML"
                remedy = "put the whole value in single quotes"
            else:
                remedy = _remedy_for_a_lost_line(line)
        for found, (said, what_to_do) in _IN_PLAIN_WORDS.items():
            if found in problem:
                problem, remedy = said, what_to_do
        place = (None, None) if mark is None else (mark.line + 1, mark.column + 1)
        raise _refused(path, f"cannot read {path.name}: {problem}; {remedy}", *place) from error
    except yaml.YAMLError as error:
        raise _refused(path, f"cannot read {path.name}: {_one_line(error)}; fix the YAML there") from error
    except ValueError as error:
        # A scalar in the form of a date or number with an invalid value, such as 2024-99-99.
        raise _refused(path, f"cannot read {path.name}: {error}; put such text in quotes") from error
    except RecursionError as error:
        raise _refused(path, f"cannot read {path.name}: it is nested too deeply; make it flatter") from error
    finally:
        if loader is not None:
            loader.dispose()


def read_json(path: Path, most_bytes: int = MAX_BYTES) -> Document:
    """The JSON document in `path`. NaN and Infinity are refused: they are not JSON.

    Raises:
        ConfigInvalid: it cannot be read or is not JSON; exactly one diagnostic.
    """
    text = _text(path, most_bytes)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        message = f"cannot read {path.name}: not JSON at column {error.colno}, {error.msg}; fix it there"
        raise _refused(path, message, error.lineno, error.colno) from error
    except ValueError as error:
        raise _refused(path, f"cannot read {path.name}: {error}; write a finite number") from error
    except RecursionError as error:
        raise _refused(path, f"cannot read {path.name}: it is nested too deeply; make it flatter") from error
    if _is_too_deep(value):
        raise _refused(path, f"cannot read {path.name}: it is nested too deeply; make it flatter")
    if len(text) > _MAX_BYTES_WITH_LINES:
        return Document(str(path), value, None)
    try:
        # JSON is YAML except for tabs between tokens. JSON strings contain no tabs, so columns stay correct.
        root = yaml.compose(text.replace("\t", " "), Loader=_Loader)
        return Document(str(path), value, root, tuple(_repeated_keys(root, str(path))) if root else ())
    except (yaml.YAMLError, RecursionError):
        # The text is valid JSON: only the lines of diagnostics are lost.
        return Document(str(path), value, None)


# Text copied from web pages often lacks the lines that contain only a section name.
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


# PyYAML's problems in terms of its tokens, and the problem and remedy for the user.
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
        return "what is indented more than the line above lies within it, and that line has a value; fix the indentation"
    return f"the line above has a value, so {key} cannot lie within it; is the line `{section}:` missing between the two?"


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _text(path: Path, most_bytes: int = MAX_BYTES) -> str:
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
    return ConfigInvalid([Diagnostic(str(path), line, column, "", message)])


def _absent(path: Path, why: str) -> ConfigInvalid:
    # The file cannot be read: the diagnostic has no position.
    return ConfigInvalid([Diagnostic("", None, None, "", f"cannot read {path}: {why}")])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _child(node: yaml.Node | None, step: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    """The mark and the node of the child `step`; None if it is absent. The mark is the key's, or a list item's own."""
    if isinstance(node, yaml.MappingNode):
        # The exact spelling wins over others.
        for spelling in (str, folded):
            for key, value in node.value:
                if spelling(str(step)) == spelling(str(key.value)):
                    return key.start_mark, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark, node.value[step]
    return None


def _repeated_keys(root: yaml.Node, file: str) -> list[Diagnostic]:
    """A diagnostic for each key repeated in one mapping; YAML and JSON silently keep the last.

    Raises:
        yaml.constructor.ConstructorError: an anchor contains itself, or aliases expand to too large a value.
    """
    diagnostics: list[Diagnostic] = []
    # The number of values of each node, with aliases expanded.
    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def visit(node: yaml.Node, path: tuple[str | int, ...]) -> int:
        if id(node) in open_:
            raise yaml.constructor.ConstructorError(None, None, "an anchor contains itself", node.start_mark)
        if id(node) in sizes:
            return sizes[id(node)]
        open_.add(id(node))
        if len(open_) > MAX_LEVELS:
            raise yaml.constructor.ConstructorError(None, None, _TOO_DEEP, node.start_mark)
        size = 1
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name = str(key.value)
                here = (*path, name)
                if name in lines and len(diagnostics) < MAX_DIAGNOSTICS:
                    message = (
                        f"cannot use {key_of(here)}: it is in line {lines[name]} already; keep one of the two"
                    )
                    mark = key.start_mark
                    diagnostics.append(
                        Diagnostic(file, mark.line + 1, mark.column + 1, key_of(here), message)
                    )
                lines.setdefault(name, key.start_mark.line + 1)
                # A key may be a list with aliases.
                size += visit(key, here) + visit(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                size += visit(item, (*path, index))
        if size > MAX_VALUES:
            problem = f"its aliases make more than {MAX_VALUES:,} values of it"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        open_.remove(id(node))
        sizes[id(node)] = size
        return size

    visit(root, ())
    return diagnostics
