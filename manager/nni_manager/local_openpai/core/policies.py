"""Completion and retry policies of jobs and tasks.

Source: FrameworkController v1 (frameworkAttemptCompletionPolicy, retryPolicy with fancyRetryPolicy); microsoft/pai v1.8.1 for
the values that OpenPAI sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nni_manager.local_openpai.core.exits import STOPPED, Behavior, TaskExit, exit_spec
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RetryCounts:
    """Retries by cause. Only those of `user` count against the limit in the job file."""

    user: int = 0
    platform: int = 0
    resource: int = 0

    @property
    def total(self) -> int:
        """The number of all retries."""
        return self.user + self.platform + self.resource


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The maximum number of retries after failures; -1 for no limit, -2 to retry always, even after a success.

    `is_fancy`: platform failures are retried without being counted; permanent failures are not retried.
    """

    is_fancy: bool
    max_retries: int


def retried(
    policy: RetryPolicy, code: int, counts: RetryCounts, most_platform_retries: int
) -> RetryCounts | None:
    """The counts after one more retry; None if there is no retry.

    FrameworkController has no limit for retries caused by the platform; here it is `most_platform_retries`.
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
    may_retry = policy.max_retries == -2 or (
        code != 0 and (policy.max_retries == -1 or counts.user < policy.max_retries)
    )
    return replace(counts, user=counts.user + 1) if may_retry else None


@dataclass(frozen=True, slots=True)
class CompletionPolicy:
    """The numbers of failed and of succeeded tasks of a role at which the job ends. A number below 1 disables the limit."""

    min_failed: int
    min_succeeded: int


@dataclass(frozen=True, slots=True)
class Trigger:
    """The reason why an attempt of a job ended, and the deciding task. Role and index are None if no single task decided."""

    message: str
    role: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A task that has ended and is not retried."""

    role: str
    index: int
    exit: TaskExit


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an attempt of a job, and its reason."""

    exit: TaskExit
    trigger: Trigger


def verdict(
    policies: Iterable[tuple[str, CompletionPolicy]], tasks: int, ends: Sequence[TaskEnd]
) -> Verdict | None:
    """The verdict on an attempt with `tasks` tasks, from the ends in their order; None while it is undecided.

    The first end that fulfils its role's policy decides. If all tasks end without fulfilling a policy, the attempt succeeds, even
    with failed tasks: a disabled minFailedInstances has this meaning.
    """
    by_role = dict(policies)
    counts: Counter[tuple[str, str]] = Counter()
    for end in ends:
        policy = by_role[end.role]
        kind, limit = (
            ("Succeeded", policy.min_succeeded) if end.exit.code == 0 else ("Failed", policy.min_failed)
        )
        counts[end.role, kind] += 1
        if 1 <= limit <= (count := counts[end.role, kind]):
            message = f"{kind}TaskCount {count} has reached Min{kind}TaskCount {limit} in the TaskRole"
            return Verdict(end.exit, Trigger(message, end.role, end.index))
    if len(ends) < tasks:
        return None
    message = (
        f"CompletedTaskCount {len(ends)} has reached TotalTaskCount {tasks} in the job, "
        "and no completion policy of a task role was fulfilled before"
    )
    return Verdict(TaskExit(0), Trigger(message))
