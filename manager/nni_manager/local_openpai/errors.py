"""Why the cluster does not do what it was asked. The HTTP layer has one answer for each class."""

from __future__ import annotations

from collections.abc import Iterable

from nni_manager.errors import TryAgain, UserMistake
from nni_manager.training_services.openpai.mistakes import ProtocolInvalid, ProtocolMistake


class JobInvalid(UserMistake):
    """cannot run this job; mend the mistakes listed with it"""

    def __init__(self, mistakes: Iterable[ProtocolMistake]) -> None:
        """One line of the message for each mistake, in the order of the job's text."""
        invalid = ProtocolInvalid(mistakes)
        self.mistakes = invalid.mistakes
        self.response_message = invalid.response_message()
        """The `message` of the server's answer, in OpenPAI's form."""
        super().__init__(str(invalid))


class JobTooLarge(JobInvalid):
    """cannot ever run this job: it needs more than its virtual cluster has; ask for less, or start a larger cluster"""


class JobExists(UserMistake):
    """cannot submit a job of a name that is taken; choose another name"""


class JobUnknown(UserMistake):
    """cannot find the job, or this attempt of it; list the jobs to see what there is"""


class TagUnknown(UserMistake):
    """cannot remove a tag that the job does not have; look at the job's tags"""


class LogUnknown(UserMistake):
    """cannot find a log of that name; list the task's logs to see what there is"""


class NotYours(UserMistake):
    """cannot change the job of another user; ask its owner or an administrator"""


class StillRunning(UserMistake):
    """cannot delete a job that has not ended; stop it first"""


class VirtualClusterUnknown(UserMistake):
    """cannot find the virtual cluster; list the virtual clusters to see what there is"""


class StorageUnknown(UserMistake):
    """cannot find the storage; list the storages to see what there is"""


class StateDirUnusable(UserMistake):
    """cannot use the cluster's state directory; see what the message says of it"""


class StateBusy(TryAgain):
    """cannot write the cluster's state now; free some disk space or wait, then try again"""


class ClusterClosed(TryAgain):
    """cannot do this while the cluster is starting or has been closed; try again in a moment"""
