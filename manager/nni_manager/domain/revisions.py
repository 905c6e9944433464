"""Which trials have changed since somebody last looked.

Every change has a number, the next one. Trials are kept in the order of their last change, so what is new is found without a
look at what is not: it costs as much as there is of it, at any number of trials.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Revisions:
    """The numbers of the last changes of trials. `latest` is the highest there is."""

    latest: int = 0
    _of: dict[str, int] = field(default_factory=dict)
    """By trial; the one that changed last is the last."""

    def note(self, trial_id: str) -> None:
        """The trial has changed, or is new."""
        self.latest += 1
        self._of.pop(trial_id, None)
        self._of[trial_id] = self.latest

    def of(self, trial_id: str) -> int:
        """The number of the last change of a trial; 0: none is known."""
        return self._of.get(trial_id, 0)

    def since(self, revision: int) -> Iterator[str]:
        """The trials whose last change has a higher number, the latest first."""
        for trial_id in reversed(self._of):
            if self._of[trial_id] <= revision:
                return
            yield trial_id
