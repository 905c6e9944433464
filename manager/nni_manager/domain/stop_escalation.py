"""Escalates stops: the steps against a job that does not end, or does not stop its trial, in time.

Theory of operation. A job with a pending stop request is in a stage, and each stage has a deadline. A job that misses it moves
on to the next, harder stage. First the manager asks the keeper to stop its trial (STOP_SENT) or to drain (SHUTDOWN_SENT). Then
it asks the training service to end the job with grace (ENDING), then without grace (KILLED). Finally it names the remains of
the job and no longer waits for the job (ABANDONED). No stage needs an answer of the keeper, a database commit or a file of the
workspace. When a job has ended, the manager drains its workspace (COLLECTING). While the experiment stops, draining has a
deadline, too. Storage or a database that is unavailable does not block the end of the manager (STALLED), and a later manager
reads the rest.

Only jobs with a stop request are tracked. Times are monotonic.
"""

from dataclasses import dataclass, field
from enum import Enum

from nni_manager.domain.state_tables import changes_by_event, pairs_by_event, with_ignored

# The keeper's grace, after which it kills its trial; `KeeperSettings.grace_s`.
KEEPER_GRACE_S = 30.0
# Added to the grace of a keeper or a cluster: a loaded machine needs a second or two.
MARGIN_S = 5.0
# Clusters are polled every 5 s. A job that ends by itself is detected within this time, before the manager would end the job.
CLUSTER_REPORT_TIMEOUT_S = 15.0
# The kernel takes this long to free hundreds of gigabytes, or a GPU's memory.
KILLED_TIMEOUT_S = 10.0
# Shared storage shows data of another machine within 6 s. Each further piece of data renews this deadline.
DRAINED_TIMEOUT_S = 8.0
# A transaction takes milliseconds; on slow storage, a second or two.
RECORDED_TIMEOUT_S = 5.0
# Kubernetes has the longest grace, 45 s with a margin; the rest is for the manager's own end.
MAX_STOP_S = 100.0


class StopStage(Enum):
    """The last step taken to stop a job or its trial."""

    STOP_SENT = "its keeper was asked to stop a trial; other trials may follow"
    SHUTDOWN_SENT = "its keeper was asked to drain, or has no trial left"
    ENDING = "the training service was asked to end it"
    KILLED = "the training service was asked to end it without grace"
    ABANDONED = "it may still run, and the manager no longer waits for it"
    COLLECTING = "it has ended, and the workspace is being read"
    STALLED = "it has ended, and its remaining data can be neither read nor stored now"


class StopEvent(Enum):
    """The events of a job with a stop request."""

    OVERDUE = "overdue"
    DRAIN_ASKED = "leave asked"
    END_ASKED = "end asked"
    ENDED = "ended"
    PROGRESSED = "progressed"


_S, _E = StopStage, StopEvent
FIRST: dict[StopEvent, StopStage] = {
    _E.DRAIN_ASKED: _S.SHUTDOWN_SENT,
    _E.END_ASKED: _S.ENDING,
    _E.ENDED: _S.COLLECTING,
}
"""The first stage of a job without an earlier stop request. A request to stop only a trial starts at STOP_SENT."""
_ASKED = (_S.STOP_SENT, _S.SHUTDOWN_SENT, _S.ENDING, _S.KILLED, _S.ABANDONED)
CHANGES: dict[tuple[StopStage, StopEvent], StopStage] = changes_by_event(
    {
        _E.OVERDUE: {
            _S.ENDING: (_S.STOP_SENT, _S.SHUTDOWN_SENT),
            _S.KILLED: (_S.ENDING,),
            _S.ABANDONED: (_S.KILLED,),
            _S.STALLED: (_S.COLLECTING,),
        },
        _E.DRAIN_ASKED: {_S.SHUTDOWN_SENT: (_S.STOP_SENT, _S.ENDING)},  # in ENDING: its trial has ended
        _E.END_ASKED: {_S.ENDING: (_S.STOP_SENT,)},
        _E.ENDED: {_S.COLLECTING: _ASKED},
        _E.PROGRESSED: {_S.COLLECTING: (_S.STALLED,)},
    }
)
# Events that leave the state as it is.
IGNORED: frozenset[tuple[StopStage, StopEvent]] = pairs_by_event(
    {
        _E.DRAIN_ASKED: (_S.SHUTDOWN_SENT, _S.KILLED, _S.ABANDONED, _S.COLLECTING, _S.STALLED),
        _E.END_ASKED: (_S.SHUTDOWN_SENT, _S.ENDING, _S.KILLED, _S.ABANDONED, _S.COLLECTING, _S.STALLED),
        _E.ENDED: (_S.COLLECTING, _S.STALLED),
        _E.PROGRESSED: (*_ASKED, _S.COLLECTING),  # e.g. reports of a trial that still runs
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)
_RENEWED_BY_PROGRESS = frozenset({_S.SHUTDOWN_SENT, _S.COLLECTING, _S.STALLED})


@dataclass(slots=True)
class _StopOfJob:
    stage: StopStage
    deadline_s: float | None = None
    kill_at_s: float = float("inf")
    """The latest time for the kill: by then the grace of the training service has elapsed."""


@dataclass(slots=True)
class StopEscalation:
    """The jobs with a stop request, their stages and deadlines.

    `cluster_grace_s`: how long the training service waits before it kills a job that it was asked to end; 0: not at all.
    `is_stopping`: the experiment stops, so every stage has a deadline.
    """

    cluster_grace_s: float = 0.0
    keeper_grace_s: float = KEEPER_GRACE_S
    is_stopping: bool = False
    _jobs: dict[str, _StopOfJob] = field(default_factory=dict)

    # ---- queries

    def stage(self, job_id: str) -> StopStage | None:
        """The stage of the job; None: it has no stop request."""
        job = self._jobs.get(job_id)
        return None if job is None else job.stage

    @property
    def stalled(self) -> list[str]:
        """The ended jobs whose remaining data can be neither read nor stored now."""
        return [job_id for job_id, job in self._jobs.items() if job.stage is StopStage.STALLED]

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline; None: no job has one."""
        deadlines = (job.deadline_s for job in self._jobs.values())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    # ---- events

    def stop_asked(self, job_id: str, now_s: float, *, ends_job: bool) -> None:
        """Record that the keeper was asked to stop its trial. `ends_job`: the training service is also asked to end the job."""
        job = self._jobs.get(job_id)
        if job is not None and not (ends_job and job.stage is StopStage.STOP_SENT):
            return
        if ends_job:
            # The trial gets the longer grace of the keeper's and the cluster's.
            kill_at_s = now_s + max(self.keeper_grace_s, self.cluster_grace_s) + MARGIN_S
            self._jobs[job_id] = _StopOfJob(StopStage.ENDING, kill_at_s, kill_at_s)
        else:
            self._jobs[job_id] = _StopOfJob(StopStage.STOP_SENT, now_s + self.keeper_grace_s + MARGIN_S)

    def apply(self, job_id: str, event: StopEvent, now_s: float) -> None:
        """Change the stage of the job by the tables."""
        job = self._jobs.get(job_id)
        if job is None:
            if event in FIRST:
                job = self._jobs[job_id] = _StopOfJob(FIRST[event])
                self._enter(job, job.stage, now_s)
            return
        stage = TRANSITIONS[job.stage, event]
        if stage is not job.stage or (event is StopEvent.PROGRESSED and stage in _RENEWED_BY_PROGRESS):
            self._enter(job, stage, now_s)

    def overdue(self, now_s: float) -> list[tuple[str, StopStage, StopStage]]:
        """Move each job that missed its deadline to the next stage. Returns (job id, stage before, stage after)."""
        moved = []
        for job_id, job in self._jobs.items():
            if job.deadline_s is not None and job.deadline_s <= now_s:
                before = job.stage
                self._enter(job, TRANSITIONS[before, StopEvent.OVERDUE], now_s)
                moved.append((job_id, before, job.stage))
        return moved

    def begin_stopping(self, now_s: float) -> None:
        """Record that the experiment stops: from now on every stage has a deadline."""
        self.is_stopping = True
        for job in self._jobs.values():
            if job.stage is StopStage.COLLECTING:
                self._enter(job, job.stage, now_s)

    def forget(self, job_id: str) -> None:
        """Stop tracking a job that has complied with its stop request, or that no longer exists."""
        self._jobs.pop(job_id, None)

    def _enter(self, job: _StopOfJob, stage: StopStage, now_s: float) -> None:
        job.stage = stage
        match stage:
            case StopStage.SHUTDOWN_SENT:
                within_s = MARGIN_S if self.cluster_grace_s == 0 else CLUSTER_REPORT_TIMEOUT_S
                job.deadline_s = min(now_s + within_s, job.kill_at_s)
            case StopStage.ENDING:
                job.kill_at_s = min(job.kill_at_s, now_s + self.cluster_grace_s + MARGIN_S)
                job.deadline_s = job.kill_at_s
            case StopStage.KILLED:
                job.deadline_s = now_s + KILLED_TIMEOUT_S
            case StopStage.COLLECTING if self.is_stopping:
                job.deadline_s = now_s + DRAINED_TIMEOUT_S
            case _:
                job.deadline_s = None
