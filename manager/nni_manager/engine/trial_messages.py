"""The message about a trial: how it ended, or, before its end, what the cluster reports."""

from itertools import islice

from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.snapshot import ExperimentSnapshot

MAX_CLUSTER_MESSAGES = 100
"""Maximum number of trials in `cluster_messages`, which each page receives again when one changes."""
_MAX_LENGTH = 300


def message_of(snapshot: ExperimentSnapshot, trial: Trial) -> str:
    """The message about the end of the trial, or what the cluster reports of one that waits, may end, or lost its keeper."""
    if trial.state is TrialState.CLOSING:
        return snapshot.warning_of(trial.job_id) or trial.run.message
    if trial.state is TrialState.RUNNING and (warning := snapshot.warning_of(trial.job_id)):
        seen_at_s = snapshot.experiment.transports.last_seen(trial.job_id).at_s
        if seen_at_s is None:
            return warning
        return f"{warning}; its keeper has been silent for {snapshot.now_s - seen_at_s:.0f} s"
    if trial.state is not TrialState.WAITING or not trial.job_id:
        return trial.run.message
    why = snapshot.pending_reason(trial.job_id)
    return f"not started yet: {why}" if why else trial.run.message


def cluster_messages(snapshot: ExperimentSnapshot) -> dict[str, str]:
    """What the cluster reports of trials that have not ended, by trial id: the first line; of many trials, the oldest."""
    trials = snapshot.experiment.scheduler.trials_with_jobs
    messages = ((trial.trial_id, message_of(snapshot, trial)) for trial in trials)
    said = ((trial_id, message.partition("\n")[0][:_MAX_LENGTH]) for trial_id, message in messages if message)
    return dict(islice(said, MAX_CLUSTER_MESSAGES))
