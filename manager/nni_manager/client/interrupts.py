"""Defers Ctrl-C where an interrupt would leave a process that nobody knows, or a cleanup half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block, unless another exception ends it.

    Processes that the block starts receive them as usual: a blocked signal would be blocked there, too.

    Raises:
        KeyboardInterrupt: one of them was received, and its handler is that of Python or of nnictl.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    replaced = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in replaced:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
    for each in dict.fromkeys(received):
        replaced[signal.Signals(each)](each, None)
