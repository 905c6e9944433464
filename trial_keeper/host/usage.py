"""A trial's resource usage, sampled every few seconds in a separate thread, so that slow storage delays nothing else.

No CPU time is lost between two samples: when a process is waited for, its time moves to its parent, and finally to the keeper.
So the sum of the descendants' times and of the keeper's time of waited-for children only grows.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from trial_keeper.gpus import Gpus, GpusUnseen, gpus_here
from trial_keeper.processes import ProcessStat, descendants, session_of
from trial_keeper.wire.messages import AttemptKey, Usage

INTERVAL_S = 5.0
# Early enough to cover short trials, late enough not to delay their start.
FIRST_AFTER_S = 1.0
# The delay after a sample grows with the cost of the sample, so that all scans stay below 0.2 % of a core.
_DELAY_PER_CPU_TIME = 1000
_DELAY_PER_WALK = 2000
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def size_on_disk(folder: Path) -> int:
    """Return the bytes that the visible files below a folder occupy."""
    total = 0
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512  # stat(2): always units of 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


class UsageSampler:
    """Samples everything below this process, the GPUs of the trial and the attempt's folder."""

    def __init__(
        self,
        key: AttemptKey,
        folder: Path,
        gpu_indices: tuple[int, ...] | None,
        exempt_sessions: Collection[int] = (),
    ) -> None:
        """Create the sampler at the trial's start, before the trial has started any process.

        `exempt_sessions` belong to no trial.
        """
        self._key = key
        self._folder = folder
        self._exempt_sessions = exempt_sessions
        self._gpu_indices = gpu_indices
        self._gpus: Gpus | None = None
        self._is_first_sample = True
        self._last_sample_s = time.monotonic()
        self._last_cpu_s = self._cpu_s([])
        self._disk_bytes = 0
        self._next_walk_s = 0.0
        self.delay_s = FIRST_AFTER_S
        """Delay before the next sample."""

    def sample(self) -> Usage:
        """Return the current usage; the CPU usage is that since the last sample."""
        if self._is_first_sample:
            self._is_first_sample = False
            with contextlib.suppress(GpusUnseen):
                self._gpus = gpus_here() if self._gpu_indices != () else None
        began_s = time.thread_time()
        processes = self._processes()
        cpu_s, now_s = self._cpu_s(processes), time.monotonic()
        # The time of children that the kernel reaps by itself is lost, so the sum may shrink.
        used_s = max(cpu_s - self._last_cpu_s, 0.0)
        cpu_percent = 100 * used_s / max(now_s - self._last_sample_s, _TICK_S)
        self._last_cpu_s, self._last_sample_s = cpu_s, now_s
        self.delay_s = max(INTERVAL_S, (time.thread_time() - began_s) * _DELAY_PER_CPU_TIME)
        return Usage(
            self._key,
            cpu_percent,
            sum(process.rss_bytes for process in processes),
            self._disk(now_s),
            self._gpus.usage(self._gpu_indices) if self._gpus is not None else (),
        )

    def _processes(self) -> list[ProcessStat]:
        def is_exempt(pid: int) -> bool:
            return bool(self._exempt_sessions) and session_of(pid) in self._exempt_sessions

        below = map(ProcessStat.of, descendants((os.getpid(),), is_exempt))
        return [stat for stat in below if stat is not None]

    def _cpu_s(self, processes: list[ProcessStat]) -> float:
        times = os.times()
        return times.children_user + times.children_system + sum(process.cpu_s for process in processes)

    def _disk(self, now_s: float) -> int:
        if now_s >= self._next_walk_s:
            self._disk_bytes = size_on_disk(self._folder)
            took_s = time.monotonic() - now_s
            self._next_walk_s = now_s + took_s * _DELAY_PER_WALK
        return self._disk_bytes


class UsageWatch:
    """Samples a trial's usage in a separate thread. A trial that ends before the first sample never starts the thread."""

    def __init__(self, sampler: UsageSampler, report: Callable[[Usage], object]) -> None:
        self._sampler = sampler
        self._report = report
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running loop, on which `report` is called."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._sampler.delay_s, self._begin, loop)

    def stop(self) -> None:
        """Stop sampling. Returns at once; a sample in progress is discarded."""
        if self._timer is not None:
            self._timer.cancel()
        self._stopped.set()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        # A daemon thread: hanging storage must not block the keeper's exit.
        threading.Thread(target=self._run, args=(loop,), name="usage", daemon=True).start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.is_set():
            usage = self._sampler.sample()
            # The loop may have closed meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._report_unless_stopped, usage)
            self._stopped.wait(self._sampler.delay_s)

    def _report_unless_stopped(self, usage: Usage) -> None:
        if not self._stopped.is_set():
            self._report(usage)
