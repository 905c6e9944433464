"""Suspends the processes that run tests, now and then: a test must not depend on how soon it notices an event."""

import contextlib
import os
import random
import threading

import psutil

# pytest-xdist starts each worker with this command, so it identifies the workers.
_WORKER = "import sys;exec(eval(sys.stdin.readline()))"
# This is the mean time between two pauses. With six workers, each is suspended for about a tenth of the time if a pause may take
# 1 s.
_GAP_S = 0.5


class Pauses:
    """Within the `with` block, one worker after another is suspended, for `max_s` at most. Their child processes continue."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(random.expovariate(1 / _GAP_S)):
            if workers := _workers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    chosen = random.choice(workers)
                    chosen.suspend()
                    try:
                        self._is_over.wait(random.uniform(0, self._max_s))
                    finally:
                        chosen.resume()


def _workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process(os.getpid()).children():
        with contextlib.suppress(psutil.Error):
            found += [each for each in process.children() if _WORKER in each.cmdline()]
    return found
