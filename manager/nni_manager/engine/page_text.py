"""Values of parameters as the web page's script writes and reads them, so that searches give the same trials there and here.

Source: ECMA-262, Number::toString, Number.prototype.toPrecision and StringToNumber; `number` in web/page/format.js.
"""

import json
import math
import re
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

# Larger whole numbers lose digits in a script, whose numbers are floats.
_MAX_EXACT = 2**53
_WHITE = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_SPACES = re.compile(f"[{_WHITE}]+")
_DECIMAL = re.compile(r"[+-]?(?:Infinity|[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)")
_RADIX = re.compile(r"0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")
_GROUPS = re.compile(r"\B(?=(?:[0-9]{3})+$)")


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return [word for word in _SPACES.split(text.lower()) if word]


def code_units(text: str) -> bytes:
    """A key that sorts texts as a script does: by UTF-16 code units."""
    return text.encode("utf-16-be", "surrogatepass")


def number_in(text: str) -> float | None:
    """The number that a script reads from a text; None if it reads none, or the text is blank."""
    text = _SPACES.sub(" ", text).strip(" ")
    if _RADIX.fullmatch(text):
        return as_float(int(text, 0))
    return float(text) if _DECIMAL.fullmatch(text) else None


def as_float(value: float) -> float:
    """The number as a script holds it: a whole number beyond the range of floats is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def number_text(value: float) -> str:
    """A number as `String(value)` writes it: 1e-7, 0.00001, 5."""
    if isinstance(value, int) and -_MAX_EXACT <= value <= _MAX_EXACT:
        return str(value)
    value = as_float(value) + 0.0  # -0 is written as 0
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    text = repr(value)
    if "e" not in text:
        return text[:-2] if text.endswith(".0") else text
    return _positional(value, text)


def _positional(value: float, text: str) -> str:
    mantissa, _, exponent = text.lstrip("-").partition("e")
    sign = "-" if value < 0 else ""
    digits = mantissa.replace(".", "").rstrip("0") or "0"
    # The position of the decimal point after the first digit of `digits`. Python writes an exponent only below -4 and from 16 on,
    # and never more than 17 digits.
    point = int(exponent)
    if 0 < point < 21:
        return f"{sign}{digits.ljust(point + 1, '0')}"
    if -7 < point < 0:
        return f"{sign}0.{'0' * (-point - 1)}{digits}"
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{'+' if point > 0 else '-'}{abs(point)}"


def shown_number(value: float) -> str:
    """A number as the page shows it: six significant digits, thousands separators in whole numbers."""
    size = abs(value)
    if size < 1e15 and value == int(value):
        text = str(int(value))
        return (_GROUPS.sub(",", text) if size >= 1000 else text).replace("-", "\u2212")
    value = as_float(value)
    if math.isinf(value):
        return "∞" if value > 0 else "\u2212∞"
    if 1e-4 <= size < 1e15:
        text = number_text(float(_rounded(value, 6)))
    else:
        mantissa, _, exponent = _rounded(value, 5).partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent):+d}"
    return text.replace("-", "\u2212")


def _rounded(value: float, digits: int) -> str:
    """A number with this number of significant digits, in scientific notation. A script rounds ties away from zero."""
    exact = repr(value).lstrip("-").partition("e")[0].replace(".", "").strip("0")
    if len(exact) == digits + 1 and exact.endswith("5"):
        number = Decimal(value)
        return f"{number.quantize(Decimal(1).scaleb(number.adjusted() - digits + 1), ROUND_HALF_UP):.{digits - 1}e}"
    return f"{value:.{digits - 1}e}"


def value_text(value: Any) -> str:
    """A scalar, or a list, as `String(value)` or `JSON.stringify(value)` writes it."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case int():
            return number_text(value)
        case float():
            return number_text(value) if math.isfinite(value) else "null"
    return _json(value)


def _json(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{','.join(_json(entry) for entry in value)}]"
        case dict():
            entries = (
                f"{json.dumps(str(name), ensure_ascii=False)}:{_json(entry)}" for name, entry in value.items()
            )
            return f"{{{','.join(entries)}}}"
    return value_text(value)
