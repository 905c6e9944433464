"""The life of a trial, as the manager sees it.

A trial waits, runs, and ends for one reason. Between the end of its command and its final state lies CLOSING: the manager
does not have every byte yet, and a final result may be among those that are on their way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nni_manager.domain.usage import PeakUsage
from trial_keeper.wire.messages import AttemptKey, TrialEnded, Usage
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason


class TrialState(str, Enum):
    """Where a trial is. The value is NNI's word where NNI has one."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    CLOSING = "CLOSING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    USER_CANCELED = "USER_CANCELED"
    SYS_CANCELED = "SYS_CANCELED"
    EARLY_STOPPED = "EARLY_STOPPED"

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to the trial."""
        return self in FINAL_STATES

    @property
    def nni_status(self) -> str:
        """The word NNI's interfaces know: they have none for a trial that is on its way out."""
        return "RUNNING" if self in (TrialState.STOPPING, TrialState.CLOSING) else self.value


# The one place that says what a reason means for the state.
FINAL_STATE: dict[ExitReason, TrialState] = {
    ExitReason.SUCCEEDED: TrialState.SUCCEEDED,
    ExitReason.NONZERO_EXIT: TrialState.FAILED,
    ExitReason.SIGNAL: TrialState.FAILED,
    ExitReason.OUT_OF_MEMORY: TrialState.FAILED,
    ExitReason.STOPPED_BY_USER: TrialState.USER_CANCELED,
    ExitReason.EARLY_STOPPED: TrialState.EARLY_STOPPED,
    ExitReason.TIME_LIMIT: TrialState.SYS_CANCELED,
    ExitReason.KEEPER_LOST: TrialState.FAILED,
    ExitReason.JOB_LOST: TrialState.FAILED,
    ExitReason.MOUNT: TrialState.FAILED,
    ExitReason.VERSION: TrialState.FAILED,
    ExitReason.COULD_NOT_START: TrialState.FAILED,
    # No trial ends so, unless a keeper says that of the only task there is.
    ExitReason.TRIAL_OVER: TrialState.FAILED,
}
FINAL_STATES = frozenset(FINAL_STATE.values())

# What is said of a trial that succeeded and that the tuner can learn nothing from.
NO_FINAL_RESULT = (
    "it reported no final result; call nni_sdk.report_final_result() in the training code, with a number"
)
NO_NUMBER_IN_FINAL_RESULT = (
    "its final result has no finite number the tuner could use; report a number, "
    'or a dict with a number under "default"'
)
METRICS_ARE_CUT = "its metrics are cut"
"""How the warning begins that tells it."""
NO_FINAL_RESULT_BEFORE_THE_CUT = (
    "no final result is among the metrics that were collected, see the warning; report less, or less often"
)


class TrialEvent(Enum):
    """What can happen to a trial."""

    STARTED = "started"
    STOP_ASKED = "stop asked"
    ENDED = "ended"
    CLOSED = "closed"
    LOST = "lost to the cluster, to be begun again"


_W, _R, _S, _C = TrialState.WAITING, TrialState.RUNNING, TrialState.STOPPING, TrialState.CLOSING
# `None`: the final state that the trial's reason has in FINAL_STATE.
NEXT: dict[tuple[TrialState, TrialEvent], TrialState | None] = {
    (_W, TrialEvent.STARTED): _R,
    (_W, TrialEvent.STOP_ASKED): _S,
    (_W, TrialEvent.ENDED): _C,  # so short that its start is told together with its end, or it never started
    (_R, TrialEvent.STARTED): _R,  # told again after a lost link, or a new attempt
    (_R, TrialEvent.STOP_ASKED): _S,
    (_R, TrialEvent.ENDED): _C,
    (_S, TrialEvent.STARTED): _S,
    (_S, TrialEvent.STOP_ASKED): _S,  # the first reason stands
    (_S, TrialEvent.ENDED): _C,
    (_C, TrialEvent.STARTED): _R,  # the cluster made a new attempt before the last one was closed
    (_C, TrialEvent.STOP_ASKED): _C,  # it came too late
    (_C, TrialEvent.ENDED): _C,  # told again after a lost link
    (_C, TrialEvent.CLOSED): None,
    (_W, TrialEvent.LOST): _W,
    (_R, TrialEvent.LOST): _W,
}


@dataclass(slots=True)
class Trial:
    """One evaluation of one set of parameters.

    `parameters` is what the training code gets; `memo` is the tuner's own note, stored with it. Times are in seconds since
    the epoch. `final` is the JSON text of the final result of the attempt that counts, `value` the number in it.
    """

    trial_id: str
    sequence_id: int
    parameters: Mapping[str, Any]
    memo: Mapping[str, Any]
    created_at_s: float
    job_id: str
    state: TrialState = TrialState.WAITING
    attempt: int | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    stop_reason: ExitReason | None = None
    reason: ExitReason | None = None
    exit_code: int | None = None
    message: str = ""
    final: str | None = None
    value: float | None = None
    intermediate: str | None = None
    intermediate_count: int = 0
    peak_usage: PeakUsage | None = None
    reporter: str | None = None
    """The task that reported first: its metrics are the trial's."""
    warning: str = ""
    """What somebody should know of a trial that went on all the same."""
    is_customized: bool = False
    """Whether a person gave its parameters: then the tuner did not propose them, and learns of them as of any result."""
    retries: int = 0
    """How often it was begun again because the cluster lost it."""
    first_attempts: dict[str, int] = field(default_factory=dict, repr=False)
    """From which attempt of each task on anything counts: those before were lost. A task that is not here: from the first."""
    latest_usage: Usage | None = None
    """As last reported; not stored."""
    ended: TrialEnded | None = field(default=None, repr=False)
    """The end that decided, when its bytes may still be on their way; not stored."""
    attempts: dict[str, int] = field(default_factory=dict, repr=False)
    """The newest attempt of each task that has begun. A cluster may start one task anew and leave the others; not stored."""
    ends: dict[str, TrialEnded] = field(default_factory=dict, repr=False)
    """The end of each task that has told it, in that order; not stored."""
    was_returned: bool = False
    """Whether a job died when it was the next to begin there; not stored."""
    undelivered: set[str] = field(default_factory=set, repr=False)
    """The tasks that have begun and whose last byte is not here; not stored."""
    heard_s: float | None = None
    """When this manager heard of the start, by its monotonic clock; not stored."""

    def happened(self, event: TrialEvent) -> None:
        """Move on by the table.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        following = NEXT[self.state, event]
        if following is not None:
            self.state = following
        elif self.reason is not None:
            self.state = FINAL_STATE[self.reason]
            if self.is_without_result:
                self.message = self._why_without_result
        else:
            raise KeyError(f"trial {self.trial_id} is closed without a reason")

    @property
    def is_without_result(self) -> bool:
        """Whether it succeeded, and yet gave the tuner nothing to learn from; `message` says why."""
        return self.state is TrialState.SUCCEEDED and self.value is None

    @property
    def _why_without_result(self) -> str:
        if self.final is not None:
            return NO_NUMBER_IN_FINAL_RESULT
        return NO_FINAL_RESULT_BEFORE_THE_CUT if METRICS_ARE_CUT in self.warning else NO_FINAL_RESULT

    def warn(self, text: str) -> bool:
        """Add a line that somebody should read; whether it is a new one."""
        lines = self.warning.splitlines()
        if not text or text in lines:
            return False
        self.warning = "\n".join([*lines, text])
        return True

    def counts(self, key: AttemptKey) -> bool:
        """Whether anything of this attempt matters: it is the newest of its task."""
        newest = self.attempt_of(key.task)
        return key.attempt >= max(newest or 0, self.first_attempts.get(key.task, 0))

    def attempt_of(self, task: str) -> int | None:
        """The newest attempt of a task that has begun; None if it has not."""
        # Of a trial that an earlier manager began, only the attempt that counts is stored.
        return self.attempts.get(task) if self.attempts else self.attempt

    def began(self, key: AttemptKey, at_s: float, now_s: float) -> None:
        """An attempt runs, in one of its tasks at least. `now_s` is monotonic."""
        self.joined(key)
        self.started_at_s, self.heard_s = at_s, now_s
        self.happened(TrialEvent.STARTED)

    def joined(self, key: AttemptKey) -> None:
        """A task of it runs: one more, or one that begins anew."""
        self._turn_to(key)
        self.undelivered.add(key.task)

    def knows(self, key: AttemptKey) -> bool:
        """Whether this task of this attempt has begun."""
        has_begun = key.task in self.undelivered or key.task in self.ends
        return has_begun and self.attempt_of(key.task) == key.attempt

    def has_delivered(self, key: AttemptKey) -> bool:
        """Whether all that this task of this attempt had to say is here: nothing more is taken of it."""
        return (
            key.task in self.ends
            and key.task not in self.undelivered
            and self.attempt_of(key.task) == key.attempt
        )

    def restarts_with(self, key: AttemptKey) -> bool:
        """Whether all begins anew when this does: it is a new attempt of the task whose metrics count."""
        newest = self.attempt_of(key.task)
        return newest is not None and key.attempt > newest and self.reporter in (None, key.task)

    def reported(self, key: AttemptKey) -> str:
        """A task is about to report. What to say if its metrics will not count; empty when they will."""
        self._turn_to(key)
        if self.reporter in (None, key.task):
            self.reporter = key.task
            return ""
        return (
            f"task {key.task} reports metrics as well, and they do not count: {self.reporter} reported first; "
            "let one task report"
        )

    def ended_in(self, ended: TrialEnded) -> None:
        """One task has come to its end; whether that ends the trial is not its own to say."""
        self._turn_to(ended.key)  # one that could not be started has an end only
        self.ends[ended.key.task] = ended
        self.undelivered.add(ended.key.task)

    @property
    def reason_for_others(self) -> ExitReason:
        """Why tasks that still run are to stop, once others have ended the trial: they neither failed nor succeeded."""
        reason = self.reason
        return reason if reason is not None and reason in STOP_REASONS else ExitReason.TRIAL_OVER

    def finished(self, ended: TrialEnded) -> None:
        """The command is over. What we asked for before decides the reason, unless the command had succeeded by itself."""
        if ended.key.task not in self.ends:
            self.ended_in(ended)
        self.ended = ended
        self.reason = (
            ended.reason if ended.reason is ExitReason.SUCCEEDED else (self.stop_reason or ended.reason)
        )
        self.exit_code = ended.exit_code
        self.message = ended.message
        self.started_at_s = min(self.started_at_s or ended.started_at_s, ended.started_at_s)
        self.ended_at_s = max(self.started_at_s, *(each.ended_at_s for each in self.ends.values()))
        self.happened(TrialEvent.ENDED)

    def used(self, usage: Usage) -> bool:
        """Take note of what the attempt uses; whether it is more than ever before."""
        before = self.peak_usage
        self.latest_usage = usage
        self.peak_usage = (before or PeakUsage()).raised_by(usage)
        return self.peak_usage != before

    def _turn_to(self, key: AttemptKey) -> None:
        """A newer attempt than before starts with empty hands."""
        newest = self.attempt_of(key.task)
        if newest is not None and key.attempt > newest:
            if self.ended is not None:  # the cluster runs all of the job again
                self.ends.clear()
                self.undelivered.clear()
            self.ends.pop(key.task, None)
            self.undelivered.discard(key.task)
            if self.restarts_with(key):
                self.final = self.value = self.intermediate = None
                self.intermediate_count = 0
                self.peak_usage = self.latest_usage = self.heard_s = None
                self.ended = self.reason = self.exit_code = self.started_at_s = self.ended_at_s = None
                self.reporter = None
                self.message = self.warning = ""
        self.attempts[key.task] = key.attempt
        if self.reporter in (None, key.task):
            self.attempt = key.attempt

    def lost(self, how: str) -> None:
        """The cluster lost it: it waits for another attempt, and what it has said so far stays and does not count."""
        self.happened(TrialEvent.LOST)
        newest = dict(self.attempts)
        if not newest and self.attempt is not None and self.reporter is not None:
            newest = {self.reporter: self.attempt}
        self.first_attempts |= {task: attempt + 1 for task, attempt in newest.items()}
        self.retries += 1
        self.warn(how)
        for by_task in (self.attempts, self.ends):
            by_task.clear()
        self.undelivered.clear()
        self.attempt = self.reporter = self.final = self.value = self.intermediate = None
        self.intermediate_count = 0
        self.peak_usage = self.latest_usage = self.started_at_s = self.heard_s = None
        self.was_returned = False
        self.job_id = ""

    def gone(self, reason: ExitReason, message: str, at_s: float, now_s: float) -> None:
        """It is over and nobody can tell more than that. `now_s` is monotonic."""
        self.reason = self.stop_reason or reason
        self.message = message
        self.ended_at_s = at_s
        if self.started_at_s is not None:
            # The start is by another machine's clock, and either clock may have been set since.
            lasted_s = at_s - self.started_at_s if self.heard_s is None else now_s - self.heard_s
            self.ended_at_s = self.started_at_s + max(lasted_s, 0.0)
        self.happened(TrialEvent.ENDED)
        self.happened(TrialEvent.CLOSED)
