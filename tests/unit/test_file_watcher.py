"""Waits for writes to files, with inotify and without."""

import array
import asyncio
import ctypes
import fcntl
import mmap
import os
import subprocess
import termios
import threading
import time

import pytest
from deadlines import DEADLINE_S, scaled_s

from trial_keeper.host.file_watcher import MAX_POLL_S, MIN_POLL_S, SLOW_POLL_S, FileWatcher

# This timeout is far longer than the slow poll. So if a wait with this timeout ends early, a write has ended it.
NEVER_S = scaled_s(60.0)
COOLDOWN_S = 0.01


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics"
    path.touch()
    return path


@pytest.fixture
def watcher(file):
    watcher = FileWatcher()
    watcher.add(file, cooldown_s=COOLDOWN_S)
    assert watcher._descriptor is not None
    yield watcher
    watcher.close()


@pytest.fixture
def polling_watcher(file, monkeypatch):
    """A watcher in a sandbox without inotify."""

    class NoInotify:
        def inotify_init1(self, flags):
            return -1

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_, **__: NoInotify())
        watcher = FileWatcher()
    watcher.add(file, cooldown_s=COOLDOWN_S)
    assert watcher._descriptor is None
    yield watcher
    watcher.close()


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def wait(loop):
    """Waits once and returns the duration in seconds."""

    def wait(watcher, *, grew=False, longest_s=NEVER_S):
        begin = time.monotonic()
        loop.run_until_complete(asyncio.wait_for(watcher.wait(grew=grew, longest_s=longest_s), DEADLINE_S))
        return time.monotonic() - begin

    return wait


def append(path, data=b"x"):
    with path.open("ab") as file:
        file.write(data)


def test_a_wait_ends_if_a_write_occurred_between_the_last_poll_and_the_start_of_the_wait(watcher, file, wait):
    wait(watcher, longest_s=0)
    append(file)
    wait(watcher)


def test_a_write_by_another_process_ends_the_wait(watcher, file, loop):
    async def waiting():
        waits = asyncio.create_task(watcher.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        with subprocess.Popen(["bash", "-c", f"echo new >> {file}"]):
            await asyncio.wait_for(waits, DEADLINE_S)

    loop.run_until_complete(waiting())


def test_a_write_to_a_file_ends_only_one_wait(watcher, file, wait):
    append(file)
    wait(watcher)
    assert wait(watcher, longest_s=0.05) >= 0.05


def test_the_watcher_reports_a_write_to_a_second_file_until_the_file_is_removed(
    watcher, file, tmp_path, wait
):
    other = tmp_path / "stdout"
    other.touch()
    watcher.add(other, cooldown_s=COOLDOWN_S)
    append(other)
    wait(watcher)
    watcher.remove(other)
    append(other)
    assert wait(watcher, longest_s=0.05) >= 0.05
    append(file)
    wait(watcher)


@pytest.mark.slow
def test_many_writes_cause_one_poll_per_cooldown(watcher, file, loop):
    async def polls_during_writes():
        polls = 0
        begin = time.monotonic()
        while time.monotonic() < begin + 0.3:
            await watcher.wait(grew=True, longest_s=NEVER_S)
            polls += 1
        return polls, time.monotonic() - begin

    stopped = threading.Event()

    def write():
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        while not stopped.is_set():
            os.write(descriptor, b"x")
        os.close(descriptor)

    flood = threading.Thread(target=write)
    flood.start()
    try:
        polls, took_s = loop.run_until_complete(polls_during_writes())
    finally:
        stopped.set()
        flood.join()
    assert 2 <= polls <= took_s / COOLDOWN_S + 1


def test_a_file_in_its_cooldown_does_not_delay_reports_of_another_file(watcher, file, tmp_path, loop):
    flooded = tmp_path / "stdout"
    flooded.touch()
    watcher.add(flooded, cooldown_s=NEVER_S)

    async def waiting():
        append(flooded)
        # The cooldown of `flooded` has started, because it was just added. So a write to it must not end the wait below.
        await watcher.wait(grew=False, longest_s=0)
        waits = asyncio.create_task(watcher.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        append(flooded)
        append(file)
        await asyncio.wait_for(waits, DEADLINE_S)

    loop.run_until_complete(waiting())


def test_a_thousand_writes_queue_a_single_write_event_of_inotify(watcher, file):
    for _ in range(1000):
        append(file)
    waiting_bytes = array.array("i", [0])
    fcntl.ioctl(watcher._descriptor, termios.FIONREAD, waiting_bytes)
    # There are two events of 16 bytes: the first write, and the removal of the watch that it causes.
    assert waiting_bytes[0] == 2 * 16


def test_a_deleted_file_does_not_hide_writes_to_other_files(watcher, file, tmp_path, wait):
    other = tmp_path / "stdout"
    other.touch()
    watcher.add(other, cooldown_s=COOLDOWN_S)
    append(other)
    other.unlink()
    wait(watcher)
    append(file)
    wait(watcher)
    assert watcher._descriptor is not None


@pytest.mark.slow
def test_a_write_through_a_memory_mapping_is_found_by_the_slow_poll(watcher, file, wait):
    append(file, bytes(4096))
    wait(watcher)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096) as mapped:
        mapped[0:4] = b"seen"
        assert 0.5 * SLOW_POLL_S <= wait(watcher, longest_s=SLOW_POLL_S) <= 10


def test_an_explicit_request_for_a_poll_ends_a_pending_wait(watcher, loop):
    async def waiting():
        waits = asyncio.create_task(watcher.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        watcher.poll_now()
        await asyncio.wait_for(waits, DEADLINE_S)

    loop.run_until_complete(waiting())


def test_a_cancelled_wait_removes_its_reader_from_the_event_loop(watcher, file, wait, loop):
    async def waiting():
        waits = asyncio.create_task(watcher.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        return asyncio.get_running_loop().remove_reader(watcher._descriptor)

    assert loop.run_until_complete(waiting()) is False
    append(file)
    wait(watcher)


@pytest.mark.slow
def test_files_are_polled_with_growing_delays_if_inotify_is_missing(polling_watcher, loop):
    async def delays_s():
        delays = []
        for _ in range(10):
            await polling_watcher.wait(grew=False)
            delays.append(polling_watcher._poll_s)
        return delays

    delays = loop.run_until_complete(delays_s())
    assert MIN_POLL_S < delays[0] < delays[1] <= delays[-1] == MAX_POLL_S
    assert delays == sorted(delays)
    loop.run_until_complete(polling_watcher.wait(grew=True))
    assert polling_watcher._poll_s == MIN_POLL_S


def test_a_file_that_cannot_be_watched_switches_all_files_to_polling(watcher, tmp_path, wait):
    watcher.add(tmp_path / "missing", cooldown_s=COOLDOWN_S)
    assert watcher._descriptor is None
    assert wait(watcher) < NEVER_S


def test_closing_the_watcher_closes_its_descriptors(file):
    before = set(os.listdir("/proc/self/fd"))
    watcher = FileWatcher()
    watcher.add(file, cooldown_s=COOLDOWN_S)
    watcher.close()
    watcher.close()
    assert set(os.listdir("/proc/self/fd")) == before
