"""Curvefitting: whose learning curve, extrapolated to its last step, ends below the best final value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nni_manager.config.algorithm import BuiltInAssessor, MaximizingArgs
from nni_manager.config.schema import must_be, whole
from nni_manager.domain.objectives import OptimizeMode
from nni_manager.tuner.assessment import BaseAssessor
from nni_manager.tuner.lazy import Floats, np

# Shapes of a fitted curve: powers of the step, and rates over the whole learning curve.
_POWERS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class CurvefittingArgs(MaximizingArgs):
    """classArgs of Curvefitting."""

    epoch_num: int = whole(1, None, "20")
    start_step: int = whole(0, None, "6", 6)
    threshold: float = must_be("a number from 0 to 1", "0.95", 0.95, ge=0, le=1)
    gap: int = whole(1, None, "1", 1)


class Curvefitting(BaseAssessor):
    """Stops a trial whose learning curve, extrapolated to the last epoch, is clearly worse than the best final result.

    Curves are a + b g(x) with three families of g. For each family, the shape, a and b are fitted by least squares. The
    forecasts of the families are averaged, weighted by goodness of fit.
    """

    def __init__(self, optimize_mode: OptimizeMode, args: CurvefittingArgs) -> None:
        """Only trials that succeeded are used for comparison."""
        self._maximizes = optimize_mode == "maximize"
        self._args = args
        self._best: float | None = None
        self._assessed_at: dict[str, int] = {}
        """The step at which each trial was last assessed."""

    def may_go_on(self, trial_id: str, learning_curve: Sequence[float]) -> bool:
        """See `BaseAssessor`."""
        step = len(learning_curve)
        last = self._assessed_at.get(trial_id)
        is_due = last is None or step - last >= self._args.gap
        if self._best is None or step < max(self._args.start_step, 3) or not is_due:
            return True
        self._assessed_at[trial_id] = step
        if step >= self._args.epoch_num:
            return True
        end = forecast(learning_curve, self._args.epoch_num)
        margin = (1 - self._args.threshold) * abs(self._best)
        return end >= self._best - margin if self._maximizes else end <= self._best + margin

    def end(self, trial_id: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """See `BaseAssessor`."""
        self._assessed_at.pop(trial_id, None)
        if has_succeeded and learning_curve:
            ends = [learning_curve[-1]] if self._best is None else [self._best, learning_curve[-1]]
            self._best = max(ends) if self._maximizes else min(ends)


def forecast(learning_curve: Sequence[float], epoch: int) -> float:
    """Extrapolate a learning curve of at least three results to `epoch`, counted from 1."""
    scale = max(1.0, *map(abs, learning_curve))
    values = np.array(learning_curve) / scale
    steps = np.arange(1, len(learning_curve) + 1, dtype=np.float64)
    families: tuple[tuple[Callable[[Floats, float], Floats], tuple[float, ...]], ...] = (
        (lambda at, power: at**-power, _POWERS),
        (lambda at, rate: np.exp(-rate / epoch * at), _RATES),
        (lambda at, half: half / (at + half), _RATES),
    )
    fits = [
        min((_fit(bend, shape, steps, values, epoch) for shape in shapes), key=lambda fit: fit[0])
        for bend, shapes in families
    ]
    weights = [1 / (error + 1e-9) for error, _ in fits]
    ends = sum(weight * end for weight, (_, end) in zip(weights, fits, strict=True))
    return float(ends / sum(weights) * scale)


def _fit(
    bend: Callable[[Floats, float], Floats], shape: float, steps: Floats, values: Floats, epoch: int
) -> tuple[float, float]:
    """The mean squared error of the best curve of this shape, and the value of that curve at `epoch`."""
    bent = bend(steps, shape)
    centred = bent - bent.mean()
    slope = float(centred @ (values - values.mean())) / max(float(centred @ centred), 1e-12)
    start = float(values.mean()) - slope * float(bent.mean())
    error = float(((start + slope * bent - values) ** 2).mean())
    return error, start + slope * float(bend(np.array([float(epoch)]), shape)[0])


DECLARED = BuiltInAssessor("Curvefitting", __doc__, Curvefitting, CurvefittingArgs)
