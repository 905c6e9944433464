"""The nesting limit, which applies to all JSON values."""

import json
from typing import Any

import pytest

from nni_sdk.nesting import MAX_LEVELS, NestedTooDeeply, is_too_deep, parsed_json


def nested(levels: int, innermost: Any = 1) -> Any:
    value = innermost
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize("levels", [0, 1, MAX_LEVELS - 1, MAX_LEVELS])
def test_a_value_within_the_nesting_limit_is_accepted(levels):
    value = nested(levels)
    assert not is_too_deep(value)
    assert parsed_json(json.dumps(value)) == value


@pytest.mark.parametrize("value", [nested(MAX_LEVELS + 1), nested(MAX_LEVELS, {}), [1, nested(MAX_LEVELS)]])
def test_the_error_for_a_value_that_is_nested_too_deeply_contains_the_limit(value):
    assert is_too_deep(value)
    with pytest.raises(NestedTooDeeply, match=f"nested more than {MAX_LEVELS} levels deep"):
        parsed_json(json.dumps(value))


def test_a_flat_value_is_accepted_even_if_its_text_contains_many_brackets():
    value = [[]] * 500 + ["[" * 500]
    assert parsed_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "", "{'a': 1}"])
def test_text_that_is_not_json_or_exceeds_the_recursion_limit_raises_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the texts are Python's
        parsed_json(text)


def test_a_value_that_contains_itself_counts_as_nested_too_deeply():
    value: list[Any] = []
    value += [value, value]
    assert is_too_deep(value)
