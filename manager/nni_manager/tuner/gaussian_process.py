"""A Gaussian process over the features of a flat space, and the acquisition functions of `Auto`.

The kernel is Matérn 5/2 with a length scale for each dimension; two options of a choice are 1 apart. Length scales, scale and
noise maximise the posterior density, by L-BFGS with analytic gradients.

Source: C. Rasmussen and C. Williams, Gaussian Processes for Machine Learning, 2006; S. Ament et al., Unexpected Improvements to
Expected Improvement for Bayesian Optimization, 2023, for its logarithm.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nni_manager.errors import InternalError
from nni_manager.startup.single_threaded_blas import one_blas_thread
from trial_keeper.frozen_dataclass import dataclass

with one_blas_thread():
    from scipy.linalg.lapack import dpotrf, dpotri, dpotrs
    from scipy.optimize import minimize
    from scipy.special import erfcx, ndtr

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

# Logarithms of the prior's mean and standard deviation. The length scale grows with the root of the width, as distances do.
_LENGTH_SCALE, _LENGTH_DEVIATION = math.log(0.4), 1.0
_SCALE, _SCALE_DEVIATION = 0.0, 0.7
_NOISE, _NOISE_DEVIATION = math.log(1e-3), 1.5
_MIN_NOISE = 1e-6
# Each of some thirty steps costs the cube of this number; beyond it, hyper-parameters change little.
MAX_FITTED = 100
# More steps change the length scales by less than their uncertainty.
_MAX_STEPS = 25


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Length scales of the dimensions, and the variances of the function and of its noise."""

    length_scales: Floats
    scale: float
    noise: float


class MaternProcess:
    """The posterior of a function, given losses at points: features, one point per row."""

    def __init__(self, points: Floats, losses: Floats, are_choices: Flags, settings: Hyperparameters) -> None:
        """Condition on losses, which have about mean 0 and variance 1."""
        self._points, self._are_choices, self._settings = points, are_choices, settings
        self._losses = losses
        kernel = self._kernel(points)
        kernel[np.diag_indices(len(points))] += settings.noise + _MIN_NOISE
        root = _cholesky(kernel)
        self._weights = dpotrs(root, losses, lower=1)[0]
        lower = np.tril(dpotri(root, lower=1)[0])
        self._inverse = lower + np.tril(lower, -1).T

    @classmethod
    def fitted(cls, points: Floats, losses: Floats, are_choices: Flags) -> MaternProcess:
        """A process whose hyper-parameters are the most probable ones, given MAX_FITTED of the losses, evenly chosen."""
        chosen = np.unique(np.linspace(0, len(points) - 1, MAX_FITTED).astype(int))
        settings = _most_probable(points[chosen], losses[chosen], are_choices)
        return cls(points, losses, are_choices, settings)

    def with_expected(self, points: Floats) -> MaternProcess:
        """The process after the expected losses were seen at these points: the means stay, the deviations shrink."""
        losses = np.concatenate([self._losses, self.predict(points)[0]])
        return MaternProcess(np.vstack([self._points, points]), losses, self._are_choices, self._settings)

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Expected losses and their standard deviations, without the noise."""
        kernel = self._kernel(points)
        variances = self._settings.scale - np.einsum("ij,ij->i", kernel @ self._inverse, kernel)
        return kernel @ self._weights, np.sqrt(np.maximum(variances, 1e-12))

    def _kernel(self, points: Floats) -> Floats:
        scales, numbers = self._settings.length_scales, ~self._are_choices
        one, two = (each[:, numbers] / scales[numbers] for each in (points, self._points))
        squares = np.maximum((one**2).sum(axis=1)[:, None] + (two**2).sum(axis=1) - 2 * one @ two.T, 0.0)
        for index in np.flatnonzero(self._are_choices):
            squares += (points[:, index, None] != self._points[:, index]) / scales[index] ** 2
        distances = np.sqrt(5 * squares)
        kernel: Floats = self._settings.scale * (1 + distances + distances**2 / 3) * np.exp(-distances)
        return kernel


def _cholesky(kernel: Floats) -> Floats:
    for jitter in (0.0, 1e-5, 1e-3, 1e-1):  # it may be singular in double precision
        root, failed = dpotrf(kernel + jitter * np.eye(len(kernel)), lower=1)
        if not failed:
            factor: Floats = root
            return factor
    raise InternalError(
        "cannot fit the model of Auto: its kernel is not positive definite; please report this"
    )


def _most_probable(points: Floats, losses: Floats, are_choices: Flags) -> Hyperparameters:
    width = points.shape[1]
    density = _Density(points, losses, are_choices)
    found = minimize(
        density.negated,
        density.means,
        jac=True,
        method="L-BFGS-B",
        bounds=[(mean - 5, mean + 5) for mean in density.means],
        options={"maxiter": _MAX_STEPS, "ftol": 1e-4},
    ).x
    return Hyperparameters(np.exp(found[:width]), math.exp(found[width]), math.exp(found[width + 1]))


class _Density:
    """The posterior density of the logarithms of length scales, scale and noise. Matrices are lower triangles."""

    def __init__(self, points: Floats, losses: Floats, are_choices: Flags) -> None:
        self._losses = losses
        width = points.shape[1]
        self._lower = np.tril_indices(len(points), -1)
        rows, columns = self._lower
        self._squares = np.where(
            are_choices, points[rows] != points[columns], (points[rows] - points[columns]) ** 2
        ).T.copy()
        self.means = np.array([_LENGTH_SCALE + 0.5 * math.log(width)] * width + [_SCALE, _NOISE])
        self._deviations = np.array([_LENGTH_DEVIATION] * width + [_SCALE_DEVIATION, _NOISE_DEVIATION])

    def negated(self, logarithms: Floats) -> tuple[float, Floats]:
        """The negated logarithm of the density, and its gradient."""
        width, count = len(self._squares), len(self._losses)
        weights = np.exp(-2 * logarithms[:width])
        scale, noise = np.exp(logarithms[width:])
        distances = np.sqrt(5 * (weights @ self._squares))
        decay = scale * np.exp(-distances)
        linear = decay * (1 + distances)
        matrix = np.zeros((count, count), order="F")
        values = linear + decay * distances**2 / 3
        matrix[self._lower] = values
        matrix[np.diag_indices(count)] = scale + noise + _MIN_NOISE
        root, failed = dpotrf(matrix, lower=1)
        if failed:
            return 1e10, np.zeros_like(logarithms)
        solved = dpotrs(root, self._losses, lower=1)[0]
        inverse = dpotri(root, lower=1)[0]
        rows, columns = self._lower
        # Half of it is the derivative by an element of the matrix; the other half is that of the upper triangle.
        slopes = inverse[rows, columns] - solved[rows] * solved[columns]
        diagonal = 0.5 * float(np.diag(inverse).sum() - solved @ solved)
        gradient = np.empty_like(logarithms)
        gradient[:width] = 5 / 3 * weights * (self._squares @ (slopes * linear))
        gradient[width] = slopes @ values + diagonal * scale
        gradient[width + 1] = diagonal * noise
        away = (logarithms - self.means) / self._deviations
        negated = (
            0.5 * float(self._losses @ solved) + float(np.log(np.diag(root)).sum()) + 0.5 * float(away @ away)
        )
        return negated, gradient + away / self._deviations


def log_expected_improvement(means: Floats, deviations: Floats, best: float) -> Floats:
    """The logarithm of the mean amount by which losses of these normal distributions are below `best`."""
    margins = (best - means) / deviations
    near = np.maximum(margins, -1.0)
    usual = np.log(np.exp(-0.5 * near**2) / math.sqrt(2 * math.pi) + near * ndtr(near))
    far = np.minimum(margins, -1.0)
    # φ(z) + zΦ(z) = φ(z) (1 - |z| Φ(z)/φ(z)); the ratio is that of erfcx, which does not underflow.
    ratio = -far * erfcx(-far / math.sqrt(2)) * math.sqrt(math.pi / 2)
    tail = -0.5 * far**2 - 0.5 * math.log(2 * math.pi) + np.log(np.maximum(1 - ratio, 1e-300))
    # The difference from 1 is lost far out; it is 1/z² there.
    tail = np.where(far < -1e3, -0.5 * far**2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(-far), tail)
    logarithms: Floats = np.log(deviations) + np.where(margins > -1.0, usual, tail)
    return logarithms
