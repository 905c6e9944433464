"""Reads a configuration written in Python as a file of the second schema; diagnostics name Python fields.

Messages are the same, with fields in place of keys: `trainingService.taskRoles[0].memorySize: 4g` is
`config.training_service.task_roles[0].memory_size = '4g'` here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_snake

from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, KeyPath, key_of, leaves
from nni_manager.config.dialect import EACH, Dialect
from nni_manager.config.document import Document
from nni_manager.config.experiment_schema import ExperimentKeys
from nni_manager.config.keys import names_in_v1
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.platforms import PLATFORMS
from nni_manager.config.reader import read_document, service_keys
from nni_manager.config.schema import names_of_kind
from nni_manager.config.v2 import from_v2
from nni_sdk.nesting import TOO_DEEP, deep_entry

CALLED = "experiment.config"
"""The label that replaces a file name in messages: a configuration in Python has no file."""
_NOT_TEXT = re.compile(r"without quotes YAML reads (.*) as (a \w+(?: \w+)?); put it in quotes")
_REMEDY = "use only text, finite numbers, True, False, None, and lists and mappings of these"


class _Python(Dialect):
    """The names of keys in Python: the fields of `ExperimentConfig`."""

    space = ("searchSpace", "a mapping of hyper-parameters", "{lr: {_type: loguniform, _value: [0.001, 1]}}")

    def key(self, key_path: KeyPath) -> str:
        """The field, such as `config.training_service.host`."""
        steps: list[str | int] = ["config"]
        is_open = False
        for step in self.path(key_path):
            steps.append(step if is_open or isinstance(step, int) else to_snake(step))
            is_open = is_open or step in names_of_kind(ExperimentKeys, "open")
        return key_of(steps)

    def example(self, key_path: KeyPath, written: str) -> str:
        """The assignment of a value, such as `trial_concurrency = 2`."""
        path = self.path(key_path)
        last = f"class_args[{path[-1]!r}]" if "classArgs" in path[:-1] else to_snake(str(path[-1]))
        return f"{last} = {_in_fields(yaml.safe_load(written))!r}"

    def text(self, message: str) -> str:
        """The message with Python's fields and notation."""
        message = super().text(message).replace("cannot use this file", "cannot use config")
        message = message.replace(f" of {CALLED}", "").replace(f" in {CALLED}", "")
        return _NOT_TEXT.sub(_as_no_text, message)


def _as_no_text(found: re.Match[str]) -> str:
    written = "it as text" if found[1] == "its value" else f"'{found[1]}'"
    return f"{found[1]} is {found[2]}, but text is required; write {written}"


def _in_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            to_snake(name): item if name == "classArgs" else _in_fields(item)
            for name, item in value.items()
            if name != "..."
        }
    return [_in_fields(item) for item in value] if isinstance(value, list) else value


def read_python(value: Mapping[str, Any], name: str) -> ExperimentSpec:
    """The experiment that `value` describes, with the keys of the second schema. `name`: the default experiment name.

    Raises:
        ConfigInvalid: with every error; each names its field.
    """
    if (deep := deep_entry(value)) is not None:
        key = key_of(("config", to_snake(deep)))
        message = f"cannot use {key}: it is {TOO_DEEP}; make it flatter"
        raise ConfigInvalid([Diagnostic("", None, None, key, message)])
    if unsupported := [*_unsupported_values(value)]:
        raise ConfigInvalid(unsupported)
    return read_document(Path.cwd() / CALLED, _document({"experimentName": name, **value}))


def read_python_service_keys(value: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    """The values of these keys of `trainingService`; None for an absent key. Other parts of `value` may have errors.

    Raises:
        ConfigInvalid: one of these keys is wrong.
    """
    return service_keys(_document(value), keys)


def _document(value: Mapping[str, Any]) -> Document:
    return from_v2(Document("", value, None, dialect=_Python()))


def _unsupported_values(value: Any) -> Iterator[Diagnostic]:
    """A diagnostic for each value that JSON cannot represent."""
    for key_path, item in leaves(value):
        if isinstance(item, float) and not math.isfinite(item):
            what = "a number that is not finite"
        elif not isinstance(item, str | int | float | None):
            what = f"an object of type {type(item).__name__}"
        else:
            continue
        key = key_of(("config", to_snake(str(key_path[0])), *key_path[1:]))
        yield Diagnostic("", None, None, key, f"cannot use {key}: it is {what}; {_REMEDY}")


# ---- messages of the other parts of the manager, which name keys of the first schema


@cache
def _fields_of_v1() -> tuple[Mapping[str, str], re.Pattern[str]]:
    """The field of each key of the first schema, and a pattern of these keys; an example of a value may follow each."""
    found: dict[str, str] = {"reuse": "reuse_mode"}
    for platform in PLATFORMS:
        for v2, v1 in names_in_v1(platform).items():
            if EACH not in v2:
                found.setdefault(key_of(v1), ".".join(map(to_snake, v2)))
                if re.search("[A-Z]", v1[-1]):
                    found.setdefault(v1[-1], to_snake(v2[-1]))
    names = "|".join(sorted(map(re.escape, found), key=len, reverse=True))
    quoted = r"\"(?:[^\"\\]|\\.)*\"|'[^']*'"
    lead = r"(?P<lead>write |write e\.g\. |set |With |cannot use |cannot create )?"
    return found, re.compile(
        rf"{quoted}|{lead}(?<![\w./'-])(?P<key>{names})(?![\w'-])(?P<value>: [^\s,;{{]+)?"
    )


def to_python_names(message: str) -> str:
    """A message about keys of the first schema, with the fields of a configuration in Python."""
    fields, keys = _fields_of_v1()

    def as_field(found: re.Match[str]) -> str:
        key, lead, value = found["key"], found["lead"] or "", found["value"] or ""
        if key is None or (key == "reuse" and not value):
            return found[0]
        field = fields[key]
        if lead.startswith(("write", "set", "With")) and value:
            return f"{lead}{field.rpartition('.')[2]} = {yaml.safe_load(value[2:])!r}"
        return f"{lead}{'config.' if '.' in field or lead else ''}{field}{value}"

    return keys.sub(as_field, message.replace(f" of {CALLED}", "").replace(f" in {CALLED}", ""))
