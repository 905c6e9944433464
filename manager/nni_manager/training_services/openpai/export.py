"""Serialises jobs: plain values as YAML, or a job's own text with masked secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from nni_manager.support.yaml_reader import TAGS
from nni_manager.training_services.openpai.document import read_document
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.protocol import JobProtocol, parse
from nni_manager.training_services.openpai.scalars import Date

MASK = "******"

# Text that every YAML reader parses as a string: OpenPAI's runtime reads YAML 1.1, its server nearly 1.2.
_PLAIN = re.compile(
    r"^(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/_][^\n\x00-\x1f\x7f-\xa0\ufeff]*$", re.IGNORECASE
)


def of_values(values: Mapping[str, Any], file: str = "") -> JobProtocol:
    """Returns the job that these plain values describe, with newly serialised text.

    Raises:
        ProtocolInvalid: the job is invalid; has all diagnostics.
    """
    return parse(dumped(values), file)


def without_secrets(job: JobProtocol) -> str:
    """Returns the job's text for other readers: `secrets`, however written, is `"******"`.

    No other character changes. If that is impossible (the secrets are merged, or shared with other keys), the whole job is
    serialised again, without its comments.
    """
    document = job.document
    if not job.secrets:
        return document.text
    wanted = {**document.value, "secrets": MASK}
    # A comment beside a secret may contain another secret.
    span = document.span_with_comments(("secrets",))
    if span is not None:
        start, end = span
        text = f"{document.text[:start]}: {json.dumps(MASK)}{document.text[end:]}"
        if _has_value(text, wanted):
            return text
    return dumped(wanted)


def dumped(values: Any) -> str:
    """Serialises plain values as YAML that all of OpenPAI's readers parse alike."""
    text: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, sort_keys=False, allow_unicode=True, width=2**31
    )
    return text


def _has_value(text: str, value: Any) -> bool:
    try:
        return bool(read_document(text).value == value)
    except ProtocolInvalid:
        return False


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader may parse as another type; never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        style = None if _PLAIN.match(data) else "|" if _is_block(data) else '"'
        return self.represent_scalar(f"{TAGS}str", data, style=style)

    def number(self, data: float) -> yaml.ScalarNode:
        # Without a point, YAML 1.1 readers parse 1e-07 as text.
        written = repr(data) if "e" not in repr(data) or "." in repr(data) else repr(data).replace("e", ".0e")
        special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
        return self.represent_scalar(f"{TAGS}float", special.get(written, written))

    def date(self, data: Date) -> yaml.ScalarNode:
        return self.represent_scalar(f"{TAGS}timestamp", data.at.isoformat(timespec="milliseconds"))


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(float, _Dumper.number)
_Dumper.add_representer(Date, _Dumper.date)


def _is_block(text: str) -> bool:
    """True if a text can safely be written as lines below `|`."""
    first, *others = text.split("\n")
    lines_are_plain = all(line.isprintable() and line == line.rstrip() for line in (first, *others))
    return bool(first and others) and first == first.lstrip() and lines_are_plain
