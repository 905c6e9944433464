"""The jobs of an experiment: which of them can be given a trial, and how many more are needed.

A job without reuse is made for one trial and leaves after it. A reused job is made for whichever trial waits longest: once all
its keepers are idle it is given one, and so on, until it leaves. It may be given the next ones ahead, while it is busy: its
keeper then begins them without a word from here. Nothing here looks at all jobs, so a thousand of them cost an event what
ten did.

What was given ahead may turn out long, so it is asked back when a job is idle and nothing else is coming for it: one trial for
each such job, each time the last of those that a job has most of. A keeper that has not begun it gives it back, and it is the
next that is given; one that has does not answer, since its start is told anyway. Between question and answer the trial stays
with its job. It is not asked for again as long as the keeper's stream lasts, and whatever is said on another stream is no
answer; when the stream has ended nobody knows which of the two was lost, and both are forgotten. If it was the answer, the
keeper does not have the trial any more, which then is either asked for again (who does not have a trial gives it back as well)
or given again, when the keeper is idle.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

# So many trials follow the one that a job runs, at most.
MOST_AHEAD = 12


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
    returns_trials: bool = True
    """Whether its keeper, when it was last connected, knew how to give a trial back. Until then it may."""
    is_linked: bool = False
    """Whether its keeper is connected."""
    begun_ids: set[str] = field(default_factory=set)
    """Which of its trials have begun, as far as is known."""
    asked_ids: set[str] = field(default_factory=set)
    """Which of its trials were asked back, and nothing has come of it yet."""
    taken: int = 0
    """How many trials it was given in all and has not given back."""

    @property
    def trial_ids(self) -> tuple[str, ...]:
        """All that it was given and that is not over, in order."""
        return () if self.trial_id is None else (self.trial_id, *self.next_ids)

    @property
    def waiting_ids(self) -> list[str]:
        """Those that wait there behind another, in order.

        The first is about to begin, unless another has: then its keeper has never heard of it, or has given it back.
        """
        behind = self.next_ids if self.begun_ids.isdisjoint(self.next_ids) else self.trial_ids
        return [trial_id for trial_id in behind if trial_id not in self.begun_ids]


class _Ranking:
    """Ids of jobs by a small number each, and among equals by when they got it."""

    def __init__(self, most: int) -> None:
        self.by_number: tuple[dict[str, None], ...] = tuple({} for _ in range(most + 1))
        self._numbers: dict[str, int] = {}

    def put(self, job_id: str, number: int) -> None:
        """The job has this number from now on."""
        self.drop(job_id)
        self._numbers[job_id] = number
        self.by_number[number][job_id] = None

    def drop(self, job_id: str) -> None:
        """The job has none."""
        if (number := self._numbers.pop(job_id, None)) is not None:
            del self.by_number[number][job_id]


@dataclass(slots=True)
class Jobs:
    """The jobs that have not ended, and the trials that wait for one.

    `tasks` is how many keepers a job has, `max_trials` how many trials it may run; 0: any number.
    """

    tasks: int = 1
    max_trials: int = 0
    live: dict[str, Job] = field(default_factory=dict)
    queue: deque[str] = field(default_factory=deque)
    """Trials without a job, in the order in which they are given one."""
    _idle: dict[str, None] = field(default_factory=dict)
    _busy: _Ranking = field(default_factory=lambda: _Ranking(MOST_AHEAD - 1))
    """Busy jobs that may be given a trial ahead, by how many they have that follow."""
    _givers: _Ranking = field(default_factory=lambda: _Ranking(MOST_AHEAD))
    """Busy jobs that may be asked for a trial, by how many they have that were not asked for; the last number means more, too."""
    _returnable: dict[str, int] = field(default_factory=dict)
    """How many trials may come back from each job, asked for or not; only of those whose keepers know how to give back."""
    _returnable_count: int = 0
    _asked_count: int = 0
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
        job.taken += 1
        job.idle_tasks.clear()
        self._move(job, JobEvent.TRIAL_GIVEN)

    def note_idle(self, job: Job, task: str) -> None:
        """The keeper of a task has nothing to run."""
        job.idle_tasks.add(task)
        self._note_all_idle(job)

    def give_ahead(self, job: Job, trial_id: str) -> None:
        """A busy job runs this trial after those it has."""
        job.next_ids.append(trial_id)
        job.taken += 1
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
        job.begun_ids.intersection_update(job.trial_ids)
        self._forget_asked(job, trial_id)
        if job.trial_id is None:
            self._move(job, JobEvent.TRIAL_OVER)
            self._note_all_idle(job)
        else:
            self._note_room(job)

    # ---- what is given back

    def note_begun(self, job_id: str, trial_id: str) -> None:
        """A trial of the job has begun: it is not given back any more."""
        job = self.live.get(job_id)
        if job is None or trial_id not in job.trial_ids:
            return
        job.begun_ids.add(trial_id)
        if trial_id in job.asked_ids:
            self._forget_asked(job, trial_id)
            job.idle_tasks.clear()  # it was said before the trial came
        self._note_giver(job)

    def note_link(self, job: Job, *, is_up: bool, returns_trials: bool = False) -> None:
        """A keeper of the job has connected, or is cut off. What was asked on the stream of before is not answered any more."""
        job.is_linked = is_up
        if is_up:
            job.returns_trials = returns_trials
        elif self.tasks == 1:
            # Whatever it is given would wait for its keeper, which says that it is idle when it is back.
            job.idle_tasks.clear()
            self._idle.pop(job.job_id, None)
        self._forget_asked(job, *job.asked_ids)
        self._note_giver(job)

    def ask_back(self, coming: int) -> list[tuple[Job, str]]:
        """Which trials to ask back of which jobs, from now on: one for each idle job.

        Trials that wait are given to idle jobs first, and so is what is `coming`.
        """
        asked: list[tuple[Job, str]] = []
        wanted = len(self._idle) - coming - len(self.queue) - self._asked_count
        while len(asked) < wanted and (job := self._next_giver()) is not None:
            trial_id = next(each for each in reversed(job.waiting_ids) if each not in job.asked_ids)
            job.asked_ids.add(trial_id)
            self._asked_count += 1
            self._note_giver(job)
            asked.append((job, trial_id))
        return asked

    def take_back(self, job: Job, trial_id: str) -> None:
        """The job has given back a trial that it was asked for: it is the next that is given."""
        job.taken -= 1
        self.free(job.job_id, trial_id)
        self.queue.appendleft(trial_id)

    @property
    def needless(self) -> int:
        """How many of those without a trial are too many for all that could come back, when nothing else comes."""
        return self._counts[JobState.READYING] + self._counts[JobState.IDLE] - self._returnable_count

    def _next_giver(self) -> Job | None:
        """Of the jobs that may be asked for a trial, the one with the most of them."""
        having = reversed(self._givers.by_number[1:])
        return next((self.live[next(iter(jobs))] for jobs in having if jobs), None)

    def _forget_asked(self, job: Job, *trial_ids: str) -> None:
        before = len(job.asked_ids)
        job.asked_ids.difference_update(trial_ids)
        self._asked_count += len(job.asked_ids) - before

    def _note_giver(self, job: Job) -> None:
        self._forget_giver(job)
        if job.state is not JobState.BUSY or not job.returns_trials or self.tasks > 1:
            return
        unasked = sum(trial_id not in job.asked_ids for trial_id in job.waiting_ids)
        self._returnable[job.job_id] = unasked + len(job.asked_ids)
        self._returnable_count += self._returnable[job.job_id]
        if job.is_linked:
            self._givers.put(job.job_id, min(unasked, MOST_AHEAD))

    def _forget_giver(self, job: Job) -> None:
        self._returnable_count -= self._returnable.pop(job.job_id, 0)
        self._givers.drop(job.job_id)

    # ---- who leaves

    def dismiss(self, job: Job) -> None:
        """The job gets no other trial."""
        self._move(job, JobEvent.LEAVE_ASKED)

    def end(self, job_id: str) -> Job | None:
        """The job is gone; None if it had been before."""
        job = self.live.pop(job_id, None)
        if job is not None:
            self._counts[job.state] -= 1
            self._idle.pop(job_id, None)
            self._forget_asked(job, *job.asked_ids)
            self._busy.drop(job_id)
            self._forget_giver(job)
        return job

    def next_idle(self) -> Job | None:
        """The job that has been idle longest."""
        return self.live[next(iter(self._idle))] if self._idle else None

    def next_with_room(self, most_ahead: int = 1) -> Job | None:
        """Of the busy jobs with the fewest trials that follow, fewer than these, the one that has been so for longest."""
        having = self._busy.by_number[:most_ahead]
        return next((self.live[next(iter(jobs))] for jobs in having if jobs), None)

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
        """Those without a trial, and last those that could be given one at once; empty at once when there are none."""
        if not self._counts[JobState.READYING] + self._counts[JobState.IDLE]:
            return []
        free = [job for job in self.live.values() if job.state in (JobState.READYING, JobState.IDLE)]
        return sorted(free, key=lambda job: job.state is JobState.IDLE)

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
        self._note_giver(job)
        has_room = len(job.next_ids) < MOST_AHEAD and not 0 < self.max_trials <= job.taken
        if job.state is JobState.BUSY and has_room:
            self._busy.put(job.job_id, len(job.next_ids))
        else:
            self._busy.drop(job.job_id)
