"""Who proposes parameters over an experiment's whole life: one tuner after the other, when the search space is changed.

The tuner of each search space begins with what the trials so far came to, as far as that lies in its space. Which space a trial
is of stands in its memo. Results of trials that an earlier tuner proposed reach the one of now as imported data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nni_manager.config.known_results import KnownResult
from nni_manager.config.model import ExperimentConfig
from nni_manager.tuner.base import Later, PastTrial, Suggestion, TrialResult, Tuner

# In a memo beside the tuner's own notes; absent from those of the space that the experiment began with.
_REVISION = "search space revision"


class Proposer:
    """The tuner of now, and the trials that it and those before it have under way. Used by one thread at a time."""

    def __init__(self, config: ExperimentConfig, make: Callable[[ExperimentConfig], Tuner]) -> None:
        """`make` makes a fresh tuner over the search space of a configuration."""
        self._make = make
        self._tuner = make(config)
        self._revision = config.search_space_revision
        self._running: dict[int, Mapping[str, Any]] = {}
        """The trials that the tuner of now has to be told of, with their parameters."""
        self._of_before: dict[int, Mapping[str, Any] | None] = {}
        """Those that an earlier one proposed; None: what they came to is known."""

    @property
    def learns(self) -> bool:
        """See `Tuner.learns`."""
        return self._tuner.learns

    def ask(self, trial_key: int) -> Suggestion | Later | None:
        """See `Tuner.ask`."""
        suggestion = self._tuner.ask(trial_key)
        if suggestion is None or isinstance(suggestion, Later):
            return suggestion
        self._running[trial_key] = suggestion.parameters
        if not self._revision:
            return suggestion
        return replace(suggestion, memo=suggestion.memo | {_REVISION: self._revision})

    def hear(self, trial_key: int, result: TrialResult) -> None:
        """See `Tuner.hear`."""
        self._running.pop(trial_key, None)
        if trial_key not in self._of_before:
            self._tuner.hear(trial_key, result)
            return
        parameters = self._of_before.pop(trial_key)
        if parameters is not None and result.value is not None and math.isfinite(result.value):
            self.import_results([_known(parameters, result.value, result.metric)])

    def import_results(self, results: Sequence[KnownResult]) -> int:
        """See `Tuner.import_results`."""
        return self._tuner.import_results(results)

    def close(self) -> None:
        """See `Tuner.close`."""
        self._tuner.close()

    def change_space(
        self, config: ExperimentConfig, known: Sequence[KnownResult], over: Collection[int]
    ) -> None:
        """Propose parameters of another search space from now on.

        `known` is all that has come out so far, of imported data and of the trials with the keys `over`; that they are may still
        have to be told.
        """
        tuner = self._make(config)
        try:
            tuner.import_results(known)
        except BaseException:
            tuner.close()  # it may have a process of its own
            raise
        self._tuner.close()
        self._tuner, self._revision = tuner, config.search_space_revision
        self._of_before |= self._running
        self._of_before |= dict.fromkeys(self._of_before.keys() & set(over))
        self._running = {}

    def restore(self, trials: Iterable[PastTrial], known: Sequence[KnownResult]) -> None:
        """Know these trials, in the order in which they were asked for, and what came from elsewhere. Before the first `ask`."""
        own: list[PastTrial] = []
        earlier: list[KnownResult] = []
        for trial in trials:
            if trial.memo.get(_REVISION, 0) == self._revision:
                own.append(replace(trial, memo=_without_revision(trial)))
                if not trial.ended:
                    self._running[trial.key] = trial.parameters
            elif not trial.ended:
                self._of_before[trial.key] = trial.parameters
            elif trial.value is not None and math.isfinite(trial.value):
                earlier.append(_known(trial.parameters, trial.value, trial.metric))
        self._tuner.restore(own)
        if earlier or known:
            self._tuner.import_results([*earlier, *known])


def _without_revision(trial: PastTrial) -> dict[str, Any]:
    return {name: note for name, note in trial.memo.items() if name != _REVISION}


def _known(parameters: Mapping[str, Any], value: float, metric: str | None) -> KnownResult:
    return KnownResult(parameters, value, json.dumps(value) if metric is None else metric)
