"""The values of plain YAML scalars in OpenPAI, and the text that its templates write for a value.

OpenPAI's REST server reads jobs with js-yaml 3 (safe schema): YAML 1.2's core with leftovers of 1.1. So `1e-4` is a number,
`yes` a string, `0o17` a string, `017` fifteen, `1:30` ninety, `2020-01-01` a date. The only number type is the double:
here an int if it is whole and exact, else a float.

Source: js-yaml 3.14.1 (microsoft/pai v1.8.1, src/rest-server: "js-yaml": "^3.13.1"); ECMAScript Number::toString.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from email.utils import format_datetime
from typing import Any

from trial_keeper.frozen_dataclass import dataclass

# Doubles above this do not represent every integer.
MAX_EXACT = 2**53 - 1

_INTEGER = re.compile(
    r"^(?P<sign>[-+]?)(?:(?P<zero>0)|0b(?P<binary>_*[01][01_]*)|0x(?P<hex>_*[0-9a-fA-F][0-9a-fA-F_]*)"
    r"|0(?P<octal>_*[0-7][0-7_]*)|(?P<decimal>[1-9][0-9_]*)|(?P<sexagesimal>[1-9][0-9_]*(?::[0-5]?[0-9])+))$"
)
_FLOAT = re.compile(
    r"^(?:[-+]?(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    re.ASCII,
)
_DATE = re.compile(r"^(?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})$")
_TIME = re.compile(
    r"^(?P<year>[0-9]{4})-(?P<month>[0-9]{1,2})-(?P<day>[0-9]{1,2})(?:[Tt]|[ \t]+)"
    r"(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})(?:\.(?P<fraction>[0-9]*))?"
    r"(?:[ \t]*(?:Z|(?P<zone>[-+])(?P<zone_hour>[0-9]{1,2})(?::(?P<zone_minute>[0-9]{2}))?))?$"
)
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True)
class Date:
    """A point in time, as in JavaScript's Date. The protocol's rules treat it as neither string nor number."""

    at: datetime

    def __str__(self) -> str:
        """JavaScript's text of the date, on a server in UTC."""
        day, date, month, year, time, _ = format_datetime(self.at, usegmt=True).replace(",", "").split()
        return f"{day} {month} {date} {year} {time} GMT+0000 (Coordinated Universal Time)"


def resolved(text: str) -> Any:
    """Returns the value of a plain scalar: None, a bool, a number, a Date, or the text itself.

    Raises:
        OverflowError: the date is out of range, such as 9999-99-99.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if match := _INTEGER.match(text):
        # js-yaml rejects numbers with a trailing underscore.
        return text if text.endswith("_") else as_number(_integer(match))
    if _FLOAT.match(text) and not text.endswith("_"):
        return as_number(_float(text))
    if match := _DATE.match(text) or _TIME.match(text):
        return Date(_moment({name: part or "" for name, part in match.groupdict().items()}))
    return text


def explicitly(tag: str, text: str) -> Any:
    """Returns the value of a scalar with an explicit YAML tag (`int` of `!!int`).

    Raises:
        ValueError: the text has another type.
        KeyError: unknown scalar tag.
        OverflowError: as `resolved`.
    """
    kind = _TYPES[tag]
    value = text if tag == "str" else resolved(text)
    if not isinstance(value, kind) or (isinstance(value, bool) and tag != "bool"):
        raise ValueError(text)
    return value


_TYPES: dict[str, Any] = {
    "str": str,
    "null": type(None),
    "bool": bool,
    "int": int,
    "float": int | float,
    "timestamp": Date,
}


def as_number(value: float) -> int | float:
    """Returns the double nearest to `value`: an int if it is whole and exact. Excess digits are lost."""
    try:
        double = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return int(double) if abs(double) <= MAX_EXACT and double.is_integer() else double


def javascript_text(value: Any) -> str:
    """Returns JavaScript's `String()` of a value: `x,y` for a list, `[object Object]` for a mapping."""
    match value:
        case str():
            return value
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return _number_text(value)
        case list() | tuple():
            return ",".join("" if item is None else javascript_text(item) for item in value)
        case Mapping():
            return "[object Object]"
        case _:
            return str(value)


def _integer(match: re.Match[str]) -> float:
    sign = -1 if match["sign"] == "-" else 1
    digits = {name: part.replace("_", "") for name, part in match.groupdict().items() if part is not None}
    for name, base in (("binary", 2), ("octal", 8), ("hex", 16)):
        if name in digits:
            return sign * int(digits[name], base)
    if "sexagesimal" in digits:
        return sign * _sexagesimal(digits["sexagesimal"])
    # Not int(): Python limits its input to some thousand digits.
    return sign * float(digits.get("decimal", "0"))


def _float(text: str) -> float:
    plain = text.replace("_", "").lower()
    sign = -1 if plain.startswith("-") else 1
    plain = plain.lstrip("+-")
    if plain in (".inf", ".nan"):
        return sign * float(plain[1:])
    if ":" in plain:
        return sign * _sexagesimal(plain)
    # A point followed only by underscores has no digits: js-yaml resolves it as a number and parses NaN.
    return sign * float(plain) if plain[:2] not in (".", ".e") else math.nan


def _sexagesimal(digits: str) -> float:
    value = 0.0
    for part in digits.split(":"):
        value = value * 60 + float(part)
    return value


def _moment(parts: Mapping[str, str]) -> datetime:
    def number(name: str) -> int:
        return int(parts.get(name) or 0)

    # As Date.UTC: months and days overflow into the next year or month, and years 0-99 are of the 20th century.
    years, month = divmod(number("month") - 1, 12)
    year = number("year") + (1900 if number("year") < 100 else 0) + years
    try:
        first = datetime(year, month + 1, 1, tzinfo=timezone.utc)
    except ValueError as error:
        raise OverflowError(str(error)) from error
    zone = timedelta(hours=number("zone_hour"), minutes=number("zone_minute"))
    return (
        first
        + timedelta(days=number("day") - 1, hours=number("hour"), minutes=number("minute"))
        + timedelta(seconds=number("second"), milliseconds=int(parts.get("fraction", "")[:3].ljust(3, "0")))
        - (-zone if parts.get("zone") == "-" else zone)
    )


def _number_text(value: float) -> str:
    """ECMAScript writes the same shortest digits as Python, with an exponent below 1e-6 and from 1e21 on."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    number = Decimal(repr(value)).normalize()
    if number == 0 or Decimal("1e-6") <= abs(number) < Decimal("1e21"):
        return f"{abs(number) if number == 0 else number:f}"
    mantissa, _, exponent = f"{number:e}".partition("e")
    return f"{mantissa}e{int(exponent):+}"
