"""What bounds an experiment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of what there may be. None: no limit. All of it may change while the experiment runs.

    `max_trials` and `max_duration_s` end the asking, not the trials. `max_trial_duration_s` is how long one trial may run, from
    the start of its attempt on. `max_retries`: how often a trial is begun again that the cluster lost.
    """

    concurrency: int
    max_trials: int | None
    max_duration_s: float | None
    max_trial_duration_s: float | None = None
    max_retries: int = 0
