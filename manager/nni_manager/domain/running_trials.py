"""The running trials in the order of their starts, for the time limit of a trial."""

from dataclasses import dataclass, field

from nni_manager.domain.trial import Trial, TrialState


@dataclass(slots=True)
class RunningTrials:
    """Trials in the order in which their starts were received; may include some that no longer run."""

    _by_start: dict[str, Trial] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add a trial that has just started, perhaps again."""
        self.remove(trial)
        self._by_start[trial.trial_id] = trial

    def remove(self, trial: Trial) -> None:
        """Remove a trial, if it is there."""
        self._by_start.pop(trial.trial_id, None)

    @property
    def longest(self) -> tuple[Trial, float] | None:
        """The trial that has run for longest, and the monotonic time at which its start was received; None: none runs."""
        while self._by_start:
            trial = next(iter(self._by_start.values()))
            if trial.state is TrialState.RUNNING and trial.run.start_received_at_s is not None:
                return trial, trial.run.start_received_at_s
            self.remove(trial)
        return None
