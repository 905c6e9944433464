"""Optuna's pruners, with its names, arguments and defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from nni_manager.config.algorithm import AssessorArgs, BuiltInAssessor
from nni_manager.config.schema import must_be, refusal, whole
from nni_manager.domain.objectives import OptimizeMode
from nni_manager.tuner.assessment import BaseAssessor
from nni_manager.tuner.lazy import optuna

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class MedianPrunerArgs(AssessorArgs):
    """classArgs of MedianPruner, with Optuna's names."""

    n_startup_trials: int = whole(0, None, "5", 5)
    n_warmup_steps: int = whole(0, None, "0", 0)
    interval_steps: int = whole(1, None, "1", 1)
    n_min_trials: int = whole(1, None, "1", 1)


class PercentilePrunerArgs(MedianPrunerArgs):
    """classArgs of PercentilePruner, with Optuna's names."""

    percentile: float = must_be("a number from 0 to 100", "25", ge=0, le=100)


class SuccessiveHalvingPrunerArgs(AssessorArgs):
    """classArgs of SuccessiveHalvingPruner, with Optuna's names."""

    min_resource: int = whole(1, None, "1", 1)
    reduction_factor: int = whole(2, None, "4", 4)
    min_early_stopping_rate: int = whole(0, None, "0", 0)
    bootstrap_count: int = whole(0, None, "0", 0)


class HyperbandPrunerArgs(AssessorArgs):
    """classArgs of HyperbandPruner, with Optuna's names."""

    min_resource: int = whole(1, None, "1", 1)
    max_resource: int = must_be("a whole number of at least 1, the steps of a full trial", "20", ge=1)
    reduction_factor: int = whole(2, None, "3", 3)
    bootstrap_count: int = whole(0, None, "0", 0)


class PatientPrunerArgs(AssessorArgs):
    """classArgs of PatientPruner, with Optuna's names. `wrapped_pruner` names a built-in pruner, used with its defaults."""

    patience: int = whole(0, None, "3")
    min_delta: float = must_be("a number of at least 0", "0.01", 0.0, ge=0)
    wrapped_pruner: Literal["MedianPruner", "SuccessiveHalvingPruner"] | None = must_be(
        "MedianPruner or SuccessiveHalvingPruner", "MedianPruner", None
    )


class ThresholdPrunerArgs(AssessorArgs):
    """classArgs of ThresholdPruner, with Optuna's names. At least one of `lower` and `upper` is required."""

    lower: float | None = must_be("a number", "0.1", None)
    upper: float | None = must_be("a number", "10", None)
    n_warmup_steps: int = whole(0, None, "0", 0)
    interval_steps: int = whole(1, None, "1", 1)

    @model_validator(mode="after")
    def _has_a_threshold(self) -> ThresholdPrunerArgs:
        if self.lower is None and self.upper is None:
            raise refusal(
                "cannot use ThresholdPruner without a threshold; write lower, upper or both into «assessor.classArgs»"
            )
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise refusal(
                f"cannot use «assessor.classArgs»: lower {self.lower} is above upper {self.upper}; swap them"
            )
        return self


class WilcoxonPrunerArgs(AssessorArgs):
    """classArgs of WilcoxonPruner, with Optuna's names."""

    p_threshold: float = must_be("a number from 0 to 1", "0.1", 0.1, ge=0, le=1)
    n_startup_steps: int = whole(0, None, "2", 2)


class Pruner(BaseAssessor):
    """Applies an Optuna pruner to a study in memory."""

    def __init__(self, optimize_mode: OptimizeMode, pruner: BasePruner) -> None:
        """A step is a result's position in the learning curve, from 1."""
        # The study's name is an input to the choice of a trial's bracket.
        self._study = optuna.create_study(
            study_name="assessment",
            storage=optuna.storages.InMemoryStorage(),
            direction=optimize_mode,
            pruner=pruner,
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        # The others record rungs, also of the steps before the newest one.
        self._asks_for_newest_only = isinstance(
            pruner,
            optuna.pruners.PercentilePruner | optuna.pruners.ThresholdPruner | optuna.pruners.WilcoxonPruner,
        )
        self._running: dict[str, tuple[optuna.Trial, int]] = {}
        """For each trial id: the trial in the study, and the number of results reported to the study."""

    def may_go_on(self, trial_id: str, learning_curve: Sequence[float]) -> bool:
        """See `BaseAssessor`."""
        return self._report(trial_id, learning_curve)

    def end(self, trial_id: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """See `BaseAssessor`."""
        self._report(trial_id, learning_curve, is_terminal=True)
        trial, _ = self._running.pop(trial_id)
        states = optuna.trial.TrialState
        if has_succeeded and learning_curve:
            self._study.tell(trial, learning_curve[-1])
        else:
            self._study.tell(trial, state=states.PRUNED if learning_curve else states.FAIL)

    def _report(self, trial_id: str, learning_curve: Sequence[float], *, is_terminal: bool = False) -> bool:
        trial, known = self._running.get(trial_id) or (self._study.ask(), 0)
        may_go_on = True
        for step, value in enumerate(learning_curve[known:], known + 1):
            trial.report(value, step)
            is_newest = step == len(learning_curve) and not is_terminal
            if is_newest or not self._asks_for_newest_only:
                may_go_on = not trial.should_prune()
        self._running[trial_id] = trial, len(learning_curve)
        return may_go_on


def _patient(wrapped_pruner: str | None, **settings: Any) -> BasePruner:
    wrapped: BasePruner | None = None
    if wrapped_pruner == "MedianPruner":
        wrapped = optuna.pruners.MedianPruner()
    elif wrapped_pruner is not None:
        wrapped = optuna.pruners.SuccessiveHalvingPruner(min_resource=1)
    return optuna.pruners.PatientPruner(wrapped, **settings)


def _declared(
    name: str,
    doc: str,
    args: type[AssessorArgs],
    make_pruner: Callable[..., BasePruner] | None = None,
    *,
    has_direction: bool = True,
) -> BuiltInAssessor:
    """The declaration of Optuna's pruner of this name; `make_pruner` replaces its constructor."""

    def make(optimize_mode: OptimizeMode, given: AssessorArgs) -> Pruner:
        with warnings.catch_warnings():
            # The experiment file selects an experimental pruner explicitly, so no warning is needed.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            pruner = (make_pruner or getattr(optuna.pruners, name))(
                **given.model_dump(exclude={"optimize_mode"})
            )
        return Pruner(optimize_mode, pruner)

    return BuiltInAssessor(name, doc, make, args, origin="Optuna", has_direction=has_direction)


DECLARED = (
    _declared(
        "MedianPruner",
        "whose best result so far is worse than the median of earlier trials at this step",
        MedianPrunerArgs,
    ),
    _declared(
        "PercentilePruner",
        "whose best result so far is not among the best `percentile` % of earlier trials at this step",
        PercentilePrunerArgs,
    ),
    _declared(
        "SuccessiveHalvingPruner",
        "that is not among the best of its round; rounds are `reduction_factor` times longer each",
        SuccessiveHalvingPrunerArgs,
    ),
    _declared("HyperbandPruner", "as SuccessiveHalvingPruner, in several brackets", HyperbandPrunerArgs),
    _declared(
        "PatientPruner",
        "that has not improved for `patience` steps by more than `min_delta`; a `wrapped_pruner` must then agree",
        PatientPrunerArgs,
        _patient,
    ),
    _declared(
        "ThresholdPruner",
        "whose result leaves the range `lower` to `upper`, one of which is required",
        ThresholdPrunerArgs,
        has_direction=False,
    ),
    _declared(
        "WilcoxonPruner",
        "that is worse than the best trial, step by step, by a signed-rank test",
        WilcoxonPrunerArgs,
    ),
    _declared("NopPruner", "never", AssessorArgs, has_direction=False),
)
