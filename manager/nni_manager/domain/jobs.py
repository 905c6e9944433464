"""Keeps the jobs with their trials and the queue, for `job_scheduler`. States: table `TRANSITIONS`.

Without reuse, a job runs one trial and ends. A reused job gets the trial that has waited longest, whenever all its keepers are
idle. A busy job may get prefetched trials, which its keeper starts without the manager. Prefetching hides the dispatch latency
of short trials. No operation iterates over all jobs, so an event costs the same with ten jobs or a thousand.

Revoking undoes prefetching when a job would otherwise be idle. For each idle job, the last trial of a job with the most queued
trials is revoked. A keeper that has not started the trial returns it, and the trial is dispatched next. A keeper that has started
the trial reports the start, and sends no other answer. Until the answer, the trial stays with its job and is not revoked again on
the same stream.

The end of the stream discards the revoke: the manager cannot detect whether the revoke or the answer was lost. An answer on
another stream does not count. If the answer was lost, the keeper no longer has the trial. The trial is then revoked again, or
dispatched again when the keeper is idle. A keeper also returns a revoked trial that it does not have.

A trial that is stopped before its start was reported is revoked, too, on each new stream. It ends when its keeper returns it, or
with its job. Its keeper may have run it to its end while it was disconnected; then its results count.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

from nni_manager.domain.state_tables import with_ignored

# The most prefetched trials per job.
MAX_PREFETCH = 12


class JobState(Enum):
    """The state of a job. A job that has ended has none: it is removed."""

    PENDING = "readying"
    """The cluster has not started it, or not all its keepers have finished the last trial."""
    IDLE = "idle"
    """All its keepers run and have no trial."""
    BUSY = "busy"
    """It has a trial."""
    DRAINING = "leaving"
    """It gets no further trial and ends."""


class JobTrigger(Enum):
    """The events of a job."""

    KEEPERS_IDLE = "keepers idle"
    TRIAL_GIVEN = "trial given"
    TRIAL_OVER = "trial over"
    DRAIN_ASKED = "leave asked"


_S, _E = JobState, JobTrigger
CHANGES: dict[tuple[JobState, JobTrigger], JobState] = {
    (_S.PENDING, _E.KEEPERS_IDLE): _S.IDLE,
    (_S.PENDING, _E.TRIAL_GIVEN): _S.BUSY,  # without reuse, before there is a keeper
    (_S.PENDING, _E.DRAIN_ASKED): _S.DRAINING,
    (_S.IDLE, _E.TRIAL_GIVEN): _S.BUSY,
    (_S.IDLE, _E.DRAIN_ASKED): _S.DRAINING,
    (_S.BUSY, _E.TRIAL_OVER): _S.PENDING,
    (_S.BUSY, _E.DRAIN_ASKED): _S.DRAINING,
}
# Events that leave the state as it is.
IGNORED: frozenset[tuple[JobState, JobTrigger]] = frozenset(
    {
        (_S.IDLE, _E.KEEPERS_IDLE),  # repeated after a lost connection
        (_S.BUSY, _E.KEEPERS_IDLE),  # its trial is not terminal before every byte has arrived
        (_S.DRAINING, _E.KEEPERS_IDLE),  # the drain command is in transit
        (_S.DRAINING, _E.TRIAL_OVER),
        (_S.DRAINING, _E.DRAIN_ASKED),
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)


@dataclass(slots=True)
class Job:
    """One job. `ever_connected`: a keeper of it connected or was found in the workspace, perhaps by an earlier manager.

    `was_found`: this manager found a keeper of it in the workspace.
    """

    job_id: str
    state: JobState = JobState.PENDING
    trial_id: str | None = None
    prefetched_ids: list[str] = field(default_factory=list)
    """The prefetched trials. The keeper may already run the first while the last bytes of `trial_id` are in transit."""
    ever_connected: bool = False
    was_found: bool = False
    idle_tasks: set[str] = field(default_factory=set)
    supports_revoke: bool = True
    """True if the keeper supported revoking when it last connected, and before its first connection."""
    is_linked: bool = False
    """True while the keeper is connected."""
    started_ids: set[str] = field(default_factory=set)
    """The trials of the job that are known to have started."""
    revoking_ids: set[str] = field(default_factory=set)
    """The trials of the job with a revoke in progress."""
    taken: int = 0
    """The number of trials assigned in total, without the reclaimed ones."""

    @property
    def trial_ids(self) -> tuple[str, ...]:
        """The assigned trials that have not ended, in order."""
        return () if self.trial_id is None else (self.trial_id, *self.prefetched_ids)

    @property
    def waiting_ids(self) -> list[str]:
        """The trials that are queued in the job behind another one, in order.

        The first of `trial_ids` is about to start and is left out. If a prefetched trial has already started, the keeper never
        received the first one or has returned it, so the first one is included.
        """
        behind = self.prefetched_ids if self.started_ids.isdisjoint(self.prefetched_ids) else self.trial_ids
        return [trial_id for trial_id in behind if trial_id not in self.started_ids]


class _BucketQueue:
    """A bucket queue: job ids by a small number each; first in, first out among equal numbers."""

    def __init__(self, most: int) -> None:
        self.by_number: tuple[dict[str, None], ...] = tuple({} for _ in range(most + 1))
        self._numbers: dict[str, int] = {}

    def put(self, job_id: str, number: int) -> None:
        """Set the number of the job and place it last in that bucket."""
        self.drop(job_id)
        self._numbers[job_id] = number
        self.by_number[number][job_id] = None

    def drop(self, job_id: str) -> None:
        """Remove the job."""
        if (number := self._numbers.pop(job_id, None)) is not None:
            del self.by_number[number][job_id]


@dataclass(slots=True)
class Jobs:
    """The jobs that have not ended, and the trials that wait for a job.

    `tasks`: the number of keepers of each job. `max_trials`: the number of trials a job may run; 0: unlimited.
    """

    tasks: int = 1
    max_trials: int = 0
    live: dict[str, Job] = field(default_factory=dict)
    queue: deque[str] = field(default_factory=deque)
    """Trials without a job, in the order of dispatch; only `JobScheduler` changes it."""
    _idle: dict[str, None] = field(default_factory=dict)
    _busy: _BucketQueue = field(default_factory=lambda: _BucketQueue(MAX_PREFETCH - 1))
    """Busy jobs that accept a prefetched trial, by the number of trials they have prefetched."""
    _revocable: _BucketQueue = field(default_factory=lambda: _BucketQueue(MAX_PREFETCH))
    """Busy jobs with revocable trials, by the number of trials without a revoke in progress; the last number includes more."""
    _returnable: dict[str, int] = field(default_factory=dict)
    """The number of trials that each job may return, revoked or not; only of jobs whose keepers support revoking."""
    _returnable_count: int = 0
    _revoking_count: int = 0
    _counts: Counter[JobState] = field(default_factory=Counter)
    _made: int = 0

    def new_id(self) -> str:
        """An id that no other job and no trial has: trial ids contain no dash."""
        return f"env-{self._made}"

    def add(self, job: Job) -> Job:
        """Add a new job, or one of an earlier manager."""
        self.live[job.job_id] = job
        self._counts[job.state] += 1
        self.remember(job.job_id)
        return job

    def remember(self, job_id: str) -> None:
        """Reserve the id of a job, even if the job has ended."""
        prefix, dash, number = job_id.partition("-")
        if prefix == "env" and dash:
            self._made = max(self._made, int(number) + 1)

    def give(self, job: Job, trial_id: str) -> None:
        """Assign a trial that the job runs now."""
        job.trial_id = trial_id
        job.taken += 1
        job.idle_tasks.clear()
        self._move(job, JobTrigger.TRIAL_GIVEN)

    def note_idle(self, job: Job, task: str) -> None:
        """Record that the keeper of a task is idle."""
        job.idle_tasks.add(task)
        self._note_all_idle(job)

    def prefetch(self, job: Job, trial_id: str) -> None:
        """Assign a trial that a busy job runs after its other trials."""
        job.prefetched_ids.append(trial_id)
        job.taken += 1
        job.idle_tasks.clear()
        self._note_room(job)

    def free(self, job_id: str, trial_id: str) -> None:
        """Remove a trial that has ended from its job. Ignored for a job that has ended."""
        job = self.live.get(job_id)
        if job is None or trial_id not in job.trial_ids:
            return
        if trial_id != job.trial_id:
            job.prefetched_ids.remove(trial_id)
        else:
            job.trial_id = job.prefetched_ids.pop(0) if job.prefetched_ids else None
        job.started_ids.intersection_update(job.trial_ids)
        self._forget_revoking(job, trial_id)
        if job.trial_id is None:
            self._move(job, JobTrigger.TRIAL_OVER)
            self._note_all_idle(job)
        else:
            self._note_room(job)

    # ---- revoking

    def note_started(self, job_id: str, trial_id: str) -> None:
        """Mark a trial as started. A started trial can no longer be revoked."""
        job = self.live.get(job_id)
        if job is None or trial_id not in job.trial_ids:
            return
        job.started_ids.add(trial_id)
        if trial_id in job.revoking_ids:
            self._forget_revoking(job, trial_id)
            job.idle_tasks.clear()  # the keeper reported idle before it received the trial
        self._update_revocable(job)

    def note_link(self, job: Job, *, is_up: bool, supports_revoke: bool = False) -> None:
        """Record that a keeper of the job connected or disconnected. Revokes on the previous stream are discarded."""
        job.is_linked = is_up
        if is_up:
            job.supports_revoke = supports_revoke
        elif self.tasks == 1:
            # A dispatched trial would wait for the keeper, which reports idle when it reconnects.
            job.idle_tasks.clear()
            self._idle.pop(job.job_id, None)
        self._forget_revoking(job, *job.revoking_ids)
        self._update_revocable(job)

    def revoke(self, coming: int) -> list[tuple[Job, str]]:
        """Start revoking one trial for each idle job; returns the trials with their jobs.

        `coming`: the number of trials that the tuner will suggest. Idle jobs for queued and coming trials do not count.
        """
        asked: list[tuple[Job, str]] = []
        wanted = len(self._idle) - coming - len(self.queue) - self._revoking_count
        while len(asked) < wanted and (job := self._next_revocable()) is not None:
            trial_id = next(each for each in reversed(job.waiting_ids) if each not in job.revoking_ids)
            self._note_revoking(job, trial_id)
            asked.append((job, trial_id))
        return asked

    def revoke_one(self, job: Job, trial_id: str) -> bool:
        """Start revoking a trial of the job, unless it has started, is being revoked, or the keeper cannot be asked now."""
        may_ask = job.is_linked and job.supports_revoke and self.tasks == 1
        if not may_ask or trial_id in job.started_ids | job.revoking_ids:
            return False
        self._note_revoking(job, trial_id)
        return True

    def reclaim(self, job: Job, trial_id: str) -> None:
        """Remove a revoked trial from its job."""
        job.taken -= 1
        self.free(job.job_id, trial_id)

    @property
    def surplus(self) -> int:
        """The number of unassigned jobs minus the number of revocable trials: the surplus jobs if no more trials come."""
        return self._counts[JobState.PENDING] + self._counts[JobState.IDLE] - self._returnable_count

    def _next_revocable(self) -> Job | None:
        """The job with the most revocable trials; None: no job has one."""
        having = reversed(self._revocable.by_number[1:])
        return next((self.live[next(iter(jobs))] for jobs in having if jobs), None)

    def _note_revoking(self, job: Job, trial_id: str) -> None:
        job.revoking_ids.add(trial_id)
        self._revoking_count += 1
        self._update_revocable(job)

    def _forget_revoking(self, job: Job, *trial_ids: str) -> None:
        before = len(job.revoking_ids)
        job.revoking_ids.difference_update(trial_ids)
        self._revoking_count += len(job.revoking_ids) - before

    def _update_revocable(self, job: Job) -> None:
        self._drop_revocable(job)
        if job.state is not JobState.BUSY or not job.supports_revoke or self.tasks > 1:
            return
        unasked = sum(trial_id not in job.revoking_ids for trial_id in job.waiting_ids)
        self._returnable[job.job_id] = unasked + len(job.revoking_ids)
        self._returnable_count += self._returnable[job.job_id]
        if job.is_linked:
            self._revocable.put(job.job_id, min(unasked, MAX_PREFETCH))

    def _drop_revocable(self, job: Job) -> None:
        self._returnable_count -= self._returnable.pop(job.job_id, 0)
        self._revocable.drop(job.job_id)

    # ---- leaving

    def dismiss(self, job: Job) -> None:
        """Drain the job: it gets no more trials."""
        self._move(job, JobTrigger.DRAIN_ASKED)

    def end(self, job_id: str) -> Job | None:
        """Remove a job that has ended and return it; None if it was removed before."""
        job = self.live.pop(job_id, None)
        if job is not None:
            self._counts[job.state] -= 1
            self._idle.pop(job_id, None)
            self._forget_revoking(job, *job.revoking_ids)
            self._busy.drop(job_id)
            self._drop_revocable(job)
        return job

    def next_idle(self) -> Job | None:
        """The job that has been idle longest; None: no job is idle."""
        return self.live[next(iter(self._idle))] if self._idle else None

    def next_for_prefetch(self, most_ahead: int) -> Job | None:
        """The busy job with the fewest prefetched trials, fewer than `most_ahead`; among equals the first to have so few."""
        having = self._busy.by_number[:most_ahead]
        return next((self.live[next(iter(jobs))] for jobs in having if jobs), None)

    @property
    def busy(self) -> int:
        """The number of jobs that have a trial."""
        return self._counts[JobState.BUSY]

    @property
    def active(self) -> int:
        """The number of jobs that have a trial or may get one: all that are not draining."""
        return self.busy + self._counts[JobState.PENDING] + self._counts[JobState.IDLE]

    @property
    def shortfall(self) -> int:
        """The number of additional jobs the queue needs, besides those that are or will soon be idle."""
        return len(self.queue) - self._counts[JobState.PENDING] - self._counts[JobState.IDLE]

    @property
    def unassigned(self) -> list[Job]:
        """The jobs without a trial, idle ones last."""
        if not self._counts[JobState.PENDING] + self._counts[JobState.IDLE]:
            return []
        free = [job for job in self.live.values() if job.state in (JobState.PENDING, JobState.IDLE)]
        return sorted(free, key=lambda job: job.state is JobState.IDLE)

    def _note_all_idle(self, job: Job) -> None:
        if len(job.idle_tasks) >= self.tasks:
            self._move(job, JobTrigger.KEEPERS_IDLE)

    def _move(self, job: Job, event: JobTrigger) -> None:
        before, job.state = job.state, TRANSITIONS[job.state, event]
        self._counts[before] -= 1
        self._counts[job.state] += 1
        if job.state is not JobState.IDLE:
            self._idle.pop(job.job_id, None)
        else:
            self._idle.setdefault(job.job_id)
        self._note_room(job)

    def _note_room(self, job: Job) -> None:
        self._update_revocable(job)
        has_room = len(job.prefetched_ids) < MAX_PREFETCH and not 0 < self.max_trials <= job.taken
        if job.state is JobState.BUSY and has_room:
            self._busy.put(job.job_id, len(job.prefetched_ids))
        else:
            self._busy.drop(job.job_id)
