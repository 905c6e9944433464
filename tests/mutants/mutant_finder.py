"""Finds the mutants of source files: small bugs, each at one place.

Not mutated: messages, log lines, annotations, decorators, docstrings, assignments in `__init__`, and named numbers of a module.
A test of their exact text or value would repeat the code.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, permutations
from pathlib import Path
from typing import Any

_PAIRS = ["< <=", "> >=", "== !=", "is is_not", "in not_in", "and or", "+ -", "* /"]
_NAMES = {
    "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "Is": "is", "IsNot": "is not", "In": "in",
    "NotIn": "not in", "And": "and", "Or": "or", "Add": "+", "Sub": "-", "Mult": "*", "Div": "/",
}  # fmt: skip
SWAPS = {
    one.replace("_", " "): other.replace("_", " ")
    for pair in _PAIRS
    for one, other in permutations(pair.split())
}


@dataclass(frozen=True)
class Mutant:
    """A changed span of a file: the bytes from `start` to `end` become `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """The whole file with the change."""
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()

    def diff(self, source: str) -> tuple[str, str]:
        """The changed lines before and after, each joined to one line."""
        raw = source.encode()
        first = raw.rfind(b"\n", 0, self.start) + 1
        last = raw.find(b"\n", self.end)
        tail = raw[self.end : last if last >= 0 else len(raw)]
        before = raw[first : self.start] + raw[self.start : self.end] + tail
        after = raw[first : self.start] + self.text.encode() + tail
        return " ".join(before.decode().split()), " ".join(after.decode().split())


class _Finder:
    """Finds the mutants of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.raw = source.encode()
        self._starts = [0, *(match.end() for match in re.finditer(rb"\n", self.raw))]
        self.found: list[Mutant] = []
        self._visit(ast.parse(source), in_init=False)

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.raw[start:end].decode()

    def _replace(self, node: Any, text: str) -> None:
        self.found.append(Mutant(self.path, node.lineno, *self._span(node), text))

    def _swap(self, left: Any, operator: ast.AST, right: Any) -> None:
        symbol = _NAMES.get(type(operator).__name__)
        start, end = self._span(left)[1], self._span(right)[0]
        between = self.raw[start:end].decode()
        if symbol is not None:
            text = between.replace(symbol, SWAPS[symbol], 1)
            self.found.append(Mutant(self.path, left.end_lineno, start, end, text))

    def _negate(self, test: ast.expr) -> None:
        match test:
            case ast.UnaryOp(op=ast.Not()):
                self._replace(test, f"({self._text(test.operand)})")
            case _:
                self._replace(test, f"not ({self._text(test)})")

    def _visit(self, node: ast.AST, *, in_init: bool) -> None:
        if _is_left_out(node):
            return
        match node:
            case ast.If() | ast.While() | ast.IfExp():
                self._negate(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    self._negate(test)
            case ast.Compare(ops=[operator], comparators=[right]):
                self._swap(node.left, operator, right)
            case ast.BoolOp():
                self._swap(node.values[0], node.op, node.values[1])
            case ast.BinOp() if not _has_text(node):
                self._swap(node.left, node.op, node.right)
            case ast.Constant(value=bool()):
                self._replace(node, str(not node.value))
            case ast.Constant(value=int() | float() as value):
                # For a float above 2**53, adding 1 may have no effect.
                self._replace(node, str(value + 1 if value + 1 != value else value * 2))
            case ast.Return(value=ast.expr() as value) if self._text(value) != "None":
                self._replace(node, "return None")
            case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign() | ast.Delete():
                self._replace(node, "pass")
            case ast.Expr(value=ast.Call() | ast.Await()):
                self._replace(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not in_init:
                self._replace(node, "pass")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_init = node.name == "__init__"
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._visit(child, in_init=in_init)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.lstrip("_").isupper()
        # Skip the argument `strict` of zip(): the lists have the same length by construction.
        case ast.keyword(arg="strict"):
            return True
    return False


def _has_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, ordered by their positions."""
    return sorted(_Finder(path, source).found, key=lambda mutant: (mutant.start, mutant.end, mutant.text))


def is_valid(mutant: Mutant, source: str) -> bool:
    """True if the mutant compiles."""
    try:
        compile(mutant.apply(source), mutant.path, "exec")
    except SyntaxError:
        return False
    return True


def sampled(root: Path, targets: Sequence[str], size: int | None, seed: int, only: str = "") -> list[Mutant]:
    """A random sample of the mutants of these folders. If `size` is None, all mutants.

    The same seed and the same code give the same sample. `only`: a text that the path of each sampled file contains.
    """
    sources = {
        str(file.relative_to(root)): file.read_text()
        for target in targets
        for file in sorted((root / target).glob("*.py"))
        if only in str(file.relative_to(root))
    }
    every = [mutant for path, source in sources.items() for mutant in mutants_of(path, source)]
    random.Random(seed).shuffle(every)
    return list(islice((mutant for mutant in every if is_valid(mutant, sources[mutant.path])), size))


def lines_around(mutant: Mutant, source: str) -> set[int]:
    """The lines of the statements that the mutant changes, without the bodies of compound statements."""
    raw = source.encode()
    last = mutant.line + raw[mutant.start : mutant.end].count(b"\n")
    return {
        line
        for start, end in _statements(source)
        if start <= last and end >= mutant.line
        for line in range(start, end + 1)
    }


@lru_cache
def _statements(source: str) -> list[tuple[int, int]]:
    """The first and last line of each statement, without its body."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Match():
                found.append((node.lineno, node.subject.end_lineno or node.lineno))
            case ast.match_case():
                found.append((node.pattern.lineno, max(node.pattern.lineno, node.body[0].lineno - 1)))
            case ast.stmt() | ast.ExceptHandler():
                body = getattr(node, "body", None)
                end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
                found.append((node.lineno, max(node.lineno, end)))
    return found
