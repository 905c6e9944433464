"""Ends a search whose first trials all fail by the fault of the training code, and names the common cause."""

from collections import Counter
from dataclasses import dataclass, field

from nni_manager.domain.message_summary import why_it_ended
from nni_manager.domain.tracebacks import raised_at
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import ExitReason

# Another trial would end in the same way. The other reasons of failures are the cluster's, or the storage's.
_OWN_FAULTS = frozenset(
    {ExitReason.NONZERO_EXIT, ExitReason.SIGNAL, ExitReason.OUT_OF_MEMORY, ExitReason.COULD_NOT_START}
)
# A trial that ran until it was stopped shows that the code works; a user may stop any trial.
_SHOW_THAT_IT_WORKS = frozenset({TrialState.SUCCEEDED, TrialState.EARLY_STOPPED, TrialState.SYS_CANCELED})


@dataclass(slots=True)
class FailFast:
    """The failures of an experiment's trials while none has succeeded."""

    code_works: bool = False
    """True once a trial has shown that the training code works."""
    _causes: list[str] = field(default_factory=list)

    def restart(self) -> None:
        """Count from 0: the user has resumed the experiment."""
        self._causes.clear()

    def note(self, trial: Trial, limit: int) -> str:
        """Note a terminal trial; return the error if `limit` trials have failed (0: no limit), else an empty string."""
        self.code_works = self.code_works or trial.state in _SHOW_THAT_IT_WORKS
        if self.code_works or trial.state is not TrialState.FAILED or trial.run.reason not in _OWN_FAULTS:
            return ""
        self._causes.append(_cause_of(trial))
        return self._error() if len(self._causes) == limit else ""

    def _error(self) -> str:
        count = len(self._causes)
        (cause, times), *others = Counter(self._causes).most_common()
        which = "" if not others else f", {times} of them with"
        trials = "the first trial" if count == 1 else f"the last {count} trials"
        return (
            f"cannot continue the search: {trials} failed, and none has succeeded{which}: {cause}; fix the training code, then "
            "run `nnictl resume`, or for a function Experiment.resume(ID, objective=FUNCTION); with failFast: false all trials "
            "are started, however many fail"
        )


def _cause_of(trial: Trial) -> str:
    reason = "" if trial.run.reason is None else trial.run.reason.value
    why = why_it_ended(reason, trial.run.exit_code, trial.run.message)
    place = raised_at(trial.run.message)
    return f"{why} ({place})" if place else why
