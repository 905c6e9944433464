"""Records which trials changed after a given revision.

Changes are numbered consecutively. Trials are kept in the order of their last change, so a query costs time in proportion to
the changed trials, not to all trials.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nni_manager.domain import events
from nni_manager.domain.events import Effect, Event


@dataclass(slots=True)
class ChangeLog:
    """The revision number of each trial's last change. `latest`: the highest number."""

    latest: int = 0
    _of: dict[str, int] = field(default_factory=dict)
    """The revision by trial id, in the order of the last changes."""

    def note(self, trial_id: str) -> None:
        """Record a new or changed trial."""
        self.latest += 1
        self._of.pop(trial_id, None)
        self._of[trial_id] = self.latest

    def note_changes(self, event: Event, effects: Iterable[Effect]) -> None:
        """Record which trials changed: in the store, or only in memory by a keeper's report."""
        match event:
            case events.MetricsStored() | events.AttemptStarted() | events.TaskReported():
                self.note(event.key.trial_id)
            case events.AttemptEnded():
                self.note(event.ended.key.trial_id)
        for effect in effects:
            match effect:
                case events.SaveTrial():
                    self.note(effect.trial.trial_id)
                case events.SaveRemarks(trial_id=str(trial_id)):
                    self.note(trial_id)

    def of(self, trial_id: str) -> int:
        """The number of the last change of a trial; 0: no change is recorded."""
        return self._of.get(trial_id, 0)

    def since(self, revision: int) -> Iterator[str]:
        """The trials whose last change has a higher number than `revision`, the latest first."""
        for trial_id in reversed(self._of):
            if self._of[trial_id] <= revision:
                return
            yield trial_id
