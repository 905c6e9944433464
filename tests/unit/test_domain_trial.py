"""The states of one trial, as the manager stores them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.attempts import AttemptPhase, AttemptReport, Attempts
from nni_manager.domain.trial import (
    TERMINAL_STATE,
    TERMINAL_STATES,
    TRANSITIONS,
    Trial,
    TrialEvent,
    TrialState,
)
from nni_manager.domain.trial_run import NO_FINAL_RESULT_IN_CHANGED_FILE, TrialRun
from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.messages import MAX_WARNINGS, AttemptKey, Stream, TrialEnded
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason

W, R, S, C = TrialState.WAITING, TrialState.RUNNING, TrialState.STOPPING, TrialState.CLOSING
NOTHING: Mapping[str, Any] = {}
FIRST, SECOND = AttemptKey("abcde", attempt_id(0), "main"), AttemptKey("abcde", attempt_id(1), "main")


@pytest.fixture
def a_trial() -> Callable[..., Trial]:
    def make(attempt: int | None = None, run: Mapping[str, Any] = NOTHING, **fields: Any) -> Trial:
        """A trial with the registered attempts 0 to `attempt`, or only attempt 0 if `attempt` is None. `run` contains fields of
        the trial's run.
        """
        own = TrialRun(attempt, **run)
        trial = Trial("abcde", 0, {"lr": 0.1}, {}, 100.0, job_id="abcde", run=own, **fields)
        for number in range((trial.run.attempt or 0) + 1):
            trial.registered.register(AttemptKey("abcde", attempt_id(number), "main"))
        if trial.run.attempt is not None:
            trial.attempts["main"] = trial.registered.registered[trial.run.attempt]
        return trial

    return make


def an_end(
    reason: ExitReason = ExitReason.SUCCEEDED,
    code: int = 0,
    key: AttemptKey = FIRST,
    message: str = "",
    **more: Any,
) -> TrialEnded:
    return TrialEnded(key, reason, code, 110.0, 120.0, {}, message, **more)


@pytest.mark.parametrize(("state", "event"), list(product(TrialState, TrialEvent)))
def test_an_event_without_a_transition_raises_an_error_and_keeps_the_state(
    a_trial, state: TrialState, event: TrialEvent
) -> None:
    trial = a_trial(state=state, run={"reason": ExitReason.SUCCEEDED})
    if (state, event) in TRANSITIONS:
        trial.apply(event)
        assert trial.state is (TRANSITIONS[state, event] or TrialState.SUCCEEDED)
    else:
        with pytest.raises(KeyError):
            trial.apply(event)
        assert trial.state is state


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES))
def test_no_event_changes_a_terminal_trial(state: TrialState) -> None:
    assert state.is_terminal
    assert not [event for event in TrialEvent if (state, event) in TRANSITIONS]


@pytest.mark.parametrize("state", [W, R, S, C])
def test_every_live_state_can_reach_a_terminal_state(state: TrialState) -> None:
    assert not state.is_terminal
    after = TRANSITIONS[state, TrialEvent.ENDED]
    assert after is C
    assert TRANSITIONS[C, TrialEvent.CLOSED] is None


@pytest.mark.parametrize("reason", ExitReason)
def test_every_exit_reason_maps_to_one_terminal_state(a_trial, reason: ExitReason) -> None:
    trial = a_trial(state=R, attempt=0)
    trial.finished(an_end(reason, 1))
    assert trial.state is C
    trial.apply(TrialEvent.CLOSED)
    assert trial.state is TERMINAL_STATE[reason]
    assert trial.state.is_terminal


def test_a_trial_cannot_be_closed_without_a_reason(a_trial) -> None:
    with pytest.raises(KeyError, match="without a reason"):
        a_trial(state=C).apply(TrialEvent.CLOSED)


@pytest.mark.parametrize(("state", "word"), [(W, "WAITING"), (R, "RUNNING"), (S, "RUNNING"), (C, "RUNNING")])
def test_nni_output_shows_every_state_between_running_and_terminal_as_running(
    state: TrialState, word: str
) -> None:
    assert state.nni_status == word


def test_terminal_states_have_the_names_of_nni() -> None:
    assert {state.nni_status for state in TERMINAL_STATES} == {
        "SUCCEEDED",
        "FAILED",
        "USER_CANCELED",
        "SYS_CANCELED",
        "EARLY_STOPPED",
    }


def test_a_trial_changes_its_state_when_it_starts_or_ends_or_is_closed(a_trial) -> None:
    trial = a_trial()
    trial.began(FIRST, 110.0, 10.0)
    assert (trial.state, trial.run.attempt, trial.run.started_at_s) == (R, 0, 110.0)
    trial.finished(an_end(ExitReason.NONZERO_EXIT, 3, message="Traceback"))
    assert (trial.state, trial.run.exit_code, trial.run.message, trial.run.ended_at_s) == (
        C,
        3,
        "Traceback",
        120.0,
    )
    trial.apply(TrialEvent.CLOSED)
    assert trial.state is TrialState.FAILED


def test_the_end_reason_of_a_stopped_trial_is_the_reason_of_the_stop_request(a_trial) -> None:
    trial = a_trial(state=S, attempt=0, stop_reason=ExitReason.EARLY_STOPPED)
    trial.finished(an_end(ExitReason.SIGNAL, 143))
    trial.apply(TrialEvent.CLOSED)
    assert (trial.run.reason, trial.state) == (ExitReason.EARLY_STOPPED, TrialState.EARLY_STOPPED)


def test_a_trial_succeeds_if_it_exits_with_0_before_the_stop_request_arrives(a_trial) -> None:
    trial = a_trial(state=S, attempt=0, stop_reason=ExitReason.STOPPED_BY_USER)
    trial.finished(an_end(ExitReason.SUCCEEDED))
    trial.apply(TrialEvent.CLOSED)
    assert trial.state is TrialState.SUCCEEDED


STOPPED = {
    ExitReason.STOPPED_BY_USER: TrialState.USER_CANCELED,
    ExitReason.EXPERIMENT_STOPPED: TrialState.USER_CANCELED,
    ExitReason.EARLY_STOPPED: TrialState.EARLY_STOPPED,
    ExitReason.TIME_LIMIT: TrialState.SYS_CANCELED,
}


def with_result(a_trial, stop_reason: ExitReason | None, final_offset: int | None = 100) -> Trial:
    return a_trial(
        state=S if stop_reason else R,
        attempt=0,
        stop_reason=stop_reason,
        run={"reporter": "main", "final": "0.5", "value": 0.5, "final_offset": final_offset},
    )


@pytest.mark.parametrize("reason", STOPPED)
@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_a_trial_succeeds_if_it_reported_a_final_result_before_the_stop_request(
    a_trial, reason: ExitReason, code: int
) -> None:
    trial = with_result(a_trial, reason)
    trial.finished(an_end(reason, code, metrics_size_at_stop=101))
    trial.apply(TrialEvent.CLOSED)
    assert (trial.state, trial.run.reason, trial.run.exit_code) == (
        TrialState.SUCCEEDED,
        ExitReason.SUCCEEDED,
        code,
    )
    assert trial.run.message == f"{reason.value}, after the final result was reported"
    assert trial.stop_reason is reason
    assert trial.result == "0.5"


@pytest.mark.parametrize(("reason", "state"), STOPPED.items())
@pytest.mark.parametrize("size", [None, 0, 100])
def test_a_stopped_trial_keeps_a_final_result_that_it_reported_after_the_stop_request(
    a_trial, reason: ExitReason, state: TrialState, size: int | None
) -> None:
    trial = with_result(a_trial, reason)
    trial.finished(an_end(reason, 143, metrics_size_at_stop=size))
    trial.apply(TrialEvent.CLOSED)
    assert (trial.state, trial.run.reason, trial.run.exit_code) == (state, reason, 143)
    assert trial.result == "0.5"


@pytest.mark.parametrize(("size", "state"), [(101, TrialState.SUCCEEDED), (100, TrialState.FAILED)])
def test_a_trial_succeeds_if_the_cluster_stops_it_after_it_reported_a_final_result(
    a_trial, size, state
) -> None:
    trial = with_result(a_trial, None)
    trial.finished(an_end(ExitReason.JOB_LOST, 143, metrics_size_at_stop=size))
    trial.apply(TrialEvent.CLOSED)
    assert trial.state is state


def test_a_failed_trial_has_no_result(a_trial) -> None:
    trial = with_result(a_trial, None)
    trial.finished(an_end(ExitReason.NONZERO_EXIT, 1))
    trial.apply(TrialEvent.CLOSED)
    assert (trial.state, trial.result) == (TrialState.FAILED, None)


@pytest.mark.parametrize(("stop_reason", "result"), [(ExitReason.EARLY_STOPPED, "0.5"), (None, None)])
def test_the_result_of_a_lost_trial_is_kept_only_if_a_stop_was_requested(
    a_trial, stop_reason, result
) -> None:
    trial = with_result(a_trial, stop_reason)
    trial.gone(ExitReason.KEEPER_LOST, "its node is gone", 130.0, 30.0)
    assert trial.state is (TrialState.EARLY_STOPPED if stop_reason else TrialState.FAILED)
    assert trial.result == result


def test_the_state_of_a_stopped_trial_depends_on_the_metrics_size_of_its_reporting_task(a_trial) -> None:
    other = AttemptKey("abcde", attempt_id(0), "other")
    for sizes, state in (((101, 0), TrialState.SUCCEEDED), ((0, 101), TrialState.EARLY_STOPPED)):
        trial = with_result(a_trial, ExitReason.EARLY_STOPPED)
        trial.ended_in(an_end(ExitReason.EARLY_STOPPED, 143, metrics_size_at_stop=sizes[0]))
        trial.finished(an_end(ExitReason.EARLY_STOPPED, 143, other, metrics_size_at_stop=sizes[1]))
        trial.apply(TrialEvent.CLOSED)
        assert trial.state is state


def test_a_final_result_does_not_make_a_trial_succeed_if_another_task_failed(a_trial) -> None:
    trial = with_result(a_trial, None)
    trial.finished(an_end(ExitReason.NONZERO_EXIT, 1, AttemptKey("abcde", attempt_id(0), "other")))
    trial.ended_in(an_end(ExitReason.TRIAL_OVER, 143, metrics_size_at_stop=101))
    trial.apply(TrialEvent.CLOSED)
    assert trial.state is TrialState.FAILED


def test_each_warning_of_the_keeper_is_added_to_the_trial_once(a_trial) -> None:
    trial = a_trial(state=R, attempt=0)
    assert not trial.warn_of_files(an_end())
    assert trial.warn_of_files(
        an_end(warnings=("its metrics file was\ntruncated", "its stdout file was truncated"))
    )
    assert trial.warning == "its metrics file was truncated\nits stdout file was truncated"
    assert not trial.warn_of_files(an_end(warnings=("its stdout file was truncated",)))


def test_the_number_of_warnings_per_trial_is_bounded(a_trial) -> None:
    trial = a_trial(state=R, attempt=0)
    for number in range(1000):
        trial.warn_of_files(an_end(warnings=(f"warning {number}",)))
    assert len(trial.warning.splitlines()) <= MAX_WARNINGS + 1


def test_the_message_names_the_truncated_metrics_file_if_a_succeeded_trial_has_no_result(a_trial) -> None:
    trial = a_trial(state=R, attempt=0)
    trial.finished(an_end(warnings=(file_warning(Stream.METRICS, FileChange.TRUNCATED),)))
    trial.apply(TrialEvent.CLOSED)
    assert trial.run.message == NO_FINAL_RESULT_IN_CHANGED_FILE


@pytest.mark.parametrize("reason", ExitReason)
def test_the_remaining_tasks_of_an_ended_trial_are_stopped_with_a_valid_stop_reason(
    a_trial, reason: ExitReason
) -> None:
    trial = a_trial(state=R, attempt=0)
    trial.finished(an_end(reason))
    assert trial.reason_for_others in STOP_REASONS
    assert trial.reason_for_others is (reason if reason in STOP_REASONS else ExitReason.TRIAL_OVER)


def test_a_lost_trial_counts_as_stopped_if_a_stop_was_requested(a_trial) -> None:
    lost, stopped = a_trial(state=R), a_trial(state=S, stop_reason=ExitReason.STOPPED_BY_USER)
    for trial in (lost, stopped):
        trial.gone(ExitReason.JOB_LOST, "the node is gone", 130.0, 30.0)
        assert (trial.run.message, trial.run.ended_at_s) == ("the node is gone", 130.0)
    assert (lost.state, stopped.state) == (TrialState.FAILED, TrialState.USER_CANCELED)


@given(
    started_at_s=st.floats(0, 2e9),
    reported_at_s=st.floats(0, 2e9),
    start_received_at_s=st.none() | st.floats(0, 1e6),
    lasted_s=st.floats(0, 1e6),
)
def test_a_trial_never_ends_before_its_start_even_if_clocks_disagree(
    started_at_s, reported_at_s, start_received_at_s, lasted_s
) -> None:
    runs = (TrialRun(started_at_s=started_at_s, start_received_at_s=start_received_at_s) for _ in range(2))
    lost, ended = (Trial("abcde", 0, {}, {}, 0.0, "abcde", R, run=run) for run in runs)
    lost.gone(ExitReason.JOB_LOST, "", reported_at_s, (start_received_at_s or 0.0) + lasted_s)
    assert lost.run.ended_at_s is not None
    if start_received_at_s is not None:
        # A manager that has received the start of the trial measures the duration itself. It ignores the reported time of day,
        # which may be wrong.
        assert lost.run.ended_at_s - started_at_s == pytest.approx(lasted_s, abs=1e-3)
    assert lost.run.ended_at_s >= started_at_s
    ended.finished(replace(an_end(), started_at_s=reported_at_s, ended_at_s=reported_at_s))
    assert ended.run.started_at_s is not None
    assert ended.run.ended_at_s is not None
    assert ended.run.ended_at_s >= ended.run.started_at_s


def test_an_attempt_is_current_unless_a_later_attempt_of_its_task_has_started(a_trial) -> None:
    assert a_trial().is_current(FIRST)
    trial = a_trial(state=R, attempt=1)
    assert [trial.is_current(AttemptKey("abcde", attempt_id(attempt), "main")) for attempt in (0, 1, 2)] == [
        False,
        True,
        True,
    ]


SPENT = {
    "final": "1",
    "value": 1.0,
    "final_offset": 200,
    "intermediate": "0.5",
    "intermediate_count": 4,
    "exit_code": 137,
    "message": "killed",
    "reason": ExitReason.SIGNAL,
    "ended_at_s": 115.0,
    "reporter": "main",
}
WARNED = "a second task reports as well"


def test_a_new_attempt_resets_all_fields_of_the_previous_attempt(a_trial) -> None:
    trial = a_trial(0, SPENT | {"ended": an_end(ExitReason.SIGNAL, 137)}, state=C, warning=WARNED)
    trial.registered.register(SECOND)
    trial.began(SECOND, 130.0, 30.0)
    fresh = a_trial(1, {"started_at_s": 130.0, "start_received_at_s": 30.0}, state=R)
    fresh.attempts["main"].apply(AttemptReport.STARTED)
    assert trial == fresh


def test_a_trial_has_no_result_of_the_previous_attempt_if_the_next_attempt_could_not_start(a_trial) -> None:
    trial = a_trial(0, SPENT, state=R)
    trial.registered.register(SECOND)
    trial.finished(an_end(ExitReason.COULD_NOT_START, 104, SECOND, "no bash"))
    assert (trial.run.attempt, trial.run.final, trial.run.value, trial.run.intermediate_count) == (
        1,
        None,
        None,
        0,
    )
    assert (trial.run.reason, trial.run.message) == (ExitReason.COULD_NOT_START, "no bash")


def test_a_repeated_start_report_changes_no_field_of_the_attempt(a_trial) -> None:
    trial = a_trial(0, {"final": "1", "value": 1.0, "intermediate_count": 4}, state=R)
    trial.began(FIRST, 110.0, 10.0)
    assert (trial.run.final, trial.run.value, trial.run.intermediate_count) == ("1", 1.0, 4)


def test_an_attempt_is_delivered_when_its_end_is_reported_and_all_bytes_are_stored(a_trial):
    trial = a_trial()
    trial.began(FIRST, 1.0, 0.0)
    assert trial.phase_of(FIRST) is not AttemptPhase.DELIVERED
    trial.ended_in(an_end())
    assert trial.phase_of(FIRST) is not AttemptPhase.DELIVERED
    trial.attempts[FIRST.task].apply(AttemptReport.DELIVERED)
    assert trial.phase_of(FIRST) is AttemptPhase.DELIVERED
    assert trial.phase_of(SECOND) is not AttemptPhase.DELIVERED


def test_the_first_attempt_after_a_resume_resets_the_fields_of_a_lost_attempt(a_trial) -> None:
    stored = a_trial(0, SPENT | {"started_at_s": 110.0}, state=R)
    registered = stored.registered
    registered.mark_lost(FIRST)
    stored.attempts = {}
    stored.restore_attempts(registered)
    assert stored.attempts["main"].key == FIRST, "the restored fields are those of the lost attempt"
    registered.register(SECOND)
    stored.began(SECOND, 130.0, 30.0)
    assert (stored.run.attempt, stored.run.final, stored.run.value, stored.run.intermediate_count) == (
        1,
        None,
        None,
        0,
    )
    assert stored.run.started_at_s == 130.0


def test_a_resumed_trial_keeps_the_attempt_of_its_run_until_a_newer_attempt_starts(a_trial) -> None:
    trial = a_trial(0, SPENT, state=C)
    registered = trial.registered
    registered.register(SECOND)
    trial.restore_attempts(registered)
    assert trial.attempts["main"].key == FIRST
    trial.began(SECOND, 130.0, 30.0)
    assert (trial.state, trial.run.attempt, trial.run.started_at_s) == (R, 1, 130.0)
    assert trial.run.final is None


def test_a_resumed_trial_has_its_latest_attempt_which_stays_lost(a_trial) -> None:
    trial = a_trial(1, SPENT, state=R)
    registered = Attempts()
    for key in (FIRST, SECOND):
        registered.register(key)
    registered.mark_lost()
    trial.restore_attempts(registered)
    assert not trial.is_current(SECOND)
    assert trial.attempts["main"].key == SECOND


def test_a_resume_restores_the_current_attempt_of_each_task(a_trial) -> None:
    trial = a_trial(0, {"reporter": "worker-0"}, state=R)
    keys = [AttemptKey("abcde", attempt_id(0), task) for task in ("worker-0", "worker-1")]
    registered = Attempts()
    for key in keys:
        registered.register(key)
    trial.restore_attempts(registered)
    assert [each.key for each in trial.attempts.values()] == keys


def test_a_lost_attempt_is_replaced_even_if_the_clock_of_the_next_attempt_is_behind(a_trial) -> None:
    trial = a_trial(0, SPENT, state=R)
    trial.registered = Attempts()
    trial.attempts = {"main": trial.registered.add(SECOND)}
    trial.registered.mark_lost()
    trial.registered.register(FIRST)
    trial.began(FIRST, 130.0, 30.0)
    assert (trial.run.attempt, trial.run.final, trial.run.value, trial.run.intermediate_count) == (
        1,
        None,
        None,
        0,
    )


def test_the_end_time_of_a_lost_trial_is_the_time_of_the_loss_report_if_no_start_was_received(
    a_trial,
) -> None:
    trial = a_trial(0, {"started_at_s": 110.0}, state=R)
    trial.gone(ExitReason.JOB_LOST, "gone", 150.0, 7.0)
    assert (trial.run.started_at_s, trial.run.ended_at_s) == (110.0, 150.0)


def test_task_ends_are_stored_in_the_order_of_their_reports(a_trial) -> None:
    trial = a_trial()
    first, second = (AttemptKey("abcde", attempt_id(0), task) for task in ("worker-0", "worker-1"))
    for key in (first, second):
        trial.registered.register(key)
        trial.began(key, 100.0, 0.0)
    for key in (second, first):
        trial.ended_in(an_end(key=key))
    assert [end.key for end in trial.ends] == [second, first]
