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
from nni_manager.config.kubernetes import EXPERIMENTS
from nni_manager.config.schema import V2_NAME, Schema
from nni_manager.config.v2 import (
    ALIASES,
    DURATION_PATTERN,
    DURATIONS,
    EACH,
    PLATFORMS,
    KeyV2,
    implicit_keys,
    keys_on,
)

Json: TypeAlias = dict[str, Any]
Version: TypeAlias = Literal["v1", "v2"]
_Place: TypeAlias = tuple[str, ...]
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
    root: Json
    if version is None:
        first, second = _root_of_v1(definitions), _root_of_v2(definitions)
        root = {"type": "object", "if": _has(_PLATFORM), "then": first, "else": second}
    else:
        root = _root_of_v1(definitions) if version == "v1" else _root_of_v2(definitions)
    which = {"v1": ", in NNI's first schema", "v2": ", in NNI's second schema", None: ""}[version]
    used = _used(root, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Experiment file of trial-keeper{which}",
        **root,
        "definitions": {name: made for name, made in definitions.items() if name in used},
    }


def _definitions() -> dict[str, Json]:
    """The schemas of all parts of v1 files and of all classArgs, by class name."""
    args = {*CLASS_ARGS.values(), *ASSESSOR_ARGS.values()}
    models = [
        (each, "validation")
        for each in (*EXPERIMENTS.values(), *sorted(args, key=lambda each: each.__name__))
    ]
    _, made = models_json_schema(models, by_alias=True, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    found = {name: _tidy(schema) for name, schema in made["$defs"].items()}
    for section in _ALGORITHMS:
        _add_class_args(found[f"{section.capitalize()}V1"], section)
    return found


def _tidy(schema: Json) -> Json:
    """The schema without titles, which repeat the keys, and with examples as values instead of YAML."""
    properties: dict[str, Json] = {}
    for key, value in schema.get("properties", {}).items():
        if not value.keys() & {"type", "anyOf", "$ref", "enum", "const", "allOf"}:
            properties[key] = {"not": {}}  # the key is always refused
            continue
        value.pop("title", None)
        value.pop(V2_NAME, None)
        if "examples" in value:
            value["examples"] = [yaml.safe_load(each) for each in value["examples"]]
        properties[key] = value
    required = [key for key in schema.get("required", ()) if key in properties]
    return _mapping(properties, required, schema.get("description", ""))


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
    if "className" in algorithm["properties"]:
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


# ---- v1


def _root_of_v1(definitions: Mapping[str, Json]) -> Json:
    wholes = {platform: definitions[schema.__name__] for platform, schema in EXPERIMENTS.items()}
    everywhere = set.intersection(*(set(whole["properties"]) for whole in wholes.values())) - {"trial"}
    first = next(iter(wholes.values()))
    properties = {key: value for key, value in first["properties"].items() if key in everywhere}
    for spelling in _spellings(_PLATFORM):
        properties[spelling] = {**properties[spelling], "enum": list(wholes)}
    branches: list[Json] = []
    sections: dict[str, Json] = {}
    for platform, whole in wholes.items():
        own = {key: value for key, value in whole["properties"].items() if key not in everywhere}
        sections |= {key: {} for key in own}
        branches.append(
            _if(_has(_PLATFORM, {"const": platform}), {"properties": own, "allOf": whole["allOf"]})
        )
        for other in (
            {key for each in wholes.values() for key in each["properties"]} - everywhere - own.keys()
        ):
            branches[-1]["then"]["properties"][other] = False
    return {
        "type": "object",
        "properties": properties | sections,
        "additionalProperties": False,
        "allOf": [_has(_PLATFORM), *_proposer_and_space("searchSpacePath"), *branches],
    }


def _if(condition: Json, then: Json) -> Json:
    return {"if": condition, "then": then}


def _proposer_and_space(*spaces: str) -> list[Json]:
    not_null: Json = {"not": _NULL}
    return [
        {"anyOf": [_has("tuner", not_null), _has("advisor", not_null)]},
        {"anyOf": [_has("useAnnotation", {"const": True}), *(_has(space, not_null) for space in spaces)]},
    ]


# ---- v2


def _root_of_v2(definitions: dict[str, Json]) -> Json:
    services, branches = [], []
    properties: dict[str, Json] = {}
    for platform in PLATFORMS:
        own = _V2SchemaBuilder(platform, definitions).mapping(())
        service = own["properties"].pop("trainingService")
        own["properties"].pop("training_service")
        is_this = _has("platform", {"const": platform})
        services.append(_if(is_this, service))
        needs = [each for each in own.get("allOf", ()) if each != _has("trainingService")]
        branches.append(_if(_has("trainingService", is_this), {"allOf": needs}))
        properties |= own["properties"]
    service = {
        "type": "object",
        "properties": {"platform": {"enum": list(PLATFORMS)}},
        "required": ["platform"],
        "allOf": services,
    }
    space = {
        "anyOf": [{"type": "object"}, _NULL],
        "description": "The search space, in place of searchSpaceFile.",
    }
    for key, value in (
        ("searchSpace", space),
        ("experimentType", {"enum": ["hpo", None]}),
        ("trainingService", {"$ref": _REF + "TrainingServiceV2"}),
    ):
        properties |= dict.fromkeys(_spellings(key), value)
    definitions["TrainingServiceV2"] = service
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "allOf": [_has("trainingService"), *_proposer_and_space("searchSpaceFile", "searchSpace"), *branches],
    }


class _V2SchemaBuilder:
    """The schema of v2 files for one platform. Each key has the type of the v1 key that it is translated to."""

    def __init__(self, platform: str, definitions: dict[str, Json]) -> None:
        self.platform = platform
        self.definitions = definitions
        self.required = {("trainingService",), ("trainingService", "platform")}
        self.leaves: dict[_Place, Json] = {}
        for key in keys_on(platform):
            if key.is_required:
                self.required.add(key.v2)
            if not key.is_mapping:
                self.leaves.setdefault(key.v2, self._leaf(key))
        for alias, to in ALIASES.items():
            if to in self.leaves:
                leaf = self.leaves[to]
                self.leaves[alias] = {"anyOf": [leaf, _NULL]} if to in self.required else leaf
        without_effect = {"description": "Accepted; has no effect on this platform."}
        self.leaves |= {place: without_effect for place, v1 in implicit_keys(platform).items() if not v1}

    def mapping(self, above: _Place) -> Json:
        """The schema of the mapping at a v2 path."""
        steps = dict.fromkeys(
            place[len(above)]
            for place in self.leaves
            if len(place) > len(above) and place[: len(above)] == above
        )
        properties = {step: self._value((*above, step)) for step in steps}
        required = [step for step in steps if (*above, step) in self.required]
        made = _mapping(properties, [step for step in required if not self._others((*above, step))])
        needs = [self._either((*above, step)) for step in required if self._others((*above, step))]
        if needs:
            made.setdefault("allOf", []).extend(needs)
        if above and above[0] in _ALGORITHMS:
            _add_class_args(made, above[0])
        return made

    def _value(self, place: _Place) -> Json:
        if place in self.leaves:
            return self.leaves[place]
        if any(each[: len(place) + 1] == (*place, EACH) for each in self.leaves):
            return {"type": "array", "minItems": 1, "items": self._named((*place, EACH))}
        if place == ("trainingService",):
            return self.mapping(place)
        return {"anyOf": [self._named(place), _NULL]}

    def _named(self, place: _Place) -> Json:
        name = ".".join((self.platform, *place))
        if name not in self.definitions:
            self.definitions[name] = self.mapping(place)
        return {"$ref": _REF + name}

    def _leaf(self, key: KeyV2) -> Json:
        if key.v2[-1] == "platform":
            return {"const": self.platform}
        if key.v1[-1] in DURATIONS:
            return {
                "anyOf": [
                    {"type": "integer", "exclusiveMinimum": 0},
                    {"type": "string", "pattern": DURATION_PATTERN},
                    _NULL,
                ],
                "description": "A number and s, m, h or d, or a number of seconds.",
            }
        found: Json = self.definitions[key.owner.__name__]["properties"][key.v1[-1]]
        return found if key.is_required else {"anyOf": [found, _NULL]}

    def _others(self, place: _Place) -> list[_Place]:
        return [alias for alias, to in ALIASES.items() if to == place and alias in self.leaves]

    def _either(self, place: _Place) -> Json:
        """The condition that a key is present under any of its names."""
        either = [_has(place[-1])]
        for other in self._others(place):
            same = other[: len(place) - 1] == place[:-1]
            either.append(_has(other[-1]) if same else _has(other[0], _has(other[-1])))
        return {"anyOf": either}
