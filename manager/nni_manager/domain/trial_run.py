"""What one run of a trial reports. A newer attempt of the task that reports metrics, or a retry, starts a new run."""

from dataclasses import dataclass, field

from nni_manager.domain.learning_curve import InheritedResults
from nni_manager.domain.metrics import objective_hint, reason_without_reward, truncate_for_display
from nni_manager.domain.objectives import Objectives
from nni_manager.domain.usage import PeakUsage
from trial_keeper.wire.file_changes import METRICS_FILE_WAS
from trial_keeper.wire.messages import TrialEnded, Usage
from trial_keeper.wire.reasons import ExitReason

# Messages of trials that succeeded without a result for the tuner.
NO_FINAL_RESULT = (
    "no final result was reported; call nni_sdk.report_final_result() with a number in the training code"
)
NO_NUMBER_IN_FINAL_RESULT = (
    "the final result has no finite number for the tuner: it is {}; report a number, "
    'or a dict with a number under "default"{}'
)
NO_NUMBERS_IN_FINAL_RESULT = (
    "the final result has not all numbers of objectives and constraints: it is {}; "
    "report a dict with a number under {}"
)
FUNCTION_RETURNED_NONE = "; if the objective is a function, it returned None: add `return`"
OFFSET_OF_INHERITED = -1
"""`final_offset` of a final result that an earlier attempt reported: it precedes any stop of this one."""
METRICS_ARE_CUT = "its metrics are cut"
"""The prefix of the warning about truncated metrics."""
NO_FINAL_RESULT_BEFORE_THE_CUT = (
    "the collected metrics contain no final result, see the warning; report less, or less often"
)
NO_FINAL_RESULT_IN_CHANGED_FILE = "the collected metrics contain no final result, see the warning"


@dataclass(slots=True)
class TrialRun:
    """The reports of one run, in all tasks of the trial. Times are in seconds since the epoch.

    `attempt`: the number of the attempt whose metrics count. `final`: the JSON text of its final result; `value`: the number of
    the first objective in it.
    """

    attempt: int | None = None
    reporter: str | None = None
    """The task that reported metrics first; only its metrics count."""
    started_at_s: float | None = None
    start_received_at_s: float | None = None
    """When this manager received the start, by its monotonic clock; not stored."""
    ended: TrialEnded | None = field(default=None, repr=False)
    """The decisive end, whose bytes may still be in transit; not stored."""
    ended_at_s: float | None = None
    reason: ExitReason | None = None
    exit_code: int | None = None
    message: str = ""
    final: str | None = None
    final_offset: int | None = None
    """The offset of the record of `final` in the reporter's metrics file; stored in the metric's row. See OFFSET_OF_INHERITED."""
    value: float | None = None
    is_feasible: bool = True
    """False if the final result violates a constraint: it is then never the best. Derived from `final`."""
    unusable: str = ""
    """Why the final result has no `value`; empty: it has one, or the reason is not known. Derived from `final`."""
    intermediate: str | None = None
    intermediate_count: int = 0
    peak_usage: PeakUsage | None = None
    latest_usage: Usage | None = None
    """The last reported usage; not stored."""

    def set_final(self, text: str, offset: int | None, objectives: Objectives) -> None:
        """Record the final result, and what it is for these objectives. `text`: its JSON text."""
        self.final, self.final_offset, self.unusable = text, offset, ""
        outcome = objectives.outcome(text)
        self.value = None if outcome is None else outcome.values[0]
        self.is_feasible = outcome is None or outcome.is_feasible
        if outcome is None and not objectives.is_plain:
            names = ", ".join(f'"{name}"' for name in objectives.metrics)
            self.unusable = NO_NUMBERS_IN_FINAL_RESULT.format(objectives.reason_against(text), names)

    def continue_from(self, inherited: InheritedResults, objectives: Objectives, *, is_late: bool) -> None:
        """Record that a process of the attempt continues from a checkpoint: its earlier reports count no more.

        `is_late`: the inherited results are stored only now, and later reports are recorded already.
        """
        if not is_late:
            self.final = self.final_offset = self.value = self.intermediate = None
            self.is_feasible, self.unusable = True, ""
            self.intermediate_count = 0
        self.intermediate_count += inherited.intermediate_count
        if self.intermediate is None and inherited.intermediate is not None:
            self.intermediate = truncate_for_display(inherited.intermediate)
        if self.final is None and inherited.final is not None:
            self.set_final(inherited.final, OFFSET_OF_INHERITED, objectives)

    def used(self, usage: Usage) -> bool:
        """Record the usage of the attempt; True if a peak rises."""
        before = self.peak_usage
        self.latest_usage = usage
        self.peak_usage = (before or PeakUsage()).merge_max(usage)
        return self.peak_usage != before

    def end(self, ended: TrialEnded, reason: ExitReason, at_s: float) -> None:
        """Record the decisive end. `at_s`: the last end that a task has reported."""
        self.ended, self.reason = ended, reason
        self.exit_code, self.message = ended.exit_code, ended.message
        self.started_at_s = min(self.started_at_s or ended.started_at_s, ended.started_at_s)
        self.ended_at_s = max(self.started_at_s, at_s)

    def end_unreported(self, reason: ExitReason, message: str, at_s: float, now_s: float) -> None:
        """Record the end without a report of the keeper. `now_s` is monotonic."""
        self.reason, self.message, self.ended_at_s = reason, message, at_s
        if self.started_at_s is not None:
            # The start time comes from another machine's clock, and either clock may have been set since.
            lasted_s = (
                at_s - self.started_at_s
                if self.start_received_at_s is None
                else now_s - self.start_received_at_s
            )
            self.ended_at_s = self.started_at_s + max(lasted_s, 0.0)

    def why_without_result(self, warning: str) -> str:
        """Why a trial that succeeded has no number for the tuner. `warning`: those of the trial."""
        if self.final is not None:
            reason = self.unusable or NO_NUMBER_IN_FINAL_RESULT.format(
                reason_without_reward(self.final), objective_hint(self.final)
            )
            return f"{reason}{FUNCTION_RETURNED_NONE}" if self.final == "null" else reason
        if METRICS_FILE_WAS in warning:
            return NO_FINAL_RESULT_IN_CHANGED_FILE
        return NO_FINAL_RESULT_BEFORE_THE_CUT if METRICS_ARE_CUT in warning else NO_FINAL_RESULT
