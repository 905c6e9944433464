"""The life of a trial, as the manager sees it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.trial import FINAL_STATE, FINAL_STATES, NEXT, Trial, TrialEvent, TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason

W, R, S, C = TrialState.WAITING, TrialState.RUNNING, TrialState.STOPPING, TrialState.CLOSING
FIRST, SECOND = AttemptKey("abcde", 0, "main"), AttemptKey("abcde", 1, "main")


@pytest.fixture
def a_trial() -> Callable[..., Trial]:
    def make(**fields: Any) -> Trial:
        return Trial("abcde", 0, {"lr": 0.1}, {}, 100.0, job_id="abcde", **fields)

    return make


def an_end(
    reason: ExitReason = ExitReason.SUCCEEDED, code: int = 0, key: AttemptKey = FIRST, message: str = ""
) -> TrialEnded:
    return TrialEnded(key, reason, code, 110.0, 120.0, {}, message)


@pytest.mark.parametrize(("state", "event"), list(product(TrialState, TrialEvent)))
def test_what_the_table_does_not_hold_cannot_happen(a_trial, state: TrialState, event: TrialEvent) -> None:
    trial = a_trial(state=state, reason=ExitReason.SUCCEEDED)
    if (state, event) in NEXT:
        trial.happened(event)
        assert trial.state is (NEXT[state, event] or TrialState.SUCCEEDED)
    else:
        with pytest.raises(KeyError):
            trial.happened(event)
        assert trial.state is state


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_nothing_happens_to_a_trial_that_is_over(state: TrialState) -> None:
    assert state.is_final
    assert not [event for event in TrialEvent if (state, event) in NEXT]


@pytest.mark.parametrize("state", [W, R, S, C])
def test_every_state_on_the_way_can_end(state: TrialState) -> None:
    assert not state.is_final
    after = NEXT[state, TrialEvent.ENDED]
    assert after is C
    assert NEXT[C, TrialEvent.CLOSED] is None


@pytest.mark.parametrize("reason", ExitReason)
def test_every_reason_has_one_final_state(a_trial, reason: ExitReason) -> None:
    trial = a_trial(state=R, attempt=0)
    trial.finished(an_end(reason, 1))
    assert trial.state is C
    trial.happened(TrialEvent.CLOSED)
    assert trial.state is FINAL_STATE[reason]
    assert trial.state.is_final


def test_a_trial_cannot_be_closed_without_a_reason(a_trial) -> None:
    with pytest.raises(KeyError, match="without a reason"):
        a_trial(state=C).happened(TrialEvent.CLOSED)


@pytest.mark.parametrize(("state", "word"), [(W, "WAITING"), (R, "RUNNING"), (S, "RUNNING"), (C, "RUNNING")])
def test_nni_has_no_word_for_a_trial_on_its_way_out(state: TrialState, word: str) -> None:
    assert state.nni_status == word


def test_a_final_state_is_nnis_own_word() -> None:
    assert {state.nni_status for state in FINAL_STATES} == {
        "SUCCEEDED",
        "FAILED",
        "USER_CANCELED",
        "SYS_CANCELED",
        "EARLY_STOPPED",
    }


def test_an_ordinary_life(a_trial) -> None:
    trial = a_trial()
    trial.began(FIRST, 110.0, 10.0)
    assert (trial.state, trial.attempt, trial.started_at_s) == (R, 0, 110.0)
    trial.finished(an_end(ExitReason.NONZERO_EXIT, 3, message="Traceback"))
    assert (trial.state, trial.exit_code, trial.message, trial.ended_at_s) == (C, 3, "Traceback", 120.0)
    trial.happened(TrialEvent.CLOSED)
    assert trial.state is TrialState.FAILED


def test_what_was_asked_for_is_the_reason_of_the_end(a_trial) -> None:
    trial = a_trial(state=S, attempt=0, stop_reason=ExitReason.EARLY_STOPPED)
    trial.finished(an_end(ExitReason.SIGNAL, 143))
    trial.happened(TrialEvent.CLOSED)
    assert (trial.reason, trial.state) == (ExitReason.EARLY_STOPPED, TrialState.EARLY_STOPPED)


def test_a_command_that_was_done_before_the_stop_reached_it_has_succeeded(a_trial) -> None:
    trial = a_trial(state=S, attempt=0, stop_reason=ExitReason.STOPPED_BY_USER)
    trial.finished(an_end(ExitReason.SUCCEEDED))
    trial.happened(TrialEvent.CLOSED)
    assert trial.state is TrialState.SUCCEEDED


@pytest.mark.parametrize("reason", ExitReason)
def test_other_tasks_of_a_trial_that_is_over_are_stopped_with_a_reason_that_keepers_take(
    a_trial, reason: ExitReason
) -> None:
    trial = a_trial(state=R, attempt=0)
    trial.finished(an_end(reason))
    assert trial.reason_for_others in STOP_REASONS
    assert trial.reason_for_others is (reason if reason in STOP_REASONS else ExitReason.TRIAL_OVER)


def test_a_trial_that_is_gone_was_stopped_if_a_stop_was_asked_for(a_trial) -> None:
    lost, stopped = a_trial(state=R), a_trial(state=S, stop_reason=ExitReason.STOPPED_BY_USER)
    for trial in (lost, stopped):
        trial.gone(ExitReason.JOB_LOST, "the node is gone", 130.0, 30.0)
        assert (trial.message, trial.ended_at_s) == ("the node is gone", 130.0)
    assert (lost.state, stopped.state) == (TrialState.FAILED, TrialState.USER_CANCELED)


@given(
    started_at_s=st.floats(0, 2e9),
    told_at_s=st.floats(0, 2e9),
    heard_s=st.none() | st.floats(0, 1e6),
    lasted_s=st.floats(0, 1e6),
)
def test_no_clock_makes_a_trial_end_before_it_began(started_at_s, told_at_s, heard_s, lasted_s) -> None:
    fields = {"state": R, "started_at_s": started_at_s, "heard_s": heard_s}
    lost, ended = (Trial("abcde", 0, {}, {}, 0.0, "abcde", **fields) for _ in range(2))  # type: ignore[arg-type]
    lost.gone(ExitReason.JOB_LOST, "", told_at_s, (heard_s or 0.0) + lasted_s)
    assert lost.ended_at_s is not None
    if heard_s is not None:
        # The time of day when somebody noticed is no matter to a manager that was there when it began.
        assert lost.ended_at_s - started_at_s == pytest.approx(lasted_s, abs=1e-3)
    assert lost.ended_at_s >= started_at_s
    ended.finished(replace(an_end(), started_at_s=told_at_s, ended_at_s=told_at_s))
    assert ended.started_at_s is not None
    assert ended.ended_at_s is not None
    assert ended.ended_at_s >= ended.started_at_s


def test_only_the_newest_attempt_counts(a_trial) -> None:
    assert a_trial().counts(FIRST)
    trial = a_trial(state=R, attempt=1)
    assert [trial.counts(AttemptKey("abcde", attempt, "main")) for attempt in (0, 1, 2)] == [
        False,
        True,
        True,
    ]


SPENT = {
    "attempt": 0,
    "final": "1",
    "value": 1.0,
    "intermediate": "0.5",
    "intermediate_count": 4,
    "exit_code": 137,
    "message": "killed",
    "reason": ExitReason.SIGNAL,
    "ended_at_s": 115.0,
    "reporter": "main",
    "warning": "a second task reports as well",
}


def test_a_new_attempt_starts_with_empty_hands(a_trial) -> None:
    trial = a_trial(state=C, ended=an_end(ExitReason.SIGNAL, 137), **SPENT)
    trial.began(SECOND, 130.0, 30.0)
    assert trial == a_trial(
        state=R, attempt=1, started_at_s=130.0, attempts={"main": 1}, undelivered={"main"}, heard_s=30.0
    )


def test_an_attempt_that_could_not_be_started_does_not_inherit_either(a_trial) -> None:
    trial = a_trial(state=R, **SPENT)
    trial.finished(an_end(ExitReason.COULD_NOT_START, 104, SECOND, "no bash"))
    assert (trial.attempt, trial.final, trial.value, trial.intermediate_count) == (1, None, None, 0)
    assert (trial.reason, trial.message) == (ExitReason.COULD_NOT_START, "no bash")


def test_an_attempt_that_is_told_again_keeps_what_it_has(a_trial) -> None:
    trial = a_trial(state=R, attempt=0, final="1", value=1.0, intermediate_count=4)
    trial.began(FIRST, 110.0, 10.0)
    assert (trial.final, trial.value, trial.intermediate_count) == ("1", 1.0, 4)


def test_a_task_has_delivered_when_its_end_is_told_and_nothing_is_missing(a_trial):
    trial = a_trial()
    trial.began(FIRST, 1.0, 0.0)
    assert not trial.has_delivered(FIRST)
    trial.ended_in(an_end())
    assert not trial.has_delivered(FIRST)
    trial.undelivered.discard(FIRST.task)
    assert trial.has_delivered(FIRST)
    assert not trial.has_delivered(SECOND)
