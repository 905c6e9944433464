"""The built-in assessors: NNI's Medianstop and Curvefitting, and Optuna's pruners."""

from __future__ import annotations

import warnings
from bisect import insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState

from nni_manager.config.algorithms import ASSESSOR_ARGS, CurvefittingArgs, MedianstopArgs
from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.objectives import OptimizeMode
from nni_manager.tuner.assessment import Assessment, BaseAssessor
from nni_manager.tuner.optuna_log import configure_logging
from nni_manager.tuner.user_classes import UserAssessor

configure_logging()

Floats: TypeAlias = NDArray[np.float64]

# Shapes of a fitted curve: powers of the step, and rates over the whole learning curve.
_POWERS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class Medianstop(BaseAssessor):
    """Stops a trial whose best result so far is worse than the median of earlier trials' running averages at that step.

    Source: D. Golovin et al., Google Vizier, 2017, section 3.2; NNI v2.10 for the choice between two medians.
    """

    def __init__(self, optimize_mode: OptimizeMode, args: MedianstopArgs) -> None:
        """Only trials that succeeded are used for comparison."""
        self._maximizes = optimize_mode == "maximize"
        self._start_step = args.start_step
        self._averages: list[list[float]] = []
        """Sorted running averages of each step."""

    def may_go_on(self, trial_id: str, learning_curve: Sequence[float]) -> bool:
        """See `BaseAssessor`."""
        step = len(learning_curve)
        if step < self._start_step or step > len(self._averages):
            return True
        averages = self._averages[step - 1]
        # With an even number of averages, use the median that favours the trial.
        if self._maximizes:
            return max(learning_curve) >= averages[(len(averages) - 1) // 2]
        return min(learning_curve) <= averages[len(averages) // 2]

    def end(self, trial_id: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """See `BaseAssessor`."""
        if not has_succeeded:
            return
        average = 0.0
        for step, value in enumerate(learning_curve, 1):
            # Divide before adding: a sum of large floats overflows.
            average = average * ((step - 1) / step) + value / step
            if step > len(self._averages):
                self._averages.append([])
            insort(self._averages[step - 1], average)


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


class Pruner(BaseAssessor):
    """Applies an Optuna pruner to a study in memory."""

    def __init__(self, optimize_mode: OptimizeMode, pruner: optuna.pruners.BasePruner) -> None:
        """A step is a result's position in the learning curve, from 1."""
        # The study's name is an input to the choice of a trial's bracket.
        self._study = optuna.create_study(
            study_name="assessment",
            storage=optuna.storages.InMemoryStorage(),
            direction=optimize_mode,
            pruner=pruner,
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        self._running: dict[str, tuple[optuna.Trial, int]] = {}
        """For each trial id: the trial in the study, and the number of results reported to the study."""

    def may_go_on(self, trial_id: str, learning_curve: Sequence[float]) -> bool:
        """See `BaseAssessor`."""
        return self._report(trial_id, learning_curve)

    def end(self, trial_id: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """See `BaseAssessor`."""
        self._report(trial_id, learning_curve)
        trial, _ = self._running.pop(trial_id)
        if has_succeeded and learning_curve:
            self._study.tell(trial, learning_curve[-1])
        else:
            self._study.tell(trial, state=TrialState.PRUNED if learning_curve else TrialState.FAIL)

    def _report(self, trial_id: str, learning_curve: Sequence[float]) -> bool:
        trial, known = self._running.get(trial_id) or (self._study.ask(), 0)
        may_go_on = True
        for step, value in enumerate(learning_curve[known:], known + 1):
            trial.report(value, step)
            may_go_on = not trial.should_prune()
        self._running[trial_id] = trial, len(learning_curve)
        return may_go_on


def _pruner(make: Callable[..., optuna.pruners.BasePruner]) -> Callable[[OptimizeMode, Any], BaseAssessor]:
    def build(optimize_mode: OptimizeMode, args: Any) -> BaseAssessor:
        with warnings.catch_warnings():
            # The experiment file selects an experimental pruner explicitly, so no warning is needed.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            pruner = make(**args.model_dump(exclude={"optimize_mode"}))
        return Pruner(optimize_mode, pruner)

    return build


def _patient(wrapped_pruner: str | None, **settings: Any) -> optuna.pruners.BasePruner:
    wrapped: optuna.pruners.BasePruner | None = None
    if wrapped_pruner == "MedianPruner":
        wrapped = optuna.pruners.MedianPruner()
    elif wrapped_pruner is not None:
        wrapped = optuna.pruners.SuccessiveHalvingPruner(min_resource=1)
    return optuna.pruners.PatientPruner(wrapped, **settings)


# The second argument is an instance of the class in ASSESSOR_ARGS for the name.
ASSESSORS: dict[str, Callable[[OptimizeMode, Any], BaseAssessor]] = {
    "Medianstop": Medianstop,
    "Curvefitting": Curvefitting,
    "MedianPruner": _pruner(optuna.pruners.MedianPruner),
    "PercentilePruner": _pruner(optuna.pruners.PercentilePruner),
    "SuccessiveHalvingPruner": _pruner(optuna.pruners.SuccessiveHalvingPruner),
    "HyperbandPruner": _pruner(optuna.pruners.HyperbandPruner),
    "PatientPruner": _pruner(_patient),
    "ThresholdPruner": _pruner(optuna.pruners.ThresholdPruner),
    "WilcoxonPruner": _pruner(optuna.pruners.WilcoxonPruner),
    "NopPruner": _pruner(optuna.pruners.NopPruner),
}


def make_assessment(config: ExperimentSpec, log_folder: Path | None = None) -> Assessment | None:
    """A new assessor of the experiment; None if the experiment has none.

    `log_folder`: folder for the output of a user's assessor; None: the output is discarded.
    """
    if config.assessor is None:
        return None
    if config.assessor.own is not None:
        return Assessment(UserAssessor(config.assessor.own, config.assessor.class_args, log_folder))
    args = ASSESSOR_ARGS[config.assessor.name].model_validate(config.assessor.class_args)
    written: OptimizeMode | None = config.assessor.class_args.get("optimize_mode")
    optimize_mode = config.assessor.optimize_mode or written or config.tuner.optimize_mode
    return Assessment(ASSESSORS[config.assessor.name](optimize_mode, args))
