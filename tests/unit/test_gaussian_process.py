"""The Gaussian process of Auto and the logarithm of its expected improvement."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.tuner.gaussian_process import (
    Hyperparameters,
    MaternProcess,
    _Density,
    log_expected_improvement,
)

MIXED = np.array([False, False, True])


def a_sample(seed, count=12):
    """Points of two numbers and one choice, and the normalised loss of each point."""
    random = np.random.default_rng(seed)
    points = np.column_stack([random.random((count, 2)), random.integers(-1, 3, count).astype(float)])
    losses = np.sin(5 * points[:, 0]) + (points[:, 2] == 1) + 0.1 * random.normal(size=count)
    return points, (losses - losses.mean()) / losses.std()


@given(seed=st.integers(0, 10_000))
def test_the_gradient_of_the_density_matches_finite_differences(seed):
    density = _Density(*a_sample(seed), MIXED)
    at = density.means + np.random.default_rng(seed).normal(size=5)
    _, gradient = density.negated(at)
    for index in range(5):
        step = 1e-5 * np.eye(5)[index]
        slope = (density.negated(at + step)[0] - density.negated(at - step)[0]) / 2e-5
        assert gradient[index] == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_fitted_length_scales_are_shorter_for_the_dimension_that_affects_the_loss():
    random = np.random.default_rng(1)
    points = random.random((40, 2))
    losses = np.sin(8 * points[:, 0])
    process = MaternProcess.fitted(points, losses / losses.std(), np.array([False, False]))
    one, other = process._settings.length_scales
    assert other > 4 * one


def test_a_gaussian_process_without_noise_predicts_the_observed_losses():
    points, losses = a_sample(1)
    process = MaternProcess(points, losses, MIXED, Hyperparameters(np.array([0.2, 0.2, 1.0]), 1.0, 0.0))
    means, deviations = process.predict(points)
    assert means == pytest.approx(losses, abs=1e-3)
    assert np.all(deviations < 0.01)


def test_predictions_far_from_all_points_equal_the_prior():
    points, losses = a_sample(1)
    process = MaternProcess(points, losses, MIXED, Hyperparameters(np.array([0.01, 0.01, 0.01]), 2.0, 0.0))
    means, deviations = process.predict(np.array([[5.0, 5.0, 7.0]]))
    assert (means[0], deviations[0]) == pytest.approx((0.0, math.sqrt(2.0)))


def test_two_unobserved_options_of_a_choice_have_equal_predictions():
    settings = Hyperparameters(np.array([1.0]), 1.0, 0.0)
    process = MaternProcess(np.array([[2.0]]), np.array([1.0]), np.array([True]), settings)
    means, _ = process.predict(np.array([[0.0], [1.0], [3.0], [-1.0]]))
    assert np.ptp(means) == 0
    assert 0 < means[0] < 1


@given(seed=st.integers(0, 10_000))
def test_the_points_of_running_trials_reduce_deviations_and_leave_predicted_means_unchanged(seed):
    process = MaternProcess.fitted(*a_sample(seed), MIXED)
    running, others = a_sample(seed + 1, 3)[0], a_sample(seed + 2, 20)[0]
    after = process.with_expected(running)
    assert after.predict(others)[0] == pytest.approx(process.predict(others)[0], abs=1e-3)
    assert np.all(after.predict(others)[1] <= process.predict(others)[1] + 1e-6)


@pytest.mark.parametrize("losses", [np.zeros(30), np.tile([1.0, -1.0], 15)])
def test_a_gaussian_process_can_be_fitted_to_many_losses_of_the_same_point(losses):
    means, deviations = MaternProcess.fitted(np.full((30, 3), 0.5), losses, MIXED).predict(
        np.full((1, 3), 0.5)
    )
    assert abs(means[0]) < 0.1
    assert np.isfinite(deviations[0])


@given(mean=st.floats(-3, 3), deviation=st.floats(0.1, 3), best=st.floats(-3, 3))
def test_the_expected_improvement_equals_the_integral_below_the_best_loss(mean, deviation, best):
    losses = np.linspace(mean - 9 * deviation, best, 4001)
    density = np.exp(-0.5 * ((losses - mean) / deviation) ** 2) / deviation / math.sqrt(2 * math.pi)
    integral = float(np.trapezoid((best - losses) * density, losses)) if best > losses[0] else 0.0
    found = float(log_expected_improvement(np.array([mean]), np.array([deviation]), best)[0])
    if NormalDist(mean, deviation).cdf(best) > 1e-9:
        assert math.exp(found) == pytest.approx(integral, rel=1e-3)


def test_the_log_expected_improvement_is_finite_and_decreases_with_the_predicted_mean():
    means = np.geomspace(0.01, 1e7, 400)
    found = log_expected_improvement(means, np.ones(400), 0.0)
    assert np.all(np.isfinite(found))
    assert np.all(np.diff(found) < 0)
