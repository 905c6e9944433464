"""Every metric and every byte of a log is stored once and in order, whatever dies.

The machine is in conftest.py; test_planted_faults.py shows that it detects faults.
"""

from collections.abc import Callable


def test_every_written_byte_is_stored_once_and_in_order_after_any_crashes(
    play: Callable[..., None],
) -> None:
    play()
