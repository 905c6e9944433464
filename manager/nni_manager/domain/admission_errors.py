"""The errors that refuse a keeper. The gRPC server maps each to its own status, in one place."""

from nni_manager.errors import UserError


class InvalidToken(UserError):
    """cannot admit this keeper: its token is not valid for its job; start keepers only with `nnictl create` or `nnictl resume`"""


class UnknownJob(UserError):
    """cannot admit this keeper: its job does not belong to this experiment; stop the job"""


class VersionRefused(UserError):
    """cannot admit this keeper: the first two numbers of its version differ from the manager's; use the manager's version"""


class TooManyStreams(UserError):
    """cannot admit this keeper: its job has more open streams than tasks; try again, and stop the job if this error persists"""


class KeeperTimeout(UserError):
    """cannot finish the keeper's request in time; connect again"""


class NotAccepting(UserError):
    """cannot admit keepers now: the manager is starting or stopping; connect again"""


class ProtocolError(UserError):
    """cannot process a message of this keeper: the message violates the protocol; use the keeper that comes with the manager"""
