"""Decides when the manager stops waiting for the cluster's report about a job that seems to be lost.

Theory of operation. A keeper that the cluster has ended reports the end of its trial before the cluster reports why: the trial
waits for the end of its job, which has the reason (REASON_AWAITED). A node that fails reports nothing, and the cluster may keep
its jobs for as long as the node exists: its jobs are in NODE_NOT_READY while the cluster reports that. Both stages have a
deadline. A job that misses it is GIVEN_UP: it is reported as lost, with what the cluster has reported so far, and its trials are
retried if `maxTrialRetry` allows. Its attempts are marked as lost, so that a keeper that returns cannot report for them.

Only such jobs are tracked. Times are monotonic.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from nni_manager.domain.state_tables import pairs_by_event, with_ignored

# A pod with other containers ends at the latest after its grace period, 45 s; the rest is for the report.
END_REASON_TIMEOUT_S = 60.0
# The default. As long as a cluster usually tolerates a node that is not reachable.
LOST_NODE_TIMEOUT_S = 300.0


class LossStage(Enum):
    """Why a job seems to be lost."""

    REASON_AWAITED = "its keeper was ended by the cluster, which has not reported why"
    NODE_NOT_READY = "the cluster reports that a node of the job is not ready"
    GIVEN_UP = "the manager no longer waits for the cluster"


class LossEvent(Enum):
    """The events of a job that seems to be lost."""

    KEEPER_ENDED = "its keeper was ended by the cluster"
    KEEPER_RETURNED = "a new keeper of the job runs its trial"
    NODE_LOST = "a node is not ready"
    NODE_RETURNED = "all nodes are ready"
    REQUEUED = "the cluster will start the same job again"
    OVERDUE = "overdue"


_S, _E = LossStage, LossEvent
FIRST: dict[LossEvent, LossStage] = {_E.KEEPER_ENDED: _S.REASON_AWAITED, _E.NODE_LOST: _S.NODE_NOT_READY}
"""The first stage of a job that was not tracked; other events do not concern it."""
# `None`: the job is not tracked any more.
CHANGES: dict[tuple[LossStage, LossEvent], LossStage | None] = {
    (_S.NODE_NOT_READY, _E.KEEPER_ENDED): _S.REASON_AWAITED,  # usually the sooner deadline
    (_S.NODE_NOT_READY, _E.NODE_RETURNED): None,
    (_S.NODE_NOT_READY, _E.OVERDUE): _S.GIVEN_UP,
    (_S.REASON_AWAITED, _E.KEEPER_RETURNED): None,
    (_S.REASON_AWAITED, _E.OVERDUE): _S.GIVEN_UP,
    (_S.REASON_AWAITED, _E.REQUEUED): None,
    (_S.GIVEN_UP, _E.REQUEUED): None,  # the training service is asked only then
}
# Events that leave the stage as it is.
IGNORED: frozenset[tuple[LossStage, LossEvent]] = pairs_by_event(
    {
        _E.KEEPER_ENDED: (_S.REASON_AWAITED, _S.GIVEN_UP),
        _E.KEEPER_RETURNED: (_S.NODE_NOT_READY, _S.GIVEN_UP),
        _E.NODE_LOST: (_S.REASON_AWAITED, _S.NODE_NOT_READY, _S.GIVEN_UP),
        _E.NODE_RETURNED: (_S.REASON_AWAITED, _S.GIVEN_UP),
        _E.REQUEUED: (_S.NODE_NOT_READY,),
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)


@dataclass(slots=True)
class _LostJob:
    stage: LossStage
    since_s: float
    deadline_s: float | None


@dataclass(slots=True)
class LostJobs:
    """The jobs that seem to be lost, with their stages and deadlines."""

    _jobs: dict[str, _LostJob] = field(default_factory=dict)

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline; None: no job has one."""
        return min(
            (job.deadline_s for job in self._jobs.values() if job.deadline_s is not None), default=None
        )

    def apply(self, job_id: str, event: LossEvent, now_s: float, node_timeout_s: float = 0.0) -> None:
        """Change the stage of the job by the tables. `node_timeout_s`: how long a node may be not ready."""
        job = self._jobs.get(job_id)
        stage = FIRST.get(event) if job is None else TRANSITIONS[job.stage, event]
        if stage is None:
            self._jobs.pop(job_id, None)
        elif job is None or job.stage is not stage:
            within_s = {_S.REASON_AWAITED: END_REASON_TIMEOUT_S, _S.NODE_NOT_READY: node_timeout_s}.get(stage)
            self._jobs[job_id] = _LostJob(stage, now_s, None if within_s is None else now_s + within_s)

    def overdue(
        self, now_s: float, node_timeout_s: float, last_contact_s: Callable[[str], float | None]
    ) -> list[str]:
        """Give up the jobs that have missed their deadline, and return their ids.

        `last_contact_s`: when the keepers of a job last reported; None: never. A node whose keeper reports is not lost: its
        deadline moves.
        """
        given_up = []
        for job_id, job in self._jobs.items():
            if job.stage is LossStage.NODE_NOT_READY:
                contact_s = last_contact_s(job_id)
                job.deadline_s = (
                    max(job.since_s, job.since_s if contact_s is None else contact_s) + node_timeout_s
                )
            if job.deadline_s is not None and job.deadline_s <= now_s:
                given_up.append(job_id)
        for job_id in given_up:
            self.apply(job_id, LossEvent.OVERDUE, now_s)
        return given_up

    def forget(self, job_id: str) -> None:
        """Stop tracking a job that has ended, or that was asked to end."""
        self._jobs.pop(job_id, None)
