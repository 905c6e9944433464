"""Diagnostics of a job: each has a position. One error holds all of them, and is also the server's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nni_manager.config.diagnostics import Diagnostic
from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

Path = tuple[str | int, ...]

_IDENTIFIER = re.compile(r"^[A-Za-z_$][A-Za-z0-9_$]*$")


@dataclass(frozen=True, slots=True)
class Violation:
    """The rule of the job schema that a value violates, in JSON Schema's terms."""

    keyword: str
    schema_path: tuple[str | int, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProtocolDiagnostic(Diagnostic):
    """One diagnostic of a job. `violation` None: the form is valid and the meaning is not."""

    path: Path = ()
    violation: Violation | None = None

    def __str__(self) -> str:
        place = f"line {self.line}, column {self.column}"
        if self.file or self.line is None:
            place = ":".join(str(each) for each in (self.file, self.line, self.column) if each is not None)
        return f"{place}: {self.message}" if place else self.message


class ProtocolInvalid(UserError):
    """cannot run this job; fix the listed errors"""

    def __init__(self, diagnostics: Iterable[ProtocolDiagnostic]) -> None:
        """Sorts the diagnostics by position; the message has one line for each."""
        self.diagnostics = tuple(sorted(diagnostics, key=lambda each: (each.line or 0, each.column or 0)))
        super().__init__("\n".join(str(each) for each in self.diagnostics))

    def response_message(self) -> str:
        """Returns the `message` of the server's answer (400, InvalidProtocolError).

        As in OpenPAI: a JSON list of errors if the job's form is invalid, else plain text.
        Source: the error objects of ajv 6, the schema library of microsoft/pai's REST server.
        """
        if not any(each.violation for each in self.diagnostics):
            return str(self)
        return json.dumps([_as_ajv(each) for each in self.diagnostics], ensure_ascii=False)


def _as_ajv(diagnostic: ProtocolDiagnostic) -> dict[str, Any]:
    rule = diagnostic.violation or Violation("semantics", (), {})
    return {
        "keyword": rule.keyword,
        "dataPath": _data_path(diagnostic.path),
        "schemaPath": "/".join(("#", *map(str, rule.schema_path))),
        "params": dict(rule.params),
        "message": str(diagnostic),
    }


def _data_path(path: Sequence[str | int]) -> str:
    """Returns a path in JavaScript notation: `.taskRoles['w-1'].commands[0]`."""
    return "".join(
        f"[{step}]"
        if isinstance(step, int)
        else f".{step}"
        if _IDENTIFIER.match(step)
        else "['{}']".format(step.replace("\\", "\\\\").replace("'", "\\'"))
        for step in path
    )
