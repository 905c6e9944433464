"""The state machine of a trial in the manager.

A trial waits, runs and ends for one reason. CLOSING lies between the end of its command and its terminal state: the manager
does not have every byte yet, and a final result may be in transit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nni_manager.domain.attempts import HAVE_ENDED, AttemptPhase, AttemptReport, Attempts, RegisteredAttempt
from nni_manager.domain.remarks import NO_REMARKS, Remarks
from nni_manager.domain.state_tables import with_ignored
from nni_manager.domain.trial_run import TrialRun
from trial_keeper.wire.attempt_ids import sort_key
from trial_keeper.wire.messages import MAX_WARNINGS, AttemptKey, TrialEnded
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason


class TrialState(str, Enum):
    """The state of a trial. The value is NNI's word where NNI has one."""

    WAITING = "WAITING"
    """Not started: it waits for a job, or its job for the cluster or for other tasks."""
    RUNNING = "RUNNING"
    """Its command runs."""
    STOPPING = "STOPPING"
    """It was asked to stop."""
    CLOSING = "CLOSING"
    """Its command has ended; bytes, or the ends of other tasks, have not arrived yet."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    USER_CANCELED = "USER_CANCELED"
    SYS_CANCELED = "SYS_CANCELED"
    EARLY_STOPPED = "EARLY_STOPPED"

    @property
    def is_terminal(self) -> bool:
        """True if the trial changes no more."""
        return self in TERMINAL_STATES

    @property
    def nni_status(self) -> str:
        """The status in NNI's interfaces, which have none for STOPPING and CLOSING."""
        return "RUNNING" if self in (TrialState.STOPPING, TrialState.CLOSING) else self.value


# The only mapping from a reason to a terminal state. TRIAL_OVER fails only a trial whose single task reports it.
TERMINAL_STATE: dict[ExitReason, TrialState] = dict.fromkeys(ExitReason, TrialState.FAILED) | {
    ExitReason.SUCCEEDED: TrialState.SUCCEEDED,
    ExitReason.STOPPED_BY_USER: TrialState.USER_CANCELED,
    ExitReason.EXPERIMENT_STOPPED: TrialState.USER_CANCELED,
    ExitReason.EARLY_STOPPED: TrialState.EARLY_STOPPED,
    ExitReason.TIME_LIMIT: TrialState.SYS_CANCELED,
}
TERMINAL_STATES = frozenset(TERMINAL_STATE.values())

STATES_WITH_RESULT = TERMINAL_STATES - {TrialState.FAILED}
"""The states in which a reported final result counts: a stop does not discard it."""
# Stops that the training code did not cause: the keeper was asked to stop the trial.
_CUT_OFF = (ExitReason.JOB_LOST, ExitReason.PREEMPTED)
_STOPPED = STOP_REASONS - {ExitReason.TRIAL_OVER} | {*_CUT_OFF}

SEVERAL_FINAL_RESULTS = (
    "it reported several final results, and only the first counts; call report_final_result once"
)


class TrialEvent(Enum):
    """The events of a trial."""

    STARTED = "started"
    STOP_ASKED = "stop asked"
    ENDED = "ended"
    CLOSED = "closed"
    LOST = "lost by the cluster, to be retried"


_W, _R, _S, _C = TrialState.WAITING, TrialState.RUNNING, TrialState.STOPPING, TrialState.CLOSING
# `None`: the terminal state of the trial's reason in TERMINAL_STATE.
CHANGES: dict[tuple[TrialState, TrialEvent], TrialState | None] = {
    (_W, TrialEvent.STARTED): _R,
    (_W, TrialEvent.STOP_ASKED): _S,
    (_W, TrialEvent.ENDED): _C,  # it ended before its start was reported, or it never started
    (_R, TrialEvent.STOP_ASKED): _S,
    (_R, TrialEvent.ENDED): _C,
    (_S, TrialEvent.ENDED): _C,
    (_C, TrialEvent.STARTED): _R,  # the cluster started a new attempt before the last one was closed
    (_C, TrialEvent.CLOSED): None,
    (_R, TrialEvent.LOST): _W,
    (_C, TrialEvent.LOST): _W,  # its keeper ended it on the cluster's signal, before the cluster reported why
}
# Events that leave the state as it is.
IGNORED: frozenset[tuple[TrialState, TrialEvent]] = frozenset(
    {
        (_R, TrialEvent.STARTED),  # repeated after a lost connection, or a new attempt
        (_S, TrialEvent.STARTED),
        (_S, TrialEvent.STOP_ASKED),  # the first reason is kept
        (_C, TrialEvent.STOP_ASKED),  # the request came too late
        (_C, TrialEvent.ENDED),  # repeated after a lost connection
        (_W, TrialEvent.LOST),
    }
)
TRANSITIONS = with_ignored(CHANGES, IGNORED)


@dataclass(slots=True)
class Trial:
    """One evaluation of one set of parameters.

    `parameters`: what the training code gets. `metadata`: the tuner's metadata, stored with them. Times are in seconds since
    the epoch.
    """

    trial_id: str
    sequence_id: int
    parameters: Mapping[str, Any]
    metadata: Mapping[str, Any]
    created_at_s: float
    job_id: str
    state: TrialState = TrialState.WAITING
    run: TrialRun = field(default_factory=TrialRun)
    """What the current run has reported."""
    stop_reason: ExitReason | None = None
    stop_asked_at_s: float | None = None
    late_stop_reason: ExitReason | None = None
    """Of a stop after the end of the command: it concerns only an attempt that the cluster may start next; not stored."""
    metrics: tuple[str, ...] = ("default",)
    """The metrics of the objectives, the first one first, and of the constraints; not stored."""
    warning: str = ""
    """Problems that did not end the trial, one per line."""
    is_customized: bool = False
    """True if a user, not the tuner, proposed the parameters. The tuner receives the result as an additional observation."""
    retries: int = 0
    """How often the trial was started again because the cluster lost it."""
    preemptions: int = 0
    """How often the trial was started again because the cluster preempted it."""
    continues: str | None = None
    """The trial whose newest checkpoint this one loads first; None: it starts at its first step."""
    registered: Attempts = field(default_factory=Attempts, repr=False)
    """The attempts with their numbers, until the trial is terminal; stored in a table of their own."""
    remarks: Remarks = NO_REMARKS
    attempts: dict[str, RegisteredAttempt] = field(default_factory=dict, repr=False)
    """The described attempt of each task; those that have ended are in the order of their reports.

    A cluster may restart one task without the others.
    """
    was_returned: bool = False
    """True if a job crashed when this trial was the next to start there; not stored."""

    def apply(self, event: TrialEvent) -> None:
        """Change the state by the table.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        following = TRANSITIONS[self.state, event]
        if following is not None:
            self.state = following
        elif (reason := self.run.reason) is not None:
            if self._had_result_at_stop:
                self.run.message = f"{reason.value}, after the final result was reported"
                reason = self.run.reason = ExitReason.SUCCEEDED
            self.state = TERMINAL_STATE[reason]
            if self.is_without_result:
                self.run.message = self.run.why_without_result(self.warning)
        else:
            raise KeyError(f"trial {self.trial_id} is closed without a reason")

    @property
    def stopping_since_s(self) -> float | None:
        """When the stop in progress was requested, in seconds since the epoch; None: there is none."""
        return self.stop_asked_at_s if self.state is TrialState.STOPPING else None

    @property
    def result(self) -> str | None:
        """The final result of a terminal trial, as JSON text, perhaps without a number; None: it has none that counts."""
        return self.run.final if self.state in STATES_WITH_RESULT else None

    @property
    def _had_result_at_stop(self) -> bool:
        """True if the final record lies within the metrics file as the keeper measured it when it received the stop."""
        attempt = self.attempts.get(self.run.reporter or "")
        size = None if attempt is None or attempt.end is None else attempt.end.metrics_size_at_stop
        offset = self.run.final_offset
        is_before = size is not None and offset is not None and offset < size
        return is_before and self.run.reason in _STOPPED

    @property
    def is_without_result(self) -> bool:
        """True if the trial succeeded without a number for the tuner; `message` states the reason."""
        return self.state is TrialState.SUCCEEDED and self.run.value is None

    def warn(self, text: str) -> bool:
        """Add a line to the warnings; True if it is new."""
        lines = self.warning.splitlines()
        if not text or text in lines:
            return False
        self.warning = "\n".join([*lines, text])
        return True

    def warn_of_files(self, ended: TrialEnded) -> bool:
        """Add the warnings of the keeper; True if there is a new line."""
        before = self.warning
        for warning in ended.warnings:
            # A keeper may report its end any number of times.
            if self.warning.count("\n") < MAX_WARNINGS:
                self.warn(" ".join(warning.split()))
        return self.warning != before

    def is_current(self, key: AttemptKey) -> bool:
        """True if the attempt counts: it is not lost, and no other attempt of its task started later."""
        return self.registered.may_count(key)

    @property
    def ends(self) -> list[TrialEnded]:
        """The reported ends, in the order of their reports."""
        return [attempt.end for attempt in self.attempts.values() if attempt.end is not None]

    def has_task_in(self, *phases: AttemptPhase) -> bool:
        """True if the described attempt of any task is in one of these phases."""
        return any(attempt.phase in phases for attempt in self.attempts.values())

    def phase_in(self, task: str) -> AttemptPhase:
        """The phase of the described attempt of a task."""
        attempt = self.attempts.get(task)
        return AttemptPhase.REGISTERED if attempt is None else attempt.phase

    def phase_of(self, key: AttemptKey) -> AttemptPhase:
        """The phase of an attempt; REGISTERED if it is not the described one of its task."""
        return self.phase_in(key.task) if self.describes(key) else AttemptPhase.REGISTERED

    def describes(self, key: AttemptKey) -> bool:
        """True if the attempt is the described one of its task."""
        attempt = self.attempts.get(key.task)
        return attempt is not None and attempt.key == key

    def began(self, key: AttemptKey, at_s: float, now_s: float) -> None:
        """Record that an attempt runs in at least one task. `now_s` is monotonic."""
        self.add_task(key)
        self.run.started_at_s, self.run.start_received_at_s = at_s, now_s
        self.apply(TrialEvent.STARTED)

    def add_task(self, key: AttemptKey) -> None:
        """Record that one more task runs, or a new attempt of a task."""
        self._describe(key).apply(AttemptReport.STARTED)

    def supersedes(self, key: AttemptKey) -> bool:
        """True if this attempt starts a new run: a newer attempt of the task whose metrics count."""
        return self._is_newer(key) and self.run.reporter in (None, key.task)

    def _is_newer(self, key: AttemptKey) -> bool:
        described = self.attempts.get(key.task)
        if described is None or described.key == key:
            return False
        # The successor of a lost attempt may run on a machine whose clock is behind.
        return described.is_lost or sort_key(key.attempt_id) > sort_key(described.key.attempt_id)

    def reported(self, key: AttemptKey) -> str:
        """Register a task that reports metrics. Returns a warning if they will not count, else an empty string."""
        self._describe(key)
        if self.run.reporter in (None, key.task):
            self.run.reporter = key.task
            return ""
        return f"metrics of task {key.task} are ignored: task {self.run.reporter} reported first; report metrics in one task only"

    def ended_in(self, ended: TrialEnded) -> None:
        """Record the end of one task, which need not end the trial."""
        attempt = self._describe(ended.key)
        attempt.apply(AttemptReport.ENDED)
        attempt.end = ended
        self.attempts[ended.key.task] = self.attempts.pop(ended.key.task)  # the last in the order of the ends
        self.warn_of_files(ended)

    @property
    def reason_for_others(self) -> ExitReason:
        """The stop reason for tasks that still run when others have ended the trial: they neither failed nor succeeded."""
        reason = self.run.reason
        return reason if reason is not None and reason in STOP_REASONS else ExitReason.TRIAL_OVER

    def finished(self, ended: TrialEnded) -> None:
        """Record the decisive end. An earlier stop reason takes precedence unless the command succeeded."""
        if self.phase_in(ended.key.task) not in HAVE_ENDED:
            self.ended_in(ended)
        stop_reason = None if ended.reason is ExitReason.SUCCEEDED else self.stop_reason
        self.run.end(ended, stop_reason or ended.reason, max(each.ended_at_s for each in self.ends))
        self.apply(TrialEvent.ENDED)

    def _describe(self, key: AttemptKey) -> RegisteredAttempt:
        """Return the attempt, and make it the described one of its task. A newer attempt than before starts a new run."""
        attempt = self.registered.find(key) or self.registered.add(key)
        if self._is_newer(key):
            if self.run.ended is not None:  # the cluster runs the whole job again
                for each in self.attempts.values():
                    each.apply(AttemptReport.DISCARDED)
            attempt.apply(AttemptReport.DISCARDED)
            if self.supersedes(key):
                self.run = TrialRun()
                self.warning = ""
        self.attempts[key.task] = attempt
        if self.run.reporter in (None, key.task):
            self.run.attempt = attempt.number
        return attempt

    def restore_attempts(self, registered: Attempts) -> None:
        """Restore the attempts that an earlier manager registered for an unfinished trial."""
        self.registered = registered
        currents = [
            registered.current(task)
            for task in dict.fromkeys(each.key.task for each in registered.registered)
        ]
        self.attempts = {each.key.task: each for each in currents if each is not None and each.key.task}
        for each in registered.registered:
            # The run is that of an earlier or lost attempt until its successor starts.
            if (
                each.key.task
                and each.number == self.run.attempt
                and self.run.reporter in (None, each.key.task)
            ):
                self.attempts[each.key.task] = each

    @property
    def restarts(self) -> int:
        """How often the trial was started again in another job."""
        return self.retries + self.preemptions

    @property
    def awaits_job_end(self) -> bool:
        """True if its keeper ended it, without a result, because the cluster ended the job, perhaps to preempt it."""
        is_cut_off = self.state is TrialState.CLOSING and self.run.reason in _CUT_OFF
        return is_cut_off and not self._had_result_at_stop

    @property
    def is_to_stop(self) -> bool:
        """True if a stop was requested, before or after the end of its command."""
        return self.stop_reason is not None or self.late_stop_reason is not None

    def was_cut_off(self, task: str) -> bool:
        """True if the trial awaits the end of its job, and its keeper in this task was ended by the cluster."""
        attempt = self.attempts.get(task)
        end = None if attempt is None or attempt.phase is not AttemptPhase.DELIVERED else attempt.end
        return self.awaits_job_end and end is not None and end.reason in _CUT_OFF

    def discard_attempts(self) -> None:
        """Let each task start the trial once more: the cluster has started its job again."""
        for attempt in self.attempts.values():
            attempt.apply(AttemptReport.DISCARDED)

    def lost(self, how: str, *, is_preempted: bool = False) -> list[RegisteredAttempt]:
        """Queue a trial that the cluster lost or preempted for another attempt. Its earlier reports stay stored but do not count.

        Returns the attempts that this call declares lost.
        """
        self.apply(TrialEvent.LOST)
        lost = self.registered.mark_lost()
        if is_preempted:
            self.preemptions += 1
        else:
            self.retries += 1
        self.warn(how)
        self.attempts.clear()
        self.run = TrialRun()
        self.was_returned = False
        return lost

    def gone(self, reason: ExitReason, message: str, at_s: float, now_s: float) -> None:
        """End the trial without a report of its keeper. `now_s` is monotonic."""
        self.run.end_unreported(self.stop_reason or reason, message, at_s, now_s)
        self.apply(TrialEvent.ENDED)
        self.apply(TrialEvent.CLOSED)

    def release(self) -> None:
        """Free the fields that only an unfinished trial needs: an experiment keeps all of its trials in memory."""
        self.registered.registered.clear()
        self.attempts.clear()
        self.run.ended = self.run.start_received_at_s = None
