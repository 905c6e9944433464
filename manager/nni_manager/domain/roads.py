"""By which road the manager hears of each task: the keeper's stream, or its files on the shared storage.

Theory of operation. A task whose keeper is connected is on the road STREAM, and costs nothing here. One whose keeper is not, and
has not been for `PATIENCE_S`, is looked for in the workspace; once something of it is found there it is on the road MOUNT. When
its keeper connects it is on the road STREAM again, at the offsets that both roads share: which of them brought a byte does not
matter, so a look that is under way when the stream takes over does no harm.

Looks are given out one at a time and each job has at most one, so whoever does them decides how many are under way; a job is
looked at every `LOOK_EVERY_S`, and more seldom when there are so many silent ones that the looks would be more than
`LOOKS_PER_S`. Times are monotonic.
"""

from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

# A lost link is mostly back after a few tries of its keeper, the first five of which come within 6 s.
PATIENCE_S = 5.0
# Shared storage shows what others write up to 3 s late, so more looks would not show more.
LOOK_EVERY_S = 2.0
# One is about ten calls of the file system. A thousand silent trials are so looked at every 20 s.
LOOKS_PER_S = 50.0


class Road(str, Enum):
    """How a task is heard."""

    NONE = "none"
    STREAM = "stream"
    MOUNT = "mount"


class RoadEvent(Enum):
    """What can happen to a task's road."""

    CONNECTED = "connected"
    LOST = "lost"
    FOUND = "found"


_R, _E = Road, RoadEvent
NEXT: dict[tuple[Road, RoadEvent], Road] = {
    (_R.NONE, _E.CONNECTED): _R.STREAM,
    (_R.NONE, _E.FOUND): _R.MOUNT,
    (_R.STREAM, _E.CONNECTED): _R.STREAM,  # anew, before the end of its last stream was noticed
    (_R.STREAM, _E.FOUND): _R.STREAM,  # by a look that was under way when it connected
    (_R.STREAM, _E.LOST): _R.NONE,
    (_R.MOUNT, _E.CONNECTED): _R.STREAM,
    (_R.MOUNT, _E.FOUND): _R.MOUNT,
}


@dataclass(frozen=True, slots=True)
class Contact:
    """How a job is heard, and when it was last; None: never.

    Of several tasks, the road is that of the worst off: MOUNT before STREAM, and NONE only if no task has been heard. The
    contact is that of the task which has been quiet for longest.
    """

    road: Road = Road.NONE
    at_s: float | None = None


@dataclass(slots=True)
class _Task:
    silent_since_s: float
    road: Road = Road.NONE
    contact_at_s: float | None = None


@dataclass(slots=True)
class _Job:
    watched_since_s: float
    tasks: dict[str, _Task] = field(default_factory=dict)
    look_at_s: float | None = None
    """When it is looked at next; None while it need not be, or is being looked at."""
    is_looked_at: bool = False


@dataclass(slots=True)
class Roads:
    """The roads of all jobs that may have keepers. `tasks` is how many each has.

    Nothing here looks at all jobs.
    """

    tasks: int = 1
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _due: list[tuple[float, str]] = field(default_factory=list)
    _next_look_at_s: float = 0.0

    # ---- what happens

    def watch(self, job_id: str, now_s: float) -> None:
        """The cluster has the job: from now on its keepers may connect. Said again it changes nothing."""
        if job_id not in self._jobs:
            self._jobs[job_id] = _Job(now_s)
            self._look_later(job_id, now_s + PATIENCE_S)

    def forget(self, job_id: str) -> None:
        """The job is gone."""
        self._jobs.pop(job_id, None)

    def connected(self, job_id: str, task: str, now_s: float) -> None:
        """A keeper of the job has connected. The job may be one that nobody has said to watch yet."""
        self.watch(job_id, now_s)
        job = self._jobs[job_id]
        self._happened(job, task, RoadEvent.CONNECTED).contact_at_s = now_s
        if self._is_heard(job):
            job.look_at_s = None

    def heard(self, job_id: str, task: str, now_s: float) -> None:
        """The keeper has said something."""
        job = self._jobs.get(job_id)
        if job is not None and task in job.tasks:
            job.tasks[task].contact_at_s = now_s

    def lost(self, job_id: str, task: str, now_s: float) -> None:
        """The stream of a connected keeper is gone. Of a job that is gone too it is no matter."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._happened(job, task, RoadEvent.LOST).silent_since_s = now_s
            self._look_later(job_id, now_s + PATIENCE_S)

    def found(self, job_id: str, task: str, now_s: float, *, has_news: bool) -> None:
        """The workspace shows that the task has begun, and perhaps something that was not known."""
        job = self._jobs.get(job_id)
        if job is not None:
            found = self._happened(job, task, RoadEvent.FOUND)
            if has_news or found.contact_at_s is None:
                found.contact_at_s = now_s

    # ---- what to do

    def uses_mount(self, job_id: str, task: str, now_s: float) -> bool:
        """Whether what the workspace shows of the task is to be taken."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        known = job.tasks.get(task)
        if known is None:
            return now_s >= job.watched_since_s + PATIENCE_S
        return known.road is not Road.STREAM and now_s >= known.silent_since_s + PATIENCE_S

    def is_all_stream(self, job_id: str) -> bool:
        """Whether all keepers of the job are connected."""
        job = self._jobs.get(job_id)
        return job is not None and self._is_heard(job)

    def next_look(self, now_s: float) -> str | None:
        """The job to look at now, if there is one; `looked` is to follow."""
        while self._due and self._due[0][0] <= now_s and now_s >= self._next_look_at_s:
            at_s, job_id = heappop(self._due)
            job = self._jobs.get(job_id)
            if job is None or job.look_at_s != at_s:
                continue
            job.look_at_s = None
            if not self._is_heard(job):
                job.is_looked_at = True
                self._next_look_at_s = now_s + 1 / LOOKS_PER_S
                return job_id
        return None

    def looked(self, job_id: str, now_s: float) -> None:
        """The look is over."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.is_looked_at = False
            self._look_later(job_id, now_s + LOOK_EVERY_S)

    def next_look_at_s(self) -> float | None:
        """When `next_look` may have one; None: not before something happens."""
        return max(self._due[0][0], self._next_look_at_s) if self._due else None

    # ---- what others may look at

    def contact(self, job_id: str) -> Contact:
        """How the job is heard."""
        job = self._jobs.get(job_id)
        tasks = [] if job is None else list(job.tasks.values())
        roads = {task.road for task in tasks}
        road = next((road for road in (Road.MOUNT, Road.STREAM) if road in roads), Road.NONE)
        contacts = [task.contact_at_s for task in tasks if task.contact_at_s is not None]
        return Contact(road, min(contacts, default=None))

    # ---- inside

    def _happened(self, job: _Job, name: str, event: RoadEvent) -> _Task:
        task = job.tasks.setdefault(name, _Task(job.watched_since_s))
        task.road = NEXT[task.road, event]
        return task

    def _is_heard(self, job: _Job) -> bool:
        return sum(task.road is Road.STREAM for task in job.tasks.values()) >= self.tasks

    def _look_later(self, job_id: str, at_s: float) -> None:
        job = self._jobs[job_id]
        if job.look_at_s is None and not job.is_looked_at and not self._is_heard(job):
            job.look_at_s = at_s
            heappush(self._due, (at_s, job_id))
