"""The forwarder of a trial's output to the container's log."""

import contextlib
import errno
import os
import select
import threading

import pytest
from deadlines import DEADLINE_S

from trial_keeper.host import output_forwarder as relay_module
from trial_keeper.host.output_forwarder import OutputForwarder, finish


@pytest.fixture
def pipe():
    """Both ends of a pipe. A test that closes an end sets it to None."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "stdout"
    path.touch()
    return path


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def read_exactly(descriptor, size):
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data


def following(target, source):
    forwarder = OutputForwarder(target)
    forwarder.follow(source)
    return forwarder


def end_of(forwarder):
    finish([forwarder])
    assert not forwarder._thread.is_alive()


def test_bytes_are_forwarded_while_the_file_grows_and_one_last_time_before_the_forwarder_ends(pipe, source):
    forwarder = following(pipe[1], source)
    append(source, b"first")
    forwarder.poll()
    assert read_exactly(pipe[0], 5) == b"first"
    append(source, b" second")
    forwarder.poll()
    assert read_exactly(pipe[0], 7) == b" second"
    append(source, b" last")
    end_of(forwarder)
    assert read_exactly(pipe[0], 5) == b" last"


def test_bytes_written_before_the_forwarder_starts_are_forwarded(pipe, source):
    append(source, b"early")
    end_of(following(pipe[1], source))
    assert read_exactly(pipe[0], 5) == b"early"


def test_output_larger_than_the_pipe_buffer_is_forwarded_completely(pipe, source):
    content = os.urandom(3_000_000)
    append(source, content)
    forwarder = following(pipe[1], source)
    assert read_exactly(pipe[0], len(content)) == content
    end_of(forwarder)


def test_lines_written_directly_to_the_forwarder_arrive_in_order(pipe):
    forwarder = OutputForwarder(pipe[1])
    forwarder.write("one\n")
    assert read_exactly(pipe[0], 4) == b"one\n"
    for number in range(100):
        forwarder.write(f"{number}\n")
    end_of(forwarder)
    wanted = b"".join(b"%d\n" % number for number in range(100))
    assert read_exactly(pipe[0], len(wanted)) == wanted


def test_characters_that_are_not_valid_unicode_are_replaced(pipe):
    forwarder = OutputForwarder(pipe[1])
    forwarder.write("\udcff é\n")
    end_of(forwarder)
    assert read_exactly(pipe[0], 5) == "? é\n".encode()


def test_a_stalled_reader_does_not_block_writers(pipe, source, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_DRAIN_S", 0.05)
    append(source, b"x" * 1_000_000)
    forwarder = following(pipe[1], source)
    writer = threading.Thread(target=lambda: [forwarder.write("line\n") for _ in range(100_000)])
    writer.start()
    writer.join(DEADLINE_S)
    assert not writer.is_alive()
    finish([forwarder])
    # finish() has not ended the thread: its write blocks until the pipe is read or closed, or the process exits.
    assert forwarder._thread.is_alive()
    os.close(pipe[0])
    pipe[0] = None
    forwarder._thread.join(DEADLINE_S)
    assert not forwarder._thread.is_alive()


def test_a_pipe_without_a_reader_ends_the_forwarder_silently(pipe, source):
    os.close(pipe[0])
    pipe[0] = None
    append(source, b"nobody wants it")
    forwarder = following(pipe[1], source)
    forwarder._thread.join(DEADLINE_S)
    assert not forwarder._thread.is_alive()
    forwarder.write("nor this\n")
    end_of(forwarder)


def test_a_full_disk_ends_the_forwarder_silently(source):
    append(source, b"does not fit")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        forwarder = following(full, source)
        forwarder._thread.join(DEADLINE_S)
        end_of(forwarder)
    finally:
        os.close(full)


def test_a_forwarder_opens_no_further_file_if_its_pipe_is_closed(pipe, source):
    forwarder = following(pipe[1], source)
    os.close(pipe[0])
    pipe[0] = None
    forwarder.write("into the void\n")
    forwarder._thread.join(DEADLINE_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        forwarder.follow(source)
    assert len(os.listdir("/proc/self/fd")) == before


def test_lines_for_a_stalled_reader_are_dropped_and_counted(pipe, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_LINES_BYTES", 10_000)
    os.set_blocking(pipe[1], False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe[1], bytes(select.PIPE_BUF))
    os.set_blocking(pipe[1], True)
    forwarder = OutputForwarder(pipe[1])
    line = "x" * 99 + "\n"
    for _ in range(5000):
        forwarder.write(line)
    assert forwarder._lines_bytes == 10_000
    assert forwarder._dropped == 4900
    read = threading.Event()
    seen = bytearray()

    def drain():
        while data := os.read(pipe[0], 65_536):
            seen.extend(data)
            if b"were dropped" in seen:
                read.set()

    reader = threading.Thread(target=drain)
    reader.start()
    while not read.wait(0.01):
        forwarder.write("and so on\n")
    end_of(forwarder)
    os.close(pipe[1])
    pipe[1] = None
    reader.join()
    assert b"lines were dropped here: the reader had stalled\nand so on\n" in seen


def test_a_forwarder_with_a_stalled_reader_keeps_a_bounded_number_of_files_open(pipe, source, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_SOURCES", 3)
    append(source, b"x" * 1_000_000)
    forwarder = following(pipe[1], source)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        forwarder.follow(source)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    os.close(pipe[0])
    pipe[0] = None
    end_of(forwarder)


def test_a_source_that_cannot_be_opened_is_skipped(pipe, source, tmp_path):
    forwarder = OutputForwarder(pipe[1])
    forwarder.follow(tmp_path / "removed")
    append(source, b"of the next trial")
    forwarder.follow(source)
    assert read_exactly(pipe[0], 17) == b"of the next trial"
    end_of(forwarder)


def test_an_unreadable_source_blocks_neither_lines_of_the_keeper_nor_the_next_source(
    pipe, source, tmp_path, monkeypatch
):
    broken = tmp_path / "broken"
    broken.write_bytes(b"lost")
    read = os.read
    fails = {}

    def read_or_fail(descriptor, size):
        if os.path.samestat(os.fstat(descriptor), broken.stat()):
            fails[descriptor] = True
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, size)

    monkeypatch.setattr(relay_module.os, "read", read_or_fail)
    forwarder = following(pipe[1], broken)
    forwarder.write("a line of the keeper\n")
    assert read_exactly(pipe[0], 21) == b"a line of the keeper\n"
    append(source, b"next")
    forwarder.follow(source)
    assert read_exactly(pipe[0], 4) == b"next"
    assert fails
    end_of(forwarder)


def test_a_non_blocking_pipe_receives_all_bytes(pipe, source):
    os.set_blocking(pipe[1], False)
    content = bytes(range(256)) * 4096  # 1 MiB, more than a pipe's buffer
    append(source, content)
    forwarder = following(pipe[1], source)
    assert read_exactly(pipe[0], len(content)) == content
    end_of(forwarder)
