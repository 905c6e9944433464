"""The corpus of experiment files and their verdicts; `python tests/fakes/config_corpus.py` rewrites the
verdicts.

A verdict contains the parsed configuration or all errors, and the result of the JSON schema. Fields that are
none, zero, false or empty are omitted.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.document import as_yaml
from nni_manager.config.json_schema import json_schema
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.v2 import is_v2
from nni_manager.startup.schema_validators import Draft7Validator

CORPUS = Path(__file__).parents[1] / "golden" / "config"
FILES = sorted((CORPUS / "files").glob("v[12]_*.yml"))
# These fields are paths of this machine, or copies of other fields, so the expected results do not contain them.
_LEFT_OUT = ("config_path", "expansions", "search_space_raw", "job_text", "template_text")


def verdict_path(file: Path) -> Path:
    """The path of the verdict on a file."""
    return CORPUS / "verdicts" / f"{file.stem}.txt"


def verdict_of(file: Path) -> str:
    """The verdict, independent of this machine's paths."""
    try:
        config = read_experiment_file(file)
    except ConfigInvalid as error:
        lines = ["refused", *str(error).splitlines()]
    else:
        fields = _something(json.loads(config.to_json()))
        space = list(config.search_space.parameters)
        lines = ["accepted", as_yaml(fields | {"search_space": space}).rstrip()]
    lines += ["", f"JSON schema: {_schema_verdict(file)}"]
    text = "\n".join(lines) + "\n"
    return text.replace(f"{file.parent}/", "").replace(str(file.parent), ".").replace(str(Path.home()), "~")


def _something(value: Any) -> Any:
    if isinstance(value, dict):
        inner = {key: _something(each) for key, each in value.items() if key not in _LEFT_OUT}
        return {
            key: each for key, each in inner.items() if each not in (None, "", [], {}, False) and each != 0
        }
    return [_something(each) for each in value] if isinstance(value, list) else value


def _schema_verdict(file: Path) -> str:
    try:
        value = yaml.safe_load(file.read_text())
    except yaml.YAMLError:
        return "no YAML"
    return "valid" if validator("v2" if is_v2(value) else "v1").is_valid(value) else "not valid"


@functools.cache
def validator(version: str) -> Draft7Validator:
    """The validator that editors use for such files."""
    schema = json_schema("v1" if version == "v1" else "v2")
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


if __name__ == "__main__":
    (CORPUS / "verdicts").mkdir(exist_ok=True)
    for old in (CORPUS / "verdicts").glob("*.txt"):
        old.unlink()
    for each in FILES:
        verdict_path(each).write_text(verdict_of(each))
