"""Decides which changes of an experiment are notified: its end, an error, and failed trials in a row."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.message_summary import why_it_ended
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.frozen_dataclass import dataclass


class NotificationEvent(str, Enum):
    """What a notification is about, in the words of the experiment file."""

    END = "end"
    """All trials have ended, or a user has stopped the experiment."""
    ERROR = "error"
    """The experiment cannot continue."""
    FAILURES = "failures"
    """A number of trials have failed one after another."""


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification. `text` continues a sentence that names the experiment. `failures`: the failed trials in a row, or 0."""

    event: NotificationEvent
    text: str
    failures: int = 0


_OF_STATE = {
    ExperimentState.DONE: (NotificationEvent.END, "is done"),
    ExperimentState.STOPPED: (NotificationEvent.END, "was stopped"),
    ExperimentState.ERROR: (NotificationEvent.ERROR, "has failed"),
}


@dataclass(slots=True)
class Notifications:
    """The notifications of one manager. `limits`: the numbers of failures in a row that are notified.

    `state` is the state that the manager found. Failures of earlier managers do not count.
    """

    limits: Collection[int]
    state: ExperimentState
    _failures: int = 0

    def of_state(self, state: ExperimentState, error: str) -> Notification | None:
        """The notification of a state of the experiment; None if the experiment had it before."""
        before, self.state = self.state, state
        if state is before or state not in _OF_STATE:
            return None
        event, text = _OF_STATE[state]
        return Notification(event, f"{text}: {error}" if error else text)

    def of_end(self, trial: Trial) -> Notification | None:
        """The notification of a trial's end, if as many trials as a limit have now failed one after another."""
        if trial.state is not TrialState.FAILED:
            self._failures = 0
            return None
        self._failures += 1
        if self._failures not in self.limits:
            return None
        reason = "" if trial.run.reason is None else trial.run.reason.value
        why = why_it_ended(reason, trial.run.exit_code, trial.run.message)
        trials = "a trial has" if self._failures == 1 else f"{self._failures} trials in a row have"
        text = f"continues, but {trials} failed; the latest is {trial.trial_id}: {why}"
        return Notification(NotificationEvent.FAILURES, text, self._failures)
