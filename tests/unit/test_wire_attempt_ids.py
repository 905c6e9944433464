"""Attempt ids: valid, sortable by start time, and unique."""

from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.wire.attempt_ids import (
    MAX_START_MS,
    is_attempt_id,
    is_legacy_number,
    new_attempt_id,
    sort_key,
    start_ms_of,
)
from trial_keeper.wire.safe_open import is_safe_name

TIMES = st.floats(0, MAX_START_MS / 1000)


@given(TIMES)
def test_an_attempt_id_contains_its_start_time(now_s: float) -> None:
    made = new_attempt_id(now_s)
    assert is_attempt_id(made)
    assert is_safe_name(made)
    assert not is_legacy_number(made)
    assert start_ms_of(made) == int(now_s * 1000)


@given(TIMES, TIMES)
def test_attempt_ids_sort_by_start_time(one_s: float, other_s: float) -> None:
    one, other = new_attempt_id(one_s), new_attempt_id(other_s)
    if int(one_s * 1000) != int(other_s * 1000):
        assert (sort_key(one) < sort_key(other)) == (one_s < other_s)


@given(st.floats(0, 4e9), st.floats(0, 4e9))
def test_an_attempt_id_sorts_after_its_predecessor_even_if_the_clock_was_set_back(
    before_s: float, now_s: float
) -> None:
    before = new_attempt_id(before_s)
    assert sort_key(before) < sort_key(new_attempt_id(now_s, before))


def test_attempt_ids_created_at_the_same_time_differ() -> None:
    assert len({new_attempt_id(1.0) for _ in range(10_000)}) == 10_000


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_attempt_numbers_of_version_0_6_sort_numerically_and_before_all_attempt_ids(
    one: int, other: int
) -> None:
    assert is_legacy_number(str(one))
    assert not is_attempt_id(str(one))
    assert (sort_key(str(one)) < sort_key(str(other))) == (one < other)
    assert sort_key(str(one)) < sort_key(new_attempt_id(0.0))
    assert start_ms_of(str(one)) == 0
    assert new_attempt_id(1.0, str(one))


@given(st.text())
def test_a_valid_attempt_id_has_26_characters_and_a_start_time_in_range(text: str) -> None:
    if is_attempt_id(text):
        assert len(text) == 26
        assert 0 <= start_ms_of(text) <= MAX_START_MS
