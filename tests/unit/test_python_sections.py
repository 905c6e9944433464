"""The configuration classes in Python are generated from the key declarations.

`make golden` writes `experiment/sections.py`.
"""

import dataclasses
import os
import pydoc
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.alias_generators import to_snake

from nni_manager.config.diagnostics import folded
from nni_manager.config.dialect import EACH, SERVICE, Keys
from nni_manager.config.experiment_schema import ExperimentKeys
from nni_manager.config.keys import keys_on
from nni_manager.config.platform_file import file_of
from nni_manager.config.platforms import PLATFORMS
from nni_manager.config.schema import Key, keys_in
from nni_manager.config.v2 import aliases_on

FILE = Path(__file__).parents[2] / "manager" / "nni_manager" / "experiment" / "sections.py"
HEAD = '''\
"""The sections of a configuration in Python: the keys of NNI's second schema as fields, without checks.

Generated from the declarations of the keys; `make golden` writes this file. A field that is None is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nni_manager.experiment.aliases import ConfigBase, GpuIndices, PathOrText, Seconds
from nni_manager.experiment.platform_section import PlatformSection
'''
TYPES = {
    "folder": "PathOrText",
    "file": "PathOrText",
    "duration": "Seconds",
    "size": "str | int",
    "gpus": "GpuIndices",
}
WIDTH = 120


class Section:
    """A class with the keys of one section, or of several sections that share the class."""

    def __init__(self, name: str, base: str, about: str) -> None:
        self.name, self.base, self.about = name, base, about
        self.keys: dict[str, list[Key]] = {}
        self.aliases: dict[str, str] = {}
        self.platform = ""
        # These keys of NNI are refused with a hint.
        self.refused: list[str] = []

    def add(self, key: Key) -> None:
        same = self.keys.setdefault(to_snake(key.path[-1]), [])
        if key.declared not in [each.declared for each in same]:
            same.append(key)

    def lines(self) -> Iterator[str]:
        described = {
            name: keys for name, keys in self.keys.items() if name != "platform" or not self.platform
        }
        yield from ("", "", "@dataclass(kw_only=True)", f"class {self.name}({self.base}):")
        yield f'    """{self.about}'
        if self.platform:
            yield from ("", f"    The other fields are those of `{self.base}`.")
        yield ""
        for name, keys in described.items():
            text = f"{name}: {purpose(keys)}."
            yield from textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="        ")
        yield from ('    """', "")
        parts = {name: part_of(keys[0]) for name, keys in self.keys.items()}
        yield from mapping("parts", "type[ConfigBase]", {name: part for name, part in parts.items() if part})
        yield from mapping("aliases", "str", {old: f'"{new}"' for old, new in self.aliases.items()})
        for name, keys in self.keys.items():
            declared = f"    {name}: {self.declared(name, keys[0])}"
            yield (
                declared
                if len(declared) <= 110
                else declared.replace("field(", "field(\n        ")[:-1] + "\n    )"
            )
            if name in described:
                text = f'"""{description(keys)}"""'
                yield from textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
        yield from (f"    {name}: dict[str, Any] | None = None" for name in self.refused)

    def declared(self, name: str, key: Key) -> str:
        part = part_of(key)
        if name == "platform" and self.platform:
            return f'str | None = "{self.platform}"'
        if part and key.is_list:
            return f"list[{part}] = field(default_factory=list)"
        if part and (key.field.is_required() or not any(each.is_required() for each in fields(key))):
            return f"{part} = field(default_factory={part})"
        kind = part or TYPES.get(key.declared.kind) or type_of(key)
        if kind.startswith("dict["):
            return f"{kind} = field(default_factory=dict)"
        return f"{kind} | None = {'None' if key.field.repr else 'field(default=None, repr=False)'}"


def fields(key: Key) -> list[Any]:
    assert key.inner is not None
    return [*key.inner.model_fields.values()]


def part_of(key: Key) -> str:
    return "" if key.inner is None else key.inner.python_name


def type_of(key: Key) -> str:
    """The type of the values that a key accepts before validation."""
    if key.inner is not None:
        # The key holds a list of mappings, and no Python class exists for these mappings.
        return "list[dict[str, Any]]"

    def named(kind: Any) -> Iterator[str]:
        if get_origin(kind) is Annotated:
            yield from named(get_args(kind)[0])
        elif get_origin(kind) in (Union, UnionType):
            for each in get_args(kind):
                yield from named(each)
        elif get_origin(kind) is Literal:
            yield from (type(each).__name__ for each in get_args(kind))
        elif kind is Any and key.declared.kind == "open":
            yield "Mapping[str, Any]"
        elif kind is not type(None):
            yield (
                kind.__name__
                if isinstance(kind, type) and not get_args(kind)
                else str(kind).replace("typing.", "")
            )

    return " | ".join(dict.fromkeys(named(key.field.annotation)))


def purpose(keys: list[Key]) -> str:
    text = "; ".join(dict.fromkeys(key.declared.sentence for key in keys))
    return in_python(text[0].upper() + text[1:])


def description(keys: list[Key]) -> str:
    """The purpose of a field, its values, and its default, with Python field names in place of keys."""
    key, declared = keys[0], keys[0].declared
    sentences = [purpose(keys)]
    if key.inner is None and declared.what not in ("text", "a mapping", "true or false"):
        sentences.append("Value: " + " or ".join(dict.fromkeys(each.declared.what for each in keys)))
    sentences += [f"Since {declared.since}, not in NNI"] if declared.since else []
    unset = re.sub(r".*in (the second schema|Python),? ", "", declared.unset)
    if not unset and not key.field.is_required() and key.field.default not in (None, "", []):
        unset = f"`{key.field.default}`"
    sentences += [f"Default: {in_python(unset)}"] if unset and not unset.startswith("required") else []
    return ". ".join(sentences) + "."


def in_python(text: str) -> str:
    """The text without links, and with Python field names in place of keys."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"`(true|false)`", lambda found: f"`{found[1].title()}`", text)
    return re.sub(r"`([a-z]+[A-Z]\w*)`", lambda found: f"`{to_snake(found[1])}`", text)


def mapping(name: str, kind: str, items: dict[str, str]) -> Iterator[str]:
    if items:
        yield f"    {name}: ClassVar[Mapping[str, {kind}]] = {{"
        yield from (f'        "{key}": {value},' for key, value in items.items())
        yield "    }"


def about(key: Key) -> str:
    """The first paragraph of the docstring of a section's class."""
    assert key.inner is not None
    named = next(each for each in key.inner.__mro__ if "python_name" in vars(each))
    return in_python(" ".join((named.__doc__ or "").partition("\n\n")[0].split()))


def sections() -> dict[str, Section]:
    """All classes, by name."""
    found: dict[str, Section] = {}

    def section(name: str, base: str, text: str) -> Section:
        return found.setdefault(name, Section(name, base, text))

    shared = keys_in(ExperimentKeys)
    service = next(key for key in shared if key.path == SERVICE)
    for platform in PLATFORMS:
        keys, aliases = keys_on(platform), aliases_on(platform)
        for key in [each for each in keys if part_of(each)]:
            home: Keys = (*key.path, *((EACH,) if key.is_list else ()))
            is_platform = key.path == SERVICE
            if is_platform:
                assert "python_name" in vars(key.inner), (
                    f"{key.inner} has no python_name, that of its class in Python"
                )
                general = section(part_of(service), "PlatformSection", about(service))
                general.keys = {} if general.keys else general.keys
                for each in keys_in(ExperimentKeys):
                    if each.path[:-1] == SERVICE or (*SERVICE, each.path[0]) in aliases:
                        general.add(each)
            own = section(part_of(key), general.name if is_platform else "ConfigBase", about(key))
            if is_platform:
                own.platform = platform
                own.refused = [to_snake(each) for each in file_of(platform).open_keys]
            for each in keys:
                if each.path[:-1] == home and not each.declared.only_v1:
                    own.add(each)
            own.aliases |= {
                folded(old[-1]): to_snake(new[-1])
                for old, new in aliases.items()
                if old[:-1] == new[:-1] == home
            }
            if is_platform:
                own.keys = {
                    name: each
                    for name, each in own.keys.items()
                    if name == "platform" or name not in general.keys
                }
    whole = section("ExperimentFields", "ConfigBase", "The fields of `ExperimentConfig`.")
    for key in shared:
        if len(key.path) == 1 and not key.declared.only_v1:
            whole.add(key)
    return found


def generated() -> str:
    found = sections()
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        """Add a class after the classes that it refers to."""
        for each in (found[name].base, *(part_of(keys[0]) for keys in found[name].keys.values())):
            if each in found:
                add(each)
        ordered[name] = None

    for name in found:
        add(name)
    names = ["", "__all__ = [", *(f'    "{name}",' for name in sorted(found)), "]", ""]
    return (
        HEAD + "\n".join(names) + "\n".join(line for name in ordered for line in found[name].lines()) + "\n"
    )


def test_the_configuration_classes_are_generated_from_the_key_declarations() -> None:
    if os.environ.get("GOLDEN") == "write":
        FILE.write_text(generated())
    else:
        assert FILE.read_text() == generated(), "run `make golden` after a change of a key"


def test_python_help_describes_each_field_of_each_configuration_class() -> None:
    # These modules are imported only here, because `make golden` must be able to write `sections` even if it cannot be imported.
    from nni_manager.experiment import config, sections

    for made in (config.ExperimentConfig, *(getattr(sections, name) for name in sections.__all__)):
        text = pydoc.plain(pydoc.render_doc(made))
        # The help of the base class describes the fields that all platforms share, so the help of a platform's class omits them.
        inherited = () if made is config.ExperimentConfig else made.__base__.field_names()
        refused = ("openpai_config", "shared_storage")
        for name in (each.name for each in dataclasses.fields(made)):
            if name not in (*inherited, *refused):
                assert re.search(rf"^ \|  {name}: \S", text, re.MULTILINE), (made, name)
        assert not inherited or made.__base__.__name__ in made.__doc__
