"""The search space: its parameter types, the errors of invalid spaces, and the check whether parameters are inside a space."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.search_space import (
    TYPES,
    Choice,
    LogNormal,
    LogUniform,
    Nested,
    Normal,
    QLogNormal,
    QLogUniform,
    QNormal,
    QUniform,
    RandInt,
    SearchSpace,
    Uniform,
    contains,
    multiple_of,
    parse_search_space,
    read_search_space,
)


def one(kind, *values):
    """A space with the single hyper-parameter x."""
    return {"x": {"_type": kind, "_value": list(values)}}


def refused(raw):
    with pytest.raises(ConfigInvalid) as caught:
        parse_search_space(raw)
    return [error.message for error in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("raw", "parameter"),
    [
        (one("choice", 16, "a", None, [1]), Choice((16, "a", None, [1]))),
        (one("choice", {"size": 3}), Choice(({"size": 3},))),
        (one("randint", -3, 1e3), RandInt(-3, 1000)),
        (one("uniform", 0, 1), Uniform(0.0, 1.0)),
        (one("quniform", 0, 10, 2), QUniform(0.0, 10.0, 2.0)),
        (one("loguniform", 1e-5, 1), LogUniform(1e-5, 1.0)),
        (one("qloguniform", 1, 100, 7), QLogUniform(1.0, 100.0, 7.0)),
        (one("normal", -1, 2), Normal(-1.0, 2.0)),
        (one("qnormal", 0, 1, 0.5), QNormal(0.0, 1.0, 0.5)),
        (one("lognormal", 0, 1), LogNormal(0.0, 1.0)),
        (one("qlognormal", 0, 1, 2), QLogNormal(0.0, 1.0, 2.0)),
    ],
)
def test_every_parameter_type_is_parsed(raw, parameter):
    assert parse_search_space(raw) == SearchSpace({"x": parameter})


def test_choices_can_be_nested_to_any_depth():
    inner = {
        "_name": "deep",
        "k": {"_type": "choice", "_value": [{"_name": "deeper", **one("uniform", 0, 1)}]},
    }
    deep = Nested(
        "deep", SearchSpace({"k": Choice((Nested("deeper", SearchSpace({"x": Uniform(0.0, 1.0)})),))})
    )
    assert parse_search_space(one("choice", inner, "plain")) == SearchSpace({"x": Choice((deep, "plain"))})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            5,
            'cannot use the search space: 5 is not a mapping; write {"lr": {"_type": "uniform", "_value": [0, 1]}}',
        ),
        (
            {"lr": [1, 0]},
            "cannot use lr: [1, 0] is not a mapping; write a hyper-parameter as "
            '{"_type": "uniform", "_value": [0, 1]}',
        ),
        (
            {"lr": {"_type": "uniform"}},
            'cannot use lr: _value missing; write a hyper-parameter as {"_type": "uniform"',
        ),
        ({"lr": {}}, "cannot use lr: _type and _value missing"),
        ({"lr": {"_type": "uniform", "_value": [0, 1], "_q": 1}}, "cannot use lr._q: there is no such key"),
        (
            one("unifrom", 0, 1),
            'cannot use x: "unifrom" is not a type; did you mean uniform? (known: choice, ',
        ),
        (one(["uniform"], 0, 1), 'cannot use x: ["uniform"] is not a type; use one of choice, randint, '),
        (
            one("mutable_layer", 1),
            "cannot use x: architecture search (mutable_layer) is not supported; use choice",
        ),
        ({1: one("choice", 1)["x"]}, 'cannot use 1: a name must be text; write "1"'),
        (
            one("choice", {"_name": "a", 2: one("choice", 1)["x"]}),
            'cannot use x[0].2: a name must be text; write "2"',
        ),
        (one("choice", [b"bytes"]), "is not a JSON value; put it in quotes, or write a finite number"),
        (one("choice", math.inf), "cannot use x[0]: Infinity is not a JSON value"),
        (one("choice"), "cannot use x: the choice has no option; list at least one"),
        (
            {"x": {"_type": "choice", "_value": "ab"}},
            'cannot use x: "ab" is not a list; write a list of options',
        ),
        (one("choice", {"_name": 3}), 'cannot use x[0]._name: 3 is not text; write "_name": "text"'),
        (
            one("choice", {"_name": "a", "k": 3}),
            "cannot use x[0].k: 3 is not a mapping; write a hyper-parameter as",
        ),
        (
            {"x": {"_type": "uniform", "_value": 3}},
            "cannot use x: 3 is not a list; uniform requires [low, high]",
        ),
        (one("uniform", 0), "cannot use x: [0] has 1 item; uniform requires [low, high]"),
        (one("quniform", 0, 1), "cannot use x: [0, 1] has 2 items; quniform requires [low, high, q]"),
        (one("uniform", "0", 1), 'cannot use x: "0" is not a finite number; uniform requires [low, high]'),
        (one("uniform", True, 2), "cannot use x: true is not a finite number"),
        (one("uniform", 0, 10**400), "is not a finite number"),
        (one("uniform", 1, 0), "cannot use x: low 1 is not below high 0; swap them or use choice"),
        (one("uniform", 1, 1), "cannot use x: low 1 is not below high 1; widen the range or use choice"),
        (
            one("uniform", -1.7e308, 1.7e308),
            "cannot use x: the range from -1.7e+308 to 1.7e+308 is too wide for a float",
        ),
        (
            one("randint", 0, 2.5),
            "cannot use x: 2.5 is not a whole number up to 2**53; randint requires [low, high]",
        ),
        (one("randint", 0, 2**54), "is not a whole number up to 2**53"),
        (one("loguniform", 0, 1), "cannot use x: low 0 is not above 0; loguniform requires a positive low"),
        (one("qloguniform", -1, 1, 1), "cannot use x: low -1 is not above 0"),
        (one("quniform", 0, 1, 0), "cannot use x: q 0 is not above 0; write a positive q or use uniform"),
        (one("quniform", 0, 1e300, 1e-300), "cannot use x: q 1e-300 is too small for values of this size"),
        (one("normal", 0, 0), "cannot use x: sigma 0 is not above 0; write a positive sigma or use choice"),
        (one("qnormal", 0, 1, -1), "cannot use x: q -1 is not above 0; write a positive q or use normal"),
        (one("normal", 0, 1.7e308), "cannot use x: mu 0 with sigma 1.7e+308 exceeds the range of floats"),
        (
            one("lognormal", 700, 10),
            "cannot use x: exp(700 + 8.5 * 10) is too large for a float; lower mu or sigma",
        ),
    ],
)
def test_an_invalid_search_space_is_refused_with_a_clear_sentence(raw, message):
    (found,) = refused(raw)
    assert message in found


def test_all_errors_in_a_search_space_are_reported_together():
    raw = {"a": 1, "b": one("choice", {"_name": "n", "k": 2})["x"], "c": one("loguniform", -1, -2)["x"]}
    assert len(refused(raw)) == 4


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["_name", "k"]), inner),
    max_leaves=10,
)
parameter_like = st.fixed_dictionaries(
    {"_type": st.sampled_from(TYPES), "_value": st.lists(json_values, max_size=3)}
)


@given(st.dictionaries(st.text(max_size=3), parameter_like | json_values) | json_values)
def test_any_json_value_is_parsed_as_a_search_space_or_refused_with_error_messages(raw):
    space, problems = read_search_space(raw)
    assert (space is None) == bool(problems)
    assert all(message.startswith("cannot use ") and "; " in message for _, message in problems)


@pytest.mark.parametrize(
    ("quantised", "values"),
    [
        (QUniform(2.5, 5.5, 1), {3, 4, 5}),
        (QUniform(1, 10, 3), {1, 3, 6, 9}),
        (QUniform(0, 1, 0.5), {0, 0.5, 1}),
        (QUniform(1, 2, 100), {1}),
        (QLogUniform(1, 100, 7), {1, *range(7, 99, 7)}),
    ],
)
def test_a_quantised_range_has_the_documented_values(quantised, values):
    steps = 10_000
    width = quantised.high - quantised.low
    assert {quantised.quantised(quantised.low + width * step / steps) for step in range(steps + 1)} == values


def test_a_multiple_of_q_may_have_a_rounding_error_but_is_never_negative_zero():
    assert multiple_of(0.31, 0.1) == 0.30000000000000004
    assert math.copysign(1, multiple_of(-0.2, 1)) == 1
    assert [multiple_of(u, 1) for u in (0.5, 1.5, 2.5)] == [0, 2, 2]


@given(
    low=st.floats(-1e6, 1e6),
    width=st.floats(1e-3, 1e6),
    q=st.floats(1e-3, 1e6),
    share=st.floats(0, 1),
)
def test_a_quantised_value_is_within_its_range_and_unchanged_when_quantised_again(low, width, q, share):
    quantised = QUniform(low, low + width, q)
    value = quantised.quantised(min(low + width * share, low + width))
    assert low <= value <= low + width
    assert quantised.quantised(value) == value


@given(low=st.integers(-1000, 1000), steps=st.integers(1, 200), q=st.integers(1, 50), share=st.floats(0, 1))
def test_a_quantised_value_is_the_nearest_multiple_or_a_bound_of_the_range(low, steps, q, share):
    high = low + steps
    u = low + steps * share
    value = QUniform(low, high, q).quantised(u)
    within = range(low + -low % q, high + 1, q)
    nearest = min((abs(multiple - u) for multiple in within), default=math.inf)
    assert value in (low, high, *within)
    assert abs(value - u) <= nearest, "no other value of the support is nearer"


SPACE = parse_search_space(
    {
        "lr": {"_type": "loguniform", "_value": [0.001, 1]},
        "n": {"_type": "randint", "_value": [1, 4]},
        "net": {
            "_type": "choice",
            "_value": ["none", 1, {"_name": "conv", "size": {"_type": "quniform", "_value": [1, 10, 3]}}],
        },
    }
)
GOOD = {"lr": 0.1, "n": 3, "net": {"_name": "conv", "size": 9.0}}


def test_parameters_inside_the_search_space_are_accepted():
    assert contains(SPACE, GOOD) == []
    assert contains(SPACE, GOOD | {"net": "none"}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lr": 1.1}, "lr: 1.1 is outside loguniform [0.001, 1]"),
        ({"lr": math.nan}, "lr: NaN is outside"),
        ({"n": 4}, "n: 4 is outside randint [1, 4]"),
        ({"n": 2.0}, "n: 2.0 is outside"),
        ({"n": True}, "n: true is outside"),
        ({"net": True}, "net: true is not an option"),
        ({"net": "conv"}, 'net: "conv" is not an option'),
        ({"net": {"_name": "conv", "size": 10.0}}, "net.size: 10.0 is outside"),
        ({"net": {"_name": "conv"}}, "net.size is missing"),
        ({"net": {"_name": "conv", "size": 1.0, "k": 1}}, "net.k is not in the space"),
        ({"other": 1}, "other is not in the space"),
    ],
)
def test_the_report_of_a_parameter_outside_the_search_space_contains_the_reason(change, problem):
    (found,) = contains(SPACE, GOOD | change)
    assert found.startswith(problem)


def test_a_missing_parameter_is_reported():
    assert contains(SPACE, {"lr": 0.1, "n": 1}) == ["net is missing"]


def test_normal_distributions_are_unbounded_and_quantised_values_are_multiples_of_q():
    space = parse_search_space(
        {
            "a": one("normal", 0, 1)["x"],
            "b": one("qnormal", 0, 1, 2)["x"],
            "c": one("lognormal", 0, 1)["x"],
            "d": one("qlognormal", 0, 1, 3)["x"],
        }
    )
    assert contains(space, {"a": -99.0, "b": -4.0, "c": 1e9, "d": 0.0}) == []
    assert len(contains(space, {"a": math.inf, "b": 1.0, "c": -1.0, "d": -3.0})) == 4
