"""The base of all file schemas. A field declares a key once: type, default, notation, description, and its name in v1 files.

From it come the check and its one-sentence errors, the JSON schemas, the classes in Python, and the tables of the documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    Diagnostic,
    KeyPath,
    ref,
    remedy_for_unknown,
    shown,
)
from nni_manager.config.dialect import EACH, Keys
from trial_keeper.frozen_dataclass import dataclass

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
Kind: TypeAlias = Literal["", "folder", "file", "duration", "size", "gpus", "open"]
"""What a value is besides its type: a path on this machine, seconds, MB, GPU numbers, or a mapping with names of the user."""
PATHS: tuple[Kind, ...] = ("folder", "file")
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
# The types that YAML infers for unquoted scalars: 2024, 1.10, no, 2024-01-01.
_READ_AS: dict[type, str] = {
    int: "a number",
    float: "a number",
    bool: "a truth value",
    date: "a date",
    datetime: "a date",
}


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a field declares about its key besides type, default and notation, which pydantic's field has.

    `about` is one sentence in Markdown, without capital and full stop. `unset` is what holds without the key, if that is not
    simply the default. `since` is the version that added a key which NNI lacks; empty: NNI has it. `v1`: see `must_be`.
    """

    what: str
    about: str = ""
    unset: str = ""
    since: str = ""
    kind: Kind = ""
    v1: str | None = None
    only_v1: bool = False

    @property
    def sentence(self) -> str:
        """The description without links."""
        return _LINK.sub(r"\1", self.about)

    def __call__(self, schema: dict[str, Any]) -> None:
        """Complete the key's JSON schema."""
        schema["description"] = self.described(self.what)

    def described(self, what: str) -> str:
        """The description, and `what` the value must be."""
        about = self.sentence
        return f"{about[0].upper()}{about[1:]}. Value: {what}" if about else what


class Schema(BaseModel):
    """A mapping of the file. Unknown keys are refused; types are not converted.

    Keys are in camelCase; NNI also accepts snake_case. `python_name` is the name of its class in Python; empty: it has none.
    """

    python_name: ClassVar[str] = ""
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
    about: str = "",
    unset: str = "",
    since: str = "",
    kind: Kind = "",
    v1: str | None = None,
    only_v1: bool = False,
    **rules: Any,
) -> Any:
    """A field that must be `what`; `example` is a value in the file's notation. `repr=False` marks a secret.

    `about`, `unset`, `since` and `kind`: see `Declaration`.

    `v1` are the key's paths in NNI's first schema, separated by blanks: below the v1 mapping of the containing section, or
    below the file if it starts with /; "." is that mapping itself, "" means that v1 lacks the key, and None means the
    same name. `only_v1`: the second schema lacks the key.
    """
    declared = Declaration(what, about, unset, since, kind, v1, only_v1)
    return Field(default, description=what, examples=[example], json_schema_extra=declared, **rules)


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
    schema: type[AnySchema], raw: Any, document: Document, above: KeyPath = ()
) -> tuple[AnySchema | None, list[Diagnostic]]:
    """The mapping `raw` as `schema`, or None and its errors, up to MAX_DIAGNOSTICS. `above` is its path in the document."""
    try:
        return schema.model_validate(raw), []
    except ValidationError as error:
        found: dict[KeyPath, Diagnostic] = {}
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


@dataclass(frozen=True, slots=True)
class Key:
    """A key of experiment files: its path in v2, its paths in v1 files, and its field in the schema `owner`.

    `inner` is the schema of its value, or of each item, if that has keys of its own.
    """

    path: Keys
    v1: tuple[Keys, ...]
    owner: type[Schema]
    field: FieldInfo
    inner: type[Schema] | None

    @property
    def declared(self) -> Declaration:
        """The declaration of the key."""
        return declaration(self.field)

    @property
    def is_mapping(self) -> bool:
        """True if its value, or each item, has keys of its own."""
        return self.inner is not None

    @property
    def is_list(self) -> bool:
        """True if its value is a list of mappings."""
        return self.inner is not None and "list" in str(self.field.annotation)


def declaration(field: FieldInfo) -> Declaration:
    """The declaration of a field."""
    declared = field.json_schema_extra
    return declared if isinstance(declared, Declaration) else Declaration(field.description or "")


@cache
def keys_in(schema: type[Schema]) -> tuple[Key, ...]:
    """All keys of files with this schema, in its order."""

    def within(schema: type[Schema], above: Keys, above_v1: Keys) -> Iterator[Key]:
        for name, field in fields_of(schema).items():
            declared = declaration(field).v1
            v1 = tuple(_below(above_v1, each) for each in (name if declared is None else declared).split())
            key = Key((*above, name), v1, schema, field, schema_in(field))
            yield key
            if key.inner is not None:
                each = (EACH,) if key.is_list else ()
                yield from within(key.inner, (*key.path, *each), (*v1[0], *each))

    return tuple(within(schema, (), ()))


def _below(above: Keys, written: str) -> Keys:
    if written == ".":
        return above
    steps = tuple(written.strip("/").split("."))
    return steps if written.startswith("/") else (*above, *steps)


@cache
def names_of_kind(schema: type[Schema], *kinds: Kind) -> frozenset[str]:
    """The names of the keys of these kinds, in any section."""
    return frozenset(key.path[-1] for key in keys_in(schema) if key.declared.kind in kinds)


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


def _sentence(detail: ErrorDetails, path: KeyPath, field: FieldInfo | None, inside: type[Schema]) -> str:
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
