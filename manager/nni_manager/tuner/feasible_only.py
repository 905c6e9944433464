"""Hides results that violate constraints from tuners that cannot learn from them: such a trial counts as failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.objectives import Objectives
from nni_manager.tuner.base import BaseTuner, Later, Observation, PastTrial, Suggestion


class FeasibleOnly(BaseTuner):
    """Passes everything to another tuner, but no result that violates a constraint."""

    def __init__(self, tuner: BaseTuner, objectives: Objectives) -> None:
        """`tuner` is used by this object only."""
        self._tuner, self._objectives = tuner, objectives
        self.learns, self.restores_imports_first = tuner.learns, tuner.restores_imports_first

    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """See `BaseTuner`."""
        return self._tuner.ask(trial_key)

    def tell(self, trial_key: int, value: float | None) -> None:
        """See `BaseTuner`. A bare number is taken as it is."""
        self._tuner.tell(trial_key, value)

    def tell_result(self, trial_key: int, result: Observation) -> None:
        """See `BaseTuner`."""
        if not self._is_feasible(result.metric):
            result = replace(result, value=None)
        self._tuner.tell_result(trial_key, result)

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `BaseTuner`."""
        return self._tuner.import_results([each for each in results if self._is_feasible(each.metric)])

    def report(self, trial_key: int, trial_id: str, values: Sequence[float]) -> None:
        """See `BaseTuner`."""
        self._tuner.report(trial_key, trial_id, values)

    def take_stops(self) -> list[str]:
        """See `BaseTuner`."""
        return self._tuner.take_stops()

    def close(self) -> None:
        """See `BaseTuner`."""
        self._tuner.close()

    def restore(self, trials: Iterable[PastTrial]) -> None:
        """See `BaseTuner`."""
        self._tuner.restore(
            [each if self._is_feasible(each.metric) else replace(each, value=None) for each in trials]
        )

    def _is_feasible(self, metric: str | None) -> bool:
        outcome = None if metric is None else self._objectives.outcome(metric)
        return outcome is None or outcome.is_feasible
