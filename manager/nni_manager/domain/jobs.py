"""The jobs of an experiment: which of them can be given a trial, and how many more are needed.

A job without reuse is made for one trial and leaves after it. A reused job is made for whichever trial waits longest: once all
its keepers are idle it is given one, and so on, until it leaves. It may be given the next ones ahead, while it is busy: its
keeper then begins them without a word from here. Nothing here looks at all jobs, so a thousand of them cost an event what
ten did.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

# So many trials follow the one that a job runs, at most.
MOST_AHEAD = 3


class JobState(Enum):
    """What a job does at present. One that has ended is none of these: it is forgotten."""

    READYING = (
        "readying"  # the cluster has not started it, or not all its keepers have finished the last trial
    )
    IDLE = "idle"
    BUSY = "busy"
    LEAVING = "leaving"


class JobEvent(Enum):
    """What can happen to a job."""

    KEEPERS_IDLE = "keepers idle"
    TRIAL_GIVEN = "trial given"
    TRIAL_OVER = "trial over"
    LEAVE_ASKED = "leave asked"


_S, _E = JobState, JobEvent
NEXT: dict[tuple[JobState, JobEvent], JobState] = {
    (_S.READYING, _E.KEEPERS_IDLE): _S.IDLE,
    (_S.READYING, _E.TRIAL_GIVEN): _S.BUSY,  # without reuse, before there is a keeper
    (_S.READYING, _E.LEAVE_ASKED): _S.LEAVING,
    (_S.IDLE, _E.KEEPERS_IDLE): _S.IDLE,  # said again after a lost link
    (_S.IDLE, _E.TRIAL_GIVEN): _S.BUSY,
    (_S.IDLE, _E.LEAVE_ASKED): _S.LEAVING,
    (_S.BUSY, _E.TRIAL_OVER): _S.READYING,
    (_S.BUSY, _E.KEEPERS_IDLE): _S.BUSY,  # its trial is not over before every byte is here
    (_S.BUSY, _E.LEAVE_ASKED): _S.LEAVING,
    (_S.LEAVING, _E.KEEPERS_IDLE): _S.LEAVING,  # the word to leave is on its way
    (_S.LEAVING, _E.TRIAL_OVER): _S.LEAVING,
    (_S.LEAVING, _E.LEAVE_ASKED): _S.LEAVING,
}


@dataclass(slots=True)
class Job:
    """One job. `was_heard`: a keeper of it has connected or was found in the workspace, perhaps by an earlier manager.

    `was_found`: this manager has found one there.
    """

    job_id: str
    state: JobState = JobState.READYING
    trial_id: str | None = None
    next_ids: list[str] = field(default_factory=list)
    """The trials that follow; its keeper may run the first already while the last bytes of the one before are on their way."""
    was_heard: bool = False
    was_found: bool = False
    idle_tasks: set[str] = field(default_factory=set)

    @property
    def trial_ids(self) -> tuple[str, ...]:
        """All that it was given and that is not over, in order."""
        return () if self.trial_id is None else (self.trial_id, *self.next_ids)


@dataclass(slots=True)
class Jobs:
    """The jobs that have not ended, and the trials that wait for one.

    `tasks` is how many keepers a job has.
    """

    tasks: int = 1
    live: dict[str, Job] = field(default_factory=dict)
    queue: deque[str] = field(default_factory=deque)
    """Trials without a job, in the order in which they are given one."""
    _idle: dict[str, None] = field(default_factory=dict)
    _busy: tuple[dict[str, None], ...] = field(default_factory=lambda: tuple({} for _ in range(MOST_AHEAD)))
    """Busy jobs that may be given a trial ahead, by how many they have that follow."""
    _counts: Counter[JobState] = field(default_factory=Counter)
    _made: int = 0

    def new_id(self) -> str:
        """An id that no trial can have, and no other job: trials' ids have no dash."""
        return f"env-{self._made}"

    def add(self, job: Job) -> Job:
        """A new job, or one of an earlier manager."""
        self.live[job.job_id] = job
        self._counts[job.state] += 1
        self.remember(job.job_id)
        return job

    def remember(self, job_id: str) -> None:
        """This id is taken, also if the job has ended."""
        prefix, dash, number = job_id.partition("-")
        if prefix == "env" and dash:
            self._made = max(self._made, int(number) + 1)

    def give(self, job: Job, trial_id: str) -> None:
        """The job runs this trial from now on."""
        job.trial_id = trial_id
        job.idle_tasks.clear()
        self._move(job, JobEvent.TRIAL_GIVEN)

    def note_idle(self, job: Job, task: str) -> None:
        """The keeper of a task has nothing to run."""
        job.idle_tasks.add(task)
        self._note_all_idle(job)

    def give_ahead(self, job: Job, trial_id: str) -> None:
        """A busy job runs this trial after those it has."""
        job.next_ids.append(trial_id)
        job.idle_tasks.clear()
        self._note_room(job)

    def free(self, job_id: str, trial_id: str) -> None:
        """A trial of the job is over. A job that has ended is no matter."""
        job = self.live.get(job_id)
        if job is None or trial_id not in job.trial_ids:
            return
        if trial_id != job.trial_id:
            job.next_ids.remove(trial_id)
        else:
            job.trial_id = job.next_ids.pop(0) if job.next_ids else None
        if job.trial_id is None:
            self._move(job, JobEvent.TRIAL_OVER)
            self._note_all_idle(job)
        else:
            self._note_room(job)

    def dismiss(self, job: Job) -> None:
        """The job gets no other trial."""
        self._move(job, JobEvent.LEAVE_ASKED)

    def end(self, job_id: str) -> Job | None:
        """The job is gone; None if it had been before."""
        job = self.live.pop(job_id, None)
        if job is not None:
            self._counts[job.state] -= 1
            self._idle.pop(job_id, None)
            self._forget_room(job)
        return job

    def next_idle(self) -> Job | None:
        """The job that has been idle longest."""
        return self.live[next(iter(self._idle))] if self._idle else None

    def next_with_room(self, most_ahead: int = 1) -> Job | None:
        """Of the busy jobs with the fewest trials that follow, fewer than these, the one that has been so for longest."""
        return next((self.live[next(iter(jobs))] for jobs in self._busy[:most_ahead] if jobs), None)

    @property
    def busy(self) -> int:
        """How many jobs have a trial."""
        return self._counts[JobState.BUSY]

    @property
    def staying(self) -> int:
        """How many jobs have a trial, or will be given one."""
        return self.busy + self._counts[JobState.READYING] + self._counts[JobState.IDLE]

    @property
    def missing(self) -> int:
        """How many more jobs the queue needs, when those that will be idle soon are counted."""
        return len(self.queue) - self._counts[JobState.READYING] - self._counts[JobState.IDLE]

    @property
    def spare(self) -> list[Job]:
        """Those without a trial; empty at once when there are none."""
        if not self._counts[JobState.READYING] + self._counts[JobState.IDLE]:
            return []
        return [job for job in self.live.values() if job.state in (JobState.READYING, JobState.IDLE)]

    def _note_all_idle(self, job: Job) -> None:
        if len(job.idle_tasks) >= self.tasks:
            self._move(job, JobEvent.KEEPERS_IDLE)

    def _move(self, job: Job, event: JobEvent) -> None:
        before, job.state = job.state, NEXT[job.state, event]
        self._counts[before] -= 1
        self._counts[job.state] += 1
        if job.state is not JobState.IDLE:
            self._idle.pop(job.job_id, None)
        else:
            self._idle.setdefault(job.job_id)
        self._note_room(job)

    def _note_room(self, job: Job) -> None:
        self._forget_room(job)
        if job.state is JobState.BUSY and len(job.next_ids) < MOST_AHEAD:
            self._busy[len(job.next_ids)][job.job_id] = None

    def _forget_room(self, job: Job) -> None:
        for jobs in self._busy:
            jobs.pop(job.job_id, None)
