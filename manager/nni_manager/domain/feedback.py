"""What tuner and assessor receive of the trials: rewards, whole results, and intermediate results."""

from collections.abc import Sequence
from dataclasses import dataclass

from nni_manager.domain import events
from nni_manager.domain.events import Effect
from nni_manager.domain.metrics import MetricValue, reward
from nni_manager.domain.objectives import Objectives
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import FAULTS_OF_CLUSTER, ExitReason


@dataclass(slots=True)
class Feedback:
    """The rules of one experiment: what its tuner and its assessor receive."""

    objectives: Objectives
    is_assessed: bool = False
    """True if an assessor receives intermediate results and may stop trials early."""
    assessor_sees_all: bool = False
    """True if the assessor receives whole results instead of their numbers."""
    learns_from_early_stopped: bool = False
    """True if the tuner learns from the last intermediate result of a trial that was stopped early."""
    reports_pruned: bool = False
    """True if the tuner receives the intermediate results of a trial that was stopped early."""

    def reward_of(self, trial: Trial) -> float | None:
        """The number that the tuner receives for a terminal trial; None: it receives none.

        With several objectives, the number of the first one.
        """
        if trial.result is not None and trial.run.value is not None:
            return trial.run.value
        return (
            self.objectives.value_of(trial.run.intermediate or "") if self._is_cut_and_counts(trial) else None
        )

    def metric_of(self, trial: Trial) -> str | None:
        """The whole result of a terminal trial for the tuner, as JSON text; None: it has none."""
        if trial.result is not None:
            return trial.result
        return trial.run.intermediate if self._is_cut_and_counts(trial) else None

    def is_pruned(self, trial: Trial) -> bool:
        """True if the tuner receives the intermediate results of this terminal trial, which has no result for it."""
        is_stopped = self.reports_pruned and trial.state is TrialState.EARLY_STOPPED
        return is_stopped and self.reward_of(trial) is None

    def is_void(self, trial: Trial) -> bool:
        """True if this terminal trial has no result because a user or the cluster has ended it."""
        is_ended_from_outside = (
            trial.state is TrialState.USER_CANCELED or trial.run.reason in FAULTS_OF_CLUSTER
        )
        return is_ended_from_outside and self.reward_of(trial) is None

    def is_interrupted(self, trial: Trial) -> bool:
        """True if this terminal trial has no result because the experiment was stopped."""
        return trial.run.reason is ExitReason.EXPERIMENT_STOPPED and self.reward_of(trial) is None

    def seen_by_assessor(self, value: str) -> float | None:
        """An intermediate result in the form that the assessor receives; None: it does not receive it."""
        if not self.is_assessed:
            return None
        return MetricValue(value) if self.assessor_sees_all else reward(value, self.objectives.first.metric)

    def assess(self, trial: Trial, numbers: Sequence[float]) -> list[Effect]:
        """Send new intermediate results of a trial to the assessor, if there are any."""
        if not numbers:
            return []
        return [events.AskAssessor(trial.trial_id, trial.sequence_id, trial.run.attempt or 0, tuple(numbers))]

    def report(self, trial: Trial) -> list[Effect]:
        """Notify tuner and assessor of a terminal trial."""
        effects: list[Effect] = []
        value = self.reward_of(trial)
        if not trial.is_customized:
            effects.append(events.TellTuner(trial.sequence_id, value, trial.trial_id))
        elif value is not None:
            effects.append(events.AddObservation(trial.trial_id, value))
        if self.is_assessed:
            effects.append(events.TellAssessor(trial.trial_id, trial.state is TrialState.SUCCEEDED))
        return effects

    def _is_cut_and_counts(self, trial: Trial) -> bool:
        # NNI also treats a trial that exceeded its time limit as stopped early.
        is_cut = trial.state in (TrialState.EARLY_STOPPED, TrialState.SYS_CANCELED)
        return is_cut and self.learns_from_early_stopped
