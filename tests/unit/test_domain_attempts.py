"""The current attempt of a task: the latest started attempt that is not lost, in any order of registration."""

from itertools import product

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.attempts import (
    HAVE_ENDED,
    TRANSITIONS,
    AttemptPhase,
    AttemptReport,
    Attempts,
    RegisteredAttempt,
)
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason


def key_of(number: int, task: str = "main-0") -> AttemptKey:
    return AttemptKey("t0", attempt_id(number), task)


@given(st.lists(st.integers(0, 50), min_size=1, unique=True), st.sets(st.integers(0, 50)))
def test_the_current_attempt_is_the_latest_attempt_that_is_not_lost(order: list[int], lost: set[int]) -> None:
    attempts = Attempts()
    for number in order:
        attempts.register(key_of(number))
    for number in lost:
        attempts.mark_lost(key_of(number))
    current = attempts.current("main-0")
    valid = set(order) - lost
    assert (current and current.key) == (key_of(max(valid)) if valid else None)
    for number in range(51):
        is_lost = number in lost and number in order
        assert attempts.is_lost(key_of(number)) == is_lost
        assert attempts.may_count(key_of(number)) == (not is_lost and number >= max(valid, default=0))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["a", "b"]))))
def test_attempt_numbers_count_from_0_per_task_and_never_change(seen: list[tuple[int, str]]) -> None:
    attempts, numbers = Attempts(), {}
    for number, task in seen:
        registered = attempts.register(key_of(number, task))
        assert (registered is None) == ((number, task) in numbers), "each attempt is registered once"
        if registered is not None:
            numbers[number, task] = registered.number
    for task in "ab":
        assert sorted(found for (_, of), found in numbers.items() if of == task) == [
            *range(sum(of == task for _, of in numbers))
        ]


def test_an_attempt_is_marked_as_lost_only_once() -> None:
    attempts = Attempts()
    for number in range(3):
        attempts.register(key_of(number))
    assert [each.number for each in attempts.mark_lost(key_of(1))] == [1]
    assert attempts.mark_lost(key_of(1)) == []
    assert [each.number for each in attempts.mark_lost()] == [0, 2]
    assert attempts.current("main-0") is None


def test_a_new_attempt_replaces_a_lost_attempt_even_if_the_lost_attempt_has_a_later_start_time() -> None:
    attempts = Attempts()
    attempts.register(key_of(9))
    attempts.mark_lost()
    assert attempts.may_count(key_of(3)), "the clock of its machine is behind"
    attempts.register(key_of(3))
    current = attempts.current("main-0")
    assert current is not None
    assert current.key == key_of(3)


def test_all_attempt_ids_except_those_of_version_0_6_need_a_signature() -> None:
    attempts = Attempts()
    attempts.register(key_of(1))
    attempts.register(AttemptKey("t0", "4", ""))
    assert attempts.unsigned_ids == {"4"}


@pytest.mark.parametrize(("phase", "report"), list(product(AttemptPhase, AttemptReport)))
def test_an_event_without_a_transition_raises_an_error_and_keeps_the_phase(
    phase: AttemptPhase, report: AttemptReport
) -> None:
    end = TrialEnded(key_of(0), ExitReason.SUCCEEDED, 0, 1.0, 2.0, {}, "") if phase in HAVE_ENDED else None
    attempt = RegisteredAttempt(key_of(0), 0, phase, end)
    if (phase, report) in TRANSITIONS:
        attempt.apply(report)
        assert attempt.phase is TRANSITIONS[phase, report]
        assert attempt.end is (end if attempt.phase in HAVE_ENDED else None)
    else:
        with pytest.raises(KeyError):
            attempt.apply(report)
        assert attempt.phase is phase
