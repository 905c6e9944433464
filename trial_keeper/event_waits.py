"""Waiting for an event with a timeout, in tasks that are cancelled."""

import asyncio


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until the event is set, at most `timeout_s`; return whether it is set.

    asyncio.wait_for before Python 3.12 loses a cancellation in the tick in which the event is set. An endless task would then
    wait again, and whoever has cancelled it would wait for it forever.

    Source: python/cpython issue 86296.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()
    return event.is_set()
