"""JSON schemas of experiment files, for editors, generated from the reader's tables so that both agree.

Draft 7, which editors support. The schemas cover keys, types and ranges. Only the reader checks the disk and rules over several
keys. A file that the reader accepts always matches its schema; the reverse is not true. Keys may be in camelCase or snake_case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import yaml
from pydantic.alias_generators import to_snake
from pydantic.json_schema import models_json_schema

from nni_manager.config.algorithms import ASSESSOR_ARGS, CLASS_ARGS
from nni_manager.config.dialect import EACH, SERVICE, Keys
from nni_manager.config.keys import ALGORITHMS, keys_on
from nni_manager.config.platform_file import file_of
from nni_manager.config.platforms import PLATFORMS
from nni_manager.config.schema import Key, Schema
from nni_manager.config.v2 import DURATION_PATTERN, aliases_on, implicit_keys, keys_of_v2

Json: TypeAlias = dict[str, Any]
Version: TypeAlias = Literal["v1", "v2"]
_REF = "#/definitions/"
_PLATFORM = "trainingServicePlatform"
_NULL: Json = {"type": "null"}
_ALGORITHMS: dict[str, Mapping[str, type[Schema]]] = {
    "tuner": CLASS_ARGS,
    "advisor": CLASS_ARGS,
    "assessor": ASSESSOR_ARGS,
}


def json_schema(version: Version | None = None) -> Json:
    """The JSON schema of experiment files in NNI's first or second schema. Without a version it accepts both."""
    definitions = _definitions()
    if version is None:
        first, second = _root("v1", definitions), _root("v2", definitions)
        root: Json = {"type": "object", "if": _has(_PLATFORM), "then": first, "else": second}
    else:
        root = _root(version, definitions)
    which = {"v1": ", in NNI's first schema", "v2": ", in NNI's second schema", None: ""}[version]
    used = _used(root, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Experiment file of trial-keeper{which}",
        **root,
        "definitions": {name: made for name, made in definitions.items() if name in used},
    }


def _definitions() -> dict[str, Json]:
    """The schemas of all parts of experiment files and of all classArgs, by class name."""
    args = {*CLASS_ARGS.values(), *ASSESSOR_ARGS.values()}
    models = [
        (each, "validation")
        for each in (
            *(file_of(name).schema for name in PLATFORMS),
            *sorted(args, key=lambda each: each.__name__),
        )
    ]
    _, made = models_json_schema(models, by_alias=True, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    return {name: _tidy(schema) for name, schema in made["$defs"].items()}


def _tidy(schema: Json) -> Json:
    """The schema without titles, which repeat the keys, and with examples as values instead of YAML."""
    properties: dict[str, Json] = {}
    for key, value in schema.get("properties", {}).items():
        value.pop("title", None)
        if "examples" in value:
            value["examples"] = [yaml.safe_load(each) for each in value["examples"]]
        properties[key] = value
    return _mapping(properties, schema.get("required", ()), schema.get("description", ""))


def _mapping(properties: Mapping[str, Json], required: Iterable[str], description: str = "") -> Json:
    """The schema of a mapping with exactly these keys, each in both spellings."""
    spelt = {spelling: value for key, value in properties.items() for spelling in _spellings(key)}
    made: Json = {"type": "object", "properties": spelt, "additionalProperties": False}
    if description:
        made["description"] = description.split("\n", maxsplit=1)[0]
    if needs := [_has(key) for key in required]:
        made["allOf"] = needs
    return made


def _spellings(key: str) -> list[str]:
    return list(dict.fromkeys((key, to_snake(key))))


def _has(key: str, value: Json | None = None) -> Json:
    """The condition that a key is present in one of its spellings, with a value of this schema."""
    either = [
        {"required": [spelling]} | ({} if value is None else {"properties": {spelling: value}})
        for spelling in _spellings(key)
    ]
    return either[0] if len(either) == 1 else {"anyOf": either}


def _add_class_args(algorithm: Json, section: str) -> None:
    """Add the conditions for classArgs to the schema of a tuner, advisor or assessor of either version."""
    known, key = _ALGORITHMS[section], f"builtin{section.capitalize()}Name"
    name_key = key if key in algorithm["properties"] else "name"
    conditions = algorithm.setdefault("allOf", [])
    if "className" in algorithm["properties"] and section != "tuner":  # a tuner has a default
        is_text = {"type": "string"}
        conditions.append({"anyOf": [_has(name_key, is_text), _has("className", is_text)]})
    for name, args in known.items():
        either = {"anyOf": [{"$ref": _REF + args.__name__}, _NULL]}
        then: Json = {"properties": dict.fromkeys(_spellings("classArgs"), either)}
        if any(field.is_required() for field in args.model_fields.values()):
            then |= _has("classArgs")
        conditions.append({"if": _has(name_key, {"const": name}), "then": then})
    for spelling in _spellings(name_key):
        if spelling in algorithm["properties"]:
            algorithm["properties"][spelling] = {**algorithm["properties"][spelling], "examples": list(known)}


def _used(root: Json, definitions: Mapping[str, Json]) -> set[str]:
    """The names of all definitions that are referenced, directly or indirectly."""
    found: set[str] = set()
    left: list[Any] = [root]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).removeprefix(_REF)
            if name and name not in found:
                found.add(name)
                left.append(definitions[name])
            left += value.values()
        elif isinstance(value, list):
            left += value
    return found


def _root(version: Version, definitions: dict[str, Json]) -> Json:
    """The schema of a whole file: the keys of all platforms, and those of each platform under its condition."""
    wholes = {platform: _SchemaBuilder(version, platform, definitions).mapping(()) for platform in PLATFORMS}
    first = next(iter(wholes.values()))["properties"]
    everywhere = {
        key: value
        for key, value in first.items()
        if all(whole["properties"].get(key) == value for whole in wholes.values())
    }
    names = [row.v1 if version == "v1" else row.name for row in PLATFORMS.values()]
    branches = []
    for name, whole in zip(names, wholes.values(), strict=True):
        own = {key: value for key, value in whole["properties"].items() if key not in everywhere}
        lacking = {key for each in wholes.values() for key in each["properties"]} - whole["properties"].keys()
        then = {"properties": own | dict.fromkeys(sorted(lacking), False), "allOf": whole["allOf"]}
        branches.append({"if": _is_on(version, {"const": name}), "then": then})
    others: Json = {
        key: {} for whole in wholes.values() for key in whole["properties"] if key not in everywhere
    }
    is_known = {"enum": names}
    if version == "v1":
        others |= dict.fromkeys(_spellings(_PLATFORM), is_known)
    spaces = ("searchSpacePath",) if version == "v1" else ("searchSpaceFile", "searchSpace")
    not_null: Json = {"not": _NULL}
    return {
        "type": "object",
        "properties": everywhere | others,
        "additionalProperties": False,
        "allOf": [
            _is_on(version, is_known),
            {
                "anyOf": [
                    _has("useAnnotation", {"const": True}),
                    *(_has(space, not_null) for space in spaces),
                    # A class of the user may choose parameters without a search space.
                    *(_has(section, _has("className", not_null)) for section in ("tuner", "advisor")),
                ]
            },
            *branches,
        ],
    }


def _is_on(version: Version, platform: Json) -> Json:
    """The condition that a file's platform matches a schema."""
    return _has(_PLATFORM, platform) if version == "v1" else _has(SERVICE[0], _has("platform", platform))


class _SchemaBuilder:
    """The schema of files for one platform. `leaves` are all keys without keys of their own, by their paths in the file."""

    def __init__(self, version: Version, platform: str, definitions: dict[str, Json]) -> None:
        self.version = version
        self.platform = platform
        self.definitions = definitions
        self.leaves: dict[Keys, Json] = {}
        self.required: set[Keys] = set()
        self.aliases = aliases_on(platform) if version == "v2" else {}
        section = (PLATFORMS[platform].section,)
        for key in keys_on(platform) if version == "v1" else keys_of_v2(platform):
            is_required = key.field.is_required()
            if version == "v2":
                is_required = is_required and key.path not in implicit_keys(platform)
            elif key.is_mapping and key.v1 == (section,):
                continue  # v1 has several sections; their keys show whether they are required
            for path in key.v1 if version == "v1" else (key.path,):
                if is_required:
                    # A merged section of v1 is required if one of its keys is.
                    is_merged = version == "v1" and key.path[:-1] in ((), SERVICE)
                    self.required |= {path, path[:1]} if is_merged else {path}
                if not key.is_mapping:
                    self.leaves[path] = self._leaf(key, is_required)
        for alias, to in self.aliases.items():
            if to in self.leaves:
                leaf = self.leaves[to]
                self.leaves[alias] = {"anyOf": [leaf, _NULL]} if to in self.required else leaf

    def mapping(self, above: Keys) -> Json:
        """The schema of the mapping at a path."""
        steps = dict.fromkeys(
            key_path[len(above)]
            for key_path in self.leaves
            if len(key_path) > len(above) and key_path[: len(above)] == above
        )
        properties = {step: self._value((*above, step)) for step in steps}
        required = [step for step in steps if (*above, step) in self.required]
        made = _mapping(properties, [step for step in required if not self._others((*above, step))])
        needs = [self._either((*above, step)) for step in required if self._others((*above, step))]
        if needs:
            made.setdefault("allOf", []).extend(needs)
        if len(above) == 1 and above[0] in ALGORITHMS:
            _add_class_args(made, above[0])
        return made

    def _value(self, key_path: Keys) -> Json:
        if key_path in self.leaves:
            return self.leaves[key_path]
        if any(each[: len(key_path) + 1] == (*key_path, EACH) for each in self.leaves):
            items: Json = {"type": "array", "minItems": 1, "items": self._named((*key_path, EACH))}
            return {"anyOf": [items, _NULL]}
        is_required = key_path in self.required and (self.version == "v1" or key_path == SERVICE)
        return self._named(key_path) if is_required else {"anyOf": [self._named(key_path), _NULL]}

    def _named(self, key_path: Keys) -> Json:
        """A reference to the schema of the mapping at a path, which platforms share if it is the same."""
        made = self.mapping(key_path)
        name = ".".join((self.version, *key_path))
        if self.definitions.setdefault(name, made) != made:
            name = ".".join((self.version, self.platform, *key_path))
            self.definitions[name] = made
        return {"$ref": _REF + name}

    def _leaf(self, key: Key, is_required: bool) -> Json:
        if key.path[-1] == "platform":
            return {"const": PLATFORMS[self.platform].v1 if self.version == "v1" else self.platform}
        found: Json = self.definitions[key.owner.__name__]["properties"][key.path[-1]]
        if self.version == "v1":
            return found
        if key.declared.kind == "duration":
            found = {
                "anyOf": [
                    {"type": "integer", "exclusiveMinimum": 0},
                    {"type": "string", "pattern": DURATION_PATTERN},
                ],
                "description": key.declared.described("a number and s, m, h or d, or a number of seconds"),
            }
        return found if is_required else {"anyOf": [found, _NULL]}

    def _others(self, key_path: Keys) -> list[Keys]:
        return [alias for alias, to in self.aliases.items() if to == key_path and alias in self.leaves]

    def _either(self, key_path: Keys) -> Json:
        """The condition that a key is present under any of its names."""
        either = [_has(key_path[-1])]
        for other in self._others(key_path):
            same = other[: len(key_path) - 1] == key_path[:-1]
            either.append(_has(other[-1]) if same else _has(other[0], _has(other[-1])))
        return {"anyOf": either}
