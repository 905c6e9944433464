"""What is wrong with a job: every mistake with its place, all of them in one error, which also is the server's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nni_manager.config.mistakes import Mistake
from nni_manager.errors import UserMistake

Path = tuple[str | int, ...]

_IDENTIFIER = re.compile(r"^[A-Za-z_$][A-Za-z0-9_$]*$")


@dataclass(frozen=True, slots=True)
class Violation:
    """The rule of the job schema that a value breaks, in the words of JSON Schema."""

    keyword: str
    schema_path: tuple[str | int, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProtocolMistake(Mistake):
    """One mistake in a job. `violation` is None where the job has its form and lacks sense."""

    path: Path = ()
    violation: Violation | None = None

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.file}: {self.message}" if self.file else self.message
        place = (
            f"{self.file}:{self.line}:{self.column}"
            if self.file
            else f"line {self.line}, column {self.column}"
        )
        return f"{place}: {self.message}"


class ProtocolInvalid(UserMistake):
    """cannot run this job; mend the mistakes listed with it"""

    def __init__(self, mistakes: Iterable[ProtocolMistake]) -> None:
        """Orders the mistakes as a reader of the job meets them; one line of the message each."""
        self.mistakes = tuple(sorted(mistakes, key=lambda each: (each.line or 0, each.column or 0)))
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))

    def response_message(self) -> str:
        """The `message` of the server's answer (400, InvalidProtocolError).

        As OpenPAI's: the JSON text of a list of errors where the job's form is wrong, else plain text.
        Source: the error objects of ajv 6, the schema library of microsoft/pai's REST server.
        """
        if not any(mistake.violation for mistake in self.mistakes):
            return str(self)
        return json.dumps([_as_ajv(mistake) for mistake in self.mistakes], ensure_ascii=False)


def _as_ajv(mistake: ProtocolMistake) -> dict[str, Any]:
    rule = mistake.violation or Violation("semantics", (), {})
    return {
        "keyword": rule.keyword,
        "dataPath": _data_path(mistake.path),
        "schemaPath": "/".join(("#", *map(str, rule.schema_path))),
        "params": dict(rule.params),
        "message": str(mistake),
    }


def _data_path(path: Sequence[str | int]) -> str:
    """A place as JavaScript would write it: `.taskRoles['w-1'].commands[0]`."""
    return "".join(
        f"[{step}]"
        if isinstance(step, int)
        else f".{step}"
        if _IDENTIFIER.match(step)
        else "['{}']".format(step.replace("\\", "\\\\").replace("'", "\\'"))
        for step in path
    )
