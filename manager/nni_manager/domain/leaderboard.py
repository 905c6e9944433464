"""Keeps the trials that summaries show: the best results, the latest failures, the latest trial without a result.

Updated as trials end, so reading them costs the same at any number of trials.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from nni_manager.domain.objectives import Objectives
from nni_manager.domain.pareto import ParetoFront
from nni_manager.domain.trial import Trial, TrialState

TOP_TRIALS = 10
LATEST_FAILURES = 3


@dataclass(slots=True)
class Leaderboard:
    """Summaries of the terminal trials."""

    objectives: Objectives
    top: list[Trial] = field(default_factory=list)
    """The trials with the best final results, best first; at most TOP_TRIALS. Empty with several objectives."""
    latest_failures: deque[Trial] = field(default_factory=lambda: deque(maxlen=LATEST_FAILURES))
    """The last trials that failed, newest first."""
    latest_without_result: Trial | None = None
    """The last trial that succeeded without a usable number as its result."""
    _front: ParetoFront[Trial] = field(default_factory=ParetoFront)

    @property
    def maximize(self) -> bool:
        """True if a high value of the first objective is better."""
        return self.objectives.first.mode == "maximize"

    @property
    def best(self) -> Trial | None:
        """The trial with the best final result; among equals the first. None: no trial has one.

        With several objectives it is always None: see `front`.
        """
        return self.top[0] if self.top else None

    @property
    def front(self) -> list[Trial]:
        """The best trials: with several objectives the Pareto front, in the order of the first; else `best` if there is one."""
        return self._front.items if self.objectives.has_several else self.top[:1]

    def add(self, trial: Trial) -> None:
        """Add a terminal trial; ignored for others."""
        if trial.state is TrialState.FAILED:
            self.latest_failures.appendleft(trial)
        elif trial.is_without_result:
            self.latest_without_result = trial
        elif trial.result is not None and trial.run.value is not None and trial.run.is_feasible:
            if not self.objectives.has_several:
                insort(self.top, trial, key=self._rank)
                del self.top[TOP_TRIALS:]
            elif (outcome := self.objectives.outcome(trial.result)) is not None:
                self._front.add(self.objectives.losses(outcome), trial)

    def _rank(self, trial: Trial) -> float:
        return self.objectives.first.loss(trial.run.value or 0.0)
