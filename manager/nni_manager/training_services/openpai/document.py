"""Reads a job's text as plain values, with OpenPAI's YAML rules, and records the position of each value.

Mappings become dicts with string keys in text order; `scalars` defines the scalar values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, StringMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import BaseResolver
from ruamel.yaml.scanner import Scanner
from ruamel.yaml.tag import Tag

from nni_manager.config.diagnostics import key_of, shown
from nni_manager.training_services.openpai.job_checks import (
    Path,
    ProtocolDiagnostic,
    ProtocolInvalid,
    Violation,
)
from nni_manager.training_services.openpai.scalars import explicitly, javascript_text, resolved

# A job has about ten levels. Deeper nesting indicates a faulty generator or an attack.
MAX_LEVELS = 64
# Aliases expand a short text to a large value. Without aliases, a text of the server's limit (100 kB) has fewer values.
MAX_VALUES = 100_000

_YAML_TAGS = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Span:
    """A range of the text, as character indices."""

    start: int
    end: int


@dataclass(frozen=True)
class JobDocument:
    """A text, its value, and the form diagnostics that did not prevent reading it. `file` is its name, for messages."""

    text: str
    file: str
    value: Any
    diagnostics: tuple[ProtocolDiagnostic, ...] = ()
    root: Node | None = field(default=None, repr=False, compare=False)
    _known_children: dict[int, dict[str | int, tuple[ScalarNode | None, Node]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def diagnostic(self, path: Path, message: str, violation: Violation | None = None) -> ProtocolDiagnostic:
        """Returns a diagnostic at this path, or at its nearest ancestor in the text."""
        mark: StringMark | None = self.root.start_mark if self.root is not None else None
        for key, node in self._way(path):
            mark = (key or node).start_mark
        line, column = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
        return ProtocolDiagnostic(self.file, line, column, key_of(path), message, path, violation)

    def span(self, path: Path) -> Span | None:
        """Returns the range of `key: value` or a list item: end of the key to end of the value. None: not in the text."""
        steps = list(self._way(path))
        if len(steps) < len(path) or not steps:
            return None
        key, node = steps[-1]
        return Span(node.start_mark.index if key is None else key.end_mark.index, self._end(node))

    def span_with_comments(self, path: Path) -> Span | None:
        """Like `span`, plus the comments after the value, up to the line of the next element."""
        span, steps = self.span(path), list(self._way(path))
        if span is None:
            return None
        node = steps[-1][1]
        if isinstance(node, MappingNode | SequenceNode) and not node.flow_style:
            is_last = node.end_mark.index >= len(self.text)
            next_line = len(self.text) if is_last else self.text.rfind("\n", 0, node.end_mark.index)
            return Span(span.start, max(span.end, next_line))
        comment = re.compile(r"[^\S\n]*#[^\n]*").match(self.text, span.end)
        return Span(span.start, comment.end() if comment else span.end)

    def _end(self, node: Node) -> int:
        if isinstance(node, MappingNode | SequenceNode) and not node.flow_style:
            # The parser ends a block at the next token, after all comments; here it ends with its last value.
            return max(self._end(child) for _, child in self._children(node).values())
        end: int = node.end_mark.index
        return len(self.text[:end].rstrip()) if isinstance(node, ScalarNode) else end

    def _way(self, path: Path) -> Iterator[tuple[ScalarNode | None, Node]]:
        """Yields the key and the node of each step of the path, as far as the text has it."""
        node = self.root
        for step in path:
            if node is None or step not in self._children(node):
                return
            key, node = self._children(node)[step]
            yield key, node

    def _children(self, node: Node) -> dict[str | int, tuple[ScalarNode | None, Node]]:
        # Cached: many diagnostics query the same node.
        if id(node) not in self._known_children:
            children: dict[str | int, tuple[ScalarNode | None, Node]] = {}
            if isinstance(node, SequenceNode):
                children = {index: (None, item) for index, item in enumerate(node.value)}
            elif isinstance(node, MappingNode):
                children = {_key(key): (key, value) for key, value in reversed(node.value)}
            self._known_children[id(node)] = children
        return self._known_children[id(node)]


def read_document(text: str, file: str = "") -> JobDocument:
    """Returns the one YAML (or JSON) document in `text`.

    Raises:
        ProtocolInvalid: the text cannot be parsed; exactly one diagnostic.
    """
    text = text.removeprefix("\ufeff")
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner, yaml.Resolver, yaml.max_depth = _Scanner, _Resolver, MAX_LEVELS
    yaml.composer.warn_double_anchors = False
    try:
        # js-yaml terminates the last line too: its line feed is part of a block scalar.
        root = yaml.compose(text if text.endswith("\n") else f"{text}\n")
    except MaxDepthExceededError as error:
        raise _refused(
            file, f"more than {MAX_LEVELS} levels deep; make it flatter", error.problem_mark
        ) from error
    except MarkedYAMLError as error:
        raise _refused(file, *_translate_parser_error(text, error)) from error
    except ReaderError as error:
        mark = StringMark(file, error.position, *_line_and_column(text, error.position), None, None)
        raise _refused(
            file, f"there is a character (code {error.character}) that no text has; remove it", mark
        ) from error
    if root is None:
        return JobDocument(text, file, None)
    construction = _Construction(file)
    value = construction.value_of(root, ())
    return JobDocument(text, file, value, tuple(construction.diagnostics), root)


class _Scanner(Scanner):
    """Accepts a tab between two tokens of a line as white space, as js-yaml and YAML 1.2 do; never as indentation."""

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        while self.reader.peek() == "\t" and self.reader.column > 0 and self._follows_a_token():
            self.reader.forward()
            super().scan_to_next_token()

    def _follows_a_token(self) -> bool:
        pointer = self.reader.pointer
        return bool(self.reader.buffer[pointer - self.reader.column : pointer].strip(" \t"))


class _Resolver(BaseResolver):
    """Marks plain scalars with a tag of their own, so that `scalars` resolves them."""

    PLAIN: ClassVar = Tag(suffix="plain")
    OTHER: ClassVar = {
        ScalarNode: Tag(suffix=f"{_YAML_TAGS}str"),
        SequenceNode: Tag(suffix=f"{_YAML_TAGS}seq"),
        MappingNode: Tag(suffix=f"{_YAML_TAGS}map"),
    }

    def __init__(self, version: Any = None, loader: Any = None) -> None:
        super().__init__(loader)
        self._loader_version = version

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Tag:
        return self.PLAIN if kind is ScalarNode and implicit[0] else self.OTHER[kind]

    @property
    def processing_version(self) -> tuple[int, int]:
        return (1, 2)


class _Construction:
    """Converts nodes to values in one pass. An aliased node becomes one shared object; its size counts at each use."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.diagnostics: list[ProtocolDiagnostic] = []
        self._done: dict[int, tuple[Any, int]] = {}
        self._open: set[int] = set()
        self._size = 0

    def value_of(self, node: Node, path: Path) -> Any:
        before = self._size
        if id(node) in self._done:
            value, size = self._done[id(node)]
            self._grow(size, node)
            return value
        if id(node) in self._open:
            raise _refused(self._file, "an anchor contains itself; write the value out", node.start_mark)
        self._open.add(id(node))
        self._grow(1, node)
        value = self._new(node, path)
        self._open.remove(id(node))
        self._done[id(node)] = value, self._size - before
        return value

    def _grow(self, size: int, node: Node) -> None:
        self._size += size
        if self._size > MAX_VALUES:
            problem = f"its aliases make more than {MAX_VALUES} values of it; write out what is needed"
            raise _refused(self._file, problem, node.start_mark)

    def _new(self, node: Node, path: Path) -> Any:
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if isinstance(node, SequenceNode) and node.tag == f"{_YAML_TAGS}seq":
            return [self.value_of(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, MappingNode) and node.tag == f"{_YAML_TAGS}map":
            return self._mapping(node, path)
        raise _refused(
            self._file, f"there is no use for the tag {_short(node)} here; leave it out", node.start_mark
        )

    def _scalar(self, node: ScalarNode) -> Any:
        tag, text = str(node.tag), _whole(node.value)
        if text is None:
            raise _refused(
                self._file, "half of a surrogate pair is no character; leave it out", node.start_mark
            )
        try:
            return resolved(text) if tag == "plain" else explicitly(tag.removeprefix(_YAML_TAGS), text)
        except OverflowError as error:
            problem = f"{shown(text)} is a date too far away; put it in quotes to have the text"
            raise _refused(self._file, problem, node.start_mark) from error
        except ValueError as error:
            problem = f"{shown(text)} is not of the kind {_short(node)}; leave the tag out"
            raise _refused(self._file, problem, node.start_mark) from error
        except KeyError as error:
            problem = f"there is no use for the tag {_short(node)} here; leave it out"
            raise _refused(self._file, problem, node.start_mark) from error

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                problem = "a list or a mapping cannot be a key here; write a word as the key"
                raise _refused(self._file, problem, key_node.start_mark)
            if key_node.tag == "plain" and key_node.value == "<<":
                for source in self._sources(value_node, path):
                    merged = {**source, **merged}
                continue
            key, mark = javascript_text(self._scalar(key_node)), key_node.start_mark
            if key in lines:
                message = f"cannot use {key_of((*path, key))}: it is in line {lines[key]} already; keep one of the two"
                place = (mark.line + 1, mark.column + 1, key_of((*path, key)))
                self.diagnostics.append(ProtocolDiagnostic(self._file, *place, message, (*path, key)))
            lines.setdefault(key, mark.line + 1)
            own[key] = self.value_of(value_node, (*path, key))
        return {**merged, **own} if merged else own

    def _sources(self, node: Node, path: Path) -> list[dict[str, Any]]:
        """Returns the mappings that `<<` merges; the first one takes precedence."""
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        values = [self.value_of(each, path) for each in nodes]
        if not all(isinstance(value, dict) for value in values):
            raise _refused(self._file, "<< merges mappings only; name an anchor of one", node.start_mark)
        return values


def _key(node: ScalarNode) -> str:
    return javascript_text(resolved(node.value) if node.tag == "plain" else node.value)


def _whole(text: str) -> str | None:
    """Joins the surrogate pairs that JSON escapes produce; None if one half is missing."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return None


_NO_COLON = "could not find expected ':'"
_SECOND_COLON = "mapping values are not allowed here"
# Replaces the parser's messages about tokens with messages about the text, with a remedy.
_PARSER_MESSAGES = {
    _NO_COLON: "a line is no `key: value`; give it a colon and a value, or # for a comment",
    _SECOND_COLON: "there is a second colon; put text with a colon and a blank in quotes",
    "found character '\\t' that cannot start any token": "a line begins with a tab; indent with spaces",
    "found unexpected end of stream": "a quote is not closed; close it",
    "but found another document": "a second document begins here; keep one, with no --- behind it",
}
# The parser detects these some lines later; report the position where the construct starts.
_NOTICED_LATE = (_NO_COLON, "end of stream", "<stream end>")


def _translate_parser_error(text: str, error: MarkedYAMLError) -> tuple[str, StringMark | None]:
    problem, mark = error.problem or error.context or "this is no YAML", error.problem_mark
    if problem == _SECOND_COLON:
        # The parser joins two lines without a colon into one scalar, then reports the next colon as one too many.
        lines = text.split("\n")[: mark.line + 1]
        before = lines[-2] if len(lines) > 1 else ""
        if re.fullmatch(r"\s*[\w.-]+\s*", lines[-1][: mark.column]) and re.fullmatch(
            r"\s*[^\s#:-][^:]*", before
        ):
            indent = len(before) - len(before.lstrip())
            problem, mark = _NO_COLON, StringMark("", 0, mark.line - 1, indent, None, None)
    elif error.context_mark is not None and any(words in problem for words in _NOTICED_LATE):
        mark = error.context_mark
    return _PARSER_MESSAGES.get(problem, f"{problem}; fix the YAML there"), mark


def _line_and_column(text: str, index: int) -> tuple[int, int]:
    return text.count("\n", 0, index), index - text.rfind("\n", 0, index) - 1


def _short(node: Node) -> str:
    return str(node.tag).replace(_YAML_TAGS, "!!")


def _refused(file: str, problem: str, mark: StringMark | None) -> ProtocolInvalid:
    line, column = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
    return ProtocolInvalid([ProtocolDiagnostic(file, line, column, "", f"cannot read the job: {problem}")])
