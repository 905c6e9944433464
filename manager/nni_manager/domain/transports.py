"""Tracks whether keepers are alive, and by which transport each task's streams arrive: gRPC, or files on the shared storage.

Theory of operation. A task with a connected keeper uses GRPC and needs no polling. A task without a connection for
`RECONNECT_GRACE_S` is polled on the shared storage; once something of it is found there, it uses SHARED_STORAGE. A keeper that
connects puts its task back on GRPC. Both transports share the durable offsets, so a poll that overlaps a connection is harmless.

Polls are handed out one at a time, and each job has at most one in progress, so the caller limits concurrency. A job is polled
every `POLL_INTERVAL_S`, or less often when many jobs are unconnected: at most `MAX_POLLS_PER_S` in total. Times are monotonic.

A keeper that cannot reach its manager cannot report this problem, and its trial would wait forever without a message. So jobs
whose keepers have never connected are kept in the order of submission, and the first of them is checked.
"""

from dataclasses import field
from enum import Enum
from heapq import heappop, heappush

from nni_manager.domain.state_tables import with_ignored
from trial_keeper.frozen_dataclass import dataclass

# A keeper makes its first five reconnect attempts within 6 s.
RECONNECT_GRACE_S = 5.0
# Shared storage shows new bytes up to 3 s late, so polling more often gains nothing.
POLL_INTERVAL_S = 2.0
# One poll is about ten file system calls. A thousand unconnected trials are each polled every 20 s.
MAX_POLLS_PER_S = 50.0
# Without a connection for this long, users are shown a problem. A container with a cached image starts sooner.
MAX_SILENCE_S = 60.0


class Transport(str, Enum):
    """How a task's streams reach the manager."""

    NONE = "none"
    """Nothing of the task has reached this manager."""
    GRPC = "grpc"
    """Its keeper sends them."""
    SHARED_STORAGE = "shared_storage"
    """The manager reads them from the files of the workspace, because there is no connection."""


class TransportEvent(Enum):
    """The events of a task's transport."""

    CONNECTED = "connected"
    LOST = "lost"
    FOUND = "found"


_T, _E = Transport, TransportEvent
CHANGES: dict[tuple[Transport, TransportEvent], Transport] = {
    (_T.NONE, _E.CONNECTED): _T.GRPC,
    (_T.NONE, _E.FOUND): _T.SHARED_STORAGE,
    (_T.GRPC, _E.LOST): _T.NONE,
    (_T.SHARED_STORAGE, _E.CONNECTED): _T.GRPC,
}
# Events that leave the state as it is.
IGNORED: frozenset[tuple[Transport, TransportEvent]] = frozenset(
    {
        (_T.GRPC, _E.CONNECTED),  # reconnected before the end of the previous stream was detected
        (_T.GRPC, _E.FOUND),  # by a poll that overlapped the connection
        (_T.SHARED_STORAGE, _E.FOUND),
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The transport of a job and the time of its last contact; None: never.

    With several tasks, `transport` is the worst: SHARED_STORAGE before GRPC, and NONE only if no task was ever seen. `at_s`: the
    oldest contact among the tasks.
    """

    transport: Transport = Transport.NONE
    at_s: float | None = None


@dataclass(slots=True)
class _Task:
    silent_since_s: float
    transport: Transport = Transport.NONE
    last_contact_s: float | None = None


@dataclass(slots=True)
class _Job:
    tracked_since_s: float
    tasks: dict[str, _Task] = field(default_factory=dict)
    poll_at_s: float | None = None
    """When the job is polled next; None while no poll is needed or one is in progress."""
    is_polling: bool = False


@dataclass(slots=True)
class TransportTracker:
    """The transports of all jobs that may have keepers. No operation iterates over all jobs.

    `tasks`: the number of tasks of each job. `needs_network`: trials can be dispatched to jobs only over gRPC. `addresses`: the
    addresses to which keepers connect.
    """

    tasks: int = 1
    needs_network: bool = False
    addresses: tuple[str, ...] = ()
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _due: list[tuple[float, str]] = field(default_factory=list)
    _next_poll_at_s: float = 0.0
    _silent: dict[str, float] = field(default_factory=dict)
    """The time of submission of the jobs whose keepers have not connected, in the order of submission."""
    _unreachable: dict[str, float] = field(default_factory=dict)
    """The same, for jobs whose keepers were found on the shared storage."""
    _last_problem: str = ""

    # ---- events

    def track(self, job_id: str, now_s: float, *, expects_keeper: bool = True) -> None:
        """Start tracking a job that may exist; idempotent. `expects_keeper`: none of its keepers has ever connected."""
        if job_id not in self._jobs:
            self._jobs[job_id] = _Job(now_s)
            self._schedule_poll(job_id, now_s + RECONNECT_GRACE_S)
            if expects_keeper:
                self._silent[job_id] = now_s

    def expect_no_keeper(self, job_id: str) -> None:
        """Stop reporting the missing connection of a job: a keeper has connected, or need not connect."""
        self._silent.pop(job_id, None)
        self._unreachable.pop(job_id, None)

    def forget(self, job_id: str) -> None:
        """Stop tracking a job that has ended."""
        self.expect_no_keeper(job_id)
        self._jobs.pop(job_id, None)

    def connected(self, job_id: str, task: str, now_s: float) -> None:
        """Record that a keeper connected, perhaps before `track` was called for its job."""
        self.track(job_id, now_s)
        self.expect_no_keeper(job_id)
        job = self._jobs[job_id]
        self._apply(job, task, TransportEvent.CONNECTED).last_contact_s = now_s
        if self._is_connected(job):
            job.poll_at_s = None

    def received(self, job_id: str, task: str, now_s: float) -> None:
        """Record that a message of the keeper arrived."""
        job = self._jobs.get(job_id)
        if job is not None and task in job.tasks:
            job.tasks[task].last_contact_s = now_s

    def lost(self, job_id: str, task: str, now_s: float) -> None:
        """Record that the stream of a connected keeper ended. Ignored for a job that has ended."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._apply(job, task, TransportEvent.LOST).silent_since_s = now_s
            self._schedule_poll(job_id, now_s + RECONNECT_GRACE_S)

    def found(self, job_id: str, task: str, now_s: float, *, has_new_data: bool) -> None:
        """Record that the shared storage shows a started task."""
        job = self._jobs.get(job_id)
        if job is not None:
            if job_id in self._silent:
                self._unreachable[job_id] = self._silent.pop(job_id)
            found = self._apply(job, task, TransportEvent.FOUND)
            if has_new_data or found.last_contact_s is None:
                found.last_contact_s = now_s

    # ---- decisions

    def polls_storage(self, job_id: str, task: str, now_s: float) -> bool:
        """True if the task's streams are to be read from the shared storage."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        known = job.tasks.get(task)
        if known is None:
            return now_s >= job.tracked_since_s + RECONNECT_GRACE_S
        return known.transport is not Transport.GRPC and now_s >= known.silent_since_s + RECONNECT_GRACE_S

    def is_all_grpc(self, job_id: str) -> bool:
        """True if all keepers of the job are connected."""
        job = self._jobs.get(job_id)
        return job is not None and self._is_connected(job)

    def next_poll(self, now_s: float) -> str | None:
        """The job to poll now, or None. The caller reports the end of the poll with `polled`."""
        while self._due and self._due[0][0] <= now_s and now_s >= self._next_poll_at_s:
            at_s, job_id = heappop(self._due)
            job = self._jobs.get(job_id)
            if job is None or job.poll_at_s != at_s:
                continue
            job.poll_at_s = None
            if not self._is_connected(job):
                job.is_polling = True
                self._next_poll_at_s = now_s + 1 / MAX_POLLS_PER_S
                return job_id
        return None

    def polled(self, job_id: str, now_s: float) -> None:
        """Record that a poll has ended."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.is_polling = False
            self._schedule_poll(job_id, now_s + POLL_INTERVAL_S)

    def next_poll_at_s(self) -> float | None:
        """The earliest time at which `next_poll` may return a job; None: not before the next event."""
        return max(self._due[0][0], self._next_poll_at_s) if self._due else None

    # ---- queries

    def last_seen(self, job_id: str) -> LastSeen:
        """The transport and the last contact of a job."""
        job = self._jobs.get(job_id)
        tasks = [] if job is None else list(job.tasks.values())
        used = {task.transport for task in tasks}
        worst_first = (Transport.SHARED_STORAGE, Transport.GRPC)
        transport = next((each for each in worst_first if each in used), Transport.NONE)
        contacts = [task.last_contact_s for task in tasks if task.last_contact_s is not None]
        return LastSeen(transport, min(contacts, default=None))

    def problem(self, now_s: float) -> str:
        """The most urgent of `problems`; empty: none."""
        return next(iter(self.problems(now_s)), "")

    def problems(self, now_s: float) -> list[str]:
        """Messages for users: a job has been silent for too long, keepers cannot connect. The texts change only with that job."""
        found: list[str] = []
        addresses = " or ".join(self.addresses)
        job_id = _first_overdue(self._silent, now_s)
        if job_id is not None:
            without = (
                ". With reuse: true, jobs get trials only over the network, and end after two minutes without a trial; if the "
                "network cannot be opened, set reuse: false"
                if self.needs_network
                else ""
            )
            found.append(
                f"no keeper has connected within {MAX_SILENCE_S:g} s after job {job_id} was submitted; keepers use {addresses}; "
                f"check whether the cluster has started the job, then run `trial-keeper doctor` in its container{without}"
            )
        if _first_overdue(self._unreachable, now_s) is not None:
            # One text for all jobs: a firewall that blocks one keeper blocks the others as well.
            found.append(
                f"keepers cannot reach {addresses}; their reports are read from the shared storage, some seconds late, and none "
                "is lost. To use the network, let containers connect to that address"
            )
        return found

    def new_problem(self, now_s: float) -> str:
        """The problem if it differs from that of the previous call, else an empty string."""
        problem, before = self.problem(now_s), self._last_problem
        self._last_problem = problem
        return problem if problem != before else ""

    # ---- internals

    def _apply(self, job: _Job, name: str, event: TransportEvent) -> _Task:
        task = job.tasks.setdefault(name, _Task(job.tracked_since_s))
        task.transport = TRANSITIONS[task.transport, event]
        return task

    def _is_connected(self, job: _Job) -> bool:
        return sum(task.transport is Transport.GRPC for task in job.tasks.values()) >= self.tasks

    def _schedule_poll(self, job_id: str, at_s: float) -> None:
        job = self._jobs[job_id]
        if job.poll_at_s is None and not job.is_polling and not self._is_connected(job):
            job.poll_at_s = at_s
            heappush(self._due, (at_s, job_id))


def _first_overdue(submitted_at_s: dict[str, float], now_s: float) -> str | None:
    """The first job, which has waited longest; None if it has not waited for `MAX_SILENCE_S`."""
    longest = next(iter(submitted_at_s), None)
    is_overdue = longest is not None and now_s - submitted_at_s[longest] >= MAX_SILENCE_S
    return longest if is_overdue else None
