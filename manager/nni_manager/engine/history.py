"""The results and learning curves of all trials so far, as types of tuner and assessor."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import chain

from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.events import TellTuner
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.store.reader import StoreReader
from nni_manager.tuner.assessment import PastLearningCurve
from nni_manager.tuner.base import Observation, PastTrial
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class History:
    """The trials of one experiment, and its imported results."""

    experiment: ExperimentCore
    reader: StoreReader
    pending: set[str] = field(default_factory=set)
    """Ended trials that a user proposed and whose results are about to be sent to the tuner."""

    def past(self, trials: Sequence[Trial]) -> list[PastTrial]:
        """Restored trials that the tuner proposed."""
        feedback = self.experiment.feedback
        curves = self._curves() if any(map(feedback.is_pruned, trials)) else {}
        return [
            PastTrial(
                trial.sequence_id,
                trial.parameters,
                trial.metadata,
                feedback.reward_of(trial),
                trial.state.is_terminal,
                trial.trial_id,
                feedback.metric_of(trial),
                trial.state is TrialState.SUCCEEDED,
                curves.get(trial.trial_id, ()) if feedback.is_pruned(trial) else (),
                feedback.is_void(trial),
                feedback.is_interrupted(trial),
            )
            for trial in trials
        ]

    def observation(self, effect: TellTuner) -> Observation:
        """The result of a trial that the tuner proposed."""
        trial = self.experiment.trials[effect.trial_id]
        feedback = self.experiment.feedback
        curve: Sequence[float] = ()
        if feedback.is_pruned(trial):
            curve = self._curves(trial.sequence_id, trial.sequence_id).get(trial.trial_id, ())
        return Observation(
            trial.trial_id,
            effect.value,
            feedback.metric_of(trial),
            trial.state is TrialState.SUCCEEDED,
            curve,
            feedback.is_void(trial),
            feedback.is_interrupted(trial),
        )

    def prior_result(self, trial: Trial, value: float) -> PriorResult:
        """The result of a trial in the form of imported results."""
        metric = self.experiment.feedback.metric_of(trial)
        return PriorResult(trial.parameters, value, metric or json.dumps(value))

    def prior_results(self, trials: Iterable[Trial]) -> list[PriorResult]:
        """The results of the terminal trials that have a result."""
        reward_of = self.experiment.feedback.reward_of
        rewards = ((trial, reward_of(trial)) for trial in trials if trial.state.is_terminal)
        return [self.prior_result(trial, value) for trial, value in rewards if value is not None]

    def all_known(self) -> tuple[list[PriorResult], set[int]]:
        """All known results except those of the `pending` trials, and the sequence ids of the terminal trials."""
        trials = self.experiment.trials.values()
        over = {trial.sequence_id for trial in trials if trial.state.is_terminal}
        results = self.prior_results(trial for trial in trials if trial.trial_id not in self.pending)
        return [*self.reader.imported(self.experiment.leaderboard.objectives), *results], over

    def learning_curves(self, trials: Iterable[Trial]) -> Iterable[PastLearningCurve]:
        """The learning curve of each trial: the intermediate results of its current attempt."""
        curves = self._curves()
        return [
            PastLearningCurve(
                trial.trial_id,
                trial.run.attempt or 0,
                curves.get(trial.trial_id, []),
                trial.state is TrialState.SUCCEEDED if trial.state.is_terminal else None,
            )
            for trial in trials
        ]

    def _curves(self, *sequence_ids: int) -> dict[str, list[float]]:
        """The learning curves by trial id. `sequence_ids`: the first and the last trial; none: all trials."""
        curves: dict[str, list[float]] = {}
        for row in chain.from_iterable(self.reader.metric_pages(False, *sequence_ids)):
            if (number := self.experiment.feedback.seen_by_assessor(row.value)) is not None:
                curves.setdefault(row.trial_id, []).append(number)
        return curves
