"""The importance of hyper-parameters."""

import json
import math
import random

import pytest

from nni_manager.engine.importance import MIN_TRIALS, importance_of


def results(count, value_of, **kinds):
    numbers = random.Random(1)
    for _ in range(count):
        parameters = {name: draw(numbers) for name, draw in kinds.items()}
        yield parameters, json.dumps(value_of(parameters))


def uniform(numbers):
    return numbers.uniform(-1, 1)


@pytest.mark.slow
def test_the_parameter_with_the_largest_effect_comes_first():
    found = importance_of(
        results(200, lambda p: p["a"] + p["b"] / 100, a=uniform, b=uniform), "default", maximize=True
    )
    assert next(iter(found.shares)) == "a"
    assert found.shares["a"] > 0.7
    assert sum(found.shares.values()) == pytest.approx(1)
    assert (found.trials, found.why) == (200, "")


def test_nested_parameters_have_separate_importances():
    def nested(numbers):
        kind = numbers.choice(["conv", "pool"])
        return {"_name": kind} | ({"size": numbers.choice([3, 5])} if kind == "conv" else {})

    found = importance_of(
        results(
            300,
            lambda p: -abs(math.log10(p["lr"]) + 3) + (p["layer"].get("size", 0) == 5),
            lr=lambda numbers: 10 ** numbers.uniform(-6, 0),
            layer=nested,
            flag=lambda numbers: numbers.random() < 0.5,
            same=lambda numbers: 7,
        ),
        "default",
        maximize=True,
    )
    assert found.shares.keys() == {"lr", "layer/_name", "layer/size", "flag"}
    assert min(found.shares, key=found.shares.get) == "flag"


def test_importances_refer_to_the_best_trials_in_the_direction_of_the_search():
    # The function makes the highest results depend on `a` only, and the lowest results on `b` only.
    given = list(results(200, lambda p: max(p["a"], 0) + min(p["b"], 0), a=uniform, b=uniform))
    for maximize, first in ((True, "a"), (False, "b")):
        assert next(iter(importance_of(given, "default", maximize=maximize).shares)) == first


def test_a_parameter_with_values_of_many_orders_of_magnitude_is_compared_on_a_logarithmic_scale():
    # On a linear scale, three quarters of these values of `lr` would be in the lowest hundredth of their range, and could not be
    # distinguished.
    found = importance_of(
        results(
            300,
            lambda p: -abs(math.log10(p["lr"]) + 6) + p["b"],
            lr=lambda numbers: 10 ** numbers.uniform(-8, 0),
            b=uniform,
        ),
        "default",
        maximize=True,
    )
    assert next(iter(found.shares)) == "lr"


def test_importances_depend_on_the_selected_metric():
    given = list(results(50, lambda p: {"default": p["a"], "loss": p["b"]}, a=uniform, b=uniform))
    for metric, first in (("default", "a"), ("loss", "b")):
        assert next(iter(importance_of(given, metric, maximize=False).shares)) == first


def test_too_few_results_are_reported_as_the_reason_for_missing_importances():
    found = importance_of(results(MIN_TRIALS - 1, lambda p: p["a"], a=uniform), "default", maximize=True)
    assert (found.shares, found.why) == ({}, "9 trials have a number 'default'; 10 are needed")
    found = importance_of(results(20, lambda p: p["a"], a=uniform), "loss", maximize=True)
    assert found.why.startswith("0 trials have a number 'loss'")


def test_importances_are_computed_from_the_minimum_number_of_results():
    found = importance_of(results(MIN_TRIALS, lambda p: p["a"], a=uniform), "default", maximize=True)
    assert found.to_json() == {"importances": [{"name": "a", "value": 1.0}], "trials": MIN_TRIALS, "why": ""}


def test_constant_parameters_are_reported_as_the_reason_for_missing_importances():
    found = importance_of(results(20, lambda p: 1, a=lambda _: 1), "default", maximize=True)
    assert found.why == "all trials had the same parameters"


def test_importances_are_computed_for_parameters_with_any_json_values():
    values = [1, 2.5, "x", None, True, [1], {}, {"a": 1}, 1e308, -1e308, "<script>", 10**400, "\ud800"]
    given = [({"odd": value, "n": number}, str(number)) for number, value in enumerate(values * 2)]
    found = importance_of([*given, ({}, "3"), ({"n": 1}, "NaN"), ({"n": 1}, "{")], "default", maximize=True)
    assert found.trials == 27
    assert "n" in found.shares


def test_equal_results_are_reported_as_the_reason_for_missing_importances():
    found = importance_of(results(20, lambda p: 1, a=uniform), "default", maximize=True)
    assert (found.shares, found.why) == ({}, "all trials had the same result")
