"""The events and effects of an experiment: the input and output alphabets of `ExperimentCore.handle`.

Times inside events are seconds since the epoch.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from nni_manager.domain.jobs import Job
from nni_manager.domain.learning_curve import InheritedResults
from nni_manager.domain.remarks import Remarks
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.stop_escalation import StopStage
from nni_manager.domain.trial import Trial
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import AttemptKey, TrialEnded, Usage
from trial_keeper.wire.reasons import ExitReason


@dataclass(frozen=True, slots=True)
class _OfJob:
    job_id: str


@dataclass(frozen=True, slots=True)
class _OfAttempt:
    key: AttemptKey


@dataclass(frozen=True, slots=True)
class _OnJob:
    job: Job


# ---- events


@dataclass(frozen=True, slots=True)
class ManagerReady:
    """The manager is ready; after a resume, the earlier trials are restored."""


@dataclass(frozen=True, slots=True)
class ParametersSuggested:
    """The tuner suggested the parameters of a new trial. The ids are new."""

    trial_id: str
    sequence_id: int
    parameters: Mapping[str, Any]
    metadata: Mapping[str, Any]
    at_s: float
    continues: str | None = None
    """The trial from whose checkpoint it continues."""


@dataclass(frozen=True, slots=True)
class TunerExhausted:
    """The tuner has no parameters left."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class TunerNotReady:
    """The tuner has no parameters now, but may have some when another trial ends."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class TunerFailed:
    """The tuner raised. `message` is for users and may have several lines."""

    message: str
    was_asked: bool
    """True if this answers an `AskTuner`, False if a `TellTuner`."""


class AttemptSeen(_OfAttempt):
    """The first data of an attempt has arrived. Posted before anything of the attempt is stored."""


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """A keeper reports that the command runs."""

    key: AttemptKey
    at_s: float


@dataclass(frozen=True, slots=True)
class MetricsStored:
    """Records of an attempt are stored as rows, in this order. Each is (is_final, JSON text).

    `final_offset`: the offset of the first final record among them in the metrics file.
    """

    key: AttemptKey
    records: tuple[tuple[bool, str], ...]
    final_offset: int | None = None


@dataclass(frozen=True, slots=True)
class AttemptContinued:
    """A process of an attempt has continued from a checkpoint: its reports follow the results up to the checkpoint.

    `is_late`: these results are stored only now, and the attempt may have reported since; no earlier event had any of them.
    `missing`: the attempt whose results up to the checkpoint are not stored yet.
    """

    key: AttemptKey
    inherited: InheritedResults
    is_late: bool = False
    missing: AttemptKey | None = None


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The command has ended; its last bytes may still be in transit."""

    ended: TrialEnded


class AttemptDelivered(_OfAttempt):
    """The manager has stored every byte of an ended attempt."""


class TaskReported(_OfAttempt):
    """A task of an attempt reports metrics. Posted before they are stored."""


@dataclass(frozen=True, slots=True)
class ProblemFound:
    """A problem that does not end the trial, for users. `key`: the attempt with a full quota; None: an attempt was rejected."""

    trial_id: str
    message: str
    key: AttemptKey | None = None


@dataclass(frozen=True, slots=True)
class KeeperIdle:
    """The keeper of a task has no trial to run."""

    job_id: str
    task: str


class AttemptOrphaned(_OfAttempt):
    """The attempt belongs to an earlier keeper, which has ended: the job's connected keeper does not list it in `Hello`."""


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The workspace contains no end of an orphaned attempt."""

    key: AttemptKey
    at_s: float


@dataclass(frozen=True, slots=True)
class JobTerminated:
    """The job no longer exists, and its workspace is drained.

    `reason` and `message` apply to trials that end with it. `is_clean`: the job exited by itself, e.g. after its idle timeout.
    """

    job_id: str
    reason: ExitReason
    message: str
    at_s: float
    is_clean: bool = False
    untouched: frozenset[str] = frozenset()
    """The trials dispatched to the job that none of its keepers started."""
    was_supervised: bool = True
    """True if a manager ran when the job ended, or before it started; otherwise the cause of its end is unknown."""
    pending_reason: str = ""
    """Why the job had not started; empty if it had, or if that is unknown."""
    is_refused: bool = False
    """True if the cluster refused the job permanently: it never existed, and submitting it again is useless."""


class JobProcessesEnded(_OfJob):
    """All processes of the job have ended. Its workspace is drained next, then `JobTerminated` follows."""


@dataclass(frozen=True, slots=True)
class NodeReadinessChanged:
    """The cluster reports that a node of a running job is not ready, or that all are again."""

    job_id: str
    is_ready: bool


class JobRequeued(_OfJob):
    """The cluster has ended the keepers of the job, and will start the same job again."""


class AttemptDrained(_OfJob):
    """Data that a job left in the workspace was read and stored."""


class JobAccepted(_OfJob):
    """The cluster has accepted a submitted job."""


@dataclass(frozen=True, slots=True)
class KeeperConnected:
    """A keeper with a compatible version connected; its previous stream is superseded.

    `supports_revoke`: the keeper returns a revoked trial that it has not started.
    """

    job_id: str
    supports_revoke: bool = False


class KeeperDisconnected(_OfJob):
    """The stream of a keeper, or its job, has ended. The last messages in either direction may be lost."""


@dataclass(frozen=True, slots=True)
class TrialReclaimed:
    """A keeper does not have a revoked trial, and will not start it."""

    job_id: str
    trial_id: str
    at_s: float


class KeeperSeenOnStorage(_OfJob):
    """The workspace shows a working keeper of the job that has not connected to this manager."""


@dataclass(frozen=True, slots=True)
class UsageReported:
    """A keeper reports the current resource usage of an attempt."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class TrialStopAsked:
    """A user or the manager requests the end of one trial."""

    trial_id: str
    reason: ExitReason
    at_s: float


@dataclass(frozen=True, slots=True)
class EarlyStopRequested:
    """The assessor requests an early stop of a trial's attempt; `attempt` None: of its current one, on request of an advisor."""

    trial_id: str
    attempt: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class ExperimentStopAsked:
    """A user requests the end of the experiment."""

    at_s: float


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """A user changed the limits; they are already stored."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class SearchSpaceChanged:
    """The tuner now uses another search space, which may contain parameters that it has not suggested."""


@dataclass(frozen=True, slots=True)
class RemarksChanged:
    """A user has changed the remarks of a trial; `trial_id` None: of the experiment. They become `remarks`."""

    trial_id: str | None
    remarks: Remarks


@dataclass(frozen=True, slots=True)
class TrialProposed:
    """A user proposes a trial with these parameters, independent of the tuner and of reached limits. The id is new.

    Post it only while the experiment's `accepts_trials` is True. `continues`: the trial from whose checkpoint it continues.
    """

    trial_id: str
    parameters: Mapping[str, Any]
    at_s: float
    continues: str | None = None


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed: check the limits and deadlines."""


_TunerEvent = ParametersSuggested | TunerExhausted | TunerNotReady | TunerFailed
_AttemptBoundary = (
    AttemptSeen | AttemptStarted | AttemptEnded | AttemptDelivered | AttemptOrphaned | AttemptLost
)
_AttemptData = MetricsStored | AttemptContinued | TaskReported | ProblemFound | UsageReported
_KeeperEvent = KeeperIdle | KeeperConnected | KeeperDisconnected | KeeperSeenOnStorage | TrialReclaimed
_ClusterEvent = (
    JobAccepted | JobRequeued | NodeReadinessChanged | JobProcessesEnded | AttemptDrained | JobTerminated
)
_StopRequest = TrialStopAsked | EarlyStopRequested | ExperimentStopAsked
_UserChange = LimitsChanged | SearchSpaceChanged | RemarksChanged | TrialProposed
Event = (
    _TunerEvent
    | _AttemptBoundary
    | _AttemptData
    | _KeeperEvent
    | _ClusterEvent
    | _StopRequest
    | _UserChange
    | ManagerReady
    | TimePassed
)

# ---- effects


@dataclass(frozen=True, slots=True)
class AskTuner:
    """Ask the tuner for one set of parameters."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class TellTuner:
    """Send the result of a trial to the tuner. `value` None: no result. `trial_id` identifies the whole result."""

    sequence_id: int
    value: float | None
    trial_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class AddObservation:
    """Add the result of a trial that a user proposed to the tuner's observations."""

    trial_id: str
    value: float


@dataclass(frozen=True, slots=True)
class AskAssessor:
    """Send new intermediate results of an attempt to the assessor or advisor, which may request an early stop."""

    trial_id: str
    sequence_id: int
    attempt: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TellAssessor:
    """Notify the assessor that a trial is terminal."""

    trial_id: str
    has_succeeded: bool


@dataclass(frozen=True, slots=True)
class SaveTrial:
    """Store the current state of the trial."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class SaveTrialAttempt:
    """Store an attempt with its number, before or together with any of its data."""

    key: AttemptKey
    number: int
    is_lost: bool


@dataclass(frozen=True, slots=True)
class SaveExperiment:
    """Store the experiment's own state."""


@dataclass(frozen=True, slots=True)
class SaveRemarks:
    """Store the remarks of a trial; `trial_id` None: of the experiment."""

    trial_id: str | None
    remarks: Remarks


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store the current state of the job."""

    job: Job
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class SaveUsage:
    """Store the current resource usage of a task."""

    usage: Usage


class SubmitJob(_OnJob):
    """Submit the job to the cluster after the job is stored. `job.trial_id`: the trial that the job runs, or None."""


@dataclass(frozen=True, slots=True)
class DispatchTrial:
    """Dispatch a stored trial to the keepers of a job. `task`: dispatch only to the keeper of this task; None: to all."""

    job: Job
    trial: Trial
    task: str | None = None


@dataclass(frozen=True, slots=True)
class RevokePrefetched:
    """Revoke a prefetched trial from the keeper of a job, after all earlier dispatches to it."""

    job: Job
    trial: Trial


class DrainJob(_OnJob):
    """Drain the job: it gets no more trials and ends by itself."""


@dataclass(frozen=True, slots=True)
class EscalateStop:
    """Take the next step against a job that missed a stop deadline.

    ENDING: end it through the training service, with grace. KILLED: without grace. ABANDONED: stop waiting for its end, report
    it as terminated, and name its possible remains.
    """

    job: Job
    stage: StopStage


class GiveUpJob(_OnJob):
    """Report a job as terminated that seems to be lost, with what the cluster has reported, and name its possible remains."""


@dataclass(frozen=True, slots=True)
class CancelTrial:
    """End a trial that has a job; the reason is already stored. `ends_job`: the job ends with the trial."""

    trial: Trial
    reason: ExitReason
    ends_job: bool = True


class CloseAttempt(_OfAttempt):
    """After the trial is stored, notify the keeper that no data of the attempt needs to be resent."""


class DrainSource(_OfAttempt):
    """Read the metrics of an attempt that has ended from the workspace: a later attempt continues from its checkpoint."""


class DrainAttempt(_OfAttempt):
    """Read the end and the remaining streams of an orphaned attempt from the workspace."""


@dataclass(frozen=True, slots=True)
class DetachTrial:
    """Accept no more data of a lost trial from its job, and notify keepers that still report it."""

    trial: Trial
    job_id: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The experiment is terminal; no trial runs.

    `is_recorded`: True if the end of each trial is stored; False if some ends could be neither read nor stored.
    """

    is_recorded: bool = True


_TunerEffect = AskTuner | TellTuner | AddObservation | AskAssessor | TellAssessor
_StoreEffect = SaveTrial | SaveTrialAttempt | SaveExperiment | SaveRemarks | SaveJob | SaveUsage
_JobEffect = SubmitJob | DispatchTrial | RevokePrefetched | DrainJob | EscalateStop | GiveUpJob | CancelTrial
_AttemptEffect = CloseAttempt | DrainAttempt | DrainSource | DetachTrial
Effect = _TunerEffect | _StoreEffect | _JobEffect | _AttemptEffect | Finish
