"""The errors that refuse a keeper. The gRPC server maps each to its own status, in one place."""

from nni_manager.errors import UserError


class InvalidToken(UserError):
    """cannot let this keeper in: its token does not belong to its job; start keepers by `nnictl create` or `resume` only"""


class UnknownJob(UserError):
    """cannot let this keeper in: its job is not one of this experiment; stop the job"""


class VersionRefused(UserError):
    """cannot work with this keeper: its version differs from the manager's in the first two numbers"""


class TooManyStreams(UserError):
    """cannot let this keeper in: its job has more streams open than it has tasks; try again, and stop the job if that goes on"""


class KeeperTimeout(UserError):
    """cannot wait longer for this keeper to go on with its stream; connect again"""


class NotAccepting(UserError):
    """cannot let keepers in at present: the manager starts, or ends; connect again"""


class ProtocolError(UserError):
    """cannot understand this keeper; use the keeper that comes with the manager"""
