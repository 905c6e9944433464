"""Why a trial ended: the closed list that retries, the tuner's feedback and all displays use."""

from enum import Enum


class ExitReason(str, Enum):
    """The reason that every ended trial has, exactly one."""

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
    """For one task: the others have ended the trial, which has its own reason."""


STOP_REASONS = frozenset(
    {ExitReason.STOPPED_BY_USER, ExitReason.EARLY_STOPPED, ExitReason.TIME_LIMIT, ExitReason.TRIAL_OVER}
)
"""The reasons of a request to stop a trial. The keeper records it; only the keeper can report how a command ended by itself."""
