"""The attempts of one trial that the manager has registered, and which of them counts.

Each task starts its own attempts. The attempt of a task with the latest start counts, independent of the order of registration,
but never one that was declared lost. The number is for users: the attempts of a task count from 0 in order of registration.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trial_keeper.wire.attempt_ids import is_legacy_number, sort_key
from trial_keeper.wire.messages import AttemptKey


@dataclass(slots=True)
class RegisteredAttempt:
    """One attempt, its number, and whether it was declared lost."""

    key: AttemptKey
    number: int
    is_lost: bool = False


@dataclass(slots=True)
class Attempts:
    """All registered attempts of one trial, in the order of their registration."""

    registered: list[RegisteredAttempt] = field(default_factory=list)

    def register(self, key: AttemptKey) -> RegisteredAttempt | None:
        """Register an attempt and return it with its new number; None if it is already registered."""
        if self.find(key) is not None:
            return None
        number = 1 + max((each.number for each in self._of_task(key.task)), default=-1)
        attempt = RegisteredAttempt(key, number)
        self.registered.append(attempt)
        return attempt

    def find(self, key: AttemptKey) -> RegisteredAttempt | None:
        """The registered attempt; None if it is not registered."""
        for each in self.registered:
            if each.key == key:
                return each
        return None

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
        """The ids of registered attempts of version 0.6, which signed nothing."""
        ids = (each.key.attempt_id for each in self.registered)
        return frozenset(filter(is_legacy_number, ids))

    def mark_lost(self, key: AttemptKey) -> list[RegisteredAttempt]:
        """Declare one attempt lost. Returns it, unless it was already lost."""
        return self._mark_lost(each for each in self.registered if each.key == key)

    def mark_all_lost(self) -> list[RegisteredAttempt]:
        """Declare every attempt lost. Returns those that were not already lost."""
        return self._mark_lost(self.registered)

    def _mark_lost(self, attempts: Iterable[RegisteredAttempt]) -> list[RegisteredAttempt]:
        lost = [each for each in attempts if not each.is_lost]
        for each in lost:
            each.is_lost = True
        return lost

    def _of_task(self, task: str) -> list[RegisteredAttempt]:
        return [each for each in self.registered if each.key.task == task]
