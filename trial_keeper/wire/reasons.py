"""Why a trial ended: the closed list that retry, feedback to the tuner and every display look at."""

from enum import Enum


class ExitReason(str, Enum):
    """The one reason that every ended trial carries."""

    SUCCEEDED = "succeeded"
    NONZERO_EXIT = "non-zero exit"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out of memory"
    STOPPED_BY_USER = "stopped by user"
    EARLY_STOPPED = "early stopped"
    TIME_LIMIT = "time limit"
    KEEPER_LOST = "keeper lost"
    JOB_LOST = "job lost"
    MOUNT = "mount"
    VERSION = "version"
    COULD_NOT_START = "could not start"
    TRIAL_OVER = "trial over"
    """Of one task: the others have ended the trial, which has a reason of its own."""


STOP_REASONS = frozenset(
    {ExitReason.STOPPED_BY_USER, ExitReason.EARLY_STOPPED, ExitReason.TIME_LIMIT, ExitReason.TRIAL_OVER}
)
"""Why a keeper may be told to stop a trial. It puts the reason on record; how a command ended by itself, only it can say."""
