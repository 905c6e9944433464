"""Process ids, which the kernel reuses."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from trial_keeper.processes import ProcessIdentity, ProcessStat, open_pidfd, wait_for_ends


@pytest.fixture
def thread_id() -> Iterator[int]:
    """The id of a running thread. It simulates the case that the kernel gives the pid of an ended process to a new thread."""
    must_end = threading.Event()
    thread = threading.Thread(target=must_end.wait)
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    must_end.set()
    thread.join()


def test_a_thread_is_not_mistaken_for_an_ended_process_with_the_same_pid(thread_id: int) -> None:
    assert open_pidfd(thread_id) is None
    # /proc has entries for threads too, so a start time can be read for the id of the thread.
    stat = ProcessStat.of(thread_id)
    assert stat is not None
    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    assert ProcessIdentity(thread_id, stat.start_ticks, own.boot_id).open_pidfd() is None
    # A thread is not a process, so wait_for_ends() must return at once. Otherwise this call takes an hour.
    wait_for_ends([thread_id], time.monotonic() + 3600)


def test_a_pidfd_can_be_opened_until_the_process_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = open_pidfd(process.pid)
        assert descriptor is not None
        assert process.stdin is not None
        process.stdin.close()
        wait_for_ends([process.pid], time.monotonic() + 60)
        os.close(descriptor)
    assert open_pidfd(process.pid) is None
