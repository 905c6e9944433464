"""The states of an attempt, as the keeper of the attempt tracks them."""

from itertools import product

import pytest
from attempts import attempt_id

from trial_keeper.core.attempt import TRANSITIONS, Attempt, AttemptEvent, AttemptState
from trial_keeper.core.replication import Replication
from trial_keeper.wire.messages import AttemptKey, Stream, TrialStarted

KEY = AttemptKey("abcde", attempt_id(0), "worker-0")


def an_attempt(state: AttemptState = AttemptState.STARTING) -> Attempt:
    attempt = Attempt(KEY, Replication([Stream.METRICS]))
    attempt.state = state
    return attempt


@pytest.mark.parametrize(("state", "event"), list(product(AttemptState, AttemptEvent)))
def test_an_event_without_a_transition_raises_an_error(state: AttemptState, event: AttemptEvent) -> None:
    attempt = an_attempt(state)
    if (state, event) in TRANSITIONS:
        attempt.apply(event)
        assert attempt.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            attempt.apply(event)


@pytest.mark.parametrize("state", AttemptState)
def test_every_attempt_state_can_reach_the_last_state(state: AttemptState) -> None:
    reached = {state}
    while (
        wider := reached | {after for (before, _), after in TRANSITIONS.items() if before in reached}
    ) != reached:
        reached = wider
    assert AttemptState.CLOSED in reached


def test_no_transition_of_an_attempt_returns_to_an_earlier_state() -> None:
    order = list(AttemptState)
    assert all(order.index(after) >= order.index(before) for (before, _), after in TRANSITIONS.items())


def test_an_attempt_that_never_ran_has_no_start_report() -> None:
    assert an_attempt().started is None


def test_the_start_report_contains_the_start_time() -> None:
    attempt = an_attempt()
    attempt.started_at_s = 12.5
    assert attempt.started == TrialStarted(KEY, 12.5)
