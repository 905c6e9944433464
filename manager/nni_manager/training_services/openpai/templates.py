"""The template language of a job, `<% $parameters.lr %>`, in both of its stages.

Stage 1, at submission: OpenPAI's server fills in `$parameters`, `$data`, `$output` and `$script`. It uses mustache with its own
tags and without escaping. Only names have an effect; sections, comments and partials are removed with their content.
Stage 2, in the container: the runtime fills in `$secrets`. An unknown name stays, normalised to `<% name %>`.

Intended differences from the original: secrets are not HTML-escaped, leftover tags are not blanked, and methods that only
JavaScript has (`toString`, `constructor`) do not exist.

Source: mustache.js 2.3 and microsoft/pai v1.8.1 (src/rest-server/src/middlewares/v2/protocol.js); microsoft/openpai-runtime
v0.1.12 (src/init.d/user_command_renderer.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nni_manager.training_services.openpai.scalars import javascript_text
from trial_keeper.frozen_dataclass import dataclass

_OPENING = re.compile(r"<%\s*(?P<kind>[#^/>{&=!]?)\s*")
_PIECES = re.compile(r"\n|[^\S\n]+|\S+")
_INDEX = re.compile(r"\[([0-9]+)\]")
# The container's runtime allows blanks around an index.
_LOOSE_INDEX = re.compile(r"\[\s*([0-9]+)\s*\]")
_CLOSING = "%>"
# Blanks before a closing tag are stripped afterwards: a pattern that strips them takes quadratic time.
_SECRET = re.compile(r"<%\s*(?P<name>\$secrets\b[^%]*)%>")
_REFERENCE_BEGINS = re.compile(r"<%\s*(?=\$)")
# The indices of all lists in a job are shorter.
_MAX_DIGITS_OF_INDEX = 9


class TemplateInvalid(Exception):
    """A tag or a section is not closed. `index` is its start; `problem` ends with the remedy."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        self.problem = problem


# Differs from None, which is a value.
MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Filled:
    """A text with its references filled in, and the names of the unresolved ones."""

    text: str
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tag:
    kind: str
    name: str
    index: int


def fill_at_submission(template: str, variables: Mapping[str, Any]) -> Filled:
    """Runs stage 1 and strips surrounding white space. `$secrets` stays unless it is one of the variables.

    Raises:
        TemplateInvalid: the server would answer with an error.
    """
    text: list[str] = []
    unknown: list[str] = []
    sections: list[_Tag] = []
    for piece in _without_lines_of_tags(template):
        if isinstance(piece, str):
            text += [] if sections else [piece]
        elif piece.kind in ("#", "^"):
            sections.append(piece)
        elif piece.kind == "/":
            if not sections or sections.pop().name != piece.name:
                raise TemplateInvalid(piece.index, f"<% /{piece.name} %> closes no section; remove it")
        elif piece.kind == "" and not sections:
            name = _INDEX.sub(r".\1", piece.name)
            value = _javascript_value(variables, name)
            is_unknown = value is MISSING or value is None
            unknown += [name] if is_unknown else []
            text.append(f"<% {name} %>" if is_unknown else javascript_text(value))
    if sections:
        raise TemplateInvalid(sections[-1].index, f"<% #{sections[-1].name} %> is not closed; remove it")
    return Filled("".join(text).strip(), tuple(name for name in unknown if not name.startswith("$secrets")))


def fill_secrets(text: str, secrets: Mapping[str, Any]) -> Filled:
    """Runs stage 2. Values are formatted as in Python: the runtime is a Python program."""
    found = ((match.start(), match["name"], match.end()) for match in _SECRET.finditer(text))
    return _replaced(found, text, {"$secrets": secrets}, str)


def fill_parameter(text: str, variables: Mapping[str, Any]) -> Filled:
    """Fills in a plugin parameter, with the variables of both stages. null, lists and mappings stay unresolved."""
    return _replaced(
        _references(text), text, variables, javascript_text, without_text=(list, dict, type(None))
    )


def lookup(variables: Mapping[str, Any], name: str) -> Any:
    """Resolves `$a.b.1`: mappings by key, lists by index; MISSING if there is no such value."""
    value: Any = variables
    for step in name.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and _is_index(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return MISSING
    return value


def _javascript_value(variables: Mapping[str, Any], name: str) -> Any:
    """As `lookup`, and with what JavaScript has besides: `.` for all variables, `length`, and characters of a text by index.

    Source: mustache.js 2.3.2, Context.lookup.
    """
    if name == ".":
        return variables
    value: Any = variables
    for step in name.split("."):
        if isinstance(value, Mapping):
            value = value.get(step, MISSING)
        elif isinstance(value, list | str):
            # JavaScript counts UTF-16 units.
            units = _utf16_units(value) if isinstance(value, str) else value
            if step == "length":
                value = len(units)
            else:
                is_there = _is_index(step) and step == str(int(step)) and int(step) < len(units)
                value = units[int(step)] if is_there else MISSING
        else:
            return MISSING
    return value


def _utf16_units(text: str) -> str:
    """The text with two replacement characters for each character beyond U+FFFF, whose halves are no characters."""
    return re.sub("[^\x00-\uffff]", "\ufffd\ufffd", text)


def _is_index(step: str) -> bool:
    return step.isdecimal() and len(step) <= _MAX_DIGITS_OF_INDEX


def _references(text: str) -> Iterator[tuple[int, str, int]]:
    """Yields each reference: the start of its tag, its name with trailing blanks, and the end of its tag."""
    position = 0
    while (opening := _REFERENCE_BEGINS.search(text, position)) is not None:
        closing = text.find(_CLOSING, opening.end() + 1)
        if closing < 0:
            return  # later tags are unclosed too
        position = closing + len(_CLOSING)
        yield opening.start(), text[opening.end() : closing], position


def _replaced(
    tags: Iterable[tuple[int, str, int]],
    text: str,
    variables: Mapping[str, Any],
    written: Callable[[Any], str],
    without_text: tuple[type, ...] = (),
) -> Filled:
    unknown: list[str] = []
    filled: list[str] = []
    done = 0
    for start, name_and_blanks, end in tags:
        name = name_and_blanks.rstrip()
        value = lookup(variables, _LOOSE_INDEX.sub(r".\1", name))
        is_unknown = value is MISSING or isinstance(value, without_text)
        if is_unknown:
            unknown.append(name)
        filled += [text[done:start], text[start:end] if is_unknown else written(value)]
        done = end
    return Filled("".join([*filled, text[done:]]), tuple(unknown))


def _without_lines_of_tags(template: str) -> Iterator[str | _Tag]:
    """Yields texts and tags. A line with nothing but valueless tags yields only the tags."""
    line: list[str | _Tag] = []
    for piece in _texts_and_tags(template):
        line.append(piece)
        if piece == "\n":
            yield from _visible(line)
            line = []
    yield from line


def _visible(line: list[str | _Tag]) -> list[str | _Tag]:
    tags = [piece for piece in line if isinstance(piece, _Tag)]
    is_blank = not any(isinstance(piece, str) and piece.strip() for piece in line)
    if tags and is_blank and all(tag.kind not in ("", "&") for tag in tags):
        return list(tags)
    return line


def _texts_and_tags(template: str) -> Iterator[str | _Tag]:
    position = 0
    while opening := _OPENING.search(template, position):
        yield from _PIECES.findall(template[position : opening.start()])
        closing = "}" + _CLOSING if opening["kind"] == "{" else _CLOSING
        end = template.find(closing, opening.end())
        if end < 0:
            raise TemplateInvalid(opening.start(), "<% is not closed; write %> after the name")
        if opening["kind"] == "=":
            raise TemplateInvalid(opening.start(), "<%= would change the tag delimiters; remove it")
        kind = "&" if opening["kind"] == "{" else opening["kind"]
        yield _Tag(kind, template[opening.end() : end].rstrip(), opening.start())
        position = end + len(closing)
    yield from _PIECES.findall(template[position:])
