"""Errors of the cluster. The HTTP layer maps each class to one response."""

from __future__ import annotations

from collections.abc import Iterable

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.openpai.job_checks import ProtocolDiagnostic, ProtocolInvalid


class JobInvalid(UserError):
    """cannot run this job; fix the mistakes listed with it"""

    def __init__(self, mistakes: Iterable[ProtocolDiagnostic]) -> None:
        """The message has one line for each problem, in the order of the job's text."""
        invalid = ProtocolInvalid(mistakes)
        self.diagnostics = invalid.diagnostics
        self.response_message = invalid.response_message()
        """The `message` of the response, in OpenPAI's form."""
        super().__init__(str(invalid))


class JobExceedsCluster(JobInvalid):
    """cannot ever run this job: it needs more than its virtual cluster has; ask for less, or start a larger cluster"""


class JobExists(UserError):
    """cannot submit a job of a name that is taken; choose another name"""


class JobNotFound(UserError):
    """cannot find the job, or this attempt of it; list the jobs to see what there is"""


class TagUnknown(UserError):
    """cannot remove a tag that the job does not have; look at the job's tags"""


class LogUnknown(UserError):
    """cannot find a log of that name; list the task's logs to see what there is"""


class JobForbidden(UserError):
    """cannot change the job of another user; ask its owner or an administrator"""


class StillRunning(UserError):
    """cannot delete a job that has not ended; stop it first"""


class VirtualClusterUnknown(UserError):
    """cannot find the virtual cluster; list the virtual clusters to see what there is"""


class StorageUnknown(UserError):
    """cannot find the storage; list the storages to see what there is"""


class StateDirUnusable(UserError):
    """cannot use the cluster's state directory; see what the message says of it"""


class StateBusy(RetryableError):
    """cannot write the cluster's state now; free some disk space or wait, then try again"""


class ClusterClosed(RetryableError):
    """cannot do this while the cluster is starting or has been closed; try again in a moment"""
