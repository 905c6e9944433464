"""GPTuner: the best acquisition value of a Gaussian process with NNI's settings."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import field_validator

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.config.schema import must_be, whole
from nni_manager.tuner.flat_study import FlatStudy
from nni_manager.tuner.lazy import Floats, np
from nni_manager.tuner.model_sampler import ModelArgs, ModelSampler, expected_improvement, normal_share
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import SamplerSeeds

_NOISES = (0.0, 1e-3, 1e-1)


class GpArgs(ModelArgs):
    """classArgs of GPTuner. NNI's default of `selection_num_warm_up` is 100,000; here `nu` must be one of three values."""

    utility: Literal["ei", "ucb", "poi"] = must_be("ei, ucb or poi", "ei", "ei")
    kappa: float = must_be("a number of at least 0", "5", 5.0, ge=0, le=1e6)
    xi: float = must_be("a number of at least 0", "0", 0.0, ge=0, le=1e6)
    nu: float = must_be("0.5, 1.5 or 2.5", "2.5", 2.5)
    alpha: float = must_be("a number above 0, up to 1", "1e-6", 1e-6, gt=0, le=1)
    selection_num_warm_up: int = whole(10, 1000000, "5000", 5000)

    @field_validator("nu")
    @classmethod
    def _has_a_closed_form(cls, nu: float) -> float:
        if nu not in (0.5, 1.5, 2.5):
            raise ValueError(nu)
        return nu


class GaussianProcess(ModelSampler):
    """A Gaussian process with a Matérn kernel. Its length scale and noise maximise the likelihood of the data."""

    def __init__(self, seeds: SamplerSeeds, flat_study: FlatStudy, args: GpArgs) -> None:
        super().__init__(
            seeds,
            flat_study,
            cold_start=args.cold_start_num,
            candidates=args.selection_num_warm_up,
            starting_points=args.selection_num_starting_points,
        )
        self._args = args

    def fit(self, points: Floats, losses: Floats) -> None:
        """See `ModelSampler`."""
        self._points, self._best = points, float(losses.min())
        distances = _distances(points, points)
        likeliest = -math.inf
        for length_scale in np.geomspace(0.05, 5.0, 7) * math.sqrt(points.shape[1]):
            kernel = _matern(distances / length_scale, self._args.nu)
            for noise in _NOISES:
                noisy = kernel + (self._args.alpha + noise) * np.eye(len(points))
                try:
                    root = np.linalg.cholesky(noisy)
                except np.linalg.LinAlgError:
                    continue  # singular in double precision; shorter scales and more noise are tried as well
                inverse = np.linalg.inv(noisy)
                scale = max(float(losses @ inverse @ losses) / len(losses), 1e-12)
                likelihood = -0.5 * len(losses) * math.log(scale) - float(np.log(np.diag(root)).sum())
                if likelihood > likeliest:
                    likeliest = likelihood
                    self._inverse, self._weights = inverse, inverse @ losses
                    self._length_scale, self._scale = length_scale, scale

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Expected losses and their standard deviations."""
        kernel = _matern(_distances(points, self._points) / self._length_scale, self._args.nu)
        variances = 1 - np.einsum("ij,ij->i", kernel @ self._inverse, kernel)
        return kernel @ self._weights, np.sqrt(self._scale * np.maximum(variances, 1e-12))

    def acquisition(self, points: Floats) -> Floats:
        """See `ModelSampler`."""
        means, deviations = self.predict(points)
        args = self._args
        if args.utility == "ucb":
            return args.kappa * deviations - means
        if args.utility == "poi":
            return normal_share((self._best - means - args.xi) / deviations)
        return expected_improvement(means, deviations, self._best - args.xi)


def _distances(points: Floats, others: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * points @ others.T
    distances: Floats = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _matern(distances: Floats, nu: float) -> Floats:
    scaled = math.sqrt(2 * nu) * distances
    factor = {0.5: 1.0, 1.5: 1 + scaled, 2.5: 1 + scaled + scaled**2 / 3}[nu]
    kernel: Floats = factor * np.exp(-scaled)
    return kernel


DECLARED = BuiltInTuner(
    "GPTuner", __doc__, over_a_study(GaussianProcess, FlatStudy), GpArgs, shares_name_of="GP"
)
