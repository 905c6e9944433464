"""The built-in assessors: NNI's Medianstop and Curvefitting, and Optuna's pruners."""

from __future__ import annotations

import warnings
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState

from nni_manager.config.algorithms import ASSESSOR_ARGS, CurvefittingArgs, MedianstopArgs
from nni_manager.config.model import ExperimentConfig, OptimizeMode
from nni_manager.tuner.assessment import Assessment, Assessor
from nni_manager.tuner.optuna_log import quieten
from nni_manager.tuner.user_classes import UserAssessor

quieten()

Floats: TypeAlias = NDArray[np.float64]

# How fast a curve bends: per step for the power law, and over the whole course for the exponential.
_POWERS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class Medianstop(Assessor):
    """Stops a trial whose best result so far is worse than the median of the running averages of earlier trials at that step.

    Source: D. Golovin et al., Google Vizier, 2017, section 3.2; NNI v2.10 for which of two medians counts.
    """

    def __init__(self, optimize_mode: OptimizeMode, args: MedianstopArgs) -> None:
        """Trials that succeeded are what others are compared with."""
        self._maximizes = optimize_mode == "maximize"
        self._start_step = args.start_step
        self._averages: list[list[float]] = []
        """Of each step, sorted."""

    def may_go_on(self, trial_id: str, course: Sequence[float]) -> bool:
        """See `Assessor`."""
        step = len(course)
        if step < self._start_step or step > len(self._averages):
            return True
        averages = self._averages[step - 1]
        # Of an even number, the lower one when more is better: the trial has the benefit of the doubt.
        if self._maximizes:
            return max(course) >= averages[(len(averages) - 1) // 2]
        return min(course) <= averages[len(averages) // 2]

    def end(self, trial_id: str, course: Sequence[float], *, has_succeeded: bool) -> None:
        """See `Assessor`."""
        if not has_succeeded:
            return
        average = 0.0
        for step, value in enumerate(course, 1):
            # Each is divided before it is added: a sum of large floats is larger than any.
            average = average * ((step - 1) / step) + value / step
            if step > len(self._averages):
                self._averages.append([])
            insort(self._averages[step - 1], average)


class Curvefitting(Assessor):
    """Stops a trial whose curve, drawn out to the last epoch, ends clearly below the best end of earlier trials.

    Curves are a + b g(x) with three families of g; each family's bend is chosen, and a and b fitted, by least squares. The
    families' forecasts are averaged, each weighed by how well it fits.
    """

    def __init__(self, optimize_mode: OptimizeMode, args: CurvefittingArgs) -> None:
        """Trials that succeeded are what others are compared with."""
        self._maximizes = optimize_mode == "maximize"
        self._args = args
        self._best: float | None = None
        self._judged: dict[str, int] = {}
        """At which step a trial was last looked at."""

    def may_go_on(self, trial_id: str, course: Sequence[float]) -> bool:
        """See `Assessor`."""
        step = len(course)
        last = self._judged.get(trial_id)
        is_due = last is None or step - last >= self._args.gap
        if self._best is None or step < max(self._args.start_step, 3) or not is_due:
            return True
        self._judged[trial_id] = step
        if step >= self._args.epoch_num:
            return True
        end = forecast(course, self._args.epoch_num)
        margin = (1 - self._args.threshold) * abs(self._best)
        return end >= self._best - margin if self._maximizes else end <= self._best + margin

    def end(self, trial_id: str, course: Sequence[float], *, has_succeeded: bool) -> None:
        """See `Assessor`."""
        self._judged.pop(trial_id, None)
        if has_succeeded and course:
            ends = [course[-1]] if self._best is None else [self._best, course[-1]]
            self._best = max(ends) if self._maximizes else min(ends)


def forecast(course: Sequence[float], epoch: int) -> float:
    """Where a course of at least three results is likely to be at `epoch`, counted from 1."""
    scale = max(1.0, *map(abs, course))
    values = np.array(course) / scale
    steps = np.arange(1, len(course) + 1, dtype=np.float64)
    families: tuple[list[Callable[[Floats], Floats]], ...] = (
        [partial(_power, power) for power in _POWERS],
        [partial(_decay, rate / epoch) for rate in _RATES],
        [partial(_hyperbola, half) for half in _RATES],
    )
    fits = [
        min((_fit(bend, steps, values, epoch) for bend in bends), key=lambda fit: fit[0])
        for bends in families
    ]
    weights = [1 / (error + 1e-9) for error, _ in fits]
    ends = sum(weight * end for weight, (_, end) in zip(weights, fits, strict=True))
    return float(ends / sum(weights) * scale)


def _power(power: float, steps: Floats) -> Floats:
    bent: Floats = steps**-power
    return bent


def _decay(rate: float, steps: Floats) -> Floats:
    bent: Floats = np.exp(-rate * steps)
    return bent


def _hyperbola(half: float, steps: Floats) -> Floats:
    bent: Floats = half / (steps + half)
    return bent


def _fit(bend: Callable[[Floats], Floats], steps: Floats, values: Floats, epoch: int) -> tuple[float, float]:
    """The squared error of the best curve of this bend, and where that curve ends."""
    bent = bend(steps)
    centred = bent - bent.mean()
    slope = float(centred @ (values - values.mean())) / max(float(centred @ centred), 1e-12)
    start = float(values.mean()) - slope * float(bent.mean())
    error = float(((start + slope * bent - values) ** 2).mean())
    return error, start + slope * float(bend(np.array([float(epoch)]))[0])


class Pruner(Assessor):
    """What a pruner of Optuna's says, of a study in memory."""

    def __init__(self, optimize_mode: OptimizeMode, pruner: optuna.pruners.BasePruner) -> None:
        """A step is a result's place in the course, from 1."""
        # The name is part of what decides on a trial's bracket.
        self._study = optuna.create_study(
            study_name="assessment",
            storage=optuna.storages.InMemoryStorage(),
            direction=optimize_mode,
            pruner=pruner,
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        self._running: dict[str, tuple[optuna.Trial, int]] = {}
        """The study's trial, and how much of the course it knows."""

    def may_go_on(self, trial_id: str, course: Sequence[float]) -> bool:
        """See `Assessor`."""
        return self._show(trial_id, course)

    def end(self, trial_id: str, course: Sequence[float], *, has_succeeded: bool) -> None:
        """See `Assessor`."""
        self._show(trial_id, course)
        trial, _ = self._running.pop(trial_id)
        if has_succeeded and course:
            self._study.tell(trial, course[-1])
        else:
            self._study.tell(trial, state=TrialState.PRUNED if course else TrialState.FAIL)

    def _show(self, trial_id: str, course: Sequence[float]) -> bool:
        trial, known = self._running.get(trial_id) or (self._study.ask(), 0)
        may_go_on = True
        for step, value in enumerate(course[known:], known + 1):
            trial.report(value, step)
            may_go_on = not trial.should_prune()
        self._running[trial_id] = trial, len(course)
        return may_go_on


def _pruner(make: Callable[..., optuna.pruners.BasePruner]) -> Callable[[OptimizeMode, Any], Assessor]:
    def build(optimize_mode: OptimizeMode, args: Any) -> Assessor:
        with warnings.catch_warnings():
            # Whoever names one in an experiment file wants it.
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


# The second argument is of the class that ASSESSOR_ARGS has for the name.
ASSESSORS: dict[str, Callable[[OptimizeMode, Any], Assessor]] = {
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


def make_assessment(config: ExperimentConfig, log_folder: Path | None = None) -> Assessment | None:
    """The experiment's assessor, which has heard of no trial; None if it has none.

    `log_folder`: where what an assessor of the user's own prints is kept.
    """
    if config.assessor is None:
        return None
    if config.assessor.own is not None:
        return Assessment(UserAssessor(config.assessor.own, config.assessor.class_args, log_folder))
    args = ASSESSOR_ARGS[config.assessor.name].model_validate(config.assessor.class_args)
    optimize_mode = args.optimize_mode or config.tuner.optimize_mode
    return Assessment(ASSESSORS[config.assessor.name](optimize_mode, args))
