"""Annotations: strings in training code that declare hyper-parameters and report metrics.

    '''@nni.variable(nni.choice(16, 32), name=size)'''       the next statement assigns `size`: a chosen value replaces its value
    '''@nni.function_choice(f(x), g(x), name=f)'''           a chosen call replaces calls of `f` in the next statement
    '''@nni.get_next_parameter()'''                          this call replaces the string
    '''@nni.report_intermediate_result(loss)'''
    '''@nni.report_final_result(accuracy)'''

The reader returns the search space of a file and the rewritten text. Only the annotated places change: other bytes, comments and
line numbers stay. Exception: a file that starts with a block statement such as `def` gets one more line for the import. The
strings of the first two annotations stay: they show the source of each value in the generated code.

Reading and rewriting are one file: both depend on the same positions in the syntax tree.

No I/O. Source: NNI v2.0, the annotation tool and its documentation.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import math
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nni_manager.config.diagnostics import Diagnostic, remedy_for_unknown
from nni_manager.config.search_space import TYPES, read_search_space
from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

_MARK = "@nni."
_EXPANDED = {"get_next_parameter": 0, "report_intermediate_result": 1, "report_final_result": 1}
"""Annotations that become a call, and the number of arguments of each."""
_ARCHITECTURE_SEARCH = ("mutable_layers", "training_update")
_EXAMPLES = {
    "variable": "'''@nni.variable(nni.choice(16, 32), name=size)'''",
    "function_choice": "'''@nni.function_choice(f(x), g(x), name=f)'''",
    "get_next_parameter": "'''@nni.get_next_parameter()'''",
    "report_intermediate_result": "'''@nni.report_intermediate_result(loss)'''",
    "report_final_result": "'''@nni.report_final_result(accuracy)'''",
}
_QUOTES = ("'", '"', '"""', "'''")
_NEWLINE = re.compile(rb"\r\n|\r|\n")
_RUNTIME = "nni_sdk.annotated"
# What the parser raises. ValueError: NUL in the text. The last two: too deep nesting.
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


class ValueMissing(UserError):
    """cannot fill in the values of a trial; choose a trial with a value for each annotation"""


@dataclass(frozen=True, slots=True)
class _Option:
    """One option of a choice: its value in the search space, and the code that is written for it."""

    value: Any
    code: str
    is_literal: bool


@dataclass(frozen=True, slots=True)
class _ChoiceSite:
    """A byte range that a chosen value replaces. Without `options` the value is the parameter itself."""

    start: int
    end: int
    key: str
    options: tuple[_Option, ...]

    @property
    def is_plain(self) -> bool:
        """True if the code can use the parameter's value directly for every option."""
        return all(option.is_literal for option in self.options)


@dataclass(frozen=True, slots=True)
class _Edit:
    """A byte range of the file and the code that replaces it."""

    start: int
    end: int
    code: str


@dataclass(frozen=True, slots=True)
class AnnotatedSource:
    """The result of reading the annotations of one file.

    `space` is NNI's JSON of a search space, by keys `<module>/<name>/<type>`. `diagnostics`: all errors. `generated`: the
    code that trials run; None if the file has no annotation (it is used unchanged) or an error.
    """

    space: Mapping[str, Any]
    diagnostics: tuple[Diagnostic, ...]
    generated: bytes | None


def read_annotations(source: bytes, module: str, file: str) -> AnnotatedSource:
    """Read one Python file. `module` is its dotted name in the code folder; `file` names it in messages."""
    reader = _Reader(source, module, file)
    generated = None if reader.diagnostics or not reader.is_annotated else reader.rewritten_for_trials()
    return AnnotatedSource(reader.space, tuple(reader.diagnostics), None if reader.diagnostics else generated)


def with_values(source: bytes, module: str, parameters: Mapping[str, Any]) -> bytes:
    """The annotated code with a trial's values substituted. Annotations stay.

    Raises:
        ValueMissing: the trial has no value for an annotation, or one that the annotation does not offer.
    """
    reader = _Reader(source, module, module)
    if reader.diagnostics:
        raise ValueMissing(str(reader.diagnostics[0]))
    edits = [_Edit(site.start, site.end, _value_of(site, parameters)) for site in reader.choosing]
    try:
        return reader.rewritten(edits)
    except UnicodeEncodeError as error:
        raise ValueMissing(f"cannot write {module} as {error.encoding}; save it as UTF-8") from error


def _value_of(site: _ChoiceSite, parameters: Mapping[str, Any]) -> str:
    if site.key not in parameters:
        raise ValueMissing(
            f"cannot fill in {site.key}: the trial has no value for this key; choose a trial of this search space"
        )
    value = parameters[site.key]
    for option in site.options:
        if _same_option(option.value, value):
            return option.code
    if site.is_plain:
        return ascii(value)
    raise ValueMissing(
        f"cannot fill in {site.key}: {value!r} is not one of its options; choose another trial"
    )


def _same_option(left: Any, right: Any) -> bool:
    """True if both are the same option. In Python True equals 1; here it does not."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


class _AnnotationInvalid(Exception):
    """One annotation cannot be used; reading of the file continues."""

    def __init__(self, line: int, what: str, remedy: str) -> None:
        super().__init__(f"cannot use {what}; {remedy}")
        self.line = line


@dataclass(frozen=True, slots=True)
class _PendingAnnotation:
    """An annotation whose target is the next statement. `name` None: the annotation has no name."""

    node: ast.Constant
    kind: str
    options: list[ast.expr]
    name: str | None


class _Reader:
    """One pass over one file: collects edits and diagnostics."""

    def __init__(self, source: bytes, module: str, file: str) -> None:
        self._source = source
        self._module = module
        self._file = file
        self.diagnostics: list[Diagnostic] = []
        self.space: dict[str, Any] = {}
        self.choosing: list[_ChoiceSite] = []
        self._calling: list[_Edit] = []  # the code is an SDK call without its module
        self._encoding = "utf-8"
        self._text = b""  # UTF-8: offsets in the syntax tree count bytes
        self._line_starts = [0]
        self._body: list[ast.stmt] = []
        # Files without annotations are not parsed: they may be of another Python version.
        if _MARK.encode() in source:
            with self._recording_errors():
                self._decode()
                self._parse()
                self._read_block(self._body)
                self._check_future_imports()

    @property
    def is_annotated(self) -> bool:
        """True if the file has an annotation to replace."""
        return bool(self.choosing or self._calling)

    @contextlib.contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except _AnnotationInvalid as wrong:
            self._add_error(wrong.line, str(wrong))
        except RecursionError:
            self._add_error(
                1, "cannot use this file: it is nested too deeply; split its longest expression or elif chain"
            )

    def _add_error(self, line: int, message: str) -> None:
        self.diagnostics.append(Diagnostic(self._file, line, None, "", message))

    # ---- the text

    def _decode(self) -> None:
        try:
            self._encoding, _ = tokenize.detect_encoding(io.BytesIO(self._source).readline)
            text = self._source.decode(self._encoding)
            if text.encode(self._encoding) != self._source:
                raise _AnnotationInvalid(
                    1,
                    f"this file: encoding its text as {self._encoding} changes its bytes",
                    "save it as UTF-8",
                )
            self._text = text.encode()
        except SyntaxError as error:  # invalid coding declaration, or bytes that are not UTF-8
            remedy = "save it as UTF-8, or declare its encoding in line 1"
            raise _AnnotationInvalid(1, f"this file: {error.msg}", remedy) from error
        except UnicodeDecodeError as error:
            line = len(_NEWLINE.findall(self._source, 0, error.start)) + 1
            what = f"this file: byte {error.start} is not {self._encoding}"
            raise _AnnotationInvalid(
                line, what, "save the file in its declared encoding, or as UTF-8"
            ) from error
        except (UnicodeError, LookupError) as error:  # a codec for other data than text
            what = f"this file: {self._encoding} is not an encoding of Python code"
            raise _AnnotationInvalid(1, what, "save the file as UTF-8, and declare UTF-8") from error
        self._line_starts += [found.end() for found in _NEWLINE.finditer(self._text)]

    def _parse(self) -> None:
        try:
            self._body = _syntax_tree(self._text.decode()).body
        except _NOT_PYTHON as error:
            line = (isinstance(error, SyntaxError) and error.lineno) or 1
            remedy = "fix the file, or list it in .nniignore if no trial needs it"
            raise _AnnotationInvalid(line, f"this file: it is not Python ({_why(error)})", remedy) from error

    def _offset(self, line: int, column: int) -> int:
        return self._line_starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    # ---- annotations and their targets

    def _read_block(self, statements: list[ast.stmt]) -> None:
        pending: _PendingAnnotation | None = None
        for statement in statements:
            if not _is_annotation(statement):
                self._read_blocks_in(statement)
                if pending is not None:
                    with self._recording_errors():
                        self._apply(pending, statement)
                pending = None
                continue
            with self._recording_errors():
                _refuse_untargeted(pending, "above another annotation")
            pending = None
            with self._recording_errors():
                assert isinstance(statement, ast.Expr)
                pending = self._annotation(statement.value)
        with self._recording_errors():
            _refuse_untargeted(pending, "at the end of a block")

    def _read_blocks_in(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if not isinstance(value, list) or not value:
                continue
            if isinstance(value[0], ast.stmt):
                self._read_block(value)
            elif isinstance(value[0], ast.ExceptHandler | ast.match_case):
                for each in value:
                    self._read_blocks_in(each)

    def _annotation(self, node: ast.expr) -> _PendingAnnotation | None:
        """Record an annotation that becomes a call; return one that applies to the next statement."""
        if not isinstance(node, ast.Constant):
            remedy = "remove the f: names in an annotation need no braces"
            raise _AnnotationInvalid(node.lineno, "an f-string as an annotation", remedy)
        kind, call = _call_in(node)
        example = f"write e.g. {_EXAMPLES[kind]}"
        if any(isinstance(each, ast.Starred) for each in call.args):
            raise _AnnotationInvalid(
                node.lineno, f"@nni.{kind} with a * argument: options must be listed one by one", example
            )
        if kind in _EXPANDED:
            if call.keywords or len(call.args) != _EXPANDED[kind]:
                wanted = "exactly one value and no name" if _EXPANDED[kind] else "no arguments"
                raise _AnnotationInvalid(node.lineno, f"@nni.{kind}: it takes {wanted}", example)
            values = ", ".join(map(_code_of, call.args))
            self._calling.append(_Edit(*self._span(node), f"{kind}({values})"))
            return None
        if not call.args:
            raise _AnnotationInvalid(node.lineno, f"@nni.{kind} without options", example)
        return _PendingAnnotation(node, kind, call.args, _name_in(node, kind, call.keywords))

    def _apply(self, pending: _PendingAnnotation, target: ast.stmt) -> None:
        if pending.kind == "variable":
            self._replace_value(pending, target)
        else:
            self._replace_calls(pending, target)

    def _replace_value(self, pending: _PendingAnnotation, target: ast.stmt) -> None:
        """Apply `@nni.variable`: replace the right-hand side of an assignment."""
        line, there = pending.node.lineno, f"line {target.lineno}"
        value = _assigned_value(pending, target)
        if len(pending.options) > 1:
            raise _AnnotationInvalid(
                line, "@nni.variable with several sets of values", f"write e.g. {_EXAMPLES['variable']}"
            )
        values = pending.options[0]
        word = _nni_name(values.func) if isinstance(values, ast.Call) else None
        if not isinstance(values, ast.Call) or word not in TYPES:
            given = ast.unparse(values.func).removeprefix("nni.") if isinstance(values, ast.Call) else ""
            remedy = remedy_for_unknown(given and f"nni.{given}", [f"nni.{each}" for each in TYPES])
            what = f"@nni.variable for {there}: {ast.unparse(values)} is not a set of values"
            raise _AnnotationInvalid(line, what, remedy)
        if values.keywords or any(isinstance(each, ast.Starred) for each in values.args):
            raise _AnnotationInvalid(
                line, f"{ast.unparse(values)}: it takes values without names and *", f"write e.g. {_EXAMPLES['variable']}"
            )  # fmt: skip
        options = tuple(_option(each) for each in values.args)
        if word == "choice":
            self._add(pending, word, options, [value])
            return
        for option in options:
            if isinstance(option.value, bool) or not isinstance(option.value, int | float):
                what = f"nni.{word}: {option.code} is not a number"
                raise _AnnotationInvalid(line, what, "write numbers such as 10 or 1e-4, or use nni.choice")
        self._add(pending, word, options, [value])

    def _replace_calls(self, pending: _PendingAnnotation, target: ast.stmt) -> None:
        """Apply `@nni.function_choice`: replace calls of the named function, and calls equal to one of the options."""
        dumps = {ast.dump(each) for each in pending.options}

        def is_meant(call: ast.Call) -> bool:
            return ast.unparse(call.func) == pending.name or ast.dump(call) in dumps

        # Skip calls that overlap an edit of an annotation in an inner block.
        free = []
        for call, is_in_text in _calls(target, is_meant):
            if is_in_text:
                raise _AnnotationInvalid(
                    pending.node.lineno, f"@nni.function_choice for a call in an f-string, in line {target.lineno}",
                    "assign the result of the call to a variable, and use the variable in the f-string",
                )  # fmt: skip
            start, end = self._span(call)
            if not any(site.start < end and start < site.end for site in self.choosing):
                free.append(call)
        if not free:
            lacking = f"does not call {pending.name}" if pending.name else "calls none of its options"
            raise _AnnotationInvalid(
                pending.node.lineno, f"@nni.function_choice: line {target.lineno}, the next statement, {lacking}",
                "write the annotation right above the call",
            )  # fmt: skip
        options = tuple(_option(each, in_expression=True) for each in pending.options)
        self._add(pending, pending.kind, options, free)

    def _add(
        self,
        pending: _PendingAnnotation,
        word: str,
        options: tuple[_Option, ...],
        replaced: Sequence[ast.expr],
    ) -> None:
        """Record one hyper-parameter and the expressions that its value replaces."""
        line, is_choice = pending.node.lineno, word not in TYPES or word == "choice"
        name = pending.name or f"__line{line}"
        key = f"{self._module}/{name}/{word}"
        entry = {"_type": "choice" if is_choice else word, "_value": [option.value for option in options]}
        codes: dict[str, str] = {}
        for option in options:
            if codes.setdefault(json.dumps(option.value), option.code) != option.code:
                what = f"{key}: the search space cannot distinguish the text {option.value!r} from the expression {option.value}"
                raise _AnnotationInvalid(line, what, "write one of them differently")
        for _, message in read_search_space({key: entry})[1]:
            self._add_error(line, message)
        if self.space.setdefault(key, entry) != entry:
            remedy = "give both the same values, or rename one of them"
            raise _AnnotationInvalid(line, f"{key}: another annotation gives {name} other values", remedy)
        for node in replaced:
            self.choosing.append(_ChoiceSite(*self._span(node), key, options if is_choice else ()))

    def _check_future_imports(self) -> None:
        if any(map(_is_future_import, self._body)) and self._is_a_call(self._body[0]):
            raise _AnnotationInvalid(
                1,
                "an annotation above `from __future__ import`: no call may precede that import",
                "write the annotation below the import",
            )

    def _is_a_call(self, statement: ast.stmt) -> bool:
        """True if a statement is an annotation that a call replaces."""
        start, end = self._span(statement)
        return _is_annotation(statement) and any(start <= each.start < end for each in self._calling)

    # ---- the new text

    def rewritten_for_trials(self) -> bytes | None:
        """The code that trials run; None after an error that shows only in the generated code."""
        alias = "_nni"
        while alias.encode() in self._text:
            alias += "_"
        edits = [_Edit(site.start, site.end, _choosing_code(site, alias)) for site in self.choosing]
        edits += [_Edit(each.start, each.end, f"{alias}.{each.code}") for each in self._calling]
        try:
            source = self.rewritten([self._import(alias), *edits])
            _syntax_tree(source.decode(self._encoding))
        except UnicodeEncodeError as error:
            what = f"this file: {self._encoding} cannot encode {error.object[error.start]!r}"
            self._add_error(1, f"cannot use {what}; save it as UTF-8")
        except _NOT_PYTHON as error:
            line = (isinstance(error, SyntaxError) and error.lineno) or 1
            self._add_error(
                line, f"cannot use the annotation of this statement: the generated code is not Python ({_why(error)}); write "
                "the statement and its annotation on separate lines",
            )  # fmt: skip
        else:
            return source
        return None

    def rewritten(self, edits: list[_Edit]) -> bytes:
        """The text with these edits, in its own encoding.

        Raises:
            UnicodeEncodeError: the encoding lacks a character of an edit.
        """
        found = _NEWLINE.search(self._text)
        newline = b"\n" if found is None else found.group()
        pieces, at = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
            code = edit.code.encode().replace(b"\n", newline)
            lines = len(_NEWLINE.findall(self._text, edit.start, edit.end)) - len(_NEWLINE.findall(code))
            if lines > 0:
                code = b"(%s%s)" % (code, newline * lines)  # keeps line numbers
            pieces += [self._text[at : edit.start], code]
            at = edit.end
        text = b"".join([*pieces, self._text[at:]])
        return text.decode().encode(self._encoding) if edits else self._source

    def _import(self, alias: str) -> _Edit:
        """The edit that inserts the runtime import, after the docstring and `__future__` imports."""
        statement = f"import {_RUNTIME} as {alias}"
        last = None
        for number, each in enumerate(self._body):
            is_docstring = number == 0 and _text_of(each) is not None and not self._is_a_call(each)
            if not is_docstring and not _is_future_import(each):
                break
            last = each
        if last is not None:
            _, end = self._span(last)
            return _Edit(end, end, f"; {statement}")
        first = self._body[0]
        if not hasattr(first, "body") and not hasattr(first, "cases"):
            start, _ = self._span(first)
            return _Edit(start, start, f"{statement}; ")
        # A compound statement cannot share its line with the import.
        line = min(node.lineno for node in [first, *getattr(first, "decorator_list", [])])
        start = self._offset(line, 0)
        return _Edit(start, start, f"{statement}\n")


def _choosing_code(site: _ChoiceSite, alias: str) -> str:
    key = ascii(site.key)
    if site.is_plain:
        return f"{alias}.parameter({key})"
    # Conditional expressions evaluate only the chosen option. Lambdas cannot access the names of a class body. Without
    # parentheses an option that is a lambda or a condition would include the options after it.
    codes = [option.code if option.is_literal else f"({option.code})" for option in site.options]
    tests = [
        f"{code} if {alias}.takes({key}, {option.value!a})"
        for code, option in zip(codes, site.options, strict=True)
    ]
    return f"({' else '.join([*tests, f'{alias}.no_option({key})'])})"


# ---- syntax trees


def _syntax_tree(text: str, mode: str = "exec") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the user's code, such as "\d", appear when it runs
        return ast.parse(text, mode=mode)


def _why(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"


def _refuse_untargeted(pending: _PendingAnnotation | None, where: str) -> None:
    if pending is not None:
        remedy = "write it right above its target statement"
        raise _AnnotationInvalid(
            pending.node.lineno, f"@nni.{pending.kind} {where}: it has no target there", remedy
        )


def _call_in(node: ast.Constant) -> tuple[str, ast.Call]:
    """The kind of an annotation and its call."""
    text = str(node.value).removeprefix("@").strip()
    try:
        expression = _syntax_tree(text, "eval").body
    except _NOT_PYTHON as error:
        at = (error.lineno or 1) - 1 if isinstance(error, SyntaxError) else 0
        line = min(node.lineno + at, node.end_lineno or node.lineno)
        raise _AnnotationInvalid(
            line, f"this annotation: it is not Python ({_why(error)})", "fix it"
        ) from error
    kind = _nni_name(expression.func) if isinstance(expression, ast.Call) else None
    word = kind or re.split(r"\W", text.removeprefix("nni."), maxsplit=1)[0]
    if word in _ARCHITECTURE_SEARCH:
        remedy = "use @nni.function_choice"
        raise _AnnotationInvalid(node.lineno, f"@nni.{word}: architecture search is not supported", remedy)
    if word not in _EXAMPLES:
        remedy = remedy_for_unknown(word, _EXAMPLES)
        raise _AnnotationInvalid(node.lineno, f"@nni.{word}: there is no such annotation", remedy)
    if kind is None:
        remedy = f"write e.g. {_EXAMPLES[word]}"
        raise _AnnotationInvalid(node.lineno, f"@nni.{word}: an annotation must be a single call", remedy)
    return kind, expression


def _name_in(node: ast.Constant, kind: str, keywords: list[ast.keyword]) -> str | None:
    """The target of `name=` as source text; None without one."""
    wrong = [str(each.arg or "**") for each in keywords if each.arg != "name"]
    if wrong:
        what = f"@nni.{kind} with {', '.join(wrong)}: it takes only options and a name"
        raise _AnnotationInvalid(node.lineno, what, f"write e.g. {_EXAMPLES[kind]}")
    if not keywords:
        return None
    name = ast.unparse(keywords[0].value)
    if not isinstance(keywords[0].value, ast.Name | ast.Attribute | ast.Subscript):
        noun = "variable" if kind == "variable" else "function"
        what = f"@nni.{kind} with name={name}: it is not the name of a {noun}"
        raise _AnnotationInvalid(node.lineno, what, "write the name as in the code, without quotes")
    return name


def _assigned_value(pending: _PendingAnnotation, target: ast.stmt) -> ast.expr:
    """The right-hand side that `@nni.variable` replaces."""
    line, name, there = pending.node.lineno, pending.name, f"line {target.lineno}"
    targets = target.targets if isinstance(target, ast.Assign) else []
    if isinstance(target, ast.AnnAssign) and target.value is not None:
        targets = [target.target]
    assigned = [ast.unparse(each) for each in targets]
    if not assigned:
        what = f"@nni.variable: {there}, the next statement, does not assign a value"
        raise _AnnotationInvalid(line, what, f"write `{name or 'size'} = ...` there")
    if len(assigned) > 1:
        what = f"@nni.variable: {there} assigns {' and '.join(assigned)} at once"
        raise _AnnotationInvalid(line, what, "write a separate assignment for each")
    if name is not None and assigned[0] != name:
        what = f"@nni.variable with name={name}: {there} assigns {assigned[0]}"
        remedy = f"write name={assigned[0]}, or move the annotation right above the assignment of {name}"
        raise _AnnotationInvalid(line, what, remedy)
    assert isinstance(target, ast.Assign | ast.AnnAssign)
    assert target.value is not None
    return target.value


def _text_of(statement: ast.stmt) -> str | None:
    """The text of a statement that is only a string; None for other statements."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _is_annotation(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=text) | ast.JoinedStr(values=[ast.Constant(value=text), *_])):
            return str(text).startswith(_MARK)
    return False


def _is_future_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _nni_name(function: ast.expr) -> str | None:
    """`x` of `nni.x`; None for other expressions."""
    match function:
        case ast.Attribute(value=ast.Name(id="nni"), attr=name):
            return name
    return None


def _code_of(node: ast.expr) -> str:
    """The expression as code that every Python reads.

    From Python 3.12 on, an f-string may contain its own quote, and `ast.unparse` uses that. It then gets the quote that older
    ones choose.
    """
    texts: dict[str, str] = {}

    class Texts(ast.NodeTransformer):
        def visit_JoinedStr(self, text: ast.JoinedStr) -> ast.expr:
            code, name = ast.unparse(text), f"_text_{len(texts)}_"
            if code[1] in code[2:-1] and not code.startswith(code[1] * 3, 1):
                quote = next((each for each in _QUOTES if each not in code[2:-1]), code[1])
                code = f"f{quote}{code[2:-1]}{quote}"
            texts[name] = code
            return ast.Name(name)

    code = ast.unparse(Texts().visit(copy.deepcopy(node)))
    for name, text in texts.items():
        code = code.replace(name, text)
    return code


def _option(node: ast.expr, *, in_expression: bool = False) -> _Option:
    """The option of an expression: a JSON scalar has its own value, any other expression its source text."""
    code = _code_of(node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = ...
    is_scalar = value is None or isinstance(value, str | int | float)
    if is_scalar and not (isinstance(value, float) and not math.isfinite(value)):
        return _Option(value, code, is_literal=True)
    binds_tightly = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    return _Option(code, code if binds_tightly or not in_expression else f"({code})", is_literal=False)


def _calls(node: ast.AST, is_meant: Callable[[ast.Call], bool]) -> Iterator[tuple[ast.Call, bool]]:
    """The outermost matching calls, each with True if it is in an f-string, where code cannot be replaced."""
    pending = [(node, False)]
    while pending:
        each, is_in_text = pending.pop()
        if isinstance(each, ast.Call) and is_meant(each):
            yield each, is_in_text
            continue
        is_in_text = is_in_text or isinstance(each, ast.JoinedStr)
        pending += [(child, is_in_text) for child in ast.iter_child_nodes(each)]
