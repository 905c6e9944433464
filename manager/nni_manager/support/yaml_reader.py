"""YAML text as a value with the position of each key and item: the reader of experiment files and of OpenPAI jobs.

PyYAML parses both. `PositionedLoader` has YAML 1.1's scalars; a subclass may resolve and construct scalars by other rules.
Depth and aliases are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

import yaml

from nni_sdk.nesting import MAX_LEVELS
from trial_keeper.frozen_dataclass import dataclass

# Aliases expand a short text to a large value. A file of half a MiB has about this many values without aliases.
MAX_VALUES = 100_000
TAGS = "tag:yaml.org,2002:"

Child = tuple[yaml.ScalarNode | None, yaml.Node]
"""A node and its key; an item of a list has no key."""

_NO_COLON = "a line is not `key: value`; add a colon and a value, or # for a comment"
# The parser describes these problems by its tokens; the values describe the text and end with the remedy.
_PLAIN_PROBLEMS = {
    "<block end>, but found '<block mapping start>'": (
        "no line above has the indentation of this line; give the keys of one section the same indentation"
    ),
    "<block end>, but found '<scalar>'": (
        "text follows a closing quote or bracket; put the whole value in quotes of the other kind"
    ),
    "<block end>, but found '-'": (
        "a list item is among keys; write `key: value`, or indent the item below the key of its list"
    ),
    "could not find expected ':'": _NO_COLON,
    "found character '\\t' that cannot start any token": "a line begins with a tab; indent with spaces",
    "found character '-' that cannot start any token": "in brackets, a dash alone is not a value; put it in quotes",
    "found character '?' that cannot start any token": "in brackets, a question mark alone is not a value; put it in quotes",
    "found unexpected end of stream": "a quote is not closed; close it",
    "found another document": "a second document starts here, after ---; keep one document per file",
}
# The parser detects these some lines later; their position is where the construct starts.
_DETECTED_LATE = ("could not find expected ':'", "end of stream", "<stream end>")


LONE_SURROGATE = "half of a surrogate pair is not a character; remove it"


class Unreadable(yaml.MarkedYAMLError):
    """A text that cannot be a value. `problem` ends with the remedy."""

    def __init__(self, problem: str, mark: yaml.Mark | None) -> None:
        super().__init__(None, None, problem, mark)


@dataclass(frozen=True, slots=True)
class RepeatedKey:
    """A key that occurs twice in its mapping, first in line `first_line`. `mark` is the position of the second occurrence."""

    path: tuple[str | int, ...]
    mark: yaml.Mark
    first_line: int


@dataclass(frozen=True, slots=True)
class Tree:
    """The value of a text, and its nodes. `root` None: the text is empty."""

    value: Any
    root: yaml.Node | None = None
    repeated_keys: Sequence[RepeatedKey] = ()
    _children: Mapping[int, Mapping[str | int, Child]] = field(default_factory=dict)

    def steps_to(
        self, path: Sequence[str | int], spelling: Callable[[str], str] | None = None
    ) -> Iterator[Child]:
        """Yields the key and the node of each step of the path, up to the first absent step.

        `spelling` normalises keys for comparison; an exact match takes precedence.
        """
        node = self.root
        for step in path:
            children = self._children.get(id(node), {})
            name = step
            if step not in children and isinstance(node, yaml.MappingNode):
                name = str(step)
                if name not in children and spelling is not None:
                    same = (key for key in children if spelling(str(key)) == spelling(name))
                    name = next(same, name)
            if name not in children:
                return
            key, node = children[name]
            yield key, node

    def position_of(
        self, path: Sequence[str | int], spelling: Callable[[str], str] | None = None
    ) -> tuple[int, int]:
        """Returns the line and column, from 1, of the last step of the path that is in the text; without one, of its start."""
        steps = [(None, self.root), *self.steps_to(path, spelling)]
        node = steps[-1][0] or steps[-1][1]
        return (1, 1) if node is None else line_and_column(node.start_mark)


def line_and_column(mark: yaml.Mark) -> tuple[int, int]:
    """Returns line and column of a mark, counted from 1."""
    return mark.line + 1, mark.column + 1


class PositionedLoader(yaml.SafeLoader):
    """Reads one document to a `Tree` in one pass. An aliased node becomes one shared object; its size counts at each use.

    `max_levels`: deeper nesting is refused. `merges_may_repeat`: a mapping may have several keys `<<`.
    """

    max_levels: ClassVar[int] = MAX_LEVELS
    merges_may_repeat: ClassVar[bool] = False

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._size = 0
        self._done: dict[int, tuple[Any, int]] = {}
        self._open: set[int] = set()
        self._children: dict[int, dict[str | int, Child]] = {}
        self._repeated: list[RepeatedKey] = []

    def tree(self) -> Tree:
        """Returns the only document.

        Raises:
            yaml.YAMLError: the text is not one document, too deep or too large; `explained` returns a message for it.
        """
        try:
            root = self.get_single_node()
            value = None if root is None else self._value_of(root, ())
            return Tree(value, root, self._repeated, self._children)
        finally:
            self.dispose()

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """Returns the value of a scalar."""
        return self.construct_object(node, deep=True)

    def text(self, node: yaml.ScalarNode) -> str:
        """Returns the text of a scalar. The two halves of a surrogate pair become one character."""
        try:
            return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            raise Unreadable(LONE_SURROGATE, node.start_mark) from error

    def key(self, node: yaml.ScalarNode) -> tuple[str, Any]:
        """Returns the name of a key, for paths, and its value."""
        return str(node.value), self.scalar(node)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Returns the next node; refuses one that is too deep."""
        self._level += 1
        if self._level > self.max_levels:
            problem = f"it has more than {self.max_levels} levels; make it flatter"
            raise Unreadable(problem, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def _value_of(self, node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        before = self._size
        if id(node) in self._done:
            value, size = self._done[id(node)]
            self._grow(size, node)
            return value
        if id(node) in self._open:
            raise Unreadable("an anchor contains itself; write the value without an alias", node.start_mark)
        self._open.add(id(node))
        self._grow(1, node)
        if isinstance(node, yaml.ScalarNode):
            value = self.scalar(node)
        elif isinstance(node, yaml.SequenceNode) and node.tag == f"{TAGS}seq":
            self._children[id(node)] = {index: (None, item) for index, item in enumerate(node.value)}
            value = [self._value_of(item, (*path, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode) and node.tag == f"{TAGS}map":
            value = self._mapping(node, path)
        else:
            problem = f"the tag {short_tag(node)} is not supported here; remove it"
            raise Unreadable(problem, node.start_mark)
        self._open.remove(id(node))
        self._done[id(node)] = value, self._size - before
        return value

    def _grow(self, size: int, node: yaml.Node) -> None:
        self._size += size
        if self._size > MAX_VALUES:
            problem = (
                f"its aliases expand to more than {MAX_VALUES:,} values; write the values without aliases"
            )
            raise Unreadable(problem, node.start_mark)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        children = self._children[id(node)] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a list or a mapping cannot be a key here; write text as the key"
                raise Unreadable(problem, key_node.start_mark)
            is_merge = key_node.tag == f"{TAGS}merge"
            name, key = ("<<", None) if is_merge else self.key(key_node)
            here = (*path, name)
            first, _ = children.setdefault(name, (key_node, value_node))
            if first is not None and first is not key_node and not (is_merge and self.merges_may_repeat):
                self._repeated.append(RepeatedKey(here, key_node.start_mark, first.start_mark.line + 1))
            if is_merge:
                for source in self._sources(value_node, path):
                    merged = {**source, **merged}
            else:
                own[key] = self._value_of(value_node, here)
        return {**merged, **own} if merged else own

    def _sources(self, node: yaml.Node, path: tuple[str | int, ...]) -> list[dict[Any, Any]]:
        """Returns the mappings that `<<` merges; the first one takes precedence."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values = [self._value_of(each, path) for each in nodes]
        if not all(isinstance(value, dict) for value in values):
            raise Unreadable("<< merges only mappings; use an alias of a mapping", node.start_mark)
        return values


def short_tag(node: yaml.Node) -> str:
    """Returns a node's tag in its short form: `!!int`."""
    return str(node.tag).replace(TAGS, "!!")


def explained(
    text: str, error: yaml.MarkedYAMLError, sections: Mapping[str, str] | None = None
) -> tuple[str, int, int]:
    """Returns the problem with a remedy, and its line and column. `sections`: the section of keys that have only one."""
    problem, mark = error.problem or error.context or "this is not YAML", error.problem_mark
    if mark is None or (error.context_mark is not None and any(each in problem for each in _DETECTED_LATE)):
        mark = error.context_mark
    line, column = (1, 1) if mark is None else line_and_column(mark)
    if isinstance(error, Unreadable):
        return problem, line, column
    if "mapping values are not allowed" in problem:
        return _colon_problem(text.splitlines()[:line], column, sections or {})
    plain = (each for found, each in _PLAIN_PROBLEMS.items() if found in problem)
    return next(plain, f"{problem}; fix the YAML there"), line, column


def _colon_problem(lines: Sequence[str], column: int, sections: Mapping[str, str]) -> tuple[str, int, int]:
    """Explains the colon at `column` of the last line, which the parser does not expect."""
    *above, line = lines
    before = above[-1] if above else ""
    key, has_colon, _ = line[: column - 1].partition(":")
    if has_colon:
        problem = "the value in this line contains a colon and a space, which YAML reads as another key"
        return f"{problem}; put the whole value in single quotes", len(lines), column
    # The parser joins two lines without a colon into one scalar.
    if re.fullmatch(r"\s*[\w.-]+\s*", key) and re.fullmatch(r"\s*[^\s#:-][^:]*", before):
        return _NO_COLON, len(above), len(before) - len(before.lstrip()) + 1
    problem, section = "mapping values are not allowed here", sections.get(key.strip())
    remedy = (
        "this line is indented below a line that already has a value; fix the indentation"
        if section is None
        else f"the line above has a value, so {key.strip()} cannot be indented below it; is the line `{section}:` missing "
        "between the two?"
    )
    return f"{problem}; {remedy}", len(lines), column
