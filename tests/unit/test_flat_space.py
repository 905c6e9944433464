"""The flattened search space: dimensions, positions and features."""

import json
from random import Random

import numpy as np
import pytest
from drawn_spaces import spaces_raw
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.config.search_space import Choice, parse_search_space
from nni_manager.tuner.flat_space import INACTIVE_CHOICE, FlatSpace
from nni_manager.tuner.optuna_backed import Sampling
from nni_manager.tuner.samplers import from_unit

C = {"_type": "loguniform", "_value": [0.001, 1000]}
GAMMA = {"_type": "uniform", "_value": [0, 1]}


def flattened(raw):
    return FlatSpace(parse_search_space(raw))


def drawn(raw, seed):
    """Random parameters, and the draws that yielded the parameters."""
    return Sampling(parse_search_space(raw)).complete({}, Random(seed))


def features_of(flat, draws):
    return flat.features(flat.positions_of(draws)[None])[0]


def parameters_at(raw, positions):
    flat = flattened(raw)
    return Sampling(parse_search_space(raw)).sample(lambda name, each: flat.draw_at(positions, name, each))


def kernels(*options):
    return {"kernel": {"_type": "choice", "_value": [{"_name": name, **inner} for name, inner in options]}}


def test_options_with_the_same_parameter_name_and_range_share_a_dimension():
    flat = flattened(kernels(("linear", {"C": C}), ("rbf", {"C": C, "gamma": GAMMA})))
    assert flat.width == 3
    linear = flat.positions_of({"/kernel": 0, "/kernel/0/C": 1.0})
    rbf = flat.positions_of({"/kernel": 1, "/kernel/1/C": 1.0, "/kernel/1/gamma": 0.25})
    assert linear[1] == rbf[1] == pytest.approx(0.5)


def test_options_with_different_ranges_of_a_parameter_have_separate_dimensions():
    wider = {**C, "_value": [0.001, 1e6]}
    assert flattened(kernels(("linear", {"C": C}), ("rbf", {"C": wider}))).width == 3


def test_choices_that_are_active_together_have_separate_dimensions():
    option = [{"_name": "conv", "size": GAMMA}, {"_name": "none"}]
    flat = flattened({name: {"_type": "choice", "_value": option} for name in ("first", "second")})
    assert flat.width == 4


def test_equal_nested_choices_of_several_options_share_dimensions():
    inner = {"_type": "choice", "_value": [{"_name": "a", "n": GAMMA}, "b"]}
    flat = flattened(kernels(("one", {"inner": inner}), ("two", {"inner": inner}), ("three", {})))
    assert flat.width == 3
    draws = {"/kernel": 1, "/kernel/1/inner": 0, "/kernel/1/inner/0/n": 0.75}
    assert list(features_of(flat, draws)) == [1, 0, 0.75]
    assert list(features_of(flat, {"/kernel": 2})) == [2, INACTIVE_CHOICE, 0.5]


def test_a_choice_with_one_option_needs_no_dimension():
    flat = flattened(kernels(("only", {"C": C})))
    assert flat.width == 1
    assert flat.features(np.array([[0.3]]))[0, 0] == 0.3


def test_the_features_do_not_depend_on_the_positions_of_inactive_dimensions():
    flat = flattened(kernels(("linear", {}), ("rbf", {"gamma": GAMMA})))
    rows = flat.features(np.array([[0.1, 0.2], [0.1, 0.9], [0.1, np.nan], [0.9, 0.2]]))
    assert rows.tolist() == [[0, 0.5], [0, 0.5], [0, 0.5], [1, 0.2]]


@pytest.mark.parametrize(
    ("raw", "position", "centre"),
    [
        ({"_type": "randint", "_value": [0, 4]}, 0.3, 0.375),
        # The cell of 0 extends only from 0 to 0.5, so it is half as wide as the cells of 1, 2 and 3.
        ({"_type": "quniform", "_value": [0, 4, 1]}, 0.01, 0.0625),
        ({"_type": "quniform", "_value": [0, 4, 1]}, 0.3, 0.25),
        ({"_type": "quniform", "_value": [0, 4, 1]}, 1.0, 0.9375),
        # Values up to 50 are rounded to 1, and larger values to 100, so there are two cells.
        ({"_type": "qloguniform", "_value": [1, 100, 100]}, 0.1, 0.424742),
        ({"_type": "qnormal", "_value": [0, 1, 100]}, 0.9, 0.5),
        # Values up to e^0, the median, are rounded to 0.
        ({"_type": "qlognormal", "_value": [0, 1, 2]}, 0.2, 0.25),
    ],
)
def test_the_feature_of_a_quantised_value_is_the_centre_of_its_cell(raw, position, centre):
    assert flattened({"x": raw}).features(np.array([[position]]))[0, 0] == pytest.approx(centre, abs=1e-6)


@given(raw=spaces_raw, seed=st.integers(0, 1000))
def test_no_two_active_parameters_share_a_dimension(raw, seed):
    flat, sampling = flattened(raw), Sampling(parse_search_space(raw))
    _, draws = drawn(raw, seed)
    several = [name for name, each in sampling.distributions_of(draws).items() if not each.single()]
    assert np.count_nonzero(~np.isnan(flat.positions_of(draws))) == len(several)


@given(raw=spaces_raw, seed=st.integers(0, 1000))
def test_the_feature_of_a_choice_is_the_option_index_and_the_feature_of_a_number_is_its_position(raw, seed):
    flat, (_, draws) = flattened(raw), drawn(raw, seed)
    positions = flat.positions_of(draws)
    features = features_of(flat, draws)
    for dimension, position, feature in zip(flat.dimensions, positions, features, strict=True):
        is_choice = isinstance(dimension.parameter, Choice)
        if np.isnan(position):
            assert feature == (INACTIVE_CHOICE if is_choice else 0.5)
        elif is_choice:
            assert feature in range(len(dimension.parameter.options))
        else:
            assert 0 <= feature <= 1


@given(raw=spaces_raw, seed=st.integers(0, 1000))
def test_the_positions_of_draws_are_converted_back_into_the_drawn_parameters(raw, seed):
    parameters, draws = drawn(raw, seed)
    again = parameters_at(raw, flattened(raw).positions_of(draws))
    assert leaves(again) == pytest.approx(leaves(parameters), rel=1e-6, abs=1e-6)


@given(raw=spaces_raw, data=st.data())
def test_features_are_equal_if_and_only_if_quantised_values_and_choices_are_equal(raw, data):
    """The test gives continuous parameters equal positions, because their features differ for any two different positions."""
    flat = flattened(raw)
    one, two = (
        np.array(data.draw(st.lists(st.floats(0.001, 0.999), min_size=flat.width, max_size=flat.width)))
        for _ in range(2)
    )
    for index, dimension in enumerate(flat.dimensions):
        if type(dimension.parameter).__name__ in ("Uniform", "LogUniform", "Normal", "LogNormal"):
            two[index] = one[index]
    same_features = bool(np.all(flat.features(one[None]) == flat.features(two[None])))
    of_one, of_two = (json.dumps(parameters_at(raw, each)) for each in (one, two))
    # A choice may list equal options, for example {"_value": [1, 1]}. The features of equal options differ, but the parameters do
    # not.
    assert of_one == of_two if same_features else of_one != of_two or has_equal_options(raw)


def has_equal_options(raw):
    if isinstance(raw, dict) and raw.get("_type") == "choice":
        options = [json.dumps(each) for each in raw["_value"]]
        return len(set(options)) < len(options) or any(map(has_equal_options, raw["_value"]))
    return isinstance(raw, dict) and any(map(has_equal_options, raw.values()))


@given(raw=spaces_raw, seed=st.integers(0, 1000))
def test_the_centre_of_a_quantisation_cell_yields_the_quantised_value(raw, seed):
    flat, (parameters, draws) = flattened(raw), drawn(raw, seed)
    positions = flat.positions_of(draws)
    centres = features_of(flat, draws)
    for index, dimension in enumerate(flat.dimensions):
        if not np.isnan(positions[index]) and not isinstance(dimension.parameter, Choice):
            positions[index] = centres[index]
    assert leaves(parameters_at(raw, positions)) == pytest.approx(leaves(parameters), rel=1e-6, abs=1e-6)


def leaves(value):
    """A dict of the leaves of nested parameters. A number has its path as key; any other value becomes a part of its key."""
    if isinstance(value, dict):
        return {f"{key}.{inner}": leaf for key, each in value.items() for inner, leaf in leaves(each).items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"": value} if is_number else {json.dumps(value): 0}


def test_a_coordinate_from_0_to_1_yields_a_value_of_its_distribution():
    raw = kernels(("linear", {"C": C}), ("rbf", {"C": C, "gamma": GAMMA}))
    flat = flattened(raw)
    for position in (0.0, 0.5, 1.0):
        at = np.full(flat.width, position)
        draws = {}
        Sampling(parse_search_space(raw)).sample(
            lambda name, each, at=at, draws=draws: draws.setdefault(name, flat.draw_at(at, name, each))
        )
        assert draws["/kernel"] == from_unit(flat.dimensions[0].distribution, position)
