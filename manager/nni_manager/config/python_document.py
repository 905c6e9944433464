"""Reads a configuration written in Python as a file of the second schema; diagnostics name Python fields.

The tables of the second schema define each key. Messages are the same, with fields in place of keys:
`trainingService.taskRoles[0].memorySize: 4g` is `config.training_service.task_roles[0].memory_size = '4g'` here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_snake

from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, key_of, leaves
from nni_manager.config.document import Document
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_document
from nni_manager.config.v2 import ALIASES, EACH, PLATFORMS, as_v1, names_on, place_of

_SPACE = "searchSpace"
# An example of a value: `write e.g. trialConcurrency: 2`.
_WRITE = re.compile(r"(?P<lead>\b(?:write (?P<any>e\.g\. )?|such as |or ))(?P<key>\w+): ")
_NOT_TEXT = re.compile(r"without quotes YAML reads (.*) as (a \w+(?: \w+)?); put it in quotes")
CALLED = "experiment.config"
"""The label that replaces a file name in messages: a configuration in Python has no file."""
# Keys that are not in the tables of the second schema, or that it does not support.
_OTHER_KEYS = ((_SPACE,), ("sharedStorage",), ("experimentType",), ("trainingService", "openpaiConfig"))
_OTHER_PHRASES = {
    r"\bcannot use this file\b": "cannot use config",
    r"(?<![\w.])codeDir(?=[ ,;)])": "code_directory",
    r"(?<![\w.])gpuNum(?=[ ,;)])": "trial_gpu_number",
    rf" (?:in|of) {re.escape(CALLED)}\b": "",
    r"\bsuch key\b": "such field",
}
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'[^']*'"
_REMEDY = "use only text, finite numbers, True, False, None, and lists and mappings of these"


def read_python(value: Mapping[str, Any], name: str) -> ExperimentSpec:
    """The experiment that `value` describes, with the keys of the second schema. `name`: the default experiment name.

    Raises:
        ConfigInvalid: with every error; each names its field.
    """
    if unsupported := [*_unsupported_values(value)]:
        raise ConfigInvalid(unsupported)
    document = as_v1(Document("", {"experimentName": name, **value}, None))
    try:
        spec = read_document(Path.cwd() / CALLED, document)
    except ConfigInvalid as error:
        # Diagnostics with a file are those of a search space or of annotated code.
        raise ConfigInvalid(each if each.file else _in_python(each) for each in error.diagnostics) from None
    return dataclasses.replace(
        spec,
        warnings=tuple(map(to_python_names, spec.warnings)),
        expansions=tuple(dataclasses.replace(each, key=_in_snake_case(each.key)) for each in spec.expansions),
    )


def _in_python(diagnostic: Diagnostic) -> Diagnostic:
    key, message = diagnostic.key, diagnostic.message
    if re.match(rf"{_SPACE}(?!\w)", key):
        inner = key[len(_SPACE) :].lstrip(".")
        place = f"config.search_space{'.' * bool(inner)}{inner}"
        if not inner:
            return dataclasses.replace(diagnostic, key=place, message=to_python_names(message))
        # Keys of the search space are the user's names.
        message = message.replace("cannot use ", "cannot use config.search_space.", 1)
        return dataclasses.replace(diagnostic, key=place, message=message)
    if key.endswith(".classFileName"):
        kind = key.partition(".")[0]
        return dataclasses.replace(
            diagnostic,
            key=f"config.{kind}.class_name",
            message=f"cannot use config.{kind}.class_name: it has no module; write module and class as one name, such as "
            f"class_name = 'my_{kind}.My{kind.capitalize()}'",
        )
    if key == "searchSpaceFile" and message.startswith("cannot do without"):
        message = (
            "cannot do without config.search_space: it must be a mapping of hyper-parameters; write e.g. "
            "search_space = {'lr': {'_type': 'loguniform', '_value': [0.001, 1]}}"
        )
    return dataclasses.replace(
        diagnostic, key=f"config.{_in_snake_case(key)}" if key else "config", message=to_python_names(message)
    )


def _unsupported_values(value: Any) -> Iterator[Diagnostic]:
    """A diagnostic for each value that JSON cannot represent."""
    for place, item in leaves(value):
        if isinstance(item, float) and not math.isfinite(item):
            what = "a number that is not finite"
        elif not isinstance(item, str | int | float | None):
            what = f"an object of type {type(item).__name__}"
        else:
            continue
        key = key_of(("config", to_snake(str(place[0])), *place[1:]))
        yield Diagnostic("", None, None, key, f"cannot use {key}: it is {what}; {_REMEDY}")


# ---- translation of messages


@cache
def _places() -> frozenset[tuple[str, ...]]:
    tables = [names_on(platform, storage) for platform in PLATFORMS for storage in (None, "pvc")]
    places = {place for table in (*tables, ALIASES) for place in table} | {*_OTHER_KEYS}
    return frozenset(place[:length] for place in places for length in range(1, len(place) + 1))


@cache
def _first_schema() -> tuple[Mapping[str, str], re.Pattern[str]]:
    """The keys of the first schema with another name in the second, and a pattern that matches them."""
    found: dict[str, str] = {}
    for platform in PLATFORMS:
        for v2, v1 in names_on(platform).items():
            if EACH not in v1 and v1 not in _places():
                found.setdefault(key_of(v1), key_of(v2))
    longest_first = sorted(map(re.escape, found), key=len, reverse=True)
    return found, re.compile(rf"{_QUOTED}|(?<![\w.])(?:{'|'.join(longest_first)})(?!\w)")


@cache
def _steps() -> frozenset[str]:
    return frozenset(step for place in _places() for step in place if step != EACH)


@cache
def _keys() -> re.Pattern[str]:
    """A pattern for quoted text, which stays unchanged, or a dotted path of keys."""
    step = rf"(?:{'|'.join(sorted(map(re.escape, _steps()), key=len, reverse=True))})(?:\[\d+\])?"
    return re.compile(rf"{_QUOTED}|(?<![\w./'-]){step}(?:\.{step})*(?![\w'-])")


def to_python_names(message: str) -> str:
    """The message with the keys of either schema replaced by the fields of a configuration in Python."""
    for of_files, of_python in _OTHER_PHRASES.items():
        message = re.sub(of_files, of_python, message)
    of_v1, keys = _first_schema()
    message = keys.sub(lambda found: of_v1.get(found[0], found[0]), message)
    message = _NOT_TEXT.sub(_as_no_text, message)
    pieces, at = [], 0
    for found in _WRITE.finditer(message):
        if found.start() < at or not (found["any"] or found["key"] in _steps()):
            continue
        end = _end_of_value(message, found.end())
        pieces += [_with_fields(message[at : found.start()]), _written(found, message[found.end() : end])]
        at = end
    return "".join([*pieces, _with_fields(message[at:])])


def _as_no_text(found: re.Match[str]) -> str:
    written = "it as text" if found[1] == "its value" else f"'{found[1]}'"
    return f"{found[1]} is {found[2]}, but text is required; write {written}"


def _with_fields(text: str) -> str:
    return _keys().sub(_as_field, text)


def _as_field(found: re.Match[str]) -> str:
    key = found[0]
    if key[0] in "\"'":
        return key
    path = [part for step in key.split(".") for part in re.findall(r"\w+|\[\d+\]", step)]
    place = place_of([int(step[1:-1]) if step.startswith("[") else step for step in path])
    # `config.` precedes only a whole path.
    is_whole = place in _places() and (
        len(place) > 1 or re.search(r"(?:cannot use|cannot do without) $", found.string[: found.start()])
    )
    return ("config." if is_whole else "") + _in_snake_case(key)


def _in_snake_case(key: str) -> str:
    """A key with its known steps in snake_case; arguments of an algorithm stay unchanged."""
    return re.sub(r"\w+", lambda step: to_snake(step[0]) if step[0] in _steps() else step[0], key)


def _end_of_value(text: str, at: int) -> int:
    """The end position of an example's value that starts at `at`."""
    if text[at] in "{[":
        depth = 0
        for index in range(at, len(text)):
            depth += (text[index] in "{[") - (text[index] in "]}")
            if depth == 0:
                return index + 1
        return len(text)
    if text[at] in "\"'":
        closing = text.find(text[at], at + 1)
        return len(text) if closing < 0 else closing + 1
    stop = re.search(r",? or |; | as well|,? and ", text[at:])
    return len(text) if stop is None else at + stop.start()


def _written(found: re.Match[str], example: str) -> str:
    name = to_snake(found["key"]) if found["key"] in _steps() else f"class_args[{found['key']!r}]"
    return f"{found['lead']}{name} = {_in_fields(yaml.safe_load(example))!r}"


def _in_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            to_snake(name): item if name == "classArgs" else _in_fields(item)
            for name, item in value.items()
            if name != "..."
        }
    return [_in_fields(item) for item in value] if isinstance(value, list) else value
