"""When a job is over, and whether it or one of its tasks is tried again.

Source: FrameworkController v1 (frameworkAttemptCompletionPolicy, retryPolicy with fancyRetryPolicy); microsoft/pai v1.8.1 for
what OpenPAI writes there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nni_manager.local_openpai.core.exits import STOPPED, Behavior, Exit, exit_spec


@dataclass(frozen=True, slots=True)
class RetryCounts:
    """Retries by who caused them. Those of `user` alone count against the limit of the job's author."""

    user: int = 0
    platform: int = 0
    resource: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.user + self.platform + self.resource


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try again: -2 always, also after a success; -1 after any failure; else so many times after failures.

    `is_fancy`: what the platform caused is tried again without being counted, and what no other try can mend is not.
    """

    is_fancy: bool
    max_retries: int


def retried(
    policy: RetryPolicy, code: int, counts: RetryCounts, most_platform_retries: int
) -> RetryCounts | None:
    """The counts after one more try; None when there is none.

    FrameworkController knows no limit for what the platform caused; here it is `most_platform_retries`.
    """
    if code in STOPPED:
        return None
    behavior = exit_spec(code).behavior
    if policy.is_fancy:
        if behavior in (Behavior.TRANSIENT, Behavior.TRANSIENT_CONFLICT):
            if counts.platform + counts.resource >= most_platform_retries:
                return None
            if behavior is Behavior.TRANSIENT:
                return replace(counts, platform=counts.platform + 1)
            return replace(counts, resource=counts.resource + 1)
        if behavior is Behavior.PERMANENT:
            return None
    is_wanted = (
        policy.max_retries == -2
        or (code != 0 and policy.max_retries == -1)
        or (code != 0 and counts.user < policy.max_retries)
    )
    return replace(counts, user=counts.user + 1) if is_wanted else None


@dataclass(frozen=True, slots=True)
class CompletionPolicy:
    """How many failed tasks of a role fail the job, and how many succeeded ones make it a success; below 1: never."""

    min_failed: int
    min_succeeded: int


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why an attempt of a job is over, and the task that made it so. Role and index are None where no single task did."""

    message: str
    role: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A task that has ended for good."""

    role: str
    index: int
    exit: Exit


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt of a job ends, and why."""

    exit: Exit
    trigger: Trigger


def verdict(
    policies: Iterable[tuple[str, CompletionPolicy]], tasks: int, ends: Sequence[TaskEnd]
) -> Verdict | None:
    """What the ends, in their order, make of an attempt of so many tasks; None while it is open.

    The first end that fulfils its role's policy decides. When all tasks have ended and none did, the attempt is a success,
    whatever became of them: that is what disabling minFailedInstances says.
    """
    by_role = dict(policies)
    failed: Counter[str] = Counter()
    succeeded: Counter[str] = Counter()
    for end in ends:
        policy = by_role[end.role]
        if end.exit.code == 0:
            succeeded[end.role] += 1
            if 1 <= policy.min_succeeded <= succeeded[end.role]:
                return Verdict(end.exit, _trigger(end, "Succeeded", succeeded, policy.min_succeeded))
        else:
            failed[end.role] += 1
            if 1 <= policy.min_failed <= failed[end.role]:
                return Verdict(end.exit, _trigger(end, "Failed", failed, policy.min_failed))
    if len(ends) < tasks:
        return None
    message = (
        f"CompletedTaskCount {len(ends)} has reached TotalTaskCount {tasks} in the job, "
        "and no completion policy of a task role was fulfilled before"
    )
    return Verdict(Exit(0), Trigger(message))


def _trigger(end: TaskEnd, word: str, counted: Counter[str], limit: int) -> Trigger:
    message = f"{word}TaskCount {counted[end.role]} has reached Min{word}TaskCount {limit} in the TaskRole"
    return Trigger(message, end.role, end.index)
