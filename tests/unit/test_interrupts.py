"""Signals that arrive while a block defers them."""

import os
import signal

import pytest

from nni_manager.client.interrupts import deferred_interrupts


@pytest.fixture
def own_handler():
    """The signals that a handler of the user's own has received."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_two_deferred_signals_reach_the_handler_of_the_user_once_and_after_the_with_block(own_handler):
    with deferred_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert own_handler == []
    assert own_handler == [signal.SIGTERM]


def interrupted(number, error=None):
    """Send the signal to this process in a block that defers it. The block raises the error."""
    with deferred_interrupts():
        os.kill(os.getpid(), number)
        if error is not None:
            raise error


def test_ctrl_c_in_a_block_with_deferred_interrupts_raises_keyboardinterrupt_after_the_block():
    with pytest.raises(KeyboardInterrupt):
        interrupted(signal.SIGINT)


def test_an_exception_in_a_block_with_deferred_interrupts_takes_precedence_over_a_signal(own_handler):
    with pytest.raises(ValueError, match="of the block"):
        interrupted(signal.SIGTERM, ValueError("of the block"))
    assert own_handler == []
