"""The base of all file schemas: each field has a description, from which its errors become one-sentence messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    Diagnostic,
    folded,
    key_of,
    remedy_for_unknown,
    shown,
)
from nni_manager.config.document import Document

# {your_account}, ${your user name} and <path to code> in examples, alone or as part of a path. YAML reads the first as a
# mapping with one null value. A name in capitals is a shell variable: ${HOME}.
_PLACEHOLDER = re.compile(
    r"^(\{\s*[\w .-]+\s*\}|\$\{(?![A-Z_0-9]+\})[^{}]+\}|<[^<>]+>)$|\{your_\w+\}|^your_\w+$|<your[^<>]*>"
)
_SENTENCE = "sentence"
V2_NAME = "x-v2"
# The arguments that users most often indent too little.
_OF_ALGORITHMS = ("optimize_mode", "seed")
# The types that YAML infers for unquoted scalars: 2024, 1.10, no, 2024-01-01.
_READ_AS: dict[type, str] = {
    int: "a number",
    float: "a number",
    bool: "a truth value",
    date: "a date",
    datetime: "a date",
}


class Schema(BaseModel):
    """A mapping of the file, with camelCase keys. Unknown keys are refused; types are not converted.

    `answers` holds hints for unsupported keys that users often write: the reason and the replacement.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)
    answers: ClassVar[dict[str, str]] = {}


AnySchema = TypeVar("AnySchema", bound=Schema)


def must_be(what: str, example: str, default: Any = ..., *, v2: str | None = None, **rules: Any) -> Any:
    """A field that must be `what`; `example` is a value in the file's notation. `repr=False` marks a secret.

    `v2` is the key's path in NNI's second schema, below the mapping that contains it, or below the file if it starts
    with /; empty if v2 has no such key; None if the name is the same.
    """
    extra: JsonDict | None = None if v2 is None else {V2_NAME: v2}
    return Field(default, description=what, examples=[example], json_schema_extra=extra, **rules)


def whole(least: int, most: int | None, example: str, default: Any = ..., **rules: Any) -> Any:
    """A field that must be a whole number in this range, both bounds included."""
    what = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    return must_be(what, example, default, ge=least, le=most, **rules)


def flag(example: str, default: bool | None, **rules: Any) -> Any:
    """A field that must be a truth value."""
    return must_be("true or false", example, default, **rules)


def mapping(example: str, default: Any = ..., **rules: Any) -> Any:
    """A field that must be a mapping."""
    return must_be("a mapping", example, default, **rules)


def refusal(sentence: str) -> PydanticCustomError:
    """The error that a validator raises with its own message: a sentence, "cannot …; remedy"."""
    return PydanticCustomError(_SENTENCE, "{sentence}", {"sentence": sentence})


def check(
    schema: type[AnySchema],
    raw: Any,
    document: Document,
    above: tuple[str, ...] = (),
    answers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[AnySchema | None, list[Diagnostic]]:
    """The mapping `raw` as `schema`, or None and its errors, up to MAX_DIAGNOSTICS. `above` is its path in the document.

    `answers` holds hints for unknown keys, by dotted name.
    """
    try:
        return schema.model_validate(with_camel_keys(schema, raw)), []
    except ValidationError as error:
        found: dict[tuple[str | int, ...], Diagnostic] = {}
        for detail in error.errors(include_url=False)[:MAX_DIAGNOSTICS]:
            path, field, inside = _field_at(schema, detail["loc"])
            # Report only the first error of a field.
            message = _sentence(detail, (*above, *path), field, inside, answers)
            found.setdefault(path, document.diagnostic((*above, *path), message))
    return None, list(found.values())


def with_camel_keys(schema: type[BaseModel], raw: Any) -> Any:
    """`raw` with known snake_case keys, which NNI also accepts, in camelCase."""
    if isinstance(raw, list):
        return [with_camel_keys(schema, item) for item in raw]
    if not isinstance(raw, Mapping):
        return raw
    fields = fields_of(schema)
    by_folded = {folded(name): name for name in fields}
    renamed = {}
    for key, value in raw.items():
        camel = by_folded.get(folded(key), key) if isinstance(key, str) and "_" in key else key
        name = camel if camel not in raw else key
        inner = schema_in(fields[name]) if name in fields else None
        renamed[name] = value if inner is None else with_camel_keys(inner, value)
    return renamed


def fields_of(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a schema by their keys in the file."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


def schema_in(field: FieldInfo) -> type[Schema] | None:
    """The schema of the mapping, or of each mapping in the list, that a field holds; None when it holds neither."""
    kinds = [field.annotation, *get_args(field.annotation)]
    for kind in (*kinds, *(inner for each in kinds for inner in get_args(each))):
        # On Python 3.10 dict[str, Any] is an instance of type, and issubclass raises.
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Schema):
            return kind
    return None


def _field_at(
    schema: type[Schema], loc: Sequence[str | int]
) -> tuple[tuple[str | int, ...], FieldInfo | None, type[Schema]]:
    """The path of the field at pydantic's `loc`, without pydantic's own steps; the field; and the schema that contains it."""
    path: tuple[str | int, ...] = ()
    inside, here = schema, schema
    field: FieldInfo | None = None
    is_list = False
    for step in loc:
        if isinstance(step, int) and is_list:
            path, is_list = (*path, step), False
            continue
        inside = here
        path = (*path, str(step))  # YAML also has keys such as 1
        field = fields_of(inside).get(str(step))
        inner = None if field is None else schema_in(field)
        if inner is None:
            break
        here, is_list = inner, True
    return path, field, inside


def _sentence(
    detail: ErrorDetails,
    path: tuple[str | int, ...],
    field: FieldInfo | None,
    inside: type[Schema],
    answers: Mapping[str, str],
) -> str:
    key, kind, value = key_of(path), detail["type"], detail["input"]
    if kind == _SENTENCE:
        return str(detail["ctx"]["sentence"])
    last = str(path[-1]) if path else ""
    if field is None:
        if (answer := answers.get(key, inside.answers.get(last))) is not None:
            return f"cannot use {key}: {answer}"
        fields = fields_of(inside)
        if homes := [
            name for name, each in fields.items() if (below := schema_in(each)) and last in fields_of(below)
        ]:
            one = homes[0] if len(homes) == 1 else f"one of {', '.join(homes)}"
            return f"cannot use {key}: it is not a key of this section; indent it below {one}"
        if last in _OF_ALGORITHMS and "classArgs" in fields:
            return f"cannot use {key}: it is an argument of the algorithm; indent it below classArgs"
        remedy = remedy_for_unknown(last, fields, verb="remove it or use")
        return f"cannot use {key or 'this file'}: there is no such key here; {remedy}"
    what, example = field.description, (field.examples or [""])[0]
    written = f"write e.g. {last}: {example}"
    if isinstance(path[-1], int):
        # An item of a list must be a mapping.
        name = next(step for step in reversed(path) if isinstance(step, str))
        return f"cannot use {key}: {shown(value)} is not a mapping; write e.g. {name}: {example}"
    if kind == "missing":
        return f"cannot do without {key}: it must be {what}; {written}"
    if is_placeholder(value):
        return f"cannot use {key}: it is a placeholder of an example; {written}"
    if kind == "string_type" and (read_as := _READ_AS.get(type(value))) is not None:
        read_value = shown(value) if field.repr else "its value"
        return f"cannot use {key}: without quotes YAML reads {read_value} as {read_as}; put it in quotes"
    if not field.repr:
        return f"cannot use {key}: its value is not {what}; {written}"  # the value is a secret
    return f"cannot use {key}: {shown(value)} is not {what}; {written}"


def is_placeholder(value: Any) -> bool:
    """True if a value is a placeholder of an example."""
    if isinstance(value, dict):
        return list(value.values()) == [None]
    return isinstance(value, str) and _PLACEHOLDER.search(value) is not None
