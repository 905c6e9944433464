"""Reads a job's text as plain values, with OpenPAI's YAML rules, and records the position of each value.

Mappings become dicts with string keys in text order; `scalars` defines the scalar values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from nni_manager.config.diagnostics import key_of, shown
from nni_manager.support import yaml_reader
from nni_manager.training_services.openpai.job_checks import (
    Path,
    ProtocolDiagnostic,
    ProtocolInvalid,
    Violation,
)
from nni_manager.training_services.openpai.scalars import explicitly, javascript_text, resolved

# A job has about ten levels. Deeper nesting indicates a faulty generator or an attack.
MAX_LEVELS = 64

# A plain scalar, which `scalars` resolves.
_PLAIN = "plain"
_TAG_OF_KIND = {
    yaml.ScalarNode: f"{yaml_reader.TAGS}str",
    yaml.SequenceNode: f"{yaml_reader.TAGS}seq",
    yaml.MappingNode: f"{yaml_reader.TAGS}map",
}
_ANCHOR = re.compile(r"[^\s,\[\]{}\0]+")
_BLANKS = " \t\r\n\0"


@dataclass(frozen=True)
class JobDocument:
    """A text, its value, and the form diagnostics that did not prevent reading it. `file` is its name, for messages."""

    text: str
    file: str
    value: Any
    diagnostics: tuple[ProtocolDiagnostic, ...] = ()
    tree: yaml_reader.Tree = field(default=yaml_reader.Tree(None), repr=False, compare=False)

    def diagnostic(self, path: Path, message: str, violation: Violation | None = None) -> ProtocolDiagnostic:
        """Returns a diagnostic at this path, or at its nearest ancestor in the text."""
        return ProtocolDiagnostic(
            self.file, *self.tree.position_of(path), key_of(path), message, path, violation
        )

    def invalid_value(self, path: Path, problem: str) -> ProtocolDiagnostic:
        """Returns a diagnostic of the value at this path. `problem` ends with the remedy."""
        return self.diagnostic(path, f"cannot use {key_of(path)}: {problem}")

    def span_with_comments(self, path: Path) -> tuple[int, int] | None:
        """Returns the range of `key: value`: from the end of the key to the line of the next element. None: not in the text.

        It includes the comments after the value.
        """
        steps = list(self.tree.steps_to(path))
        key, node = steps[-1] if len(steps) == len(path) else (None, None)
        if key is None or node is None:
            return None
        start, end = key.end_mark.index, self._end(node)
        if _is_block(node):
            is_last = node.end_mark.index >= len(self.text)
            next_line = len(self.text) if is_last else self.text.rfind("\n", 0, node.end_mark.index)
            return start, max(end, next_line)
        comment = re.compile(r"[^\S\n]*#[^\n]*").match(self.text, end)
        return start, comment.end() if comment else end

    def _end(self, node: yaml.Node) -> int:
        if _is_block(node):
            # The parser ends a block at the next token, after all comments; here it ends with its last value.
            children = (
                node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in node.value]
            )
            return max(map(self._end, children))
        end: int = node.end_mark.index
        return len(self.text[:end].rstrip()) if isinstance(node, yaml.ScalarNode) else end


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def read_document(text: str, file: str = "") -> JobDocument:
    """Returns the one YAML (or JSON) document in `text`.

    Raises:
        ProtocolInvalid: the text cannot be parsed; exactly one diagnostic.
    """
    text = text.removeprefix("\ufeff")
    try:
        # js-yaml terminates the last line too, and a block scalar includes that line feed.
        tree = _Loader(text if text.endswith("\n") else f"{text}\n").tree()
    except yaml.MarkedYAMLError as error:
        raise _refused(file, *yaml_reader.explained(text, error)) from error
    except yaml.reader.ReaderError as error:
        index = error.position
        line, column = text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)
        problem = f"it contains an invalid character (code {error.character}); remove the character"
        raise _refused(file, problem, line, column) from error
    diagnostics = tuple(
        ProtocolDiagnostic(
            file,
            *yaml_reader.line_and_column(each.mark),
            key_of(each.path),
            f"cannot use {key_of(each.path)}: line {each.first_line} has the same key; keep one of the two",
            each.path,
        )
        for each in tree.repeated_keys
    )
    return JobDocument(text, file, tree.value, diagnostics, tree)


class _Loader(yaml_reader.PositionedLoader):
    """Reads as js-yaml and YAML 1.2 where PyYAML follows YAML 1.1, and resolves scalars by `scalars`."""

    max_levels = MAX_LEVELS
    merges_may_repeat = True

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """The tag of a node without one."""
        if kind is not yaml.ScalarNode or not implicit[0]:
            return _TAG_OF_KIND[kind]
        return f"{yaml_reader.TAGS}merge" if value == "<<" else _PLAIN

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """The value of a scalar."""
        text = self.text(node)
        try:
            is_plain = node.tag in (_PLAIN, f"{yaml_reader.TAGS}merge")
            return resolved(text) if is_plain else explicitly(node.tag.removeprefix(yaml_reader.TAGS), text)
        except (OverflowError, ValueError, KeyError) as error:
            problems = {
                OverflowError: f"the date {shown(text)} is out of range; put it in quotes to use it as text",
                ValueError: f"{shown(text)} is not of type {yaml_reader.short_tag(node)}; remove the tag",
                KeyError: f"the tag {yaml_reader.short_tag(node)} is not supported; remove it",
            }
            raise yaml_reader.Unreadable(problems[type(error)], node.start_mark) from error

    def key(self, node: yaml.ScalarNode) -> tuple[str, str]:
        """The key as JavaScript has it: always a string."""
        name = javascript_text(self.scalar(node))
        return name, name

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. An anchor may be used again, for another node."""
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if not isinstance(event, yaml.AliasEvent):
            self.anchors.pop(event.anchor, None)
        return super().compose_node(parent, index)

    def scan_to_next_token(self) -> None:
        """Skip blanks, also a tab in brackets or between two tokens of a line; never a tab as indentation."""
        super().scan_to_next_token()
        while self.peek() == "\t" and (self.flow_level or self._follows_a_token()):
            self.forward()
            super().scan_to_next_token()

    def _follows_a_token(self) -> bool:
        return bool(self.buffer[self.pointer - self.column : self.pointer].strip(" \t"))

    def scan_anchor(self, TokenClass: Callable[..., yaml.Token]) -> yaml.Token:  # noqa: N803 - PyYAML's name
        """An anchor or an alias. Its name ends at a blank, a comma or a bracket."""
        start = self.get_mark()
        self.forward()
        name = _ANCHOR.match(self.buffer, self.pointer)
        if name is None:
            raise yaml_reader.Unreadable("an anchor has no name; write a name after & or *", start)
        self.forward(len(name[0]))
        return TokenClass(name[0], start, self.get_mark())

    def check_value(self) -> bool:
        """True if a colon starts a value. In brackets, a colon at the start of a word does not: `[:8080]`."""
        if not self.flow_level or self.peek(1) in f"{_BLANKS},[]{{}}":
            return bool(super().check_value())
        at = self.pointer - 1
        while self.buffer[at] in _BLANKS:
            at -= 1
        return self.buffer[at] not in "[{,:"

    def check_key(self) -> bool:
        """True if a question mark starts a key. A question mark at the start of a word does not, also in brackets."""
        return self.peek(1) in _BLANKS

    def fetch_value(self) -> None:
        """A colon and its value. In brackets, a colon at the start of an entry has an empty key: `{: 0}`."""
        if self.flow_level and self.allow_simple_key:
            here = self.get_mark()
            self.tokens.append(yaml.KeyToken(here, here))
        super().fetch_value()

    def check_plain(self) -> bool:
        """True if a plain scalar starts here. In brackets, a dash or a question mark alone is none."""
        if self.flow_level and self.peek() in "-?" and self.peek(1) in f"{_BLANKS},[]{{}}":
            return False
        return bool(super().check_plain()) or (self.flow_level > 0 and self.peek() in ":?")

    def scan_plain(self) -> yaml.ScalarToken:
        """A plain scalar. In brackets, it may contain a question mark."""
        if self.flow_level:
            self.__dict__["peek"] = self._peek_without_question_mark
        try:
            return super().scan_plain()
        finally:
            self.__dict__.pop("peek", None)

    def scan_plain_spaces(self, indent: int, start_mark: yaml.Mark) -> list[str]:
        """The blanks after a word of a plain scalar: a tab before another word belongs to the text."""
        length = 0
        while self.peek(length) in " \t":
            length += 1
        blanks: str = self.prefix(length)
        if "\t" in blanks:
            self.forward(length)
            if self.peek() not in "\0\r\n":
                return [blanks]
        return super().scan_plain_spaces(indent, start_mark) or []

    def _peek_without_question_mark(self, index: int = 0) -> str:
        found: str = yaml.reader.Reader.peek(self, index)
        return "x" if found == "?" else found


def _refused(file: str, problem: str, line: int, column: int) -> ProtocolInvalid:
    return ProtocolInvalid([ProtocolDiagnostic(file, line, column, "", f"cannot read the job: {problem}")])
