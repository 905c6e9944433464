"""The limits of an experiment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an experiment; all may change while it runs. None: no limit.

    `max_trials` and `max_duration_s` limit the start of trials; running trials continue. `max_trial_duration_s`: the longest
    duration of one attempt. `max_retries`: how often a trial that the cluster lost is started again.
    """

    concurrency: int
    max_trials: int | None
    max_duration_s: float | None
    max_trial_duration_s: float | None = None
    max_retries: int = 0
