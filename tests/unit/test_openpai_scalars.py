"""Plain scalars have the same values as on OpenPAI's server, and templates format the values in the same way."""

import json
import math
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.openpai.scalars import (
    MAX_EXACT,
    Date,
    as_number,
    explicitly,
    javascript_text,
    resolved,
)

# Each row is [text, kind, String(value)], recorded from js-yaml 3.14.1 on Node 20. The kind is JavaScript's typeof, or "null" or
# "date".
JS_YAML = json.loads((Path(__file__).parents[1] / "golden/openpai/js_yaml_scalars.json").read_text())


def kind_of(value):
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case Date():
            return "date"
    return "string"


@pytest.mark.parametrize(("text", "kind", "written"), JS_YAML, ids=[row[0] for row in JS_YAML])
def test_a_plain_scalar_has_the_same_value_as_in_js_yaml(text, kind, written):
    value = resolved(text)
    assert (kind_of(value), javascript_text(value)) == (kind, written)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.0", 1),
        ("1e-4", 0.0001),
        ("yes", "yes"),
        ("0o17", "0o17"),
        ("017", 15),
        ("0x1F", 31),
        ("~", None),
        ("", None),
    ],
)
def test_a_scalar_that_pyyaml_reads_differently_has_the_value_of_js_yaml(text, value):
    assert resolved(text) == value
    assert type(resolved(text)) is type(value)


def test_a_date_is_parsed_as_a_date_object():
    assert resolved("2020-01-01") == Date(datetime(2020, 1, 1, tzinfo=timezone.utc))


def test_a_date_out_of_range_raises_an_error():
    with pytest.raises(OverflowError):
        resolved("9999-99-99")


@pytest.mark.parametrize(
    "digits", ["9" * 50_000, "0x" + "f" * 50_000, "0" + "7" * 50_000, "0b" + "1" * 50_000, "1e999"]
)
def test_a_huge_number_is_parsed_as_infinity(digits):
    assert resolved(digits) == math.inf
    assert resolved(f"-{digits}") == -math.inf


@given(st.text(max_size=30))
def test_any_plain_text_can_be_parsed_and_formatted(text):
    try:
        value = resolved(text)
    except OverflowError:
        return
    assert isinstance(javascript_text(value), str)
    if isinstance(value, str):
        assert value == text


@given(st.text(alphabet="0123456789+-._:eExXbBoOinfaZT", min_size=1, max_size=20))
def test_a_text_that_resembles_a_number_is_parsed_as_a_number_or_a_date_or_a_text(text):
    try:
        value = resolved(text)
    except OverflowError:
        return
    assert isinstance(value, str | int | float | Date)


@given(st.integers(-MAX_EXACT, MAX_EXACT))
def test_a_whole_number_is_formatted_with_all_digits(number):
    assert resolved(javascript_text(number)) == number
    assert javascript_text(number) == str(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_formatted_number_is_parsed_back_unchanged(number):
    assert resolved(javascript_text(as_number(number))) == as_number(number)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, None, [True, "x"]], "1,,true,x"),
        ({"a": 1}, "[object Object]"),
        (math.inf, "Infinity"),
        (math.nan, "NaN"),
        (0.000001, "0.000001"),
        (1e-7, "1e-7"),
        (1.5e300, "1.5e+300"),
        (-0.0, "0"),
    ],
)
def test_a_value_is_formatted_as_in_javascript(value, text):
    assert javascript_text(value) == text


def test_a_yaml_tag_determines_the_type_of_a_scalar():
    assert explicitly("str", "1") == "1"
    assert explicitly("int", "1") == 1
    assert explicitly("float", "1") == 1
    with pytest.raises(ValueError, match="x"):
        explicitly("int", "x")
    with pytest.raises(KeyError):
        explicitly("binary", "aGk=")
