"""What waits for a keeper that does not listen."""

from attempts import attempt_id

from nni_manager.engine.connected_keepers import CoalescingQueue
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    RevokeTrial,
    RunTrial,
    Shutdown,
    StopTrial,
    Stream,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason

KEY, OTHER = AttemptKey("abcde", attempt_id(0), "main-0"), AttemptKey("fghij", attempt_id(0), "main-0")


def durable(offset, key=KEY, closed=False):
    return Ack(AttemptOffsets(key, {Stream.METRICS: offset}, closed))


def all_of(outgoing):
    return [outgoing.get_nowait() for _ in range(outgoing.qsize())]


def test_of_what_is_durable_only_the_newest_word_about_each_attempt_waits():
    outgoing = CoalescingQueue()
    outgoing.put_nowait(Welcome("0.6.0"))
    for offset in range(1000):
        outgoing.put_nowait(durable(offset))
        outgoing.put_nowait(durable(2 * offset, OTHER))
    outgoing.put_nowait(None)
    assert all_of(outgoing) == [Welcome("0.6.0"), durable(999), durable(1998, OTHER), None]
    outgoing.put_nowait(durable(1000))
    assert all_of(outgoing) == [durable(1000)]


def test_that_an_attempt_is_closed_is_not_unsaid():
    outgoing = CoalescingQueue()
    for message in (durable(1), durable(2, closed=True), durable(2)):
        outgoing.put_nowait(message)
    assert all_of(outgoing) == [durable(2, closed=True)]


def test_what_is_said_again_before_it_was_heard_is_said_once():
    outgoing = CoalescingQueue()
    words = [
        RunTrial("abcde", attempt_id(0)),
        RevokeTrial("abcde"),
        StopTrial("abcde", ExitReason.STOPPED_BY_USER),
        Shutdown("no more trials"),
    ]
    for _ in range(100):
        for word in words:
            outgoing.put_nowait(word)
    assert all_of(outgoing) == words
