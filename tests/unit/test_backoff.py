"""The delays between retries."""

from itertools import islice

import pytest

from nni_manager.support.backoff import SMALLEST_SHARE, delay_s, delays_s


def test_retry_delays_are_doubled_until_a_maximum_and_jitter_only_shortens_them():
    for made_s, nominal_s in zip(islice(delays_s(0.5, 3.0), 5), [0.5, 1.0, 2.0, 3.0, 3.0], strict=True):
        assert SMALLEST_SHARE * nominal_s <= made_s <= nominal_s


def test_two_clients_that_fail_together_get_different_delays():
    assert len({delay_s(1, 1.0, 1.0) for _ in range(20)}) > 1


@pytest.mark.parametrize("failures", [1_000, 10_000])
def test_the_delay_is_bounded_after_any_number_of_failures(failures):
    assert delay_s(failures, 0.5, 30.0) <= 30.0
