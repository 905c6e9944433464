"""Decides when a trial with several tasks ends: applies the cluster's completion policy to the reports of keepers.

Source: OpenPAI 1.8 and FrameworkController v1, frameworkAttemptCompletionPolicy.
"""

from collections import Counter
from collections.abc import Iterable

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import TrialEnded
from trial_keeper.wire.reasons import ExitReason


@dataclass(frozen=True, slots=True)
class TaskRole:
    """The tasks of a job with the same role, named `<role>-0`, `<role>-1`, …

    `min_failed_tasks` failed tasks fail the trial at once, `min_succeeded_tasks` succeeded tasks make it succeed; below 1: never.
    """

    name: str
    tasks: int = 1
    min_failed_tasks: int = 1
    min_succeeded_tasks: int = 1


# The role of every keeper outside OpenPAI and FrameworkController.
ONE_TASK = (TaskRole("main"),)


@dataclass(frozen=True, slots=True)
class Completion:
    """The roles of the jobs of one experiment."""

    roles: tuple[TaskRole, ...] = ONE_TASK

    @property
    def tasks(self) -> int:
        """The number of tasks, and therefore of keepers, of a job."""
        return sum(role.tasks for role in self.roles)

    def unreported(self, ends: Iterable[TrialEnded]) -> list[str]:
        """The names of the tasks that are not among these ends."""
        reported = {ended.key.task for ended in ends}
        names = [f"{role.name}-{index}" for role in self.roles for index in range(role.tasks)]
        return [name for name in names if name not in reported]

    def decisive(self, ends: Iterable[TrialEnded], *, are_all: bool = False) -> TrialEnded | None:
        """The end that decides the trial; None while other tasks may still decide. `ends` are in the order of their reports.

        `are_all`: no further task will report its end.

        If all tasks have ended and no role's policy was met, the trial succeeds if any task did: the policy defines which
        failures matter, and none of them occurred. A task that was stopped because the trial had ended has neither
        failed nor succeeded, so a restarted manager that receives all ends again makes the same decision.
        """
        policies = {role.name: role for role in self.roles}
        failed: Counter[str] = Counter()
        succeeded: Counter[str] = Counter()
        reported = list(ends)
        for ended in reported:
            name = ended.key.task.rpartition("-")[0]
            if ended.reason is ExitReason.TRIAL_OVER:
                continue
            role = policies.get(name, TaskRole(name))
            counted = succeeded if ended.reason is ExitReason.SUCCEEDED else failed
            counted[name] += 1
            if 1 <= role.min_failed_tasks <= failed[name] or 1 <= role.min_succeeded_tasks <= succeeded[name]:
                return ended
        if not reported or (len(reported) < self.tasks and not are_all):
            return None
        by_themselves = [ended for ended in reported if ended.reason is not ExitReason.TRIAL_OVER] or reported
        return next((ended for ended in reported if ended.reason is ExitReason.SUCCEEDED), by_themselves[-1])
