"""The base of an assessor of your own, with NNI's names: `from nni_sdk.assessor import Assessor, AssessResult`.

Also found as `nni.assessor`, see `nni_sdk.tuner`. Source: NNI v2.10, nni.assessor.
"""

from enum import Enum

from nni_sdk.tuner import Recoverable

TYPE_CHECKING = False  # the typing module costs more to import than the SDK; type checkers know this name
if TYPE_CHECKING:
    from typing import Any


class AssessResult(Enum):
    """What becomes of a trial: it goes on, or it is stopped early."""

    Good = True
    Bad = False


class Assessor(Recoverable):
    """Looks at intermediate results, and says which trials are not worth going on."""

    def assess_trial(self, trial_job_id: str, trial_history: "list[Any]") -> AssessResult:
        """Whether the trial may go on that has reported these intermediate results so far, in order."""
        raise NotImplementedError("Assessor: assess_trial not implemented")

    def trial_end(self, trial_job_id: str, success: bool) -> None:
        """A trial is over."""
