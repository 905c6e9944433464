"""Decides how many trials to request from the tuner, and when to stop: at a limit, or when the tuner is exhausted.

Each free slot becomes a request. If the tuner is not ready, the request is deferred and sent again with the same sequence id,
when a trial ends or another request is answered. When neither can happen, the tuner is exhausted.

Times are monotonic.
"""

from bisect import insort
from dataclasses import field
from math import inf

from nni_manager.domain.lost_jobs import LOST_NODE_TIMEOUT_S
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an experiment; all may change while it runs. None: no limit.

    `max_trials` and `max_duration_s` limit the start of trials; running trials continue. `max_trial_duration_s`: the longest
    duration of one attempt. `max_retries`: how often a trial that the cluster lost is started again. `max_preemptions`:
    how often one that the cluster preempted is. `fail_fast`: how many trials may fail by their own fault, before any has
    succeeded, until no more are started; 0: all of them. `lost_node_timeout_s`: how long a node of a job may be not ready.
    """

    concurrency: int
    max_trials: int | None
    max_duration_s: float | None
    max_trial_duration_s: float | None = None
    max_retries: int = 0
    max_preemptions: int = 100
    fail_fast: int = 0
    lost_node_timeout_s: float = LOST_NODE_TIMEOUT_S


@dataclass(slots=True)
class SearchBudget:
    """The limits of an experiment, and their use so far. `active_s`: the seconds counted before `_counting_since_s`."""

    limits: Limits
    active_s: float = 0.0
    asked: int = 0
    """The number of requests that the tuner has not answered."""
    added: int = 0
    """The number of trials, including those that a user proposed."""
    ended: int = 0
    """The number of terminal trials."""
    _counting_since_s: float | None = None
    _next_sequence_id: int = 0
    _unused: list[int] = field(default_factory=list)
    """Sequence ids of requests to which the tuner has given no parameters, in order. The next trials get them."""
    _is_blocked: bool = False
    """True if a request now is useless: nothing has happened since the tuner was not ready."""
    _ended_when_asked: int = 0
    """`ended` at the time of the last request: the answer may predate the end of a trial."""

    # ---- queries

    def duration_s(self, now_s: float) -> float:
        """The seconds spent running so far."""
        return self.active_s + (0.0 if self._counting_since_s is None else now_s - self._counting_since_s)

    @property
    def time_runs_out_at_s(self) -> float | None:
        """When the experiment reaches its time limit; None: there is none, or time does not count."""
        if self._counting_since_s is None or self.limits.max_duration_s is None:
            return None
        return self._counting_since_s + self.limits.max_duration_s - self.active_s

    def is_spent(self, now_s: float) -> bool:
        """True if a limit allows no more requests."""
        return self._is_out_of_time(now_s) or self._trials_left <= 0

    def has_ended_asking(self, now_s: float) -> bool:
        """True if a limit is reached permanently: no open request can be dropped and allow another one."""
        return self._is_out_of_time(now_s) or (self._trials_left <= 0 and not self.asked)

    def _is_out_of_time(self, now_s: float) -> bool:
        limit_s = self.limits.max_duration_s
        return limit_s is not None and self.duration_s(now_s) >= limit_s

    @property
    def _trials_left(self) -> float:
        """The number of trials the tuner may still be asked for."""
        return (inf if self.limits.max_trials is None else self.limits.max_trials) - self.added - self.asked

    @property
    def unfinished(self) -> int:
        """The number of trials that are not terminal."""
        return self.added - self.ended

    @property
    def is_idle(self) -> bool:
        """True if every trial is terminal and every request answered."""
        return self.unfinished == 0 and self.asked == 0

    @property
    def is_exhausted(self) -> bool:
        """True if the tuner was not ready and nothing can change that."""
        return self._is_blocked and self.is_idle

    # ---- requests

    def ask(self, ahead: int) -> list[int]:
        """The sequence ids of new requests to the tuner. `ahead`: the number of trials to prefetch besides `concurrency`."""
        if self._is_blocked:
            return []
        free = self.limits.concurrency + ahead - self.unfinished - self.asked
        count = max(0, int(min(free, self._trials_left)))
        if count:
            self.asked += count
            self._ended_when_asked = self.ended
        return [self._new_sequence_id() for _ in range(count)]

    def note_suggested(self) -> None:
        """Record a trial that answers a request."""
        self.asked -= 1
        self.added += 1
        self._is_blocked = False

    def note_proposed(self) -> int:
        """Record a trial that a user proposed; returns its sequence id."""
        self.added += 1
        return self._new_sequence_id()

    def note_unanswered(self, requests: int = 1) -> None:
        """Record that the tuner dropped requests."""
        self.asked -= requests

    def note_exhausted(self, sequence_id: int) -> None:
        """Record that the tuner has no parameters for a request; the next trial gets its number."""
        self.asked -= 1
        insort(self._unused, sequence_id)

    def note_not_ready(self, sequence_id: int) -> None:
        """Defer a request that the tuner was not ready to answer."""
        self.note_exhausted(sequence_id)
        self._is_blocked = self._ended_when_asked == self.ended

    def note_ended(self) -> None:
        """Record that a trial is terminal: its slot is free."""
        self.ended += 1
        self._is_blocked = False

    def unblock(self) -> None:
        """Allow requests again."""
        self._is_blocked = False

    def restore(self, sequence_id: int, *, is_terminal: bool) -> None:
        """Record a trial of an earlier manager."""
        self.added += 1
        self.ended += is_terminal
        self._next_sequence_id = max(self._next_sequence_id, sequence_id + 1)

    def _new_sequence_id(self) -> int:
        if self._unused:
            return self._unused.pop(0)
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    # ---- the time

    def count_time(self, now_s: float, *, counts: bool) -> None:
        """Start or stop counting time against the limit; no effect if counting is on, or off, already."""
        if counts and self._counting_since_s is None:
            self._counting_since_s = now_s
        elif not counts and self._counting_since_s is not None:
            self.active_s += now_s - self._counting_since_s
            self._counting_since_s = None
