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
