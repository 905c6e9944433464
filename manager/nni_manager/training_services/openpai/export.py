"""A job as text again. What is known here and what is not stays as it was written: keys, order, comments, spelling.

A change replaces the text of one value and leaves every other character alone. Where the text does not allow that (the value is
not there yet, or is an alias of another), the whole job is written anew, without its comments.
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

from nni_manager.training_services.openpai.document import Document, Span, read_document
from nni_manager.training_services.openpai.mistakes import Path, ProtocolInvalid
from nni_manager.training_services.openpai.protocol import JobProtocol, parse
from nni_manager.training_services.openpai.scalars import Date

MASK = "******"

# Words and beginnings that some reader of YAML takes for more than text: OpenPAI's runtime reads YAML 1.1, its server nearly 1.2.
_PLAIN = re.compile(
    r"^(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/_][^\n\x00-\x1f\x7f-\xa0\ufeff]*$", re.IGNORECASE
)


def to_yaml(job: JobProtocol) -> str:
    """The text the job was read from, to the last character."""
    return job.document.text


def of_values(values: Mapping[str, Any], file: str = "") -> JobProtocol:
    """The job that these plain values describe, with a text of its own.

    Raises:
        ProtocolInvalid: it cannot run; with all that is wrong.
    """
    return parse(dumped(values), file)


def with_changes(job: JobProtocol, changes: Mapping[Path, Any]) -> JobProtocol:
    """The job with other values at these paths, such as ("name",) or ("taskRoles", "worker", "commands").

    The mappings around a value that is not there yet are made.

    Raises:
        ProtocolInvalid: the changed job cannot run.
    """
    document = job.document
    return parse(_changed(document, changes, {path: document.span(path) for path in changes}), document.file)


def without_secrets(job: JobProtocol) -> str:
    """The job's text as others may see it: `secrets`, however written, is `"******"`."""
    document, path = job.document, ("secrets",)
    if not job.secrets:
        return document.text
    # A comment beside a secret may hold another.
    span = document.span_with_comments(path)
    return _changed(document, {path: MASK}, {path: span})


def dumped(values: Any) -> str:
    """Plain values as YAML that every reader OpenPAI has takes for the same."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer, yaml.default_flow_style, yaml.width = _Representer, False, 2**31
    yaml.representer.sort_base_mapping_type_on_output = False
    stream = io.StringIO()
    yaml.dump(values, stream)
    return stream.getvalue()


def _changed(document: Document, changes: Mapping[Path, Any], spans: Mapping[Path, Span | None]) -> str:
    wanted = copy.deepcopy(document.value)
    for path, value in changes.items():
        _put(wanted, path, value)
    text = _spliced(document.text, changes, spans)
    # The splice is trusted only where reading it gives what was wanted.
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
    """Quotes every text that anybody might take for something else; never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> ScalarNode:
        style = None if _PLAIN.match(data) else "|" if _is_block(data) else '"'
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", data, style=style)
        return node

    def number(self, data: float) -> ScalarNode:
        # Without a point, 1e-07 is a text to readers of YAML 1.1.
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
    """Whether a text reads best, and safely, as lines below `|`."""
    first, *others = text.split("\n")
    lines_are_plain = all(line.isprintable() and line == line.rstrip() for line in (first, *others))
    return bool(first and others) and first == first.lstrip() and lines_are_plain
