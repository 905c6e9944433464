"""Why a keeper is turned away. Each has its own gRPC status, given in one place."""

from nni_manager.errors import UserMistake


class TokenWrong(UserMistake):
    """cannot let this keeper in: its token does not belong to its job; start keepers by `nnictl create` or `resume` only"""


class JobUnknown(UserMistake):
    """cannot let this keeper in: its job is not one of this experiment; stop the job"""


class VersionRefused(UserMistake):
    """cannot work with this keeper: its version differs from the manager's in the first two numbers"""


class TooManyStreams(UserMistake):
    """cannot let this keeper in: its job has more streams open than it has tasks; try again, and stop the job if that goes on"""


class KeeperSilent(UserMistake):
    """cannot wait longer for this keeper to go on with its stream; connect again"""


class NotOpen(UserMistake):
    """cannot let keepers in at present: the manager starts, or ends; connect again"""


class ProtocolBroken(UserMistake):
    """cannot understand this keeper; use the keeper that comes with the manager"""
