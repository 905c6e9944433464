"""The successive tuners of an experiment: each change of the search space creates a new tuner.

A new tuner imports the earlier results that lie in its search space. A trial's metadata names the revision of
its search space. Results of trials that an earlier tuner proposed reach the current one as imported data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nni_manager.config.model import ExperimentSpec
from nni_manager.config.prior_results import PriorResult
from nni_manager.tuner.base import BaseTuner, Later, Observation, PastTrial, Suggestion

# The metadata key of the revision of the search space; absent for the initial search space.
_REVISION = "search space revision"


class TunerSession:
    """The current tuner, and the running trials of current and earlier tuners. Used by one thread at a time."""

    def __init__(self, config: ExperimentSpec, make: Callable[[ExperimentSpec], BaseTuner]) -> None:
        """`make` creates a new tuner over the search space of a configuration."""
        self._make = make
        self._tuner = make(config)
        self._revision = config.search_space_revision
        self._running: dict[int, Mapping[str, Any]] = {}
        """The trials whose results the current tuner expects, with their parameters."""
        self._superseded: dict[int, Mapping[str, Any] | None] = {}
        """The trials that an earlier tuner proposed; None: the result is already imported."""

    @property
    def learns(self) -> bool:
        """See `BaseTuner.learns`."""
        return self._tuner.learns

    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """See `BaseTuner.ask`."""
        suggestion = self._tuner.ask(trial_key)
        if suggestion is None or isinstance(suggestion, Later):
            return suggestion
        self._running[trial_key] = suggestion.parameters
        if not self._revision:
            return suggestion
        return replace(suggestion, metadata=suggestion.metadata | {_REVISION: self._revision})

    def tell_result(self, trial_key: int, result: Observation) -> None:
        """See `BaseTuner.tell_result`."""
        self._running.pop(trial_key, None)
        if trial_key not in self._superseded:
            self._tuner.tell_result(trial_key, result)
            return
        parameters = self._superseded.pop(trial_key)
        if parameters is not None and result.value is not None and math.isfinite(result.value):
            self.import_results([_known(parameters, result.value, result.metric)])

    def report(self, trial_key: int, trial_id: str, values: Sequence[float]) -> None:
        """See `BaseTuner.report`; ignores trials that the current tuner did not propose."""
        if trial_key in self._running:
            self._tuner.report(trial_key, trial_id, values)

    def take_stops(self) -> list[str]:
        """See `BaseTuner.take_stops`."""
        return self._tuner.take_stops()

    def import_results(self, results: Sequence[PriorResult]) -> int:
        """See `BaseTuner.import_results`."""
        return self._tuner.import_results(results)

    def close(self) -> None:
        """See `BaseTuner.close`."""
        self._tuner.close()

    def change_space(
        self, config: ExperimentSpec, known: Sequence[PriorResult], over: Collection[int]
    ) -> None:
        """Propose parameters of another search space from now on.

        `known`: all results so far, from imports and from the trials with the keys `over`. The outcomes of these trials
        may still be reported later.
        """
        tuner = self._make(config)
        try:
            tuner.import_results(known)
        except BaseException:
            tuner.close()  # the new tuner may have started a process
            raise
        self._tuner.close()
        self._tuner, self._revision = tuner, config.search_space_revision
        self._superseded |= self._running
        self._superseded |= dict.fromkeys(self._superseded.keys() & set(over))
        self._running = {}

    def restore(self, trials: Iterable[PastTrial], known: Sequence[PriorResult]) -> None:
        """Restore imported results, and trials in the order in which the tuner proposed them.

        Must be called before the first `ask`.
        """
        own: list[PastTrial] = []
        earlier: list[PriorResult] = []
        for trial in trials:
            if trial.metadata.get(_REVISION, 0) == self._revision:
                metadata = {name: note for name, note in trial.metadata.items() if name != _REVISION}
                own.append(replace(trial, metadata=metadata))
                if not trial.ended:
                    self._running[trial.key] = trial.parameters
            elif not trial.ended:
                self._superseded[trial.key] = trial.parameters
            elif trial.value is not None and math.isfinite(trial.value):
                earlier.append(_known(trial.parameters, trial.value, trial.metric))
        imports = [*earlier, *known]
        if imports and self._tuner.restores_imports_first:
            self._tuner.import_results(imports)
        self._tuner.restore(own)
        if imports and not self._tuner.restores_imports_first:
            self._tuner.import_results(imports)


def _known(parameters: Mapping[str, Any], value: float, metric: str | None) -> PriorResult:
    return PriorResult(parameters, value, json.dumps(value) if metric is None else metric)
