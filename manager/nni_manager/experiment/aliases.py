"""The base of all config classes: accepts field names in any spelling, and mappings instead of objects.

NNI's Python code and its examples write `gpuNumber` for the field `gpu_number`. Both are accepted; the first with a hint.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic.alias_generators import to_camel

from nni_manager.config.diagnostics import folded, remedy_for_unknown
from nni_manager.errors import UserError

Made = TypeVar("Made")


PathOrText: TypeAlias = str | PathLike[str]
"""A path; a relative path is relative to the current directory."""
Seconds: TypeAlias = str | int
"""A duration such as "90m" or "0.5h", or a number of seconds."""
GpuIndices: TypeAlias = list[int] | int | str
"""GPU indices: [0, 1], 0, or "0,1"."""


class NoSuchField(UserError, AttributeError):
    """cannot set an unknown field of a configuration; use one of its fields"""


class AliasHint(UserWarning):
    """A field name is in camelCase, as in experiment files; the documented Python spelling is snake_case."""


class AliasedFields(type):
    """A metaclass of dataclasses whose constructors accept field names in any spelling."""

    def __call__(cls: type[Made], *values: Any, **fields: Any) -> Made:
        """Create an object."""
        assert issubclass(cls, ConfigBase)
        if len(values) == 1 and "class_args" in cls.field_names():
            # A tuner, assessor or advisor is often written as its name alone.
            fields = {"name": values[0]} | fields
            values = values[1:]
        if len(values) > len(cls.__match_args__):
            raise UserError(
                f"cannot create {cls.__name__} from {values[-1]!r}: a value without a name belongs to no field; write it with "
                f"a name, such as {cls.__name__}({cls.field_names()[0]}=...)"
            )
        named = {cls.field_named(name): value for name, value in fields.items()}
        if len(named) < len(fields):
            raise NoSuchField(
                f"cannot create {cls.__name__}: two of {', '.join(fields)} are spellings of one field; keep one of them"
            )
        made: Made = type.__call__(cls, *values, **named)
        return made


@dataclasses.dataclass(kw_only=True)
class ConfigBase(metaclass=AliasedFields):
    """A part of the configuration of an experiment. None means not set: the default of the experiment file applies."""

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {}
    """The classes of fields that hold parts, or lists of parts."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """NNI's other names for fields; folded name to field."""
    answers: ClassVar[Mapping[str, str]] = {}
    """Hints for names that users often write and that are not fields."""

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of all fields."""
        return [each.name for each in dataclasses.fields(cls)]

    @classmethod
    def field_named(cls, name: str) -> str:
        """The field for a name in any spelling.

        Raises:
            NoSuchField: no field has this name.
        """
        names = cls.field_names()
        if name in names:
            return name
        by_folded = {folded(each): each for each in names}
        found = by_folded.get(folded(name)) or cls.aliases.get(folded(name))
        if found is None:
            raise NoSuchField(f"cannot set {name} of {cls.__name__}: {cls._remedy(name)}")
        if folded(found) == folded(name):
            # The stack level attributes the warning to the user's line, so each line warns once.
            warnings.warn(
                f"{name} of {cls.__name__} is read as {found}; write {found} in Python",
                AliasHint,
                stacklevel=_frames_to_the_user(),
            )
        return found

    @classmethod
    def _remedy(cls, name: str) -> str:
        if (answer := cls.answers.get(name)) is not None:
            return answer
        names = cls.field_names()
        if "class_args" in names and name in ("optimize_mode", "seed"):
            return f"it is an argument of the algorithm; write class_args[{name!r}]"
        if not difflib.get_close_matches(name, names):
            for field, part in cls.parts.items():
                if any(name in each.field_names() for each in (part, *part.__subclasses__())):
                    return f"it is a field of {field}; set {field}.{name}"
        return f"the field does not exist; {remedy_for_unknown(name, names)}"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, in any spelling; a mapping is converted to its part."""
        field = self.field_named(name)
        part = self.parts.get(field)
        object.__setattr__(self, field, value if part is None else _as_part(part, value))

    def __getattr__(self, name: str) -> Any:
        """The field for another spelling. Python calls this only if normal lookup fails."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self, self.field_named(name))

    def document(self) -> dict[str, Any]:
        """The set fields as a document of the second schema: keys in camelCase, no keys for fields that are not set."""
        found = {to_camel(name): plain(getattr(self, name)) for name in self.field_names()}
        return {name: value for name, value in found.items() if value not in (None, {})}


def _frames_to_the_user() -> int:
    """The stack level of the first frame outside this package and generated dataclass code: the user's line."""
    import sys

    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame, depth = frame.f_back, depth + 1
    return depth


def _as_part(part: type[ConfigBase], value: Any) -> Any:
    if isinstance(value, list):
        return [_as_part(part, item) for item in value]
    if isinstance(value, Mapping):
        return part.of_mapping(value) if hasattr(part, "of_mapping") else part(**value)
    return value


def plain(value: Any) -> Any:
    """Convert to a JSON value: paths to str, tuples and ranges to lists, numpy numbers to Python's; others are unchanged."""
    match value:
        case ConfigBase():
            return value.document()
        case Mapping():
            return {name: plain(item) for name, item in value.items()}
        case list() | tuple() | range():
            return [plain(item) for item in value]
        case str() | int() | float() | None:
            return value
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else plain(to_list())
