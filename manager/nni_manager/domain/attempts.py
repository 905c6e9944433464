"""The attempts of one trial: which of them counts, and the phase of each.

Each task starts its own attempts. The attempt of a task with the latest start counts, in whatever order attempts are registered.
A lost attempt never counts. Numbers are for users: the attempts of a task are numbered from 0 in the order of registration.
"""

from dataclasses import dataclass, field
from enum import Enum

from nni_manager.domain.state_tables import changes_by_event, with_ignored
from trial_keeper.wire.attempt_ids import is_legacy_number, sort_key
from trial_keeper.wire.messages import AttemptKey, TrialEnded


class AttemptPhase(Enum):
    """The phase of an attempt, as reported to this manager. Only LOST is stored."""

    REGISTERED = "registered"
    """A keeper has registered it; its command has not started."""
    RUNNING = "running"
    """Its command runs."""
    ENDED = "ended"
    """Its command has ended; its last bytes may still be in transit."""
    DELIVERED = "delivered"
    """Every byte of it is durable."""
    LOST = "lost"
    """Declared lost: nothing of it counts any more, except up to a checkpoint from which another attempt continues."""


HAVE_ENDED = frozenset({AttemptPhase.ENDED, AttemptPhase.DELIVERED})
UNDELIVERED = frozenset({AttemptPhase.RUNNING, AttemptPhase.ENDED})
"""The phases of a started attempt whose last byte has not arrived."""
HAVE_STARTED = HAVE_ENDED | UNDELIVERED


class AttemptReport(Enum):
    """The events of a registered attempt."""

    STARTED = "started"
    ENDED = "ended"
    DELIVERED = "delivered"
    DISCARDED = "discarded"
    LOST = "lost"


_P, _R = AttemptPhase, AttemptReport
CHANGES: dict[tuple[AttemptPhase, AttemptReport], AttemptPhase] = changes_by_event(
    {
        _R.STARTED: {_P.RUNNING: (_P.REGISTERED,)},
        # A command that could not be started reports only an end.
        _R.ENDED: {_P.ENDED: (_P.REGISTERED, _P.RUNNING)},
        _R.DELIVERED: {_P.DELIVERED: (_P.ENDED,)},
        # Earlier reports of the attempt do not count: the cluster runs the whole job again, or the keeper is gone.
        _R.DISCARDED: {_P.REGISTERED: (_P.RUNNING, _P.ENDED, _P.DELIVERED)},
        _R.LOST: {_P.LOST: (_P.REGISTERED, _P.RUNNING, _P.ENDED, _P.DELIVERED)},
    }
)
# Reports that leave the phase as it is.
IGNORED: frozenset[tuple[AttemptPhase, AttemptReport]] = frozenset(
    {
        (_P.RUNNING, _R.STARTED),
        (_P.DELIVERED, _R.DELIVERED),  # repeated after a lost connection
        (_P.REGISTERED, _R.DISCARDED),
        (_P.LOST, _R.DISCARDED),
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)


@dataclass(slots=True)
class RegisteredAttempt:
    """One attempt of one task, with its number."""

    key: AttemptKey
    number: int
    phase: AttemptPhase = AttemptPhase.REGISTERED
    end: TrialEnded | None = None
    """The reported end, in the phases ENDED and DELIVERED."""

    def apply(self, report: AttemptReport) -> None:
        """Change the phase by the table.

        Raises:
            KeyError: the report is not possible in this phase; a bug.
        """
        self.phase = TRANSITIONS[self.phase, report]
        if self.phase not in HAVE_ENDED:
            self.end = None

    @property
    def is_lost(self) -> bool:
        """True if the attempt was declared lost."""
        return self.phase is AttemptPhase.LOST


@dataclass(slots=True)
class Attempts:
    """All registered attempts of one trial, in the order of their registration."""

    registered: list[RegisteredAttempt] = field(default_factory=list)

    def register(self, key: AttemptKey) -> RegisteredAttempt | None:
        """Register an attempt and return it with its new number; None if it is already registered."""
        return None if self.find(key) is not None else self.add(key)

    def add(self, key: AttemptKey) -> RegisteredAttempt:
        """Add a new attempt with the next number of its task."""
        number = 1 + max((each.number for each in self._of_task(key.task)), default=-1)
        attempt = RegisteredAttempt(key, number)
        self.registered.append(attempt)
        return attempt

    def find(self, key: AttemptKey) -> RegisteredAttempt | None:
        """The registered attempt; None if it is not registered."""
        return next((each for each in self.registered if each.key == key), None)

    def current(self, task: str) -> RegisteredAttempt | None:
        """The attempt of a task that counts; None if none does."""
        valid = (each for each in self._of_task(task) if not each.is_lost)
        return max(valid, key=lambda each: sort_key(each.key.attempt_id), default=None)

    def is_lost(self, key: AttemptKey) -> bool:
        """True if the attempt was declared lost."""
        found = self.find(key)
        return found is not None and found.is_lost

    def may_count(self, key: AttemptKey) -> bool:
        """True for the current attempt of its task, and for an attempt that would replace it."""
        found = self.find(key)
        if found is not None and (found.is_lost or len(self.registered) == 1):
            return not found.is_lost
        current = self.current(key.task)
        return current is None or sort_key(key.attempt_id) >= sort_key(current.key.attempt_id)

    @property
    def unsigned_ids(self) -> frozenset[str]:
        """The ids of registered attempts of version 0.6, which did not sign attempts."""
        ids = (each.key.attempt_id for each in self.registered)
        return frozenset(filter(is_legacy_number, ids))

    def mark_lost(self, key: AttemptKey | None = None) -> list[RegisteredAttempt]:
        """Declare the attempt `key` lost; None: every attempt. Returns the attempts that were not lost before."""
        lost = [each for each in self.registered if key in (None, each.key) and not each.is_lost]
        for each in lost:
            each.apply(AttemptReport.LOST)
        return lost

    def _of_task(self, task: str) -> list[RegisteredAttempt]:
        return [each for each in self.registered if each.key.task == task]
