"""Writes a job as text again. Modelled and unknown parts stay as written: keys, order, comments, spelling.

A change replaces the text of one value and no other character. If that is impossible (the value is new, or is an alias of
another), the whole job is serialised anew, without its comments.
"""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from nni_manager.training_services.openpai.document import JobDocument, Span, read_document
from nni_manager.training_services.openpai.job_checks import Path, ProtocolInvalid
from nni_manager.training_services.openpai.protocol import JobProtocol, parse
from nni_manager.training_services.openpai.scalars import Date

MASK = "******"

# Text that no YAML reader gives another type: OpenPAI's runtime reads YAML 1.1, its server nearly 1.2.
_PLAIN = re.compile(
    r"^(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/_][^\n\x00-\x1f\x7f-\xa0\ufeff]*$", re.IGNORECASE
)


def to_yaml(job: JobProtocol) -> str:
    """Returns the job's source text, unchanged."""
    return job.document.text


def of_values(values: Mapping[str, Any], file: str = "") -> JobProtocol:
    """Returns the job that these plain values describe, with newly serialised text.

    Raises:
        ProtocolInvalid: the job is invalid; has all diagnostics.
    """
    return parse(dumped(values), file)


def with_changes(job: JobProtocol, changes: Mapping[Path, Any]) -> JobProtocol:
    """Returns the job with other values at these paths, such as ("name",) or ("taskRoles", "worker", "commands").

    Missing parent mappings are created.

    Raises:
        ProtocolInvalid: the changed job is invalid.
    """
    document = job.document
    return parse(_changed(document, changes, {path: document.span(path) for path in changes}), document.file)


def without_secrets(job: JobProtocol) -> str:
    """Returns the job's text for other readers: `secrets`, however written, is `"******"`."""
    document, path = job.document, ("secrets",)
    if not job.secrets:
        return document.text
    # A comment beside a secret may contain another secret.
    span = document.span_with_comments(path)
    return _changed(document, {path: MASK}, {path: span})


def dumped(values: Any) -> str:
    """Serialises plain values as YAML that all of OpenPAI's readers parse alike."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer, yaml.default_flow_style, yaml.width = _Representer, False, 2**31
    yaml.representer.sort_base_mapping_type_on_output = False
    stream = io.StringIO()
    yaml.dump(values, stream)
    return stream.getvalue()


def _changed(document: JobDocument, changes: Mapping[Path, Any], spans: Mapping[Path, Span | None]) -> str:
    wanted = copy.deepcopy(document.value)
    for path, value in changes.items():
        _put(wanted, path, value)
    text = _spliced(document.text, changes, spans)
    # Use the splice only if parsing it gives the wanted value.
    return text if text is not None and _says(text, wanted) else dumped(wanted)


def _says(text: str, value: Any) -> bool:
    try:
        return bool(read_document(text).value == value)
    except ProtocolInvalid:
        return False


def _put(place: Any, path: Path, value: Any) -> None:
    *above, last = path
    for step in above:
        place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
    place[last] = value


def _spliced(text: str, changes: Mapping[Path, Any], spans: Mapping[Path, Span | None]) -> str | None:
    for path, span in sorted(spans.items(), key=lambda each: each[1].start if each[1] else 0, reverse=True):
        if span is None:
            return None
        colon = "" if isinstance(path[-1], int) else ": "
        value = json.dumps(changes[path], ensure_ascii=False, default=str)
        text = f"{text[: span.start]}{colon}{value}{text[span.end :]}"
    return text


class _Representer(SafeRepresenter):
    """Quotes every text that a reader may parse as another type; never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> ScalarNode:
        style = None if _PLAIN.match(data) else "|" if _is_block(data) else '"'
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", data, style=style)
        return node

    def number(self, data: float) -> ScalarNode:
        # Without a point, YAML 1.1 readers parse 1e-07 as text.
        written = repr(data) if "e" not in repr(data) or "." in repr(data) else repr(data).replace("e", ".0e")
        words = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:float", words.get(written, written))
        return node

    def date(self, data: Date) -> ScalarNode:
        node: ScalarNode = self.represent_scalar(
            "tag:yaml.org,2002:timestamp", data.at.isoformat(timespec="milliseconds")
        )
        return node


_Representer.add_representer(str, _Representer.text)
_Representer.add_representer(float, _Representer.number)
_Representer.add_representer(Date, _Representer.date)


def _is_block(text: str) -> bool:
    """True if a text can safely be written as lines below `|`."""
    first, *others = text.split("\n")
    lines_are_plain = all(line.isprintable() and line == line.rstrip() for line in (first, *others))
    return bool(first and others) and first == first.lstrip() and lines_are_plain
