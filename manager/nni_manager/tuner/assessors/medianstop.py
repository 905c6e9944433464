"""Medianstop: whose best result so far is worse than the median of the averages of succeeded trials."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from nni_manager.config.algorithm import BuiltInAssessor, MaximizingArgs
from nni_manager.config.schema import whole
from nni_manager.domain.objectives import OptimizeMode
from nni_manager.tuner.assessment import BaseAssessor


class MedianstopArgs(MaximizingArgs):
    """classArgs of Medianstop."""

    start_step: int = whole(0, None, "0", 0)


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


DECLARED = BuiltInAssessor("Medianstop", __doc__, Medianstop, MedianstopArgs)
