"""Every metric and every log byte is stored once and in order, although the link fails and the keeper and the manager crash.

The state machine is in conftest.py. test_planted_faults.py shows that the state machine detects faults.
"""

from collections.abc import Callable


def test_every_written_byte_is_stored_once_and_in_order_despite_crashes(
    play: Callable[..., None],
) -> None:
    play()
