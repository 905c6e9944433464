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

# Far beyond the slow look: a wait that returns by its own time is told from one that was woken.
NEVER_S = scaled_s(60.0)
REST_S = 0.01


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics"
    path.touch()
    return path


@pytest.fixture
def news(file):
    news = FileWatcher()
    news.add(file, cooldown_s=REST_S)
    assert news._descriptor is not None
    yield news
    news.close()


@pytest.fixture
def deaf_news(file, monkeypatch):
    """As in a sandbox without inotify."""

    class NoInotify:
        def inotify_init1(self, flags):
            return -1

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_, **__: NoInotify())
        news = FileWatcher()
    news.add(file, cooldown_s=REST_S)
    assert news._descriptor is None
    yield news
    news.close()


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def wait(loop):
    """Waits once; how long that took."""

    def wait(news, *, grew=False, longest_s=NEVER_S):
        begin = time.monotonic()
        loop.run_until_complete(asyncio.wait_for(news.wait(grew=grew, longest_s=longest_s), DEADLINE_S))
        return time.monotonic() - begin

    return wait


def append(path, data=b"x"):
    with path.open("ab") as file:
        file.write(data)


def test_what_was_written_between_a_look_and_the_wait_is_told(news, file, wait):
    wait(news, longest_s=0)
    append(file)
    wait(news)


def test_what_another_process_writes_wakes_one_that_waits(news, file, loop):
    async def waiting():
        waits = asyncio.create_task(news.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        with subprocess.Popen(["bash", "-c", f"echo new >> {file}"]):
            await asyncio.wait_for(waits, DEADLINE_S)

    loop.run_until_complete(waiting())


def test_one_write_is_told_once(news, file, wait):
    append(file)
    wait(news)
    assert wait(news, longest_s=0.05) >= 0.05


def test_any_of_many_files_is_told_until_it_is_removed(news, file, tmp_path, wait):
    other = tmp_path / "stdout"
    other.touch()
    news.add(other, cooldown_s=REST_S)
    append(other)
    wait(news)
    news.remove(other)
    append(other)
    assert wait(news, longest_s=0.05) >= 0.05
    append(file)
    wait(news)


def test_a_flood_of_writes_is_a_look_every_few_milliseconds(news, file, loop):
    async def looks_while_flooded():
        looks = 0
        begin = time.monotonic()
        while time.monotonic() < begin + 0.3:
            await news.wait(grew=True, longest_s=NEVER_S)
            looks += 1
        return looks, time.monotonic() - begin

    stopped = threading.Event()

    def write():
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        while not stopped.is_set():
            os.write(descriptor, b"x")
        os.close(descriptor)

    flood = threading.Thread(target=write)
    flood.start()
    try:
        looks, took_s = loop.run_until_complete(looks_while_flooded())
    finally:
        stopped.set()
        flood.join()
    assert 2 <= looks <= took_s / REST_S + 1


def test_a_file_that_is_flooded_does_not_hold_up_the_news_of_another(news, file, tmp_path, loop):
    flooded = tmp_path / "stdout"
    flooded.touch()
    news.add(flooded, cooldown_s=NEVER_S)

    async def waiting():
        append(flooded)
        await news.wait(grew=False, longest_s=0)  # too soon after it was added: it rests
        waits = asyncio.create_task(news.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        append(flooded)
        append(file)
        await asyncio.wait_for(waits, DEADLINE_S)

    loop.run_until_complete(waiting())


def test_the_kernel_is_asked_for_one_write_at_a_time(news, file):
    for _ in range(1000):
        append(file)
    waiting_bytes = array.array("i", [0])
    fcntl.ioctl(news._descriptor, termios.FIONREAD, waiting_bytes)
    assert waiting_bytes[0] == 2 * 16  # the write, and the end of the watch


def test_a_file_that_was_removed_leaves_the_news_of_others(news, file, tmp_path, wait):
    other = tmp_path / "stdout"
    other.touch()
    news.add(other, cooldown_s=REST_S)
    append(other)
    other.unlink()
    wait(news)
    append(file)
    wait(news)
    assert news._descriptor is not None


def test_what_the_kernel_does_not_see_waits_for_the_slow_look(news, file, wait):
    append(file, bytes(4096))
    wait(news)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096) as mapped:
        mapped[0:4] = b"seen"
        assert 0.5 * SLOW_POLL_S <= wait(news, longest_s=SLOW_POLL_S) <= 10


def test_a_wait_can_be_asked_to_return(news, loop):
    async def waiting():
        waits = asyncio.create_task(news.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        news.poll_now()
        await asyncio.wait_for(waits, DEADLINE_S)

    loop.run_until_complete(waiting())


def test_a_wait_that_is_given_up_leaves_nothing_with_the_loop(news, file, wait, loop):
    async def waiting():
        waits = asyncio.create_task(news.wait(grew=False, longest_s=NEVER_S))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        return asyncio.get_running_loop().remove_reader(news._descriptor)

    assert loop.run_until_complete(waiting()) is False
    append(file)
    wait(news)


def test_without_inotify_the_files_are_polled_more_and_more_seldom(deaf_news, loop):
    async def rests_s():
        rests = []
        for _ in range(10):
            begin = time.monotonic()
            await deaf_news.wait(grew=False)
            rests.append(time.monotonic() - begin)
        return rests

    rests = loop.run_until_complete(rests_s())
    assert rests[0] < MAX_POLL_S
    assert deaf_news._poll_s == MAX_POLL_S
    loop.run_until_complete(deaf_news.wait(grew=True))
    assert deaf_news._poll_s == MIN_POLL_S


def test_a_file_that_cannot_be_watched_makes_all_of_them_polled(news, tmp_path, wait):
    news.add(tmp_path / "missing", cooldown_s=REST_S)
    assert news._descriptor is None
    assert wait(news) < NEVER_S


def test_nothing_stays_open(file):
    before = set(os.listdir("/proc/self/fd"))
    news = FileWatcher()
    news.add(file, cooldown_s=REST_S)
    news.close()
    news.close()
    assert set(os.listdir("/proc/self/fd")) == before
