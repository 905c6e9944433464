"""The queue of outgoing messages for a keeper that does not read."""

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


def test_only_the_latest_ack_of_each_attempt_is_queued():
    outgoing = CoalescingQueue()
    outgoing.put_nowait(Welcome("0.6.0"))
    for offset in range(1000):
        outgoing.put_nowait(durable(offset))
        outgoing.put_nowait(durable(2 * offset, OTHER))
    outgoing.put_nowait(None)
    assert all_of(outgoing) == [Welcome("0.6.0"), durable(999), durable(1998, OTHER), None]
    outgoing.put_nowait(durable(1000))
    assert all_of(outgoing) == [durable(1000)]


def test_the_ack_of_a_closed_attempt_is_not_replaced_by_an_earlier_ack():
    outgoing = CoalescingQueue()
    for message in (durable(1), durable(2, closed=True), durable(2)):
        outgoing.put_nowait(message)
    assert all_of(outgoing) == [durable(2, closed=True)]


def test_a_message_that_is_already_queued_is_not_queued_again():
    outgoing = CoalescingQueue()
    messages = [
        RunTrial("abcde", attempt_id(0)),
        RevokeTrial("abcde"),
        StopTrial("abcde", ExitReason.STOPPED_BY_USER),
        Shutdown("no more trials"),
    ]
    for _ in range(100):
        for message in messages:
            outgoing.put_nowait(message)
    assert all_of(outgoing) == messages
