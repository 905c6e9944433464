"""The reasons for a trial's end: a closed list, which retries, the tuner's feedback and all displays use."""

from enum import Enum


class ExitReason(str, Enum):
    """The reason for a trial's end. Every ended trial has exactly one."""

    SUCCEEDED = "succeeded"
    NONZERO_EXIT = "non-zero exit"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out of memory"
    STOPPED_BY_USER = "stopped by user"
    EXPERIMENT_STOPPED = "experiment stopped"
    """A user has stopped the experiment as a whole, and not this trial for what it reported."""
    EARLY_STOPPED = "early stopped"
    TIME_LIMIT = "time limit"
    KEEPER_LOST = "keeper lost"
    JOB_LOST = "job lost"
    PREEMPTED = "preempted"
    """The cluster itself reports that it gave the place of the job to one of higher priority."""
    MOUNT = "mount"
    VERSION = "version"
    COULD_NOT_START = "could not start"
    TRIAL_OVER = "trial over"
    """Of a single task: other tasks have ended the trial, which has its own reason."""


LOSSES = (ExitReason.KEEPER_LOST, ExitReason.JOB_LOST)
"""The end of a trial is unknown. The training code has not caused it; a retry may succeed."""
FAULTS_OF_CLUSTER = (*LOSSES, ExitReason.PREEMPTED)

STOP_REASONS = frozenset(
    {
        ExitReason.STOPPED_BY_USER,
        ExitReason.EXPERIMENT_STOPPED,
        ExitReason.EARLY_STOPPED,
        ExitReason.TIME_LIMIT,
        ExitReason.TRIAL_OVER,
    }
)
"""The reasons for which the manager decides to stop a trial. Others come from the keeper, which sees how the command ended."""
STOP_MESSAGE_REASONS = STOP_REASONS | {ExitReason.PREEMPTED}
"""The reasons in a message to stop a trial. The manager passes on the cluster's word that it preempts the job."""
