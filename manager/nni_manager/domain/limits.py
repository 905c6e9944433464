"""The limits of an experiment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an experiment; all may change while it runs. None: no limit.

    `max_trials` and `max_duration_s` end the asking, not the trials. `max_trial_duration_s`: how long one trial may run, from
    the start of its attempt. `max_retries`: how often a trial that the cluster lost is started again.
    """

    concurrency: int
    max_trials: int | None
    max_duration_s: float | None
    max_trial_duration_s: float | None = None
    max_retries: int = 0
