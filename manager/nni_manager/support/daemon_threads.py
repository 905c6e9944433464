"""Blocking calls that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon_thread(call: Callable[..., Result], *arguments: object, name: str) -> asyncio.Future[Result]:
    """Start a call in a thread of its own; the future has its result.

    `asyncio.run` joins the threads of `asyncio.to_thread`, and not this one: a peer that answers slowly delays no exit.

    Raises:
        RuntimeError: no thread can be started.
    """
    answer: Future[Result] = Future()
    answer.set_running_or_notify_cancel()  # the thread settles it, also after the caller's timeout

    def run() -> None:
        try:
            answer.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001 - raised again by the future
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(answer)
