"""When a trial that runs in several tasks is over: the cluster's completion policy, applied to what keepers tell.

Source: OpenPAI 1.8 and FrameworkController v1, frameworkAttemptCompletionPolicy.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trial_keeper.wire.messages import TrialEnded
from trial_keeper.wire.reasons import ExitReason


@dataclass(frozen=True, slots=True)
class TaskRole:
    """The tasks of a job that do the same. They are named `<role>-0`, `<role>-1`, …

    So many failed tasks fail the trial, so many succeeded ones make it a success at once; below 1 means never.
    """

    name: str
    tasks: int = 1
    min_failed_tasks: int = 1
    min_succeeded_tasks: int = 1


# Outside OpenPAI and FrameworkController a keeper takes itself for this.
ONE_TASK = (TaskRole("main"),)


@dataclass(frozen=True, slots=True)
class Completion:
    """The roles of the jobs of one experiment."""

    roles: tuple[TaskRole, ...] = ONE_TASK

    @property
    def tasks(self) -> int:
        """How many tasks, and so keepers, a job has."""
        return sum(role.tasks for role in self.roles)

    def decisive(self, ends: Iterable[TrialEnded]) -> TrialEnded | None:
        """The end that ends the trial; None while other tasks may still decide. `ends` are in the order they were told.

        When all tasks have ended and no role's policy was met, the trial is a success if one task was: the policy says which
        failures matter, and none of them did. A task that was stopped because the trial was over counts as neither: a manager
        that is told all ends again decides again as the one before it did.
        """
        policies = {role.name: role for role in self.roles}
        failed: Counter[str] = Counter()
        succeeded: Counter[str] = Counter()
        told = list(ends)
        for ended in told:
            name = ended.key.task.rpartition("-")[0]
            if ended.reason is ExitReason.TRIAL_OVER:
                continue
            role = policies.get(name, TaskRole(name))
            counted = succeeded if ended.reason is ExitReason.SUCCEEDED else failed
            counted[name] += 1
            if 1 <= role.min_failed_tasks <= failed[name] or 1 <= role.min_succeeded_tasks <= succeeded[name]:
                return ended
        if len(told) < self.tasks:
            return None
        by_themselves = [ended for ended in told if ended.reason is not ExitReason.TRIAL_OVER] or told
        return next((ended for ended in told if ended.reason is ExitReason.SUCCEEDED), by_themselves[-1])
