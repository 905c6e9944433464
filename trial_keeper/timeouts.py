"""Waiting with a timeout, in tasks that are cancelled.

asyncio.wait_for before Python 3.12 may lose a cancellation in the tick in which the awaited work ends. An endless task would then
go on, and whoever has cancelled it would wait for it forever.

Source: python/cpython issue 86296.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def within(timeout_s: float | None, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, if that finishes in time.

    Raises:
        TimeoutError: `work` did not finish in time.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not done:
        raise TimeoutError
    return task.result()


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until the event is set, at most `timeout_s`; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        await within(timeout_s, event.wait())
    return event.is_set()
