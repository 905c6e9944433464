"""The reward that the tuner receives for a reported metric."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.metrics import (
    MAX_PARSED_CHARACTERS,
    numbers_in,
    objective_hint,
    reason_without_reward,
    reward,
    truncate_for_display,
)
from nni_manager.trackers.source import numbers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("default"), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.93", 0.93),
        ("1", 1.0),
        ("-1e-3", -0.001),
        ('{"default": 0.5, "loss": 2}', 0.5),
        ('{"loss": 2, "default": 3}', 3.0),
        # The following results are valid JSON. Unless the expected value says otherwise, neither the result nor its `default` is
        # a finite number.
        ('{"loss": 2}', None),
        ('{"default": {"default": 1}}', None),
        ('{"default": "0.5"}', None),
        ('{"default": null}', None),
        ('{"default": NaN}', None),
        ("NaN", None),
        ("Infinity", None),
        ("-Infinity", None),
        ("1e999", None),
        ("true", 1.0),
        ("false", 0.0),
        ("null", None),
        ('"0.93"', None),
        ("[0.93]", None),
        # A broken or malicious program may report the following texts. They must neither raise an exception nor need a deep
        # recursion.
        ("", None),
        ("0.9 0.8", None),
        ("9" * 400, None),
        ("9" * 100_000, None),
        ("[" * 100_000, None),
        ('{"default": 0.5, "other": ' + "[" * 99 + "]" * 99 + "}", 0.5),
        ('{"default": 0.5, "other": ' + "[" * 100 + "]" * 100 + "}", None),
        ('{"default": ' * 20_000, None),
    ],
)
def test_the_reward_is_the_metric_or_the_default_entry_of_a_dict_metric(
    value: str, expected: float | None
) -> None:
    assert reward(value) == expected


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_reward_of_a_finite_number_is_the_number(number: float) -> None:
    assert reward(json.dumps(number)) == number
    assert reward(json.dumps({"default": number})) == number


@given(st.text() | JSON.map(json.dumps))
def test_the_reward_of_any_text_is_a_finite_float_or_none(value: str) -> None:
    number = reward(value)
    assert number is None or (type(number) is float and math.isfinite(number))


def test_a_long_result_dict_is_shortened_to_its_numbers() -> None:
    assert truncate_for_display("x" * 4096) == "x" * 4096
    assert truncate_for_display(json.dumps("x" * 5000)) is None
    assert truncate_for_display(json.dumps({"note": "x" * 5000, "default": 2})) == "2.0"
    several = {"accuracy": 0.5, "note": "x" * 5000, "ms": 3, "bad": math.nan}
    assert truncate_for_display(json.dumps(several)) == '{"accuracy": 0.5, "ms": 3}'
    many = {f"layer{number}": 0.5 for number in range(1000)}
    assert truncate_for_display(json.dumps(many | {"default": 1})) == "1.0"
    assert truncate_for_display(json.dumps(many)) is None


def test_trackers_receive_booleans_in_a_result_as_numbers():
    assert numbers('{"default": true, "inner": {"ok": false}, "note": "x"}') == {
        "default": 1.0,
        "inner/ok": 0.0,
    }


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("null", "null, nothing (None)"),
        ('"0.93"', '"0.93", a str'),
        ("[0.93]", "[0.93], a list"),
        ("Infinity", "Infinity, not a finite number"),
        ("{}", 'a dict without "default" (it has nothing)'),
        ('{"loss": 1, "acc": 2}', 'a dict without "default" (it has "loss", "acc")'),
        ('{"default": [1]}', 'a dict whose "default" is [1], a list'),
        ('{"default": {}}', 'a dict whose "default" is {}, a dict'),
        ("0.9 0.8", "0.9 0.8, which is not JSON"),
        ("[" * 101 + "]" * 101, "[" * 60 + "…, which is nested more than 100 levels deep"),
        ('"' + "x" * 58 + '"', '"' + "x" * 58 + '", a str'),
        ("[" + "1, " * 99 + "1]", "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,…, a list"),
    ],
)
def test_the_message_for_a_result_without_a_number_names_the_type(value, reason):
    assert reason_without_reward(value) == reason


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ('{"loss": 2}', '{metric: "loss"'),
        ('{"a": "x", "b": 1}', '{metric: "b"'),
        ('{"a": "x"}', ""),
        ('{"default": "x", "a": 1}', ""),
        ("[1]", ""),
        ("{", ""),
    ],
)
def test_the_hint_for_a_result_without_a_default_names_the_first_metric_with_a_number(value, named):
    hint = objective_hint(value)
    assert named in hint
    assert bool(hint) == bool(named)


def test_no_numbers_are_extracted_from_a_result_that_is_too_long_or_not_a_json_dict():
    def numbers_of(text):
        return numbers_in(text, 20, (), without_default=True)

    longest = '{"loss": 1, "' + "x" * (MAX_PARSED_CHARACTERS - 18) + '": 2}'
    assert len(longest) == MAX_PARSED_CHARACTERS
    assert len(numbers_of(longest)) == 2
    assert numbers_of(longest.replace("x", "xx", 1)) == numbers_of("{") == numbers_of("0.5") == {}


def test_the_numbers_of_a_result_are_extracted_even_if_it_contains_a_long_list():
    text = json.dumps({"predictions": [0.5] * 20_000, "loss": 1, "default": 2})
    for _ in range(2):
        assert numbers_in(text, 20, ("loss",), without_default=True) == {"loss": 1}


@given(JSON.map(json.dumps) | st.text())
def test_the_message_for_an_unusable_result_is_short_for_any_value(value):
    if reward(value) is None:
        assert len(reason_without_reward(value)) < 150
