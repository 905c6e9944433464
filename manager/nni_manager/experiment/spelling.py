"""What all config classes share: fields by NNI's names in any spelling, and mappings in the place of objects.

NNI's Python code, and examples of it, write `gpuNumber` where the field is `gpu_number`. Both mean the same here, with a hint.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic.alias_generators import to_camel

from nni_manager.config.mistakes import folded, remedy_for_unknown
from nni_manager.errors import UserMistake

Made = TypeVar("Made")


class NoSuchField(UserMistake, AttributeError):
    """cannot set what is no field of a configuration; see the fields that the message names"""


class SpellingHint(UserWarning):
    """A field is written as in experiment files, in camelCase; Python's spelling of it is the one in the documentation."""


class AnySpelling(type):
    """Lets a dataclass be made with its fields in any spelling."""

    def __call__(cls: type[Made], *values: Any, **fields: Any) -> Made:
        """A new object."""
        assert issubclass(cls, ConfigBase)
        named = {cls.field_named(name): value for name, value in fields.items()}
        if len(named) < len(fields):
            raise NoSuchField(
                f"cannot make {cls.__name__}: {', '.join(fields)} name a field twice, in several spellings; keep one of them"
            )
        made: Made = type.__call__(cls, *values, **named)
        return made


@dataclasses.dataclass(kw_only=True)
class ConfigBase(metaclass=AnySpelling):
    """A part of the configuration of an experiment. None means that nothing is said: the default is the experiment file's."""

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {}
    """Which class the fields have that hold parts of their own, or lists of them."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names that NNI has for fields, folded."""
    answers: ClassVar[Mapping[str, str]] = {}
    """What to say of names that people write here and that are no fields."""

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of all fields."""
        return [each.name for each in dataclasses.fields(cls)]

    @classmethod
    def field_named(cls, name: str) -> str:
        """The field that is meant by a name in any spelling.

        Raises:
            NoSuchField: there is none.
        """
        names = cls.field_names()
        if name in names:
            return name
        by_folded = {folded(each): each for each in names}
        found = by_folded.get(folded(name)) or cls.aliases.get(folded(name))
        if found is None:
            raise NoSuchField(f"cannot set {name} of {cls.__name__}: {cls._remedy(name)}")
        if folded(found) == folded(name):
            # One for each line of the user's that has it.
            warnings.warn(
                f"{name} of {cls.__name__} is taken as {found}, which is how Python code writes it",
                SpellingHint,
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
        return f"there is no such field; {remedy_for_unknown(name, names)}"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, in any spelling; a mapping becomes the part that it describes."""
        field = self.field_named(name)
        part = self.parts.get(field)
        object.__setattr__(self, field, value if part is None else _as_part(part, value))

    def __getattr__(self, name: str) -> Any:
        """A field in another spelling; others never come here."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self, self.field_named(name))

    def document(self) -> dict[str, Any]:
        """What is said, as the second schema of experiment files has it: camelCase, and no key for what is not said."""
        found = {to_camel(name): _plain(getattr(self, name)) for name in self.field_names()}
        return {name: value for name, value in found.items() if value not in (None, {})}


def _frames_to_the_user() -> int:
    """How far up the stack the user's line is: beyond this package, and what dataclasses generate."""
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


def _plain(value: Any) -> Any:
    """Paths as text, tuples and ranges as lists, numbers of numpy as Python's; what is none of these as it is."""
    match value:
        case ConfigBase():
            return value.document()
        case Mapping():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple() | range():
            return [_plain(item) for item in value]
        case str() | int() | float() | None:
            return value
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else _plain(to_list())
