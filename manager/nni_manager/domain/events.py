"""What can happen to an experiment, and what is to be done about it: the two alphabets of `Experiment.handle`.

Times inside events are seconds since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nni_manager.domain.jobs import Job
from nni_manager.domain.limits import Limits
from nni_manager.domain.trial import Trial
from trial_keeper.wire.messages import AttemptKey, TrialEnded, Usage
from trial_keeper.wire.reasons import ExitReason

# ---- events


@dataclass(frozen=True, slots=True)
class Begun:
    """The manager is ready. Also after a resume, when the trials of before have been restored."""


@dataclass(frozen=True, slots=True)
class ParametersSuggested:
    """The tuner answered: a new trial with these parameters. The ids are new."""

    trial_id: str
    sequence_id: int
    parameters: Mapping[str, Any]
    memo: Mapping[str, Any]
    at_s: float


@dataclass(frozen=True, slots=True)
class TunerExhausted:
    """The tuner has no parameters left."""


@dataclass(frozen=True, slots=True)
class TunerNotReady:
    """The tuner has no parameters at present, and may have some when another trial is over."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class TunerFailed:
    """The tuner raised. `message` is for people and may have many lines."""

    message: str
    was_asked: bool
    """Whether this is the answer to an `AskTuner`, rather than to a `TellTuner`."""


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """A keeper says that the command runs."""

    key: AttemptKey
    at_s: float


@dataclass(frozen=True, slots=True)
class MetricsStored:
    """Records of an attempt are rows now, in this order. Each is (is_final, JSON text)."""

    key: AttemptKey
    records: tuple[tuple[bool, str], ...]


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The command is over; its last bytes may still be on their way."""

    ended: TrialEnded


@dataclass(frozen=True, slots=True)
class AttemptDelivered:
    """The manager has every byte of an attempt that has ended."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class TaskReported:
    """A task of an attempt has metrics to be stored."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class CollectionEnded:
    """As much of a stream of an attempt was collected as ever is; `message` says which, and where all of it is."""

    key: AttemptKey
    message: str


@dataclass(frozen=True, slots=True)
class KeeperIdle:
    """The keeper of a task has no trial to run."""

    job_id: str
    task: str


@dataclass(frozen=True, slots=True)
class AttemptMissing:
    """The keeper that has connected for this attempt's task does not know it: the one that did is gone, and its job is not."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """A missing attempt has left no end in the workspace either."""

    key: AttemptKey
    at_s: float


@dataclass(frozen=True, slots=True)
class JobGone:
    """The job does not exist any more, and the workspace has told all it knows.

    `reason` and `message` are for trials that go with it. `is_clean`: the job ended by itself, as one does that has been idle
    for too long.
    """

    job_id: str
    reason: ExitReason
    message: str
    at_s: float
    is_clean: bool = False
    untouched: frozenset[str] = frozenset()
    """Those of the trials it had been given that no keeper of it has begun."""
    was_watched: bool = True
    """Whether a manager was there when it ended, or before it began: otherwise nobody knows how that came."""


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job goes to the cluster, or an earlier manager's is there already."""

    job_id: str


@dataclass(frozen=True, slots=True)
class KeeperMatched:
    """A keeper of an agreeing version has connected. What it says on an earlier stream does not come here any more.

    `returns_trials`: it gives back what it is asked for and has not begun.
    """

    job_id: str
    returns_trials: bool = False


@dataclass(frozen=True, slots=True)
class KeeperCutOff:
    """The stream of a keeper has ended, or the job has: what was said on it last may be lost, either way."""

    job_id: str


@dataclass(frozen=True, slots=True)
class TrialGivenBack:
    """A keeper does not have a trial that it was asked for, and will not begin it."""

    job_id: str
    trial_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class KeeperFound:
    """The workspace shows that a keeper of the job is at work, which has not connected to this manager."""

    job_id: str


@dataclass(frozen=True, slots=True)
class UsageReported:
    """What an attempt uses at present."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class TrialStopAsked:
    """Somebody wants one trial to end."""

    trial_id: str
    reason: ExitReason
    at_s: float


@dataclass(frozen=True, slots=True)
class TrialRefused:
    """The assessor has seen enough of a trial's attempt: it is not worth going on."""

    trial_id: str
    attempt: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ExperimentStopAsked:
    """Somebody wants the experiment to end."""

    at_s: float


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """Somebody wants other limits; they are stored already."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class SearchSpaceChanged:
    """From now on the tuner proposes parameters of another search space, of which there may be more."""


@dataclass(frozen=True, slots=True)
class TrialProposed:
    """Somebody wants a trial with these parameters, whatever the tuner thinks and whichever limit is reached. The id is new.

    To be posted only while the experiment `takes_trials`.
    """

    trial_id: str
    parameters: Mapping[str, Any]
    at_s: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A good moment to look at the limits."""


Event = (
    Begun
    | ParametersSuggested
    | TunerExhausted
    | TunerNotReady
    | TunerFailed
    | AttemptStarted
    | MetricsStored
    | AttemptEnded
    | AttemptDelivered
    | TaskReported
    | CollectionEnded
    | KeeperIdle
    | AttemptMissing
    | AttemptLost
    | JobGone
    | JobSubmitted
    | KeeperMatched
    | KeeperCutOff
    | TrialGivenBack
    | KeeperFound
    | UsageReported
    | TrialStopAsked
    | TrialRefused
    | ExperimentStopAsked
    | LimitsChanged
    | SearchSpaceChanged
    | TrialProposed
    | TimePassed
)

# ---- effects


@dataclass(frozen=True, slots=True)
class AskTuner:
    """Ask for one set of parameters."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class TellTuner:
    """How a trial came out. None: it has no result. By its id the rest of it can be looked up."""

    sequence_id: int
    value: float | None
    trial_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class TeachTuner:
    """How a trial came out whose parameters a person gave."""

    trial_id: str
    value: float


@dataclass(frozen=True, slots=True)
class AskAssessor:
    """Ask whether a trial may go on that has reported these intermediate results as well, in this attempt."""

    trial_id: str
    attempt: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TellAssessor:
    """A trial is final."""

    trial_id: str
    has_succeeded: bool


@dataclass(frozen=True, slots=True)
class SaveTrial:
    """Store the trial as it is now."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class SaveExperiment:
    """Store the experiment's own state."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store the job as it is now."""

    job: Job
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class SaveUsage:
    """Store what a task used just now."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Ask the cluster for the job, once it is stored; `job.trial_id` is the trial it is made for, if it is for one."""

    job: Job


@dataclass(frozen=True, slots=True)
class GiveTrial:
    """Let the keepers of a job run a trial, once that is stored; only the keeper of `task` if there is one."""

    job: Job
    trial: Trial
    task: str | None = None


@dataclass(frozen=True, slots=True)
class AskBack:
    """Ask the keeper of a job for a trial that it was given ahead, after all that it was to be given before."""

    job: Job
    trial: Trial


@dataclass(frozen=True, slots=True)
class DismissJob:
    """Let the job end: it gets no other trial."""

    job: Job


@dataclass(frozen=True, slots=True)
class CancelTrial:
    """End a trial that has a job; the reason is stored already."""

    trial: Trial
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class RecallTrial:
    """Tell the keeper of a job to forget a trial that it was given ahead, and that is over before it began.

    A keeper that does not hear it begins the trial and is told to close it.
    """

    trial: Trial
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class CloseAttempt:
    """Tell the keeper that nothing about the attempt needs to be sent again, once the trial is stored."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class TakeRest:
    """Look in the workspace for how a missing attempt ended, and for what it had still to tell."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ForgetTrial:
    """Take nothing more of what a job had to say of a trial that is lost, and tell its keepers that still speak of it."""

    trial: Trial
    job_id: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The experiment is over; nothing runs any more."""


Effect = (
    AskTuner
    | TellTuner
    | TeachTuner
    | AskAssessor
    | TellAssessor
    | SaveTrial
    | SaveExperiment
    | SaveJob
    | SaveUsage
    | SubmitJob
    | GiveTrial
    | AskBack
    | DismissJob
    | CancelTrial
    | RecallTrial
    | CloseAttempt
    | TakeRest
    | ForgetTrial
    | Finish
)
