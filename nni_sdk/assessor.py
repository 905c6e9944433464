"""Base class for custom assessors, with NNI's names: `from nni_sdk.assessor import Assessor, AssessResult`.

Also available as `nni.assessor`, see `nni_sdk.tuner`. Source: NNI v2.10, nni.assessor.
"""

from enum import Enum

from nni_sdk.tuner import Recoverable

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class AssessResult(Enum):
    """The decision about a trial: Good continues it, Bad stops it early."""

    Good = True
    Bad = False


class Assessor(Recoverable):
    """Decides from intermediate results which trials to stop early."""

    def assess_trial(self, trial_job_id: str, trial_history: "list[Any]") -> AssessResult:
        """Decide about a trial from its intermediate results so far, in order."""
        raise NotImplementedError("Assessor: assess_trial not implemented")

    def trial_end(self, trial_job_id: str, success: bool) -> None:
        """Called when a trial has ended."""
