"""Waiting for an event in tasks that are cancelled."""

import asyncio

import pytest
from deadlines import scaled_s

from trial_keeper.timeouts import set_within


@pytest.mark.parametrize("passes", range(5))
async def test_a_task_that_waits_in_a_loop_ends_if_it_is_cancelled_just_after_the_event_is_set(passes):
    event, waits = asyncio.Event(), 0

    async def wait_again_and_again():
        nonlocal waits
        while True:
            event.clear()
            waits += 1
            await set_within(event, 1e6)

    task = asyncio.ensure_future(wait_again_and_again())
    while not waits:
        await asyncio.sleep(0)
    event.set()
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=scaled_s(5))
    is_cancelled = task.cancelled()
    task.cancel()  # end the task even if the first cancellation was lost
    assert is_cancelled


async def test_set_within_returns_whether_the_event_is_set_in_time():
    event = asyncio.Event()
    assert not await set_within(event, 0)
    assert not await set_within(event, -1)
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await set_within(event, None)
    assert await set_within(event, 0)
