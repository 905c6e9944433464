"""Every metric and every byte of a log arrives once and in order, whatever dies: the promise all else stands on.

The machine itself is in conftest.py; test_planted_faults.py shows that it notices.
"""

from collections.abc import Callable


def test_everything_an_attempt_wrote_is_stored_once_and_in_order_whatever_dies(
    play: Callable[..., None],
) -> None:
    play()
