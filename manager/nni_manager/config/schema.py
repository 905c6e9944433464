"""The base of all file schemas: each field has a description, from which its errors become one-sentence messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    Diagnostic,
    Place,
    ref,
    remedy_for_unknown,
    shown,
)

if TYPE_CHECKING:
    from nni_manager.config.document import Document

# {your_account}, ${your user name} and <path to code> in examples, alone or as part of a path. YAML reads the first as a
# mapping with one null value. A name in capitals is a shell variable: ${HOME}.
_PLACEHOLDER = re.compile(
    r"^(\{\s*[\w .-]+\s*\}|\$\{(?![A-Z_0-9]+\})[^{}]+\}|<[^<>]+>)$|\{your_\w+\}|^your_\w+$|<your[^<>]*>"
)
_SENTENCE = "sentence"
# Without control characters, and with something else than blanks.
_LINE = r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"
# The metadata of a field about v1 files: its paths there, and a mark of keys that only v1 files have.
V1_PATHS, ONLY_V1 = "x-v1", "x-only-v1"
# The types that YAML infers for unquoted scalars: 2024, 1.10, no, 2024-01-01.
_READ_AS: dict[type, str] = {
    int: "a number",
    float: "a number",
    bool: "a truth value",
    date: "a date",
    datetime: "a date",
}


class Schema(BaseModel):
    """A mapping of the file. Unknown keys are refused; types are not converted.

    Keys are in camelCase; NNI also accepts snake_case.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        defer_build=True,
    )


AnySchema = TypeVar("AnySchema", bound=Schema)


def must_be(
    what: str,
    example: str,
    default: Any = ...,
    *,
    v1: str | None = None,
    only_v1: bool = False,
    **rules: Any,
) -> Any:
    """A field that must be `what`; `example` is a value in the file's notation. `repr=False` marks a secret.

    `v1` are the key's paths in NNI's first schema, separated by blanks: below the v1 mapping of the containing section, or
    below the file if it starts with /; "." is that mapping itself, "" means that v1 lacks the key, and None means the
    same name. `only_v1`: the second schema lacks the key.
    """
    extra: JsonDict = {} if v1 is None else {V1_PATHS: v1}
    if only_v1:
        extra[ONLY_V1] = True
    return Field(default, description=what, examples=[example], json_schema_extra=extra, **rules)


def text(what: str, example: str, default: Any = ..., **rules: Any) -> Any:
    """A field that must be text that is not empty."""
    return must_be(what, example, default, min_length=1, **rules)


def line(what: str, example: str, default: Any = ..., **rules: Any) -> Any:
    """A field that must be one line of text that is not blank."""
    return must_be(what, example, default, pattern=_LINE, **rules)


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
    """The error that a validator raises with its own message: "cannot …; remedy", or only the reason and the remedy."""
    return PydanticCustomError(_SENTENCE, "{sentence}", {"sentence": sentence})


def check(
    schema: type[AnySchema], raw: Any, document: Document, above: Place = ()
) -> tuple[AnySchema | None, list[Diagnostic]]:
    """The mapping `raw` as `schema`, or None and its errors, up to MAX_DIAGNOSTICS. `above` is its path in the document."""
    try:
        return schema.model_validate(raw), []
    except ValidationError as error:
        found: dict[Place, Diagnostic] = {}
        for detail in error.errors(include_url=False)[:MAX_DIAGNOSTICS]:
            path, field, inside = _field_at(schema, detail["loc"])
            # Report only the first error of a field.
            if not document.is_refused((*above, *path)):
                message = _sentence(detail, (*above, *path), field, inside)
                found.setdefault(path, document.diagnostic((*above, *path), message))
    return None, list(found.values())


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


def _sentence(detail: ErrorDetails, path: Place, field: FieldInfo | None, inside: type[Schema]) -> str:
    kind, value = detail["type"], detail["input"]
    subject = ref(path)
    if kind == _SENTENCE:
        sentence = str(detail["ctx"]["sentence"])
        return sentence if sentence.startswith("cannot ") else f"cannot use {subject}: {sentence}"
    last = str(path[-1]) if path else ""
    if field is None:
        remedy = remedy_for_unknown(last, fields_of(inside), verb="remove it or use")
        return f"cannot use {subject if path else 'this file'}: there is no such key here; {remedy}"
    what, written = field.description, f"write e.g. {ref(path, example_of(field))}"
    if isinstance(path[-1], int):
        # An item of a list must be a mapping.
        whole_list = tuple(path[: max(i for i, step in enumerate(path) if isinstance(step, str)) + 1])
        return f"cannot use {subject}: {shown(value)} is not a mapping; write e.g. {ref(whole_list, example_of(field))}"
    if kind == "missing":
        return f"cannot do without {subject}: it must be {what}; {written}"
    if is_placeholder(value):
        return f"cannot use {subject}: it is a placeholder of an example; {written}"
    read_value = shown(value) if field.repr else "its value"  # a secret is not shown
    if kind == "string_type" and (read_as := _READ_AS.get(type(value))) is not None:
        return f"cannot use {subject}: without quotes YAML reads {read_value} as {read_as}; put it in quotes"
    return f"cannot use {subject}: {read_value} is not {what}; {written}"


def example_of(field: FieldInfo) -> str:
    """The example of a field, in YAML."""
    return str((field.examples or [""])[0])


def is_placeholder(value: Any) -> bool:
    """True if a value is a placeholder of an example."""
    if isinstance(value, dict):
        return list(value.values()) == [None]
    return isinstance(value, str) and _PLACEHOLDER.search(value) is not None
